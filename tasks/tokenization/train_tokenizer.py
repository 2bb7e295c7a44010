"""Train a SentencePiece tokenizer, for a config without a tokenizer.

The model is BPE with byte fallback. The same sources always produce the same bytes: one thread, no sampling, no clock.
Text is not changed (no normalization, no white space removed). Digits are split, and every byte has a piece, so any
text decodes to itself. Only the markers of the template become control tokens of the model.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from packcorpus.tasks.conversations.formats import detect
from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.conversations.unused_keys import UnusedKeys
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.sources.model import Part, SourceFile
from packcorpus.tasks.sources.parts import PartReader, place_of
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.templates.built_in import MARKERS

# The trainer keeps all text in memory; more text does not improve a vocabulary of the allowed sizes.
MOST_CHARACTERS = 100_000_000
LONGEST_SENTENCE = 16_384


# A record, its file, and a function that returns its place for messages.
Placed = tuple[object, SourceFile, Callable[[], str]]


def train_tokenizer(
    parts: tuple[Part, ...], template: str, vocab_size: int, max_record_bytes: int, path: Path
) -> dict[str, Any]:
    """Train on the contents of all messages, and write the model.

    Returns the size of the model in bytes and its SHA-256. Raises the errors of `train_model` and of reading.
    """
    return write_bytes(path, train_model(placed(parts, max_record_bytes), template, vocab_size))


def placed(parts: tuple[Part, ...], max_record_bytes: int) -> Iterator[Placed]:
    """Yield all records of parts."""
    for file, of_file in groupby(parts, key=attrgetter("file")):
        # Not part by part: some files can only be read from their start.
        whole = Part(file, 0, max(part.stop for part in of_file), file.sha256)
        for number, record in PartReader(whole, max_record_bytes):
            yield record, file, partial(place_of, whole, number)


def train_model(
    records: Iterable[Placed], template: str, vocab_size: int, most_characters: int = MOST_CHARACTERS
) -> bytes:
    """Return a model trained on the contents of all messages of `records`.

    Raises DataError if there is no text, if `vocab_size` is too small for its characters, or if the first record
    without text is not supervised fine-tuning data.
    """
    from sentencepiece import SentencePieceTrainer

    model, seen = io.BytesIO(), Seen()
    options: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": vocab_size,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.9995,
        "max_sentence_length": 4 * LONGEST_SENTENCE,
        "shuffle_input_sentence": False,
        "num_threads": 1,
        "control_symbols": list(MARKERS.get(template, ())),
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "minloglevel": 2,
    }
    try:
        sentences = sentences_of(records, most_characters, seen)
        SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **options)
    except RuntimeError as error:
        if seen.failure:
            raise seen.failure from None
        if not seen.has_text:
            if seen.wrong:
                raise DataError("wrong_format", seen.wrong) from None
            first = f" (the first of {seen.rejects:,} rejects: {seen.first})" if seen.rejects else ""
            raise DataError(
                "untrainable_tokenizer",
                f"the sources contain no text to train a tokenizer on{first}; fix the sources, or name a tokenizer in "
                "the config",
            ) from None
        raise DataError(
            "untrainable_tokenizer",
            f"training a tokenizer on the sources failed ({' '.join(str(error).split())[-160:]}); raise vocab_size, "
            f"which is {vocab_size:,}, or name a tokenizer in the config",
        ) from None
    return model.getvalue()


@dataclass(slots=True)
class Seen:
    """What the trainer has read."""

    has_text: bool = False
    rejects: int = 0  # records that cannot be read
    first: str = ""  # the place and the message of the first of them
    wrong: str = ""  # the message if the first of them has the keys of another format
    failure: BaseException | None = None  # the trainer turns every exception into a RuntimeError

    def explain(self, reject: Reject, record: object, file: SourceFile, place: str) -> None:
        unused = UnusedKeys(file.format, dict(file.columns), file.ignore, unread=file.unread)
        unused.add([0], [record], lambda _: place)
        self.first, format = f"{place}: {reject.message}", detect(record, dict(file.columns))
        if format not in (None, file.format):
            self.wrong = (
                f"{place}: does not fit format: {file.format} ({reject.message}); its keys match the format {format}; "
                "remove `format`"
            )


def sentences_of(records: Iterable[Placed], most_characters: int, seen: Seen) -> Iterator[str]:
    """Yield the contents of all messages in source order, cut for the trainer."""
    left = most_characters
    try:
        for record, file, place in records:
            try:
                conversation = file.conversation(record)
            except Reject as reject:
                seen.rejects += 1
                if seen.rejects == 1:
                    seen.explain(reject, record, file, place())
                continue
            for text in map(full_text, conversation.messages):
                left -= len(text)
                if left < 0:
                    return
                for start in range(0, len(text), LONGEST_SENTENCE):
                    sentence = text[start : start + LONGEST_SENTENCE].replace("\0", "")
                    seen.has_text = seen.has_text or bool(sentence.strip())
                    yield sentence
    except BaseException as error:
        seen.failure = error
        raise
