"""The fast encoder: gigatoken, with the reference encoder behind it.

    texts ─┬─ none of the strings that a tokenizer matches as a whole ─▶ gigatoken ─┬─▶ ids, as the reference has them
           └─ the others ─────────────────────────────────────────────▶ reference ─┘

gigatoken reads the very model that the reference reads, without its control strings, and encodes 60 to 90 MB/s of
chats on one core, where SentencePiece encodes 5 and tokenizers 1.4. That both give the same ids is for `parity` to
show. It matches control tokens in plain text, so a text with a control, special, added or user-defined string in it
is the reference's, and so is one that came back with a control id all the same.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.core.process import peak_memory
from tasks.encoders.encoder import Encoded, Encoder
from tasks.encoders.gigatoken_model import Unsupported, json_of_sentencepiece
from tasks.encoders.sentencepiece_encoder import SentencePieceEncoder
from tasks.storage.arrow import offsets_of

# gigatoken keeps every word that it has seen: 40 MB for the first 25 MB of chats, 8 MB for each MB of random numbers.
# A model that is loaded anew (0.04 s) begins without them.
MOST_MEMORY = 128 << 20

# Between texts that are encoded in one call; no conversation holds it. It is a control token that is added behind the
# last of the vocabulary, so that what stands on both sides is encoded by itself.
_SEPARATOR = "\0"
_ADDED = {
    "content": _SEPARATOR, "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False,
}  # fmt: skip


class GigatokenEncoder(Encoder):
    """Gives what `reference` gives. Raises Unsupported where gigatoken cannot read the model."""

    engine = "gigatoken"

    def __init__(self, reference: Encoder):
        for name in Encoder.__annotations__:
            if name != "engine":
                setattr(self, name, getattr(reference, name))
        self.reference = reference
        self._open, self._separator = _opener(reference)
        self._load()

    def _load(self) -> None:
        try:
            self._backend = self._open().backend
            self._make_ready()
        except Exception as error:  # the library raises ValueError, RuntimeError and others
            raise Unsupported(f"gigatoken cannot read the model: {' '.join(str(error).split())[:160]}") from None
        self._memory = _memory()

    def _make_ready(self) -> None:
        """The first array that it makes in a process calls Python, where an interrupt would end in a panic of Rust."""
        with _interrupts_wait():
            self._backend.encode("")

    def _encode(self, texts: Sequence[str], holding: Sequence[int] | None = None) -> Encoded:
        if _memory() - self._memory > MOST_MEMORY:
            self._load()
        others = self.holding(texts) if holding is None else holding
        encoded = self._joined(texts, others)
        if encoded is None:
            others = sorted({*others, *(place for place, text in enumerate(texts) if _SEPARATOR in text)})
            encoded = self._joined(texts, others)
        return self.reference.encode(texts) if encoded is None else encoded

    def _joined(self, texts: Sequence[str], others: Sequence[int]) -> Encoded | None:
        """All in one call, for one call a text takes half as long again; None where a text holds the separator."""
        fast = list(texts)
        for place in others:
            fast[place] = ""
        # As bytes, and not all of them as wide as the widest character of one.
        ids = self._backend.encode(_SEPARATOR.encode().join(map(str.encode, fast))).view(np.int32)
        kept = ids != self._separator
        ends = np.flatnonzero(~kept)
        if len(ends) != len(texts) - 1:
            return None
        ids = ids[kept]
        lengths = np.diff(ends, prepend=-1, append=len(ids) + len(ends)) - 1
        if others:
            given = self.reference.encode([texts[place] for place in others])
            lengths[others] = own = np.diff(given.offsets)
            ends = offsets_of(lengths)[others]
            ids = np.insert(ids, np.repeat(ends - offsets_of(own)[:-1], own), given.ids)
        return Encoded(ids, offsets_of(lengths))

    def _encode_around(self, text: str) -> np.ndarray:
        return self.reference.encode([text]).ids

    def token_bytes(self, token: int) -> bytes:
        return self.reference.token_bytes(token)

    def model(self) -> bytes:
        return self.reference.model()


def _opener(reference: Encoder) -> tuple[Callable[[], Any], int]:
    """What loads the reference's model into gigatoken, and the id that the separator will have. Raises Unsupported
    where gigatoken would read it otherwise."""
    try:
        from gigatoken import Tokenizer
    except ImportError as error:
        raise Unsupported(f"gigatoken cannot be imported: {error}") from None
    if not reference.every_byte:
        raise Unsupported("not every byte has a token")
    if isinstance(reference, SentencePieceEncoder):
        if reference.has_unused:
            raise Unsupported("the model has unused pieces")
        if reference.nul_id is not None:  # keeps them apart as well, and is a fifth faster
            return partial(Tokenizer.from_json, json_of_sentencepiece(reference.model())), reference.nul_id
        model = json_of_sentencepiece(reference.model(), [_SEPARATOR])
        return partial(Tokenizer.from_json, model), reference.vocab_size
    model = orjson.loads(reference.model())
    model["added_tokens"] = [*(model["added_tokens"] or ()), _ADDED | {"id": reference.vocab_size}]
    return partial(Tokenizer.from_json, orjson.dumps(model)), reference.vocab_size


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """An interrupt within the block comes when it has ended. (A mask would not do: another thread would get it.)"""
    if threading.current_thread() is not threading.main_thread():  # which has them all
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda it, _: came.append(it)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


def _memory() -> int:
    """Bytes that this process holds; where that cannot be told, the most that it ever held."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()
