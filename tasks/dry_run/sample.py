"""Choose, tokenize, and repeat the samples of a dry run.

    files ─sample─▶ records ─tokenize_records─▶ token files ─repeat─▶ all conversations ─as in a run─▶ Pieces, Account

Each record of a sample represents several records. It is repeated as often, so the functions of a run plan the sample.
A corpus of more than MOST_REPEATED conversations is planned at a smaller scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders.auto_tokenizer import compare, is_installed
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from packcorpus.tasks.packing.dropped import contaminated_rows, overlaps_of
from packcorpus.tasks.packing.leaks import count_leaks
from packcorpus.tasks.packing.ledger import Account, take_account
from packcorpus.tasks.packing.mixture import mix
from packcorpus.tasks.packing.pieces import Pieces
from packcorpus.tasks.packing.plan import select_pieces
from packcorpus.tasks.packing.trees import join, with_trees
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.readers.tables import wanted
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.sources.sample_files import Sample, sample_files
from packcorpus.tasks.storage.schemas import REJECTED, drop_code, tokens_schema
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.tokenization.checks import HARD, LONGEST, difference, hard_tokens
from packcorpus.tasks.tokenization.decontamination import evaluation_of
from packcorpus.tasks.tokenization.prepare import Preparer, texts_of, unused_keys_of
from packcorpus.tasks.tokenization.tokenize_part import COUNTS, tokenize_records
from packcorpus.tasks.tokenization.train_tokenizer import train_model

PROOF = 400  # texts encoded by both encoders; a run compares more
TRAINING = 1 << 20  # characters to train a tokenizer on if the config names none: 1 s
SLOWER = 4  # divides the budget if the tokenizer's own library encodes, which takes 1 to 2 s
MOST_REPEATED = 200_000  # conversations to plan, which takes a second or two
OTHER_DIGEST = np.uint64(0x9E3779B97F4A7C15)  # multiples of it are spread evenly over all digests
MOST_SAMPLES = 8  # samples of a conversation to show
JINJA_RECORDS = 1000  # conversations to render with a Jinja template, which takes 0.3 to 1 ms for each


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """The tokenized sample of one file.

    The number of a record is its index in `sample.records`.
    """

    sample: Sample
    file: pa.Buffer  # a token file
    rejects: list[tuple[int, str, str]]  # record, reason, and message
    counts: dict[str, Any]  # as in the receipt of a token file
    unused_keys: dict[str, int]
    seconds: float
    text: np.ndarray  # int64[conversations], rendered bytes; in format 2.0 only


def open_samples(recipe: Recipe, budget: int, scratch: Path) -> tuple[Recipe, Encoder, list[Sample], str]:
    """Sample the sources, and choose the encoder of the sample.

    Samples are smaller for a slow encoder or template. If the config names no tokenizer, one is trained on the samples.
    The last value is how the tokens of some texts differ from those of AutoTokenizer, or "".
    """
    config, files = recipe.config, recipe.files
    if config.tokenizer is None:
        samples = sample_files(files, budget // SLOWER, config.max_record_bytes)
        recipe = _train_on_sample(recipe, samples, scratch)
    reference = encoder = recipe.encoder
    if config.engine != "reference":
        try:
            encoder = GigatokenEncoder(reference)
        except Unsupported:
            budget //= SLOWER
    else:
        budget //= SLOWER
    if config.tokenizer is not None or encoder is not reference:
        samples = sample_files(files, budget, config.max_record_bytes)
    texts = cache(lambda: _some_texts(recipe, samples))
    if encoder is not reference:
        proof = [*HARD, *hard_tokens(reference), *texts()]
        if difference(encoder, reference, proof) is not None:
            encoder, samples = reference, [_thinned(sample, SLOWER) for sample in samples]
    if recipe.template.engines:
        every = -(-sum(len(sample.records) for sample in samples) // JINJA_RECORDS)
        samples = [_thinned(sample, every) for sample in samples]
    return recipe, encoder, samples, _unlike_transformers(recipe, texts)


def _train_on_sample(recipe: Recipe, samples: list[Sample], folder: Path) -> Recipe:
    """Return the recipe with a tokenizer that is trained on the sample.

    A run trains the tokenizer on all sources.
    """
    config, path = recipe.config, folder / "tokenizer.model"
    records = ((value, sample.file, partial(str, place)) for sample in samples for place, value in sample.records)
    path.write_bytes(train_model(records, config.template, config.vocab_size, TRAINING))
    recipe = replace(recipe, config=config.model_copy(update={"tokenizer": str(path)}))
    _ = recipe.encoder  # read before the file is deleted
    return recipe


def _unlike_transformers(recipe: Recipe, texts: Callable[[], list[str]]) -> str:
    files = recipe.tokenizer_files
    if not files.like_transformers or not is_installed():
        return ""
    found = compare(recipe.encoder, files.main.parent, texts())
    return found.difference or found.failure


def _some_texts(recipe: Recipe, samples: list[Sample]) -> list[str]:
    texts: list[str] = []
    for sample in samples:
        some = sample.records[:: max(1, len(sample.records) // 50)]
        own = texts_of((record.value for record in some), sample.file, recipe)  # errors are left to `tokenize_sample`
        texts += [text[:LONGEST] for text in own[: max(4, PROOF // len(samples))]]
    return texts


def _thinned(sample: Sample, every: int) -> Sample:
    return sample.thinned(max(1, min(every, len(sample.records) // 20)))


def tokenize_sample(sample: Sample, recipe: Recipe, encoder: Encoder) -> SampleTokens:
    """Tokenize the sample of one file, as in a run."""
    config, records = recipe.config, sample.records
    weighted = config.reads_loss_weights
    receipt: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    name = config.checked_tokenizer
    preparer = Preparer(sample.file, recipe.template, encoder, config.train_on, config.packing, weighted, name)
    evaluation = evaluation_of(recipe)  # read once, so its time does not count
    start, out = time.process_time(), pa.BufferOutputStream()
    unused = count_unused_keys(sample, weighted)
    schema = tokens_schema(config.packing, weighted, bool(config.group_key))

    def where(number: int) -> str:
        return records[number].place

    with pa.ipc.new_file(out, schema) as writer:
        blocks = [(range(len(records)), (record.value for record in records))]
        rejects = tokenize_records(blocks, preparer, encoder, schema, writer.write_batch, receipt, where, evaluation)
    file, seconds = out.getvalue(), time.process_time() - start
    text = np.empty(0, np.int64)
    if not config.packing:
        text = pc.binary_length(pa.ipc.open_file(file).read_all().column("text")).to_numpy().astype(np.int64)
    return SampleTokens(sample, file, rejects, receipt | preparer.left_out, unused, seconds, text)


def count_unused_keys(sample: Sample, weighted: bool = False) -> dict[str, int]:
    """Return how often each unused key occurs in a sample.

    A column that is not read counts once per record. Raises DataError for a record that is not supervised fine-tuning
    data.
    """
    file, records = sample.file, sample.records
    unused = unused_keys_of(file, weighted)
    unused.add(range(len(records)), [record.value for record in records], lambda number: records[number].place)
    names = container_named(file.container).column_names(file)
    for name in set(names).difference(wanted(names, file)):
        unused.add_column(name, len(records))
    return unused.found()


class Repeated(TokenColumns):
    """The conversations of samples, each as often as the sample represents it.

    A repetition has another digest, so it is held out and chosen by chance, like another conversation. Records with the
    same prompt, or the same value of a key, have as many in common when they are repeated.
    """

    def __init__(self, tokens: TokenColumns, times: Sequence[np.ndarray]):
        """Repeat each record of each file as often as `times`, int64[records], says."""
        self._tokens, edges, rows, repetitions = tokens, [0], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for (first, last), times_of in zip(pairwise(tokens.edges), times, strict=True):
            record = tokens.column("record", first, last)
            counts = times_of[record]
            row = np.repeat(np.arange(len(record)), counts)
            repetition = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            order = np.lexsort((row, repetition, record[row]))  # the samples of a conversation stay together
            rows.append(first + row[order])
            repetitions.append(repetition[order])
            edges.append(edges[-1] + len(row))
        self.edges, self.rows, self._repetition = edges, np.concatenate(rows), np.concatenate(repetitions)

    def column(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return a column; each repetition of a record has another number."""
        chosen = slice(first, last)
        values = self._tokens.column(name)[self.rows[chosen]]
        if name == "record":
            values += self._repetition[chosen] << 32
        if name in ("digest", "prompt", "group"):
            values += self._repetition[chosen].astype(np.uint64) * OTHER_DIGEST
        return values

    def contents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the tokens of all conversations, if each is there once."""
        assert len(self.rows) == self._tokens.edges[-1]
        return self._tokens.contents()

    def tokens(self, conversation: int) -> np.ndarray:
        return self._tokens.tokens(int(self.rows[conversation]))

    def distinct(self) -> tuple[TokenColumns, np.ndarray | None]:
        return self._tokens, self.rows


@dataclass(frozen=True, slots=True)
class Selection:
    """The conversations that the samples represent, selected as in a run.

    `empty` is the error of a source without a trained token for its share, which makes the run fail.
    """

    sampled: list[SampleTokens]
    recipe: Recipe  # the sample of each file is a part
    tokens: TokenColumns  # of the samples
    repeated: Repeated
    times: list[np.ndarray]  # int64[records] for each file
    scale: float  # the number of conversations that each of `repeated` stands for
    pieces: Pieces
    joined: Pieces  # the same with `share: all`, if rows can be trees
    reason: np.ndarray  # uint8, Accepted.reason before the mixture
    account: Account
    held_out: dict[str, Any] | None  # as in the manifest
    empty: str = ""

    @property
    def late(self) -> np.ndarray:
        """Return the first samples of conversations without a trained token in a row."""
        return np.flatnonzero(self.pieces.accepted.samples.only_first(self.reason == REJECTED))

    def first_samples(self, file: int) -> list[int]:
        """Return the rows of the first conversation of a file in `tokens`."""
        first, last = self.tokens.edges[file : file + 2]
        records = self.tokens.column("record", first, min(last, first + MOST_SAMPLES))
        return [first + at for at in np.flatnonzero(records == records[:1]).tolist()]

    def giving_all(self) -> list[str]:
        """Return the paths of the sources that token_share takes completely."""
        sources, accepted = self.recipe.config.sources, self.pieces.accepted
        if self.recipe.config.weighting != "token_share":
            return []
        entries = np.array([part.file.entry for part in self.recipe.parts])
        of = entries[accepted.part(np.arange(len(accepted.reason)))]
        packed, dropped = (
            np.bincount(of[accepted.reason == code], minlength=len(sources)) for code in (0, drop_code("weight"))
        )
        return [source.path for source, some, rest in zip(sources, packed, dropped, strict=True) if some and not rest]


def select(sampled: list[SampleTokens], recipe: Recipe, whole: bool) -> Selection:
    """Select conversations; `whole` is true if the samples are all of the sources."""
    weights = np.concatenate([np.empty(0), *(each.sample.weights for each in sampled)])
    scale = 1.0 if whole else max(1.0, float(weights.sum()) / MOST_REPEATED)
    ends = np.floor(np.cumsum(weights) / scale + 0.5).astype(np.int64)  # a record of weight 2.5 counts 2 or 3 times
    edges = np.cumsum([len(each.sample.records) for each in sampled])
    times = np.split(np.diff(ends, prepend=0), edges[:-1])
    limits = [
        source.model_copy(update={"limit": source.limit and max(1, round(source.limit / scale))})
        for source in recipe.config.sources
    ]
    config = recipe.config.model_copy(update={"sources": limits})
    if config.overlong == "error":  # the figures are for truncate
        config = config.model_copy(update={"overlong": "truncate"})
    files = tuple(each.sample.file for each in sampled)
    recipe = replace(recipe, config=config, files=files, parts=tuple(Part(file, 0, file.bytes, "") for file in files))
    tokens = TokenColumns([each.file for each in sampled], [0] * len(sampled))
    repeated = Repeated(tokens, times)
    contaminated = contaminated_rows(overlaps_of([each.counts for each in sampled]), tokens, [0] * len(sampled))
    if contaminated is not None:
        contaminated = contaminated[repeated.rows]
    pieces, empty = select_pieces(repeated, recipe, is_sample=not whole, contaminated=contaminated), ""
    reason = pieces.accepted.reason.copy()
    try:
        pieces = mix(pieces, repeated, recipe)
    except DataError as error:  # a source has no conversation to share
        empty, pieces.accepted.reason[:] = str(error), reason
        sources = [source.model_copy(update={"weight": 1.0}) for source in limits]
        only_limits = config.model_copy(update={"sources": sources, "weighting": "repeat"})
        pieces = mix(pieces, repeated, replace(recipe, config=only_limits))
    apart, pieces = pieces, with_trees(pieces, repeated, config)
    joined = join(apart, repeated, config.sequence_length) if config.can_share and config.share != "all" else pieces
    account, held_out = take_account(pieces, repeated, recipe), count_leaks(pieces, repeated, whole)
    return Selection(sampled, recipe, tokens, repeated, times, scale, pieces, joined, reason, account, held_out, empty)
