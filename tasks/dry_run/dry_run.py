"""Config → what a run would give, from a bounded sample of every source, in seconds and without writing anything.

    config ─find_files─▶ files ─sample_files─▶ records ─as a run does─▶ tokens, labels, rejects
                                                           │ each stands for total / looked at
        filters, over-long policy, shares of a mixture ────────┤ by the functions of a run
                                     lengths, scaled ──────────┴─▶ its planner ─▶ rows, efficiency

Where the sample is all there is, every figure is that of the run. Else they are estimates: the bytes of a file over the
bytes of what was read of it say how many conversations there are, and the histogram of lengths, scaled by that, is
packed by the code that packs in a run. Duplicates are told within the sample alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.conversations.formats import read_record
from tasks.core.errors import Reject
from tasks.corpus.mixture_table import limited_by
from tasks.dry_run.cost_model import COMMIT, HASHED_BYTE, ROW_BYTES, START, TASK, WRITTEN_BYTE, plan_seconds
from tasks.dry_run.expected_mixture import entries_of, shares
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder
from tasks.encoders.gigatoken_model import Unsupported
from tasks.packing import bin_packing
from tasks.packing.filters import filter_conversations
from tasks.packing.pieces import DROPS, REJECTED, Pieces, cut_overlong, why
from tasks.packing.placement import hold_out_at_least_one
from tasks.packing.plan import read_columns
from tasks.packing.rejects import advice
from tasks.recipe import SPLITS, Recipe, specs_of, split_names
from tasks.sources.sample_files import Sample, sample_files
from tasks.sources.source_files import HASH_THREADS, Part, find_files
from tasks.storage.keys import Layout
from tasks.storage.manifest import MixtureFacts
from tasks.storage.token_files import SCHEMA, WHOLE_SCHEMA, TokenColumns
from tasks.templates.built_in import full_text, trained_turns
from tasks.templates.jinja_template import JinjaTemplate
from tasks.tokenization.engine_check import HARD, LONGEST, difference
from tasks.tokenization.frames import Frames
from tasks.tokenization.segments import segments_of
from tasks.tokenization.token_batch import BATCH_CHARACTERS, COUNTS, NOTICED, Batch
from tasks.tokenization.tokenize_part import add_records
from tasks.tokenization.train_tokenizer import Unread, cut_sentence, train_model

BUDGET = 8 << 20  # bytes of the sources; gigatoken and all around it take 0.7 s for them
SLOWER = 4  # times less, where the tokenizer's own library encodes: 1 to 2 s
JINJA_RECORDS = 1000  # a Jinja template takes 0.3 to 1 ms for a conversation
AT_ONCE = 256  # records that are made tokens of
PROOF = 400  # texts that both encoders are given
TRAINING = 1 << 20  # characters that a tokenizer is trained on, where the config names none: 1 s

# Bytes on disk, beside the tokens: of a piece in index.arrow (twice: the plan has a copy) and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 50.5, 25
# The largest process of a run: interpreter and libraries, and the more of these: 7.5 MB whenever the text of a part has
# doubled from 100 kB on, for the words that gigatoken has seen (130 MB in all at 1 MB, 157 at 13, 175 at 64), or the
# conversations of the plan (bench/planning.py: 19 to 28 bytes each).
BASE_MEMORY, TEXT_MEMORY, TEXT_BEGIN, PLAN_MEMORY = 105e6, 7.5e6, 100_000, 28
TOKEN_BYTES = 4  # of text, about


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
    # Of these, those that the over-long policy left without a trained token.
    cut_off: Rejects = field(default_factory=lambda: Rejects(0, 0.0, "", ""))
    noticed: dict[str, int] = field(default_factory=dict)
    packed: float = 0.0  # conversations
    too_long: float = 0.0  # than a row
    dropped: dict[str, float] = field(default_factory=dict)  # by reason
    cut: float = 0.0  # truncated or split
    tokens: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # of each split
    trained: dict[str, float] = field(default_factory=dict)  # tokens of each split
    tokenizer_bytes: int = 0
    pieces: float = 0.0
    mixture: list[MixtureFacts] = field(default_factory=list)
    empty_shares: str = ""  # sources without a token for their share
    giving_all: list[str] = field(default_factory=list)  # sources that limit the others, by token_share
    efficiency: float | None = None
    disk: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    seconds: float = 0.0
    workers: int = 1
    failures: list[str] = field(default_factory=list)  # why the run will fail, by what was looked at
    warnings: list[str] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        return bool(self.failures)


@dataclass(slots=True)
class _Tokens:
    """The token file of the sample of one file; `record` in it is the place in sample.records."""

    file: pa.Buffer
    seconds: float
    text: np.ndarray  # int64[conversations], bytes, as rendered; in format 2.0 alone


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
    _cost(found, tokens, _plan(found, tokens))
    _warn(found)
    return found


# -- encoders --------------------------------------------------------------------------------------------------------


def _train(recipe: Recipe, samples: list[Sample], folder: Path) -> Recipe:
    """With a tokenizer that is trained on the sample, as the run trains one on all."""
    config = recipe.config
    sentences: list[str] = []
    unread = Unread()
    left = TRAINING
    for text in chain.from_iterable(_said(sample, unread) for sample in samples):
        left -= len(text)
        if left < 0:
            break
        sentences += cut_sentence(text)
    path = folder / "tokenizer.model"
    path.write_bytes(train_model(sentences, config.template, config.vocab_size, unread))
    recipe = replace(recipe, config=config.model_copy(update={"tokenizer": str(path)}))
    _ = recipe.encoder  # read while it is there
    return recipe


def _said(sample: Sample, unread: Unread) -> Iterator[str]:
    """The texts of all messages. Where and why there are no more of them goes to `unread`."""
    for place, value in sample.records:
        try:
            if isinstance(value, Reject):
                raise value
            conversation = read_record(value, sample.file.format, dict(sample.file.columns))
        except Reject as reject:
            unread.add(reject, value, sample.file, place)
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
    texts = [np.empty(0, np.int64)]
    start = time.process_time()
    batch, out = Batch(encoder, receipt), pa.BufferOutputStream()
    with pa.ipc.new_file(out, schema) as writer:

        def flush() -> None:
            if batch.records:
                encoded = batch.encode(schema)
                writer.write_batch(encoded)
                if not config.packing:
                    offsets = encoded.column("text").buffers()[1]
                    texts.append(np.diff(np.frombuffer(offsets, np.int64)[: encoded.num_rows + 1]))

        for top in range(0, len(sample.records), AT_ONCE):
            numbers = range(top, min(top + AT_ONCE, len(sample.records)))
            values = [sample.records[number].value for number in numbers]
            for number, reject in add_records(
                batch, numbers, values, file, recipe.template, config, frames, lambda n: sample.records[n].place
            ):
                _reject(found, source, reject, number)
            if batch.characters >= BATCH_CHARACTERS:
                flush()
                batch = Batch(encoder, receipt)
        flush()
    seconds = time.process_time() - start
    for name in NOTICED:
        found.noticed[name] = found.noticed.get(name, 0) + receipt[name]
    return _Tokens(out.getvalue(), seconds, np.concatenate(texts))


def _reject(found: Prediction, source: Source, reject: Reject, number: int) -> None:
    """`number` is that of the record in the sample."""
    place, weight = source.sample.records[number].place, float(source.sample.weights[number])
    known = found.rejects.setdefault(reject.reason, Rejects(0, 0.0, place, reject.message))
    known.looked_at += 1
    known.expected += weight
    source.rejected += weight


# -- rows ------------------------------------------------------------------------------------------------------------


def _plan(found: Prediction, made: list[_Tokens]) -> np.ndarray:
    """As tasks.packing.plan, by its functions. Returns how often each conversation is packed in a pass, float64."""
    recipe = found.recipe
    config = recipe.config
    if config.overlong == "error":  # figures are those of truncate
        config = config.model_copy(update={"overlong": "truncate"})
    parts = tuple(Part(source.sample.file, 0, source.sample.file.bytes, "") for source in found.sources)
    recipe = replace(recipe, config=config, parts=parts)
    tokens = TokenColumns([each.file for each in made], [0] * len(made))
    accepted = read_columns(tokens, config.validation)
    weights = _weights(found, tokens)
    filter_conversations(accepted, tokens, config)
    found.too_long = float(weights[(accepted.why == 0) & (accepted.length > config.sequence_length)].sum())
    pieces = cut_overlong(accepted, tokens, recipe)
    late = accepted.why == REJECTED
    encoded = accepted.encoded(slice(None)) * ~late
    for number, source in enumerate(found.sources):
        inside = slice(*tokens.edges[number : number + 2])
        source.tokens = float(encoded[inside] @ weights[inside])
        _show_and_reject(found, source, inside, late, tokens)
    if found.whole:
        hold_out_at_least_one(accepted.held_out, accepted.why == 0, lambda: tokens.column("digest"), config.validation)
    dropped = {reason: float(weights[accepted.why == why(reason)].sum()) for reason in DROPS}
    stays = accepted.why == 0
    chosen = shares(pieces, tokens, recipe, None if found.whole else weights)
    found.empty_shares = chosen.empty
    dropped["limit"] = float((stays - chosen.within) @ weights)
    dropped["weight"] = float((chosen.within - chosen.packed) @ weights)
    if config.weighting == "token_share":
        entries, sources = entries_of(pieces, recipe), config.sources
        within, packed = (np.bincount(entries, each, len(sources)) for each in (chosen.within, chosen.packed))
        found.giving_all = [sources[e].path for e in np.flatnonzero((within > 0) & np.isclose(within, packed))]
    found.dropped = {reason: count for reason, count in dropped.items() if count >= 0.5 or reason == "too_long"}
    found.packed = float(chosen.packed @ weights)
    cut = np.unique(pieces.cut_of)
    found.cut = float(chosen.packed[cut] @ weights[cut])
    _count(found, pieces, tokens, recipe, weights * chosen.packed, weights * chosen.copies)
    return chosen.copies


def _weights(found: Prediction, tokens: TokenColumns) -> np.ndarray:
    """float64, what each conversation stands for."""
    record = tokens.column("record")
    inside = [slice(*edges) for edges in pairwise(tokens.edges)]
    weights = [source.sample.weights[record[own]] for source, own in zip(found.sources, inside, strict=True)]
    return np.concatenate([np.empty(0), *weights])


def _show_and_reject(found: Prediction, source: Source, inside: slice, late: np.ndarray, tokens: TokenColumns) -> None:
    """The first conversation of a source, and those that the over-long policy left without a trained token."""
    records = tokens.column("record", inside.start, inside.stop)
    if len(records):
        values = tokens.tokens(inside.start)
        source.shown = Shown(source.sample.records[records[0]].place, values ^ (values >> 31), values >= 0)
    config = found.recipe.config
    message = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
    for record in records[late[inside]].tolist():
        _reject(found, source, Reject("no_trained_tokens", message), record)
        found.cut_off.looked_at += 1
        found.cut_off.expected += float(source.sample.weights[record])


def _count(
    found: Prediction, pieces: Pieces, tokens: TokenColumns, recipe: Recipe, packed: np.ndarray, copies: np.ndarray
) -> None:
    """Rows and tokens of conversations that stand for `packed` others, which are packed `copies` times in a pass."""
    config, every = recipe.config, slice(None)
    accepted, conversation = pieces.accepted, pieces.conversations(every)
    held_out, weight = accepted.held_out[conversation], copies[conversation]
    length, trained = pieces.columns(every).length, pieces.trained(every, tokens)
    # Each further packing has the same pieces as the first, in as many rows.
    passes = {split: held_out if split == "validation" else ~held_out for split in split_names(config.epochs)}
    for split, own in passes.items():
        again = found.rows.get("train") if split not in SPLITS else None
        found.rows[split] = _rows(length[own], weight[own], config) if again is None else again
        found.trained[split] = float(trained[own] @ weight[own])
    total = weight * np.where(held_out, 1, config.epochs)
    found.pieces = float(total.sum())
    found.tokens = {
        "encoded": sum(source.tokens for source in found.sources),
        "packed": float(length @ total),
        "trained": float(trained @ total),
    }
    of_sources = np.bincount(accepted.part(conversation), trained * total, len(found.sources))
    for source, of_source in zip(found.sources, of_sources.tolist(), strict=True):
        source.trained = of_source
    if config.packing:
        places = sum(found.rows.values()) * config.sequence_length
        found.tokens["padding"] = max(0.0, places - found.tokens["packed"])
        found.efficiency = min(100.0, 100 * found.tokens["packed"] / max(places, 1))
    entries, in_train = entries_of(pieces, recipe), ~accepted.held_out
    of, own = entries[conversation], weight * ~held_out
    tokens_of, trained_of = (np.bincount(of, values * own, len(config.sources)) for values in (length, trained))
    there, copied = (np.bincount(entries, values * in_train, len(config.sources)) for values in (packed, copies))
    found.mixture = [
        MixtureFacts(
            path=source.path,
            weight=source.weight,
            limit=source.limit,
            conversations=round(there[entry]),
            copies=round(copied[entry]),
            tokens=round(tokens_of[entry]),
            trained_tokens=round(trained_of[entry]),
            tokens_percent=_percent(tokens_of, entry),
            trained_tokens_percent=_percent(trained_of, entry),
        )
        for entry, source in enumerate(config.sources)
    ]


def _percent(values: np.ndarray, entry: int) -> float:
    return round(100 * float(values[entry]) / max(1.0, float(values.sum())), 4)


def _rows(lengths: np.ndarray, weights: np.ndarray, config: Config) -> int:
    if not config.packing or not len(lengths):
        return round(float(weights.sum()))
    return bin_packing.pack(scaled(lengths, weights, config.sequence_length), config.sequence_length).rows


def scaled(lengths: np.ndarray, weights: np.ndarray, capacity: int) -> np.ndarray:
    """The histogram of all conversations, of those of a sample and how many each stands for; int64[capacity + 1].

    Rounded over the sum from the shortest on, so that all of them, and those of every range of lengths, are as many.
    """
    counts = np.bincount(lengths, weights, capacity + 1)
    return np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(np.int64)


# -- what it costs ---------------------------------------------------------------------------------------------------


def _cost(found: Prediction, tokens: list[_Tokens], copies: np.ndarray) -> None:
    """Bytes on disk, memory of the largest process, and time. `copies` is of each conversation."""
    config = found.recipe.config
    conversations = sum(source.conversations for source in found.sources)
    weights = [source.conversations / max(len(source.sample.records), 1) for source in found.sources]
    token_files = sum(each.file.size * weight for each, weight in zip(tokens, weights, strict=True))
    if config.packing:
        shards = sum(found.rows.values()) * config.sequence_length * float(ROW_BYTES)
    else:  # all that is said stands there twice, as messages and as rendered
        text = np.concatenate([each.text * weight for each, weight in zip(tokens, weights, strict=True)])
        shards = 2 * float(text @ copies)
    listed = found.pieces + sum(found.dropped.values())
    found.disk = {
        "shards": shards,
        "index": listed * INDEX_BYTES,
        "token_files": token_files,
        "plan": listed * INDEX_BYTES + found.pieces * PLAN_BYTES,
        "tokenizer": float(found.tokenizer_bytes),
    }
    text_bytes = min(found.tokens["encoded"] * TOKEN_BYTES, config.part_size)
    planned = max(conversations, found.pieces / config.epochs)
    found.memory = BASE_MEMORY + max(TEXT_MEMORY * np.log2(1 + text_bytes / TEXT_BEGIN), PLAN_MEMORY * planned)
    encoding = sum(each.seconds * weight for each, weight in zip(tokens, weights, strict=True))
    parts = max(found.files, found.bytes // config.part_size)
    plan = TASK + plan_seconds(max(conversations, found.pieces), found.tokens["encoded"], config.epochs)
    tasks = TASK * (parts + sum(found.recipe.shards.values()))
    at_once = max(1, min(found.workers, os.cpu_count() or 1))
    hashing = found.bytes * HASHED_BYTE / min(HASH_THREADS, os.cpu_count() or 1, found.files)
    found.seconds = START + hashing + plan + (encoding + tasks + shards * WRITTEN_BYTE) / at_once + COMMIT


def _warn(found: Prediction) -> None:
    config = found.recipe.config
    read = sum(source.conversations for source in found.sources)
    rejected = sum(source.rejected for source in found.sources)
    cut_off = found.cut_off.expected
    if rejected and rejected / max(read, 1) > config.max_rejects:
        found.failures.append(
            f"{100 * rejected / read:.2f} % of the conversations are rejected, max_rejects allows "
            f"{100 * config.max_rejects:.2f} %: the run will fail; the first of each reason is named under Rejects; "
            f"{advice(rejected, cut_off, read)}"
        )
    if config.overlong == "error" and found.too_long:
        found.failures.append(
            f"{about(found.too_long, found)} conversations are longer than a row: with overlong: error the run stops; "
            "truncate, drop or split goes on (figures are those of truncate)"
        )
    if not found.rows["train"]:
        found.failures.append("no conversation of the sample is left to train on: the run will fail")
    elif found.empty_shares:
        found.failures.append(
            f"{found.empty_shares}: no conversation of it in the sample is left in the training split, so that it can "
            "have no share of the tokens (weighting: token_share): the run will fail; figures are those of the others"
        )
    if limited := limited_by(found.giving_all, found.dropped.get("weight", 0.0), found.packed):
        found.warnings.append(limited)
    if config.duplicates == "drop" and not found.whole:
        found.warnings.append(
            "duplicates: drop: conversations that say the same are told within the sample alone; of all, the run may "
            "drop more"
        )
    short = [source.sample.file.name for source in found.sources if source.sample.reach < 1]
    if short:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        found.warnings.append(
            f"{names}: compressed and too long to be read to the end here: only the begin was looked at"
        )


def about(count: float, found: Prediction) -> str:
    """A number, and whether it is an estimate."""
    return f"{count:,.0f}" if found.whole else f"about {count:,.0f}"


def in_a_row(found: Prediction) -> float:
    """Conversations in a row, pieces counted as such."""
    return found.pieces / max(sum(found.rows.values()), 1)


def steps(found: Prediction, batch_rows: int) -> tuple[int, float]:
    """Optimizer steps in an epoch at `batch_rows` rows a step, and trained tokens of each."""
    rows = found.rows.get("train", 0)
    count = -(-rows // batch_rows)
    return count, found.trained.get("train", 0.0) / max(count, 1)
