"""Tokenize the sample of a dry run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.conversations.formats import read_record
from tasks.conversations.model import full_text
from tasks.core.errors import Reject
from tasks.dry_run.model import SampleTokens
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder
from tasks.encoders.gigatoken_model import Unsupported
from tasks.recipe import Recipe
from tasks.sources.sample import Sample
from tasks.storage.schemas import SCHEMA, WHOLE_SCHEMA
from tasks.templates.spans import trained_turns
from tasks.tokenization.engine_check import HARD, LONGEST, difference
from tasks.tokenization.frames import Frames
from tasks.tokenization.segments import segments_of
from tasks.tokenization.token_batch import BATCH_CHARACTERS, COUNTS, NOTICED, Batch
from tasks.tokenization.tokenize_part import add_records
from tasks.tokenization.train_tokenizer import Unread, cut_sentence, train_model

AT_ONCE = 256  # records tokenized at a time


PROOF = 400  # texts encoded by both encoders


TRAINING = 1 << 20  # characters to train a tokenizer on if the config names none: 1 s


def train_on_sample(recipe: Recipe, samples: list[Sample], folder: Path) -> Recipe:
    """Return the recipe with a tokenizer trained on the sample, as a run trains one on everything."""
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
    """Yield the texts of all messages. Records that cannot be read go to `unread`."""
    for place, value in sample.records:
        try:
            if isinstance(value, Reject):
                raise value
            conversation = read_record(value, sample.file.format, dict(sample.file.columns))
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


def encodes_equally(fast: Encoder, reference: Encoder, recipe: Recipe, samples: list[Sample]) -> bool:
    """Return whether gigatoken and the reference encode texts of the sample equally; a run compares more texts."""
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


def thinned(sample: Sample, every: int) -> Sample:
    """Return every n-th record of a sample, at least a few; together they represent as many conversations."""
    every = max(1, min(every, len(sample.records) // 20))
    return sample.thinned(every)


def tokenize_sample(sample: Sample, recipe: Recipe, encoder: Encoder) -> SampleTokens:
    """Tokenize the sample of one file as a run does."""
    config, file = recipe.config, sample.file
    rejects: list[tuple[int, Reject]] = []
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
            rejects += add_records(
                batch, numbers, values, file, recipe.template, config, frames, lambda n: sample.records[n].place
            )
            if batch.characters >= BATCH_CHARACTERS:
                flush()
                batch = Batch(encoder, receipt)
        flush()
    seconds = time.process_time() - start
    noticed = {name: receipt[name] for name in NOTICED}
    return SampleTokens(sample, out.getvalue(), rejects, noticed, seconds, np.concatenate(texts))
