"""Choose the encoder of a dry run, and tokenize the samples of its sources."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.encoders.auto_tokenizer import compare, is_installed
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from tasks.readers.containers import container_named
from tasks.readers.tables import wanted
from tasks.recipe import Recipe
from tasks.sources.sample_files import Sample, sample_files
from tasks.storage.schemas import tokens_schema
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
    """Compare with AutoTokenizer if the tokenizer is loaded like it."""
    files = recipe.tokenizer_files
    if not files.like_transformers or not is_installed():
        return ""
    found = compare(recipe.encoder, files.main.parent, texts())
    return found.difference or found.failure


def _some_texts(recipe: Recipe, samples: list[Sample]) -> list[str]:
    """Return about PROOF texts of the samples, as the template writes them."""
    texts: list[str] = []
    for sample in samples:
        some = sample.records[:: max(1, len(sample.records) // 50)]
        own = texts_of((record.value for record in some), sample.file, recipe)  # errors are left to `tokenize_sample`
        texts += [text[:LONGEST] for text in own[: max(4, PROOF // len(samples))]]
    return texts


def _thinned(sample: Sample, every: int) -> Sample:
    """Return every n-th record of a sample, or at least a few records."""
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
