"""Config → what a run would give, from a bounded sample of every source, in seconds and without writing anything.

    config ─find_files─▶ files ─sample_files─▶ records ─as a run does─▶ tokens, labels, rejects
                                                           │ each stands for total / looked at
                                     lengths, scaled ──────┴─▶ the planner of a run ─▶ rows, efficiency

Where the sample is all there is, rows and tokens are those of the run. Else they are estimates: the bytes of a file
over the bytes of what was read of it say how many conversations there are, and the histogram of lengths, scaled by
that, is packed by the code that packs in a run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks import packing
from tasks.batch import BATCH_CHARACTERS, COUNTS, NOTICED, Batch
from tasks.config import Config
from tasks.conversations import read_record
from tasks.encoders import Encoder
from tasks.errors import PackError, Reject
from tasks.frames import Frames
from tasks.gigatoken_encoder import GigatokenEncoder, Unsupported
from tasks.jinja_templates import JinjaTemplate
from tasks.keys import Layout
from tasks.parity import HARD, LONGEST, difference
from tasks.pieces import cut_conversation
from tasks.recipe import Recipe, specs_of
from tasks.sampling import Sample, sample_files
from tasks.segments import segments_of
from tasks.sources import find_files
from tasks.templates import full_text, trained_turns
from tasks.token_files import SCHEMA, WHOLE_SCHEMA
from tasks.tokenization import add_record
from tasks.trained_tokenizer import cut_sentence, train_model

BUDGET = 8 << 20  # bytes of the sources; gigatoken and all around it take 0.7 s for them
SLOWER = 4  # times less, where the tokenizer's own library encodes: 1 to 2 s
JINJA_RECORDS = 1000  # a Jinja template takes 0.3 to 1 ms for a conversation
PROOF = 400  # texts that both encoders are given
TRAINING = 1 << 20  # characters that a tokenizer is trained on, where the config names none: 1 s

# Bytes on disk, beside the tokens: of a piece in index.arrow (twice: the plan has a copy) and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 38, 25
ROW_BYTES = 13  # of a token in a shard: int32 + int8 + int32 + int32
# The largest process of a run: interpreter and libraries, and the more of these: for texts, 12 bytes for each of theirs
# until gigatoken has seen most words, or for the conversations of the plan.
BASE_MEMORY, TEXT_MEMORY, TEXT_BYTES, PLAN_MEMORY = 140_000_000, 80_000_000, 12, 150
TOKEN_BYTES = 4  # of text, about
# Seconds: to start and to end; for a byte that is hashed, for a byte of a shard, for a conversation in the plan.
START, PER_HASHED, PER_WRITTEN, PER_PLANNED = 1.4, 1 / 0.4e9, 1 / 0.25e9, 2e-6


@dataclass(frozen=True, slots=True)
class Shown:
    """One conversation as tokens: ids int32, trained bool; `place` is its file and line."""

    place: str
    ids: np.ndarray
    trained: np.ndarray


@dataclass(slots=True)
class Source:
    """What was found in one file, and what it will be: sums over all that its sample stands for."""

    sample: Sample
    conversations: float
    rejected: float = 0.0
    tokens: float = 0.0
    trained: float = 0.0
    shown: Shown | None = None


@dataclass(slots=True)
class Rejects:
    """Those of one reason: how many of the sample, how many they stand for, and the first of them."""

    looked_at: int
    expected: float
    place: str
    message: str


@dataclass(slots=True)
class Prediction:
    """Figures as the manifest has them; floats, since each conversation of the sample stands for several.

    `config` is the one that was asked about; `recipe` has a tokenizer in any case.
    """

    config: Config
    recipe: Recipe
    encoder: Encoder
    engine: str
    sources: list[Source]
    files: int
    bytes: int
    whole: bool
    rejects: dict[str, Rejects] = field(default_factory=dict)
    noticed: dict[str, int] = field(default_factory=dict)
    packed: float = 0.0  # conversations
    too_long: float = 0.0  # than a row
    dropped: float = 0.0
    cut: float = 0.0  # truncated or split
    tokens: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # of each split
    trained: dict[str, float] = field(default_factory=dict)  # tokens of each split
    tokenizer_bytes: int = 0
    pieces: float = 0.0
    efficiency: float | None = None
    disk: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    seconds: float = 0.0
    workers: int = 1
    warnings: list[str] = field(default_factory=list)
    fails: bool = False  # the run, by what was looked at


@dataclass(slots=True)
class _Tokens:
    """What the sample of one file became."""

    batches: list[pa.RecordBatch]
    place: list[int]  # in sample.records, of each conversation
    seconds: float = 0.0
    bytes: int = 0  # of the token file
    text: int = 0  # bytes, as rendered, in format 2.0

    def column(self, name: str, kind: type) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *(batch.column(name).to_numpy(False) for batch in self.batches)])

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all conversations end to end, and where each begins."""
        lists = [batch.column("tokens") for batch in self.batches]
        values = np.concatenate([np.empty(0, np.int32), *(each.values.to_numpy() for each in lists)])
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(each.offsets.to_numpy()) for each in lists)])
        return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(slots=True)
class _Pieces:
    """Columns over the pieces of the sample: as tasks.pieces has them, and how many pieces each stands for."""

    length: np.ndarray  # int64, places in a row
    trained: np.ndarray  # int64
    held_out: np.ndarray  # bool
    weight: np.ndarray  # float64


def predict(config: Config, folder: Path, root: Path, workers: int = 2, budget: int = BUDGET) -> Prediction:
    """What PackCorpus would give for a config that lies in `folder`, from about `budget` bytes of its sources.

    Raises what a run would raise of config, sources, tokenizer and template.
    """
    layout = Layout(root)
    files = find_files(specs_of(config), folder, layout.outputs())
    recipe = Recipe(config, folder, layout, tuple(files), ())
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        if config.tokenizer is None:
            samples = sample_files(files, budget // SLOWER, config.max_record_bytes)
            recipe = _train(recipe, samples, Path(scratch))
        reference = recipe.encoder
        encoder = _fast(reference, config)
        budget //= 1 if encoder is not reference else SLOWER
        if config.tokenizer is not None or encoder is not reference:
            samples = sample_files(files, budget, config.max_record_bytes)
        if encoder is not reference and not _equal(encoder, reference, recipe, samples):
            encoder, samples = reference, [_thinned(sample, SLOWER) for sample in samples]
        if isinstance(recipe.template, JinjaTemplate):
            every = -(-sum(len(sample.records) for sample in samples) // JINJA_RECORDS)
            samples = [_thinned(sample, every) for sample in samples]
        whole = all(sample.whole for sample in samples) and len(samples) == len(files)
        found = Prediction(
            *(config, recipe, encoder, encoder.engine, [], len(files), sum(file.bytes for file in files), whole),
            tokenizer_bytes=sum(file.stat().st_size for file in recipe.tokenizer_files.files),
            workers=workers,
        )
        tokens = [_tokenise(sample, recipe, encoder, found) for sample in samples]
    _plan(found, tokens)
    _cost(found, tokens)
    _warn(found)
    return found


# -- encoders --------------------------------------------------------------------------------------------------------


def _train(recipe: Recipe, samples: list[Sample], folder: Path) -> Recipe:
    """With a tokenizer that is trained on the sample, as the run trains one on all."""
    config = recipe.config
    sentences: list[str] = []
    rejects: list[str] = []
    left = TRAINING
    for text in chain.from_iterable(_said(sample, rejects) for sample in samples):
        left -= len(text)
        if left < 0:
            break
        sentences += cut_sentence(text)
    path = folder / "tokenizer.model"
    path.write_bytes(train_model(sentences, config.template, config.vocab_size, rejects))
    recipe = replace(recipe, config=config.model_copy(update={"tokenizer": str(path)}))
    _ = recipe.encoder  # read while it is there
    return recipe


def _said(sample: Sample, rejects: list[str]) -> Iterator[str]:
    """The texts of all messages. Where and why there are no more of them goes to `rejects`."""
    for place, value in sample.records:
        try:
            if isinstance(value, Reject):
                raise value
            conversation = read_record(value, sample.file.format, dict(sample.file.columns))
        except Reject as reject:
            rejects.append(f"{place}: {reject.message}")
            continue
        yield from map(full_text, conversation.messages)


def _fast(reference: Encoder, config: Config) -> Encoder:
    if config.engine == "reference":
        return reference
    try:
        return GigatokenEncoder(reference)
    except Unsupported:
        return reference


def _equal(fast: Encoder, reference: Encoder, recipe: Recipe, samples: list[Sample]) -> bool:
    """Whether gigatoken gives the reference's ids for texts of the sample; a run proves it on more of them."""
    texts: list[str] = []
    for sample in samples:
        own: list[str] = []
        for _, value in sample.records[:: max(1, len(sample.records) // 50)]:
            try:
                if isinstance(value, Reject):
                    continue
                conversation = read_record(value, sample.file.format, dict(sample.file.columns))
                trained = trained_turns(conversation, recipe.config.train_on)
                own += segments_of(recipe.template.spans(conversation, trained), reference).texts
            except Reject:
                continue
        texts += [text[:LONGEST] for text in own[: max(4, PROOF // len(samples))]]
    return difference(fast, reference, [*HARD, *texts]) is None


def _thinned(sample: Sample, every: int) -> Sample:
    """With every n-th of its records, a few at least; they stand for the same."""
    every = max(1, min(every, len(sample.records) // 20))
    return sample.thinned(every)


# -- tokens ----------------------------------------------------------------------------------------------------------


def _tokenise(sample: Sample, recipe: Recipe, encoder: Encoder, found: Prediction) -> _Tokens:
    """Tokens of the sample of one file, as `tokenization` makes them; what it is goes to `found`."""
    config, file = recipe.config, sample.file
    source = Source(sample, sample.expected)
    found.sources.append(source)
    schema = SCHEMA if config.packing else WHOLE_SCHEMA
    receipt: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    frames = Frames(recipe.template, encoder, config.train_on, file.format, bool(file.columns))
    tokens = _Tokens([], [])
    start = time.process_time()
    batch = Batch(encoder, receipt)

    def flush() -> None:
        if batch.records:
            tokens.place.extend(batch.records)
            tokens.batches.append(batch.encode(schema))

    for number, (place, value) in enumerate(sample.records):
        try:
            add_record(batch, number, value, file, recipe.template, config, frames)
        except Reject as reject:
            _reject(found, source, reject, number)
        except PackError as error:
            raise type(error)(error.reason, f"{place}: {error}") from None
        if batch.characters >= BATCH_CHARACTERS:
            flush()
            batch = Batch(encoder, receipt)
    flush()
    tokens.seconds = time.process_time() - start
    tokens.bytes = sum(batch.nbytes for batch in tokens.batches)
    if not config.packing:
        tokens.text = sum(batch.column("text").nbytes for batch in tokens.batches)
    for name in NOTICED:
        found.noticed[name] = found.noticed.get(name, 0) + receipt[name]
    return tokens


def _reject(found: Prediction, source: Source, reject: Reject, number: int) -> None:
    """`number` is that of the record in the sample."""
    place, weight = source.sample.records[number].place, float(source.sample.weights[number])
    known = found.rejects.setdefault(reject.reason, Rejects(0, 0.0, place, reject.message))
    known.looked_at += 1
    known.expected += weight
    source.rejected += weight


# -- rows ------------------------------------------------------------------------------------------------------------


def _plan(found: Prediction, tokens: list[_Tokens]) -> None:
    """As tasks.plan, with a weight for every conversation."""
    config = found.recipe.config
    pieces = [_cut(found, source, each) for source, each in zip(found.sources, tokens, strict=True)]
    length, trained, held_out, weight = (
        np.concatenate([getattr(some, name) for some in pieces]) for name in ("length", "trained", "held_out", "weight")
    )
    found.pieces = float(weight.sum())
    found.tokens = {
        "encoded": sum(source.tokens for source in found.sources),
        "packed": float(length @ weight),
        "trained": float(trained @ weight),
    }
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        found.rows[split] = _rows(length[chosen], weight[chosen], config)
        found.trained[split] = float(trained[chosen] @ weight[chosen])
    if config.packing:
        places = sum(found.rows.values()) * config.sequence_length
        found.tokens["padding"] = max(0.0, places - found.tokens["packed"])
        found.efficiency = min(100.0, 100 * found.tokens["packed"] / max(places, 1))


def _cut(found: Prediction, source: Source, tokens: _Tokens) -> _Pieces:
    """Pieces of the conversations of one file; what they are, and what becomes of the others, goes to `found`."""
    config = found.recipe.config
    weights = source.sample.weights[tokens.place]
    values, offsets = tokens.values()
    if tokens.place:
        ids = values[: offsets[1]]
        source.shown = Shown(source.sample.records[tokens.place[0]].place, ids ^ (ids >> 31), ids >= 0)
    lengths, trained = np.diff(offsets), tokens.column("trained", np.int64)
    held_out = tokens.column("digest", np.uint64) < np.uint64(int(config.validation * 2**64))
    encoded = lengths - tokens.column("separator", np.int64)
    is_long = lengths > config.sequence_length
    found.too_long += float(weights[is_long].sum())
    stays = np.ones(len(lengths), bool)
    if config.overlong == "drop":
        stays = ~is_long
        found.dropped += float(weights[is_long].sum())
    elif not config.packing:
        is_long[:] = False
    kept = [(c, int(lengths[c]), int(trained[c])) for c in np.flatnonzero(stays & ~is_long & (trained > 0)).tolist()]
    for conversation in np.flatnonzero(stays & is_long).tolist():
        own = values[offsets[conversation] : offsets[conversation + 1]]
        cuts = cut_conversation(own, config.sequence_length, split=config.overlong == "split")
        kept += [(conversation, cut.taken + cut.closed, cut.trained) for cut in cuts if cut.trained]
    columns = np.array(kept, np.int64).reshape(-1, 3)
    packed = np.unique(columns[:, 0])
    found.packed += float(weights[packed].sum())
    found.cut += float(weights[packed[is_long[packed]]].sum())
    late = np.setdiff1d(np.flatnonzero(stays), packed)
    for conversation in late.tolist():
        message = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
        _reject(found, source, Reject("no_trained_tokens", message), tokens.place[conversation])
    kept_tokens = encoded.copy()
    kept_tokens[late] = 0
    source.tokens = float(kept_tokens @ weights)
    own = weights[columns[:, 0]]
    source.trained = float(columns[:, 2] @ own)
    return _Pieces(columns[:, 1], columns[:, 2], held_out[columns[:, 0]], own)


def _rows(lengths: np.ndarray, weights: np.ndarray, config: Config) -> int:
    if not config.packing or not len(lengths):
        return round(float(weights.sum()))
    return packing.pack(scaled(lengths, weights, config.sequence_length), config.sequence_length).rows


def scaled(lengths: np.ndarray, weights: np.ndarray, capacity: int) -> np.ndarray:
    """The histogram of all conversations, of those of a sample and how many each stands for; int64[capacity + 1].

    Rounded over the sum from the shortest on, so that all of them, and those of every range of lengths, are as many.
    """
    counts = np.bincount(lengths, weights, capacity + 1)
    return np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(np.int64)


# -- what it costs ---------------------------------------------------------------------------------------------------


def _cost(found: Prediction, tokens: list[_Tokens]) -> None:
    """Bytes on disk, memory of the largest process, and time."""
    config = found.recipe.config
    conversations = sum(source.conversations for source in found.sources)
    weights = [source.conversations / max(len(source.sample.records), 1) for source in found.sources]
    token_files = sum(each.bytes * weight for each, weight in zip(tokens, weights, strict=True))
    if config.packing:
        shards = sum(found.rows.values()) * config.sequence_length * float(ROW_BYTES)
    else:  # all that is said stands there twice, as messages and as rendered
        shards = 2 * sum(each.text * weight for each, weight in zip(tokens, weights, strict=True))
    listed = found.pieces + found.dropped
    found.disk = {
        "shards": shards,
        "index": listed * INDEX_BYTES,
        "token_files": token_files,
        "plan": listed * INDEX_BYTES + found.pieces * PLAN_BYTES,
        "tokenizer": float(found.tokenizer_bytes),
    }
    text = min(found.tokens["encoded"] * TOKEN_BYTES, config.part_size)
    found.memory = BASE_MEMORY + max(min(TEXT_MEMORY, TEXT_BYTES * text), PLAN_MEMORY * found.pieces)
    encoding = sum(each.seconds * weight for each, weight in zip(tokens, weights, strict=True))
    at_once = max(1, min(found.workers, os.cpu_count() or 1))
    found.seconds = (
        START + found.bytes * PER_HASHED + conversations * PER_PLANNED + (encoding + shards * PER_WRITTEN) / at_once
    )


def _warn(found: Prediction) -> None:
    config = found.recipe.config
    read = sum(source.conversations for source in found.sources)
    rejected = sum(source.rejected for source in found.sources)
    if rejected and rejected / max(read, 1) > config.max_rejects:
        found.warnings.append(
            f"{100 * rejected / read:.2f} % of the conversations are rejected, max_rejects allows "
            f"{100 * config.max_rejects:.2f} %: the run will fail; mend them, or raise max_rejects"
        )
        found.fails = True
    if config.overlong == "error" and found.too_long:
        found.warnings.append(
            f"{about(found.too_long, found)} conversations are longer than a row: with overlong: error the run stops; "
            "truncate, drop or split goes on (figures are those of truncate)"
        )
        found.fails = True
    if not found.packed:
        found.warnings.append("no conversation of the sample is left to pack: the run will fail")
        found.fails = True
    short = [source.sample.file.name for source in found.sources if source.sample.reach < 1]
    if short:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        found.warnings.append(
            f"{names}: compressed and too long to be read to the end here: only the begin was looked at"
        )


def about(count: float, found: Prediction) -> str:
    """A number, and whether it is an estimate."""
    return f"{count:,.0f}" if found.whole else f"about {count:,.0f}"


def steps(found: Prediction, batch_rows: int) -> tuple[int, float]:
    """Optimizer steps in an epoch at `batch_rows` rows a step, and trained tokens of each."""
    rows = found.rows.get("train", 0)
    count = -(-rows // batch_rows)
    return count, found.trained.get("train", 0.0) / max(count, 1)
