"""Encode with gigatoken, falling back to the reference encoder.

    texts ─┬─▶ gigatoken ─┬──────────────────────────────────▶ ids, equal to the reference's
           │              └─ with a control token ─▶ reference ─┤
           └─ with an irregular token ─────────────▶ reference ─┘

gigatoken loads the same model as the reference. It encodes 60 to 90 MB/s of chats on one core; SentencePiece encodes
5 MB/s, and tokenizers 1.4 MB/s. Before a corpus is tokenized, texts of it are encoded by both and compared
(tokenization/checks.py). In a SentencePiece model, gigatoken matches control tokens in plain text, so the reference
encodes every text for which gigatoken returned a control id. Both encoders match content tokens, such as <think>.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.core.process import peak_memory
from packcorpus.tasks.encoders.encoder import Encoded, Encoder
from packcorpus.tasks.encoders.huggingface_encoder import is_placeholder
from packcorpus.tasks.encoders.sentencepiece_encoder import (
    EMPTY,
    SPACE_TO_UNDERLINE,
    SentencePieceEncoder,
    bpe_of,
    precompiled,
)
from packcorpus.tasks.encoders.texts import SEPARATOR, UNDERLINE, Texts, find, needles_of
from packcorpus.tasks.storage.schemas import offsets_of

# gigatoken caches every word: 40 MB for the first 25 MB of chats, 8 MB for each MB of random numbers. Reloading the
# model (0.04 s) clears the cache.
MOST_MEMORY = 128 << 20

# The separator is added as a control token after the last token of the vocabulary, so that the texts on both sides are
# encoded independently.
_ADDED = {
    "content": SEPARATOR, "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False,
}  # fmt: skip


class Unsupported(Exception):
    """gigatoken cannot replace this tokenizer; the message is the reason."""


class GigatokenEncoder(Encoder):
    """Encode like `reference` in less time; raises Unsupported if it cannot."""

    engine = "gigatoken"

    def __init__(self, reference: Encoder):
        for name in Encoder.__annotations__:
            if name != "engine":
                setattr(self, name, getattr(reference, name))
        self.reference = reference
        # gigatoken matches a control token in a text before spaces become U+2581, and merges its bytes otherwise.
        spaced = [string for string in reference.controls if UNDERLINE in string]
        self._irregular = needles_of([*reference.irregular, *spaced])
        self._open, self._separator = _opener(reference)
        self._load()

    def _load(self) -> None:
        try:
            self._backend = self._open().backend
            # To create the first array of a process, the library calls Python. An interrupt during this call would
            # make Rust panic.
            with _delayed_interrupts():
                self._backend.encode("")
        except Exception as error:  # the library raises ValueError, RuntimeError, and others
            raise Unsupported(f"gigatoken cannot load the model: {' '.join(str(error).split())[:160]}") from None
        self._memory = _memory()

    def _encode(self, texts: Texts) -> Encoded:
        if _memory() - self._memory > MOST_MEMORY:
            self._load()
        others = sorted({*find(self._irregular, texts), *texts.with_separator})
        encoded = self._joined(texts, others)
        if encoded is None:
            return self.reference.encode(texts)
        if others:
            encoded = encoded.replaced(others, self._encode_as_text([texts.strings[number] for number in others]))
        return encoded

    def _joined(self, texts: Texts, others: Sequence[int] = ()) -> Encoded | None:
        """Encode all texts in one call, those with the numbers `others` as empty.

        One call per text would take half as long again. Returns None if the library does not find the separators.
        """
        ids = self._backend.encode(texts.without(others)).view(np.int32)
        kept = ids != self._separator
        ends = np.flatnonzero(~kept)
        if len(ends) != len(texts) - 1:
            return None
        ids = ids[kept]
        return Encoded(ids, offsets_of(np.diff(ends, prepend=-1, append=len(ids) + len(ends)) - 1))

    def _encode_as_text(self, texts: Sequence[str]) -> Encoded:
        return self.reference.encode(texts)

    def token_bytes(self, token: int) -> bytes:
        return self.reference.token_bytes(token)

    def model(self) -> bytes:
        return self.reference.model()


def _opener(reference: Encoder) -> tuple[Callable[[], Any], int]:
    """Return a function that loads the model, and the id of the separator.

    Raises Unsupported if gigatoken would interpret the model differently.
    """
    try:
        from gigatoken import Tokenizer
    except ImportError as error:
        raise Unsupported(f"gigatoken cannot be imported: {error}") from None
    if not reference.every_byte:
        raise Unsupported("not every byte has a token")
    if isinstance(reference, SentencePieceEncoder):
        if reference.has_unused:
            raise Unsupported("the model has unused pieces")
        if reference.nul_id is not None:  # also separates texts, and is a fifth faster
            return partial(Tokenizer.from_json, json_of_sentencepiece(reference.model())), reference.nul_id
        model = json_of_sentencepiece(reference.model(), [SEPARATOR])
        return partial(Tokenizer.from_json, model), reference.vocab_size
    model = orjson.loads(reference.model())
    # gigatoken uses the ids in the file, so it needs no placeholders. They could match a text and its separators.
    added = [token for token in model["added_tokens"] or () if not is_placeholder(token)]
    model["added_tokens"] = [*added, _ADDED | {"id": reference.vocab_size}]
    return partial(Tokenizer.from_json, orjson.dumps(model)), reference.vocab_size


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delay interrupts until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives interrupts
        yield
        return
    # A signal mask would not help, because another thread would receive the interrupts.
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda it, _: received.append(it)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waiting in received:
            signal.raise_signal(waiting)


def _memory() -> int:
    """Return the resident memory in bytes, or its peak on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()


# -- SentencePiece -----------------------------------------------------------------------------------------------


def json_of_sentencepiece(model: bytes, added: Sequence[str] = ()) -> bytes:
    """Convert a BPE model with byte fallback to a tokenizer.json.

    The control tokens `added` follow the pieces of the model. gigatoken's own converter parses the model byte by byte
    in Python, which takes more than twice as long: 0.22 s for 32,768 pieces, in a run of 1.6 s. Raises Unsupported if
    the format cannot describe the model.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    read = proto.ModelProto.FromString(model)
    trainer, normalizer, types = read.trainer_spec, read.normalizer_spec, proto.ModelProto.SentencePiece
    pieces = [(piece.piece, piece.score, piece.type) for piece in read.pieces]
    pieces += [(piece, 0.0, types.CONTROL) for piece in added]
    refused = {
        "the model is not BPE": trainer.model_type != trainer.BPE,
        "the model has no byte fallback": not trainer.byte_fallback,
        "the model does not escape white space": not normalizer.escape_whitespaces,
        "the model treats white space as a suffix": trainer.treat_whitespace_as_suffix,
        "a piece of the model is not UTF-8": any(isinstance(piece, bytes) for piece, _, _ in pieces),
    }
    for reason, applies in refused.items():
        if applies:
            raise Unsupported(reason)
    added_tokens = [
        _ADDED | {"id": number, "content": piece, "special": kind == types.CONTROL}
        for number, (piece, _, kind) in enumerate(pieces)
        if kind in (types.CONTROL, types.USER_DEFINED)
    ]
    steps = precompiled(normalizer)
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if normalizer.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    vocab = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    return orjson.dumps(
        EMPTY
        | {
            "added_tokens": added_tokens,
            "normalizer": {"type": "Sequence", "normalizers": [*steps, SPACE_TO_UNDERLINE]},
            "model": bpe_of(trainer, vocab, _merges({piece: score for piece, score, _ in pieces})),
        }
    )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """List the pairs of pieces that form a piece, in merge order.

    `scores` has the score of each piece. SentencePiece merges the pair whose piece has the highest score, but
    tokenizer.json ranks pairs. So every way to split a piece in two is a pair, ranked by the score of the piece. If
    scores are equal, the pair with the longer left half comes first, and then the pair with the longer right half.
    """
    merges: list[tuple[str, str]] = []
    for _, equal in groupby(sorted(scores, key=scores.__getitem__, reverse=True), key=scores.__getitem__):
        pieces = list(equal)
        pairs = [
            (left, right)
            for piece in pieces
            for cut in range(len(piece) - 1, 0, -1)
            if (right := piece[cut:]) in scores and (left := piece[:cut]) in scores
        ]
        if len(pieces) > 1:
            pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
        merges += pairs
    return merges
