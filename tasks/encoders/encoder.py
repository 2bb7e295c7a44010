"""Text → ids, behind one interface, with all matching of control tokens off.

    open_tokenizer(path) ─▶ Encoder ── encode(texts) ─▶ Encoded(ids, offsets)
                                   └── decode(ids)   ─▶ text, byte for byte where the model can

Nothing that a text contains may become a control token. Two things see to it: the model is loaded without its
control, special, added and user-defined strings (so that it has nothing to match), and every id that comes back is
checked; a text that still gave a control id is encoded around that string. Strings of white space alone are left
in: they are how a model writes indentation, not how a template speaks to it.

No encoder here adds a dummy prefix (SentencePiece's leading space). Where one belongs depends on what stands before
the text, which the encoder cannot see, so `leading_space` says what the tokenizer itself would do and the caller
adds it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.core.errors import DataError, UsageError
from tasks.encoders.string_search import Needles
from tasks.storage.arrow import offsets_of

# Where the tokenizer itself puts a dummy prefix: nowhere, before a text at the very start, or before each text that
# stands at the start or behind a control token. "template" leaves it to the template (SentencePiece has no rule).
LeadingSpace = Literal["none", "first", "each", "template"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Texts as ids: text i is ids[offsets[i]:offsets[i + 1]]. ids int32[tokens], offsets int64[texts + 1]."""

    ids: np.ndarray
    offsets: np.ndarray


class Encoder(ABC):
    """One tokenizer. `controls` maps every string that it could take for a control token to that token's id."""

    kind: str
    engine: str
    controls: Mapping[str, int]
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    unk_id: int | None
    adds_bos: bool
    leading_space: LeadingSpace
    # A text that begins with one of these has its leading space already.
    has_space: tuple[str, ...] = ()
    # U+2581 stands for a space in such a vocabulary, so a text that contains it comes back with a space.
    underline_is_space: bool
    # Control strings that swallow the white space beside them in a rendered template.
    strips_left: frozenset[str] = frozenset()
    strips_right: frozenset[str] = frozenset()
    # Strings of white space that it matches as a whole: user-defined ones, or some of its added tokens.
    blanks: frozenset[str] = frozenset()
    # Whether every byte has a token, so that any text can be written.
    every_byte: bool = False

    @abstractmethod
    def _encode(self, texts: Sequence[str], holding: Sequence[int] | None = None) -> Encoded: ...

    @abstractmethod
    def model(self) -> bytes:
        """The model that was loaded: the file's, without its control strings and its dummy prefix."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that an ordinary token stands for; of a control token, its string."""

    def encode(self, texts: Sequence[str], holding: Sequence[int] | None = None) -> Encoded:
        """Ids of each text by itself; `holding`, where it is known already.

        Raises DataError where a text can only be written with a control token.
        """
        encoded = self._encode(texts, holding)
        # Control ids stand close together: few others are looked up, which is what takes long.
        first, last = self._suspects
        hits = np.flatnonzero(encoded.ids.view(np.uint32) - first <= last - first)
        hits = hits[self._is_suspect[encoded.ids[hits]]]
        if not hits.size:
            return encoded
        guilty = {
            index
            for index, at in zip((np.searchsorted(encoded.offsets, hits, side="right") - 1).tolist(), hits, strict=True)
            if encoded.ids[at] != self.unk_id or self.control_strings[int(encoded.ids[at])] in texts[index]
        }
        if not guilty:
            return encoded
        pieces = [encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]] for i in range(len(texts))]
        for index in guilty:
            pieces[index] = self._encode_around(texts[index])
        return Encoded(np.concatenate(pieces), offsets_of(list(map(len, pieces))))

    def holding(self, texts: Sequence[str]) -> list[int]:
        """Places of the texts that hold a string which a tokenizer matches as a whole."""
        places = list(self._matched.places(_searched(texts)))
        if not places:
            return []
        ends = np.cumsum([len(_searched([text])) + 1 for text in texts])
        return sorted(set(np.searchsorted(ends, places, side="right").tolist()))

    @cached_property
    def _matched(self) -> Needles:
        return Needles(_searched([text]) for text in (*self.controls, *self.blanks))

    def _encode_around(self, text: str) -> np.ndarray:
        """Cut the text behind the first character of each control string, then between all characters of it.

        A control string that a normalizer makes of other characters cannot be found: then between all characters.
        """
        for inside in (lambda s: [s[0], s[1:]], list):
            cut: list[str] = []
            end = 0
            for match in self.control_pattern.finditer(text):
                cut += [text[end : match.start()], *inside(match.group())]
                end = match.end()
            ids = self._encode_pieces([*cut, text[end:]])
            if not self._is_control[ids].any():
                return ids
        ids = self._encode_pieces(list(text))
        if not self._is_control[ids].any():
            return ids
        found = self.control_pattern.search(text)
        raise DataError(
            "unwritable_text",
            f"the tokenizer has no way to write {found.group() if found else text[:40]!r} as plain text; "
            "take the character out of the data or the token out of the tokenizer",
        )

    def _encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        """Ids of the pieces, one behind the other; equal ones, of which a hostile text has millions, encoded once."""
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        encoded = self._encode(list(numbers))
        arrays = np.split(encoded.ids, encoded.offsets[1:-1])
        return np.concatenate([arrays[numbers[piece]] for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, control tokens as their strings. Bytes that are no UTF-8 show as U+FFFD."""
        ids = list(map(int, ids))
        found = {token: self.token_bytes(token) for token in set(ids)}
        return b"".join(map(found.__getitem__, ids)).decode("utf-8", "replace")

    def with_leading_space(self, text: str) -> str:
        """The text with the space in front that the tokenizer itself would put there."""
        return text if text.startswith(self.has_space) else f" {text}"

    def count_controls(self, texts: Sequence[str]) -> int:
        """How many of the texts contain a control string (as text)."""
        if not self.controls or not self.control_pattern.search("\0".join(texts)):
            return 0
        return sum(self.control_pattern.search(text) is not None for text in texts)

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the longest control string first."""
        strings = sorted(self.controls, key=lambda s: (-len(s), s))
        return re.compile("|".join(map(re.escape, strings)) if strings else r"(?!)")

    @cached_property
    def written_pattern(self) -> re.Pattern[str]:
        """Matches a control token in a rendered template, with the white space that the token swallows."""
        strings = sorted(self.controls, key=lambda s: (-len(s), s))
        swallow = [(r"\s*" * (s in self.strips_left), re.escape(s), r"\s*" * (s in self.strips_right)) for s in strings]
        return re.compile("|".join(f"{left}(?:{s}){right}" for left, s, right in swallow) if swallow else r"(?!)")

    @cached_property
    def control_strings(self) -> dict[int, str]:
        return {token: string for string, token in self.controls.items()}

    @cached_property
    def _is_control(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, bool)
        table[[token for token in self.controls.values() if token != self.unk_id]] = True
        return table

    @cached_property
    def _suspects(self) -> tuple[np.uint32, np.uint32]:
        """The lowest and the highest suspect id."""
        ids = np.flatnonzero(self._is_suspect)
        return (np.uint32(ids[0]), np.uint32(ids[-1])) if ids.size else (np.uint32(self.vocab_size),) * 2

    @cached_property
    def _is_suspect(self) -> np.ndarray:
        """Control ids, and the unknown token where its string could be taken for it."""
        table = self._is_control.copy()
        if self.unk_id is not None and self.unk_id in self.control_strings:
            table[self.unk_id] = True
        return table


def _searched(texts: Sequence[str]) -> bytes:
    """Texts in a row, to look for strings in: none holds NUL, and to some models U+2581 is a space."""
    # Each by itself: one character that is wide would make all of them wide, and slow.
    return b"\0".join([text.encode() if text.isascii() else text.replace("▁", " ").encode() for text in texts])


def is_blank(piece: str) -> bool:
    return not piece.replace("▁", " ").strip()


def token_name(token: Any) -> str | None:
    """A special token as tokenizer_config.json has it: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def special_id(key: str, name: str | None, default: int, vocab: Mapping[str, int], path: Path) -> int:
    if name is None:
        if default < 0:
            raise UsageError(
                "no_such_token", f"{path}: names no {key.removesuffix('_token').upper()}; set `{key}` in the config"
            )
        return default
    if name not in vocab:
        raise UsageError("no_such_token", f"{path}: has no token {name!r}; `{key}` must be one of its tokens")
    return vocab[name]
