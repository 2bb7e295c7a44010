"""Choose, tokenize, and weigh the samples of a dry run.

    files ─sample─▶ records ─tokenize_records─▶ token files ─select_pieces─▶ Pieces ─limits, weights─▶ Selection

Each conversation of a sample represents several conversations, so it has a share: the fraction of these that a run
packs. If a conversation has several samples, each of them has its own share. If everything was read,
`packing.mixture` decides, and the conversation is either packed or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core.errors import DataError
from tasks.encoders.auto_tokenizer import compare, is_installed
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from tasks.packing.mixture import is_mixed, mix
from tasks.packing.pieces import Pieces
from tasks.packing.plan import select_pieces
from tasks.readers.containers import container_named
from tasks.readers.tables import wanted
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.sources.sample_files import Sample, sample_files
from tasks.storage.schemas import REJECTED, drop_code, tokens_schema
from tasks.storage.token_files import TokenColumns
from tasks.tokenization.checks import HARD, LONGEST, difference, hard_tokens
from tasks.tokenization.prepare import Preparer, texts_of, unused_keys_of
from tasks.tokenization.tokenize_part import COUNTS, tokenize_records
from tasks.tokenization.train_tokenizer import train_model

PROOF = 400  # texts encoded by both encoders; a run compares more
TRAINING = 1 << 20  # characters to train a tokenizer on if the config names none: 1 s
SLOWER = 4  # divides the budget if the tokenizer's own library encodes, which takes 1 to 2 s
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
    preparer = Preparer(sample.file, recipe.template, encoder, config.train_on, config.packing, weighted)
    start, out = time.process_time(), pa.BufferOutputStream()
    unused, schema = count_unused_keys(sample, weighted), tokens_schema(config.packing, weighted)

    def where(number: int) -> str:
        return records[number].place

    with pa.ipc.new_file(out, schema) as writer:
        blocks = [(range(len(records)), (record.value for record in records))]
        rejects = tokenize_records(blocks, preparer, encoder, schema, writer.write_batch, receipt, where)
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


MOST_SAMPLES = 8  # samples of a conversation to show


@dataclass(frozen=True, slots=True)
class Selection:
    """The conversations of the samples, in columns.

    A column has one entry for each sample of a conversation.
    `packed` and `copies` are 0 if filters or the overlong policy removed the conversation. `empty` names the sources
    that have no trained token for their share, which makes the run fail.
    """

    sampled: list[SampleTokens]
    recipe: Recipe  # the sample of each file is a part
    tokens: TokenColumns
    pieces: Pieces
    weights: np.ndarray  # float64, the number of conversations that it represents
    entries: np.ndarray  # int64, index into `sources`
    reason: np.ndarray  # uint8, Accepted.reason before the mixture
    within: np.ndarray  # float64, share within the limit of its source
    packed: np.ndarray  # float64, share within the limit that is packed according to the weight of its source
    copies: np.ndarray  # float64, mean number of times that it is packed in a pass
    empty: str = ""

    @property
    def parts(self) -> list[slice]:
        """Return the conversations of each file."""
        return [slice(*edges) for edges in pairwise(self.tokens.edges)]

    @property
    def cut_off(self) -> np.ndarray:
        """Return whether each conversation lost all trained tokens to its length."""
        return self.pieces.accepted.samples.only_first(self.reason == REJECTED)

    def first_samples(self, part: slice) -> list[int]:
        """Return the first samples of the first conversation of a file."""
        records = self.tokens.column("record", part.start, min(part.stop, part.start + MOST_SAMPLES))
        return [part.start + at for at in np.flatnonzero(records == records[:1]).tolist()]

    def giving_all(self) -> list[str]:
        """Return the paths of the sources that token_share takes completely."""
        sources = self.recipe.config.sources
        if self.recipe.config.weighting != "token_share":
            return []
        within, packed = (np.bincount(self.entries, each, len(sources)) for each in (self.within, self.packed))
        return [sources[entry].path for entry in np.flatnonzero((within > 0) & np.isclose(within, packed))]


def select(sampled: list[SampleTokens], recipe: Recipe, whole: bool) -> Selection:
    """Select conversations; `whole` is true if the samples are all of the sources."""
    config = recipe.config
    if config.overlong == "error":  # the figures are for truncate
        config = config.model_copy(update={"overlong": "truncate"})
    parts = tuple(Part(each.sample.file, 0, each.sample.file.bytes, "") for each in sampled)
    recipe = replace(recipe, config=config, parts=parts)
    tokens = TokenColumns([each.file for each in sampled], [0] * len(sampled))
    record, edges = tokens.column("record"), pairwise(tokens.edges)
    weights = [each.sample.weights[record[slice(*inside)]] for each, inside in zip(sampled, edges, strict=True)]
    pieces = select_pieces(tokens, recipe, is_sample=not whole)
    entries = np.repeat(np.array([part.file.entry for part in parts]), np.diff(pieces.accepted.edges))
    before = pieces.accepted.reason.copy()
    share = (before == 0).astype(np.float64)
    represents = np.concatenate([np.empty(0), *weights])
    chosen = Selection(sampled, recipe, tokens, pieces, represents, entries, before, share, share, share)
    if not is_mixed(config):
        return chosen
    if whole:
        try:
            mixed = mix(pieces, tokens, recipe)
        except DataError:  # a source is empty; the shares of the other sources can be estimated
            pieces.accepted.reason[:] = before
        else:
            reasons = pieces.accepted.reason
            packed = (reasons == 0).astype(np.float64)
            copies = packed if mixed.copies is None else mixed.copies * packed
            return replace(chosen, within=packed + (reasons == drop_code("weight")), packed=packed, copies=copies)
    return _with_shares(chosen)


def _with_shares(chosen: Selection) -> Selection:
    config, accepted, entries = chosen.recipe.config, chosen.pieces.accepted, chosen.entries
    counts = np.bincount(entries, chosen.weights * accepted.left(), len(config.sources))
    limits = np.array([source.limit or np.inf for source in config.sources])
    within = chosen.within * np.minimum(1, limits / np.maximum(counts, 1e-9))[entries]
    factors, empty = np.array([source.weight for source in config.sources]), ""
    if config.weighting == "token_share":
        conversation = chosen.pieces.conversations(slice(None))
        in_train = (chosen.weights * within * ~accepted.held_out)[conversation]
        trained_of = chosen.pieces.trained(slice(None), chosen.tokens) * in_train
        trained = np.bincount(entries[conversation], trained_of, len(factors))
        empty = ", ".join(config.sources[entry].path for entry in np.flatnonzero(trained == 0).tolist())
        there = trained > 0
        scale = (trained / factors)[there].min(initial=np.inf)
        factors[there] *= scale / trained[there]
        factors[~there] = 0
    factor = factors[entries]
    packed = within * np.minimum(factor, 1)
    copies = np.where(accepted.held_out, packed, within * factor)
    return replace(chosen, within=within, packed=packed, copies=copies, empty=empty)
