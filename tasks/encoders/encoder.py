"""Encode text to token ids, but never to control tokens.

    open_encoder(files) ─▶ Encoder ── encode(texts) ─▶ Encoded(ids, offsets)
                                  └── decode(ids)   ─▶ text, byte for byte if the model can represent it

Control tokens are the tokens that the tokenizer marks as special, and EOS, BOS, padding, and the unknown token, which
end, begin, or fill a sample, or stand for unknown characters. Two mechanisms keep them out of
text. First, the tokenizer's own library loads the model without their strings, so it has nothing to match. Second,
every id is checked: a text that still produces a control id is encoded again, in pieces that split the control string.
All other added tokens, such as <think>, are ordinary vocabulary: the tokenizer's own library matches them, both in
content and in the text of a template.

No encoder here adds a dummy prefix (SentencePiece's leading space). Whether a space belongs there depends on the
preceding text, which the encoder cannot see. `leading_space` describes the tokenizer's own rule; the caller adds the
space.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from tasks.core.errors import DataError, Reject, UsageError
from tasks.core.printable import shown, suggest
from tasks.encoders.texts import Needles, Texts, find, needles_of
from tasks.storage.arrow import offsets_of

# Where the tokenizer itself puts a dummy prefix: nowhere, before a text at the very start, or before each text at the
# start or after a control token. "template" leaves the decision to the template (SentencePiece has no rule).
LeadingSpace = Literal["none", "first", "each", "template"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded texts: text i is ids[offsets[i]:offsets[i + 1]].

    ids is int32[tokens], offsets int64[texts + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray

    def at(self, numbers: np.ndarray) -> Encoded:
        """Return the texts with these numbers; a number may occur more than once."""
        lengths = np.diff(self.offsets)[numbers]
        offsets = offsets_of(lengths)
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[numbers] - offsets[:-1], lengths)
        return Encoded(self.ids[places], offsets)

    def replaced(self, numbers: list[int], others: Encoded) -> Encoded:
        """Return the texts with `others` in place of the texts with these numbers."""
        which = np.arange(len(self.offsets) - 1)
        which[numbers] = len(which) + np.arange(len(numbers))
        offsets = np.concatenate([self.offsets, self.offsets[-1] + others.offsets[1:]])
        return Encoded(np.concatenate([self.ids, others.ids]), offsets).at(which)


class Unencodable(Reject):
    """Some texts have no encoding.

    `problems` maps each of these texts to the reason.
    """

    def __init__(self, problems: Mapping[str, str]):
        super().__init__("unwritable_text", next(iter(problems.values())))
        self.problems = problems


class TooSlow(DataError):
    """A text takes the tokenizer far too long.

    It stops the run, because the thread that encodes the text cannot be stopped.
    """

    def __init__(self, text: str, message: str):
        super().__init__("slow_tokenizer", message)
        self.text = text


class Encoder(ABC):
    """A tokenizer.

    `controls` maps every string that the tokenizer could mistake for a control token to the id of that token.
    `content_tokens` has the other added tokens, which any text may become. `named_tokens` maps the names of further
    special tokens, such as `sep_token`, to their strings, for templates.
    """

    kind: str
    engine: str
    controls: Mapping[str, int]
    content_tokens: Mapping[str, int] = MappingProxyType({})
    named_tokens: Mapping[str, str] = MappingProxyType({})
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    unk_id: int | None
    adds_bos: bool
    leading_space: LeadingSpace
    # A text that starts with one of these already has its leading space.
    has_space: tuple[str, ...] = ()
    # The vocabulary represents a space as U+2581, so that character decodes to a space.
    underline_is_space: bool
    # Control strings that absorb the white space next to them in a rendered template.
    strips_left: frozenset[str] = frozenset()
    strips_right: frozenset[str] = frozenset()
    # Content tokens that only the tokenizer's own library is known to match correctly.
    irregular: frozenset[str] = frozenset()
    # Content tokens after which the tokenizer puts a leading space, like after a control token.
    space_follows: tuple[str, ...] = ()
    # Whether every byte has a token, so that any text can be encoded.
    every_byte: bool = False
    # Digests by which recorded ids may name the tokenizer.
    digests: Callable[[], frozenset[str]] = staticmethod(frozenset)

    @abstractmethod
    def _encode(self, texts: Texts) -> Encoded:
        """Encode without checking for control ids.

        Raises Unencodable.
        """

    @abstractmethod
    def model(self) -> bytes:
        """Return the model as loaded, without its control strings and dummy prefix."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token represents; for a control token, its string."""

    def encode(self, texts: Sequence[str] | Texts) -> Encoded:
        """Encode each text separately.

        Raises Unencodable for texts on which the library fails, or that can only be represented with a control token.
        Without these texts, the next call may raise it for others.
        """
        texts = Texts.of(texts)
        encoded = self._encode(texts)
        hits = self._suspects.places(encoded.ids)
        if not hits.size:
            return encoded
        affected = {
            index
            for index, at in zip((np.searchsorted(encoded.offsets, hits, side="right") - 1).tolist(), hits, strict=True)
            if encoded.ids[at] != self.unk_id or self.control_strings[int(encoded.ids[at])] in texts.strings[index]
        }
        if not affected:
            return encoded
        numbers = sorted(affected)
        return encoded.replaced(numbers, self._encode_as_text([texts.strings[number] for number in numbers]))

    def holding(self, texts: Sequence[str] | Texts) -> list[int]:
        """Return the indexes of texts with a control string."""
        return find(self._control_needles, Texts.of(texts))

    @cached_property
    def _control_needles(self) -> Needles:
        return needles_of([*self.controls])

    def count_content_tokens(self, texts: Sequence[str]) -> list[tuple[int, str]]:
        """Return (index of the text, string) for each content token in the encoded texts.

        Content tokens that are white space are left out, and so are texts that have no encoding.
        """
        held, encoded = self.holding_content_tokens(texts), None
        while held and encoded is None:
            try:
                encoded = self.encode([texts[index] for index in held])
            except Unencodable as error:
                held = [index for index in held if texts[index] not in error.problems]
        if encoded is None:
            return []
        places = self.places_of_content_tokens(encoded.ids)
        owners = np.searchsorted(encoded.offsets, places, side="right") - 1
        names = {token: string for string, token in self.content_tokens.items()}
        return [(held[owner], names[token]) for owner, token in zip(owners, encoded.ids[places].tolist(), strict=True)]

    def holding_content_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the indexes of texts with a content token that is not white space."""
        return find(self._counted, Texts.of(texts))

    @cached_property
    def _counted(self) -> Needles:
        return needles_of([text for text in self.content_tokens if not is_blank(text)])

    def places_of_content_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return the indexes of the ids that are content tokens, except white space."""
        return self._counted_ids.places(ids)

    @cached_property
    def _counted_ids(self) -> _Flags:
        table = np.zeros(self.vocab_size, bool)
        table[[token for string, token in self.content_tokens.items() if not is_blank(string)]] = True
        return _Flags(table)

    def _encode_as_text(self, texts: Sequence[str]) -> Encoded:
        """Encode texts whose control strings `_encode` would match."""
        found, problems = [], dict[str, str]()
        for text in texts:
            try:
                found.append(self._encode_around(text))
            except Unencodable as error:
                problems |= error.problems
        if problems:
            raise Unencodable(problems)
        return Encoded(np.concatenate(found), offsets_of(list(map(len, found))))

    def _encode_around(self, text: str) -> np.ndarray:
        """Encode a text in pieces that split its control strings.

        The first attempt cuts after the first character of each control string, and the second attempt between all
        characters of each control string. The last attempt cuts between all characters of the text, because a
        normalizer can produce a control string from other characters.
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
        character = next(one for one in dict.fromkeys(text) if self._is_control[self._encode_pieces([one])].any())
        raise Unencodable(
            {
                text: f"the tokenizer encodes {shown(character)} as a control token even when it is alone; remove the "
                "character from the record, or the token from the tokenizer"
            }
        )

    def _encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        """Encode and concatenate the pieces.

        Equal pieces are encoded only once, because a hostile text can have millions of them.
        """
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        encoded = self._encode(Texts.of(list(numbers)))
        arrays = np.split(encoded.ids, encoded.offsets[1:-1])
        return np.concatenate([arrays[numbers[piece]] for piece in pieces])

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, with control tokens as their strings.

        Bytes that are not UTF-8 become U+FFFD.
        """
        ids = list(map(int, ids))
        found = {token: self.token_bytes(token) for token in set(ids)}
        return b"".join(map(found.__getitem__, ids)).decode("utf-8", "replace")

    def with_leading_space(self, text: str) -> str:
        """Add the leading space that the tokenizer itself would add, if any."""
        return text if text.startswith(self.has_space) else f" {text}"

    def count_controls(self, texts: Sequence[str]) -> int:
        """Count the texts that contain a control string as text."""
        if not self.controls or not self.control_pattern.search("\0".join(texts)):
            return 0
        return sum(self.control_pattern.search(text) is not None for text in texts)

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches any control string, trying the longest first."""
        strings = sorted(self.controls, key=lambda s: (-len(s), s))
        return re.compile("|".join(map(re.escape, strings)) if strings else r"(?!)")

    @cached_property
    def written_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches a control token in a rendered template.

        The match includes the white space that the token absorbs.
        """
        strings = sorted(self.controls, key=lambda s: (-len(s), s))
        swallow = [(r"\s*" * (s in self.strips_left), re.escape(s), r"\s*" * (s in self.strips_right)) for s in strings]
        return re.compile("|".join(f"{left}(?:{s}){right}" for left, s, right in swallow) if swallow else r"(?!)")

    @cached_property
    def control_strings(self) -> dict[int, str]:
        """Return the string of each control token, by id."""
        return {token: string for string, token in self.controls.items()}

    def is_token(self, marker: str) -> bool:
        """Return whether a marker that a template writes becomes one token."""
        return marker in self.controls or marker in self.content_tokens

    @cached_property
    def _is_control(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, bool)
        table[[token for token in self.controls.values() if token != self.unk_id]] = True
        return table

    @cached_property
    def _suspects(self) -> _Flags:
        """Return the ids to check.

        These are control ids, and the unknown token if its string is a control string.
        """
        table = self._is_control.copy()
        if self.unk_id is not None and self.unk_id in self.control_strings:
            table[self.unk_id] = True
        return _Flags(table)


class _Flags:
    """Ids whose flag in a table is set.

    They are close together, so their range leaves few other ids for the slow table lookup.
    """

    def __init__(self, table: np.ndarray):
        ids = np.flatnonzero(table) if table.any() else [len(table)]
        self._first, self._last, self._table = np.uint32(ids[0]), np.uint32(ids[-1]), table

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Return the places in an array at which ids are flagged."""
        likely = np.flatnonzero(ids.view(np.uint32) - self._first <= self._last - self._first)
        return likely[self._table[ids[likely]]]


def content_tokens_of(
    added: Mapping[str, bool], settings: Sequence[str], reserved: Collection[str], path: Path
) -> frozenset[str]:
    """Return the added tokens that a text may become.

    `added` has all added tokens of the tokenizer at `path`, and whether each is special. `settings` change the set in
    order: `X` adds a token, `-X` removes it, and `-*` removes all but white space. The set never contains `reserved`
    tokens. Raises UsageError for a name that is not an added token, and for adding a reserved token.
    """
    found = {token for token, special in added.items() if is_blank(token) or not special}
    for setting in settings:
        name = setting if setting in added else setting.removeprefix("-")
        if setting == "-*" not in added:
            found = {token for token in found if is_blank(token)}
        elif name not in added:
            raise UsageError(
                "no_such_token",
                f"content_tokens: {shown(name)} is not an added token of {path}{suggest(name, added)}; name an added "
                "token, as `X` to let content write it or as `-X` to prevent that",
            )
        elif name != setting:
            found.discard(name)
        elif name in reserved:
            raise UsageError(
                "bad_setting",
                f"content_tokens: {shown(name)} begins, ends, or pads a sample, or stands for unknown characters, so "
                "content may not write it; remove it from content_tokens",
            )
        else:
            found.add(name)
    return frozenset(found - set(reserved))


def is_blank(token: str) -> bool:
    """Return whether a token consists only of white space.

    Models use such tokens to write indentation.
    """
    return not token.replace("▁", " ").strip()


def token_name(token: Any) -> str | None:
    """Return the string of a special token in tokenizer_config.json.

    There, a token is a string or an object with `content`.
    """
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def special_id(key: str, name: str | None, default: int, vocab: Mapping[str, int], path: Path) -> int:
    """Return the id of the special token `name`, or `default`.

    Raises UsageError if there is neither.
    """
    if name is None:
        if default < 0:
            raise UsageError(
                "no_such_token", f"{path}: no {key.removesuffix('_token').upper()} token; set `{key}` in the config"
            )
        return default
    if name not in vocab:
        raise UsageError("no_such_token", f"{path}: unknown token {name!r}; set `{key}` to a token of the tokenizer")
    return vocab[name]
