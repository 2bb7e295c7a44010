"""Tokenize the sample of a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.conversations.model import full_text
from tasks.core.errors import Reject
from tasks.dry_run.model import SampleTokens
from tasks.encoders.auto_compare import compare, is_installed
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from tasks.readers.containers import container_named
from tasks.readers.tables import wanted
from tasks.recipe import Recipe
from tasks.sources.sampling.sample import Sample
from tasks.storage.schemas import tokens_schema
from tasks.tokenization.engine_check import HARD, LONGEST, difference, hard_tokens
from tasks.tokenization.prepare import Preparer, texts_of, unused_keys_of
from tasks.tokenization.token_batch import COUNTS, Batch
from tasks.tokenization.train_tokenizer import Unread, cut_sentence, train_model

PROOF = 400  # texts encoded by both encoders

TRAINING = 1 << 20  # characters to train a tokenizer on if the config names none: 1 s


def train_on_sample(recipe: Recipe, samples: list[Sample], folder: Path) -> Recipe:
    """Return the recipe with a tokenizer that is trained on the sample.

    A run trains the tokenizer on all sources.
    """
    config = recipe.config
    sentences: list[str] = []
    unread = Unread()
    left = TRAINING
    for text in chain.from_iterable(_texts(sample, unread) for sample in samples):
        left -= len(text)
        if left < 0:
            break
        sentences += cut_sentence(text)
    path = folder / "tokenizer.model"
    path.write_bytes(train_model(sentences, config.template, config.vocab_size, unread))
    recipe = replace(recipe, config=config.model_copy(update={"tokenizer": str(path)}))
    _ = recipe.encoder  # read before the file is deleted
    return recipe


def _texts(sample: Sample, unread: Unread) -> Iterator[str]:
    """Yield the texts of all messages.

    Records that cannot be read are added to `unread`.
    """
    for place, value in sample.records:
        try:
            conversation = sample.file.conversation(value)
        except Reject as reject:
            unread.add(reject, value, sample.file, place)
            continue
        yield from map(full_text, conversation.messages)


def fast_encoder(reference: Encoder, config: Config) -> Encoder:
    if config.engine == "reference":
        return reference
    try:
        return GigatokenEncoder(reference)
    except Unsupported:
        return reference


def encodes_equally(fast: Encoder, reference: Encoder, texts: list[str]) -> bool:
    """Return whether gigatoken and the reference encode texts of the sample equally.

    A run compares more texts.
    """
    return difference(fast, reference, [*HARD, *hard_tokens(reference), *texts]) is None


def unlike_transformers(recipe: Recipe, texts: Callable[[], list[str]]) -> str:
    """Return how the tokens of some texts differ from those of AutoTokenizer, or "".

    Nothing is compared if Transformers is not installed, or if the tokenizer is not loaded like AutoTokenizer.
    """
    files = recipe.tokenizer_files
    if not files.like_transformers or not is_installed():
        return ""
    found = compare(recipe.encoder, files.main.parent, texts())
    return found.difference or found.failure


def some_texts(recipe: Recipe, samples: list[Sample]) -> list[str]:
    """Return about PROOF texts of the samples, as the template writes them."""
    texts: list[str] = []
    for sample in samples:
        some = sample.records[:: max(1, len(sample.records) // 50)]
        own = texts_of((record.value for record in some), sample.file, recipe)  # errors are left to `tokenize_sample`
        texts += [text[:LONGEST] for text in own[: max(4, PROOF // len(samples))]]
    return texts


def thinned(sample: Sample, every: int) -> Sample:
    """Return every n-th record of a sample, or at least a few records.

    Together, they represent the same number of conversations.
    """
    every = max(1, min(every, len(sample.records) // 20))
    return sample.thinned(every)


def tokenize_sample(sample: Sample, recipe: Recipe, encoder: Encoder) -> SampleTokens:
    """Tokenize the sample of one file, as in a run."""
    config, file = recipe.config, sample.file
    rejects: list[tuple[int, Reject]] = []
    weighted = config.reads_loss_weights
    schema = tokens_schema(config.packing, weighted)
    receipt: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    preparer = Preparer(file, recipe.template, encoder, config.train_on, config.packing, weighted)
    texts = [np.empty(0, np.int64)]
    start = time.process_time()

    def place_of(number: int) -> str:
        return sample.records[number].place

    batch, out = Batch(encoder, receipt, place_of), pa.BufferOutputStream()
    with pa.ipc.new_file(out, schema) as writer:

        def flush() -> None:
            if batch.records and (encoded := batch.encode(schema)):
                writer.write_batch(encoded)
                if not config.packing:
                    offsets = encoded.column("text").buffers()[1]
                    texts.append(np.diff(np.frombuffer(offsets, np.int64)[: encoded.num_rows + 1]))
            rejects.extend(batch.rejects)

        unused = count_unused_keys(sample, weighted)
        for number, found in enumerate(preparer.prepare_all(record.value for record in sample.records)):
            if isinstance(found, list):
                batch.add(number, found)
            elif isinstance(found, Reject):
                rejects.append((number, found))
            else:
                raise type(found)(found.reason, f"{place_of(number)}: {found}")
            if batch.is_full:
                flush()
                batch = Batch(encoder, receipt, place_of)
        flush()
    seconds = time.process_time() - start
    receipt |= preparer.left_out
    rejects.sort(key=itemgetter(0))
    return SampleTokens(sample, out.getvalue(), rejects, receipt, unused, seconds, np.concatenate(texts))


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
