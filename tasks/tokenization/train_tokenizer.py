"""Train a SentencePiece tokenizer, for a config without a tokenizer.

The model is BPE with byte fallback. The same sources always produce the same bytes: one thread, no sampling, no clock.
Text is not changed (no normalization, no white space removed). Digits are split, and every byte has a piece, so any
text decodes to itself. Only the markers of the template become control tokens of the model.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.conversations.formats import detect
from tasks.conversations.model import full_text
from tasks.conversations.unused_keys import UnusedKeys
from tasks.core.errors import DataError, Reject
from tasks.sources.model import Part, SourceFile
from tasks.sources.parts import PartReader, place_of
from tasks.storage.files import write_bytes
from tasks.templates.built_in import MARKERS

# The trainer keeps all text in memory; more text does not improve a vocabulary of the allowed sizes.
MOST_CHARACTERS = 100_000_000
LONGEST_SENTENCE = 16_384


@dataclass(slots=True)
class Unread:
    """Count the records without text, and describe the first of them."""

    count: int = 0
    first: str = ""  # the place and the message of the first record
    wrong: str = ""  # the message if the first record has the keys of another format

    def add(self, reject: Reject, value: object, file: SourceFile, place: str) -> None:
        """Add a record.

        Raises DataError if the first record is not supervised fine-tuning data.
        """
        self.count += 1
        if self.count > 1:
            return
        UnusedKeys(file.format, dict(file.columns), file.ignore).add([0], [value], lambda _: place)
        self.first = f"{place}: {reject.message}"
        found = detect(value, dict(file.columns))
        if found not in (None, file.format):
            self.wrong = (
                f"{place}: does not fit format: {file.format} ({reject.message}); its keys match the format {found}; "
                "remove `format`"
            )


def train_tokenizer(
    parts: tuple[Part, ...], template: str, vocab_size: int, max_record_bytes: int, path: Path
) -> dict[str, Any]:
    """Train on the contents of all messages, and write the model.

    Returns the size of the model in bytes and its SHA-256. Raises the errors of `train_model` and of reading.
    """
    unread = Unread()
    return write_bytes(path, train_model(_sentences(parts, max_record_bytes, unread), template, vocab_size, unread))


def train_model(sentences: Iterable[str], template: str, vocab_size: int, unread: Unread) -> bytes:
    """Return a model trained on `sentences`.

    `unread` has the records without sentences, for the error message. Raises DataError if there is no text, or if
    `vocab_size` is too small for its characters.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    not_blank = 0
    failures: list[BaseException] = []

    def counted() -> Iterator[str]:
        # The trainer turns every exception that is raised here into a RuntimeError.
        nonlocal not_blank
        try:
            for sentence in sentences:
                not_blank += bool(sentence.strip())
                yield sentence
        except BaseException as error:
            failures.append(error)
            raise

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
        SentencePieceTrainer.train(sentence_iterator=counted(), model_writer=model, **options)
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        if not not_blank:
            if unread.wrong:
                raise DataError("wrong_format", unread.wrong) from None
            first = f" (the first of {unread.count:,} rejects: {unread.first})" if unread.count else ""
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


def _sentences(parts: tuple[Part, ...], max_record_bytes: int, unread: Unread) -> Iterator[str]:
    """Yield the contents of all messages in source order, cut for the trainer.

    Records without text are added to `unread`.
    """
    left = MOST_CHARACTERS
    for part in parts:
        for record, value in PartReader(part, max_record_bytes):
            try:
                conversation = part.file.conversation(value)
            except Reject as reject:
                unread.add(reject, value, part.file, "" if unread.count else place_of(part, record))
                continue
            for text in map(full_text, conversation.messages):
                left -= len(text)
                if left < 0:
                    return
                yield from cut_sentence(text)


def cut_sentence(text: str) -> Iterator[str]:
    """Cut a text into sentences that are short enough for the trainer."""
    for start in range(0, len(text), LONGEST_SENTENCE):
        yield text[start : start + LONGEST_SENTENCE].replace("\0", "")
