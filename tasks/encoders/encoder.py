"""Encode text to token ids, but never to control tokens.

    open_encoder(files) ─▶ Encoder ── encode(texts) ─▶ Encoded(ids, offsets)
                                  └── decode(ids)   ─▶ text, byte for byte if the model can represent it

Control tokens are the tokens that the tokenizer marks as special, and EOS, BOS, padding, and the unknown token. Two
mechanisms keep them out of text. First, the tokenizer's own library loads the model without their strings, so it has
nothing to match. Second, every id is checked: a text that still produces a control id is encoded again, in pieces that
split the control string. All other added tokens, such as <think>, are ordinary vocabulary: the tokenizer's own library
matches them, both in content and in the text of a template.

No encoder here adds a dummy prefix (SentencePiece's leading space), because it depends on the preceding text.
`leading_space` describes the tokenizer's own rule; the caller adds the space.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np

from packcorpus.tasks.core.errors import DataError, Reject, UsageError
from packcorpus.tasks.core.printable import shown, suggest
from packcorpus.tasks.encoders.texts import Needles, Texts, find, needles_of
from packcorpus.tasks.storage.schemas import offsets_of

T = TypeVar("T")

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

    def texts_at(self, places: np.ndarray) -> np.ndarray:
        """Return the number of the text of each of these ids, given by index."""
        return np.searchsorted(self.offsets, places, side="right") - 1


class Unencodable(Reject):
    """Some texts have no encoding; `problems` maps each of them to the reason."""

    def __init__(self, problems: Mapping[str, str]):
        super().__init__("unwritable_text", next(iter(problems.values())))
        self.problems = problems


class TooSlow(DataError):
    """A text takes far too long. Its thread cannot be stopped, so the run stops."""

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
        """Encode without checking for control ids; raises Unencodable."""

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
        places = self._suspects.places(encoded.ids)
        if not places.size:
            return encoded
        pairs = zip(encoded.texts_at(places).tolist(), encoded.ids[places].tolist(), strict=True)
        # The unknown token also stands for unknown characters.
        numbers = sorted({n for n, t in pairs if t != self.unk_id or self.control_strings[t] in texts.strings[n]})
        if not numbers:
            return encoded
        return encoded.replaced(numbers, self._encode_as_text([texts.strings[number] for number in numbers]))

    @cached_property
    def _suspects(self) -> _Flags:
        return _Flags(self.vocab_size, self.control_strings)

    def _encode_as_text(self, texts: Sequence[str]) -> Encoded:
        """Encode texts whose control strings `_encode` would match."""
        arrays, problems = [], dict[str, str]()
        for text in texts:
            try:
                arrays.append(self._encode_in_pieces(text))
            except Unencodable as error:
                problems |= error.problems
        if problems:
            raise Unencodable(problems)
        return Encoded(np.concatenate(arrays), offsets_of(list(map(len, arrays))))

    def _encode_in_pieces(self, text: str) -> np.ndarray:
        """Encode a text in pieces that split its control strings."""
        spans = [match.span() for match in self.control_pattern.finditer(text)]
        for cuts in (
            [place for start, end in spans for place in (start, start + 1, end)],
            [place for start, end in spans for place in range(start, end + 1)],
            range(len(text)),  # a normalizer can produce a control string from other characters
        ):
            # Equal pieces are encoded only once, because a hostile text can have millions of them.
            pieces, which = distinct([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
            encoded = self._encode(Texts.of(pieces))
            controls = [n for n in self._suspects.places(encoded.ids) if encoded.ids[n] != self.unk_id]
            if not controls:
                return encoded.at(which).ids
        character = pieces[encoded.texts_at(np.array(controls))[0]]
        raise Unencodable(
            {
                text: f"the tokenizer encodes {shown(character)} as a control token even when it is alone; remove the "
                "character from the record, or the token from the tokenizer"
            }
        )

    def encode_repeated(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, of which many are equal, and encode each distinct text once.

        Equal texts are common because the samples of a conversation repeat its beginning.
        """
        strings, which = distinct(texts)
        return self.encode(strings).at(which)

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
        held = self.holding_content_tokens(texts)
        while held:
            try:
                encoded = self.encode([texts[index] for index in held])
            except Unencodable as error:
                held = [index for index in held if texts[index] not in error.problems]
                continue
            places = self.places_of_content_tokens(encoded.ids)
            names = {token: string for string, token in self.content_tokens.items()}
            pairs = zip(encoded.texts_at(places).tolist(), encoded.ids[places].tolist(), strict=True)
            return [(held[number], names[token]) for number, token in pairs]
        return []

    def holding_content_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the indexes of texts with a content token that is not white space."""
        return find(self._counted[0], Texts.of(texts))

    def places_of_content_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Return the indexes of the ids that are content tokens, except white space."""
        return self._counted[1].places(ids)

    @cached_property
    def _counted(self) -> tuple[Needles, _Flags]:
        counted = {string: token for string, token in self.content_tokens.items() if not is_blank(string)}
        return needles_of([*counted]), _Flags(self.vocab_size, counted.values())

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, with control tokens as their strings.

        Bytes that are not UTF-8 become U+FFFD.
        """
        ids = list(map(int, ids))
        bytes_of = {token: self.token_bytes(token) for token in set(ids)}
        return b"".join(map(bytes_of.__getitem__, ids)).decode("utf-8", "replace")

    def with_leading_space(self, text: str) -> str:
        """Add the leading space that the tokenizer itself would add, if any."""
        return text if text.startswith(self.has_space) else f" {text}"

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches any control string, trying the longest first."""
        return re.compile("|".join(map(re.escape, _longest_first(self.controls))) or r"(?!)")

    @cached_property
    def written_pattern(self) -> re.Pattern[str]:
        """Return a pattern that matches a control token in a rendered template.

        The match includes the white space that the token absorbs.
        """
        space = r"\s*"
        patterns = [
            f"{space * (string in self.strips_left)}(?:{re.escape(string)}){space * (string in self.strips_right)}"
            for string in _longest_first(self.controls)
        ]
        return re.compile("|".join(patterns) or r"(?!)")

    @cached_property
    def control_strings(self) -> dict[int, str]:
        """Return the string of each control token, by id."""
        return {token: string for string, token in self.controls.items()}

    def is_token(self, marker: str) -> bool:
        """Return whether a marker that a template writes becomes one token."""
        return marker in self.controls or marker in self.content_tokens


class _Flags:
    """A set of ids that are close together."""

    def __init__(self, vocab_size: int, ids: Collection[int]):
        first, last = (min(ids), max(ids)) if ids else (vocab_size, vocab_size)
        self._first, self._last, self._table = np.uint32(first), np.uint32(last), np.zeros(vocab_size, bool)
        self._table[[*ids]] = True

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Return the places in an array at which ids are in the set."""
        # The range leaves few other ids for the slow table lookup.
        likely = np.flatnonzero(ids.view(np.uint32) - self._first <= self._last - self._first)
        return likely[self._table[ids[likely]]]


def distinct(values: Sequence[T]) -> tuple[list[T], np.ndarray]:
    """Return each value once, and the index of each value among them, int64."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [*numbers], np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))


def _longest_first(strings: Iterable[str]) -> list[str]:
    return sorted(strings, key=lambda string: (-len(string), string))


def content_tokens_of(
    added: Mapping[str, bool], settings: Sequence[str], reserved: Collection[str], path: Path
) -> frozenset[str]:
    """Return the added tokens that a text may become.

    `added` has all added tokens of the tokenizer at `path`, and whether each is special. `settings` change the set in
    order: `X` adds a token, `-X` removes it, and `-*` removes all but white space. The set never contains `reserved`
    tokens. Raises UsageError for a name that is not an added token, and for adding a reserved token.
    """
    kept = {token for token, special in added.items() if is_blank(token) or not special}
    for setting in settings:
        name = setting if setting in added else setting.removeprefix("-")
        if setting == "-*" not in added:
            kept = {token for token in kept if is_blank(token)}
        elif name not in added:
            raise UsageError(
                "no_such_token",
                f"content_tokens: {shown(name)} is not an added token of {path}{suggest(name, added)}; name an added "
                "token, as `X` to let content write it or as `-X` to prevent that",
            )
        elif name != setting:
            kept.discard(name)
        elif name in reserved:
            raise UsageError(
                "bad_setting",
                f"content_tokens: {shown(name)} begins, ends, or pads a sample, or stands for unknown characters, so "
                "content may not write it; remove it from content_tokens",
            )
        else:
            kept.add(name)
    return frozenset(kept - set(reserved))


def is_blank(token: str) -> bool:
    """Return whether a token is only white space, which models use to indent."""
    return not token.replace("▁", " ").strip()


def token_name(token: Any) -> str | None:
    """Return the string of a token in a file: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def special_id(key: str, name: str | None, default: int, vocab: Mapping[str, int], path: Path) -> int:
    """Return the id of the token `name`, or `default`; raises UsageError if neither."""
    if name is None:
        if default < 0:
            raise UsageError(
                "no_such_token", f"{path}: no {key.removesuffix('_token').upper()} token; set `{key}` in the config"
            )
        return default
    if name not in vocab:
        raise UsageError("no_such_token", f"{path}: unknown token {name!r}; set `{key}` to a token of the tokenizer")
    return vocab[name]
