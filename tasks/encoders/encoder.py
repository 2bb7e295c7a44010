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

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from tasks.core.errors import DataError, InputMissing, UsageError
from tasks.encoders.string_search import Needles
from tasks.storage.arrow import offsets_of
from tasks.storage.files import sha256_of

# Where the tokenizer itself puts a dummy prefix: nowhere, before a text at the very start, or before each text that
# stands at the start or behind a control token. "template" leaves it to the template (SentencePiece has no rule).
LeadingSpace = Literal["none", "first", "each", "template"]

# Characters that the tokenizers library is given at once, and how many each text counts for beside its own.
LONGEST = 1 << 20
_EACH = 8
_WORD_ENDS = re.compile(r"(?<=\w)(?= [^\W\d])")

# What a folder without a named EOS is asked for, in this order.
COMMON_EOS = ("</s>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|end|>")

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


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


def _groups(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Texts and their places, in groups of up to LONGEST characters; a longer text in pieces.

    The tokenizers library takes 130 bytes of memory for a character, 570 for one of four bytes, and panics at a run
    of ten million spaces. A text is cut before a space between words, where a model begins a new token, and only one
    without such a place within 64 Ki characters anywhere.
    """
    owners: list[int] = []
    group: list[str] = []
    room = LONGEST
    for owner, text in enumerate(texts):
        begin = 0
        while True:
            end = len(text) if len(text) - begin <= LONGEST else _between_words(text, begin + 1, begin + LONGEST)
            if group and end - begin + _EACH > room:
                yield owners, group
                owners, group, room = [], [], LONGEST
            owners.append(owner)
            group.append(text[begin:end])
            room -= end - begin + _EACH
            begin = end
            if begin >= len(text):
                break
    if group:
        yield owners, group


def _between_words(text: str, start: int, limit: int) -> int:
    """The last place up to `limit` with a letter or digit before it, and a space and a letter behind it."""
    start = max(start, limit - (1 << 16))
    ends = [match.start() for match in _WORD_ENDS.finditer(text[start : limit + 2])]
    return start + ends[-1] if ends else limit


def _searched(texts: Sequence[str]) -> bytes:
    """Texts in a row, to look for strings in: none holds NUL, and to some models U+2581 is a space."""
    # Each by itself: one character that is wide would make all of them wide, and slow.
    return b"\0".join([text.encode() if text.isascii() else text.replace("▁", " ").encode() for text in texts])


def _is_blank(piece: str) -> bool:
    return not piece.replace("▁", " ").strip()


class SentencePieceEncoder(Encoder):
    """The reference for `.model` files, BPE and Unigram."""

    kind = "sentencepiece"
    engine = "sentencepiece"
    leading_space: LeadingSpace = "template"
    underline_is_space = True

    def __init__(self, path: Path, eos_token: str | None = None, pad_token: str | None = None):
        # Both are imported here: a run that uses one kind of tokenizer does not load the other.
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as proto

        model = proto.ModelProto()
        try:
            model.ParseFromString(path.read_bytes())
        except DecodeError as error:
            raise DataError(
                "bad_tokenizer", f"{path}: is not a SentencePiece model, or is cut short: {error}"
            ) from None
        if not model.pieces or not model.HasField("trainer_spec"):
            raise DataError("bad_tokenizer", f"{path}: is not a SentencePiece model, or is cut short")
        # Lists: there are tens of thousands of pieces, and each look at one through protobuf takes as long as ten here.
        types = proto.ModelProto.SentencePiece
        control, by_user, byte = types.CONTROL, types.USER_DEFINED, types.BYTE
        kinds = [piece.type for piece in model.pieces]
        self._pieces = [piece.piece for piece in model.pieces]
        self.controls = {}
        self.has_unused = types.UNUSED in kinds
        for token, (piece, kind) in enumerate(zip(self._pieces, kinds, strict=True)):
            # Neither is ever content, even where the model has it as an ordinary piece.
            named_here = piece in (eos_token, pad_token)
            user_defined = kind == by_user and not _is_blank(piece)
            if kind == control or user_defined or named_here:
                self.controls[piece] = token
                # A control piece is never matched in text.
                kinds[token] = model.pieces[token].type = control
        named_kinds = list(zip(self._pieces, kinds, strict=True))
        self.blanks = frozenset(piece for piece, kind in named_kinds if kind == by_user)
        self._byte_pieces = {t: int(p[3:5], 16) for t, (p, kind) in enumerate(named_kinds) if kind == byte}
        self.every_byte = len(self._byte_pieces) == 256
        # SentencePiece allows no NUL in a piece; so what stands on both sides of one has nothing to do with each other.
        looks_around = model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.remove_extra_whitespaces
        nul = next((token for token, byte in self._byte_pieces.items() if not byte), None)
        self.nul_id = None if looks_around else nul
        model.normalizer_spec.add_dummy_prefix = False
        try:
            self._processor = SentencePieceProcessor(model_proto=model.SerializeToString())
        except RuntimeError as error:
            raise DataError(
                "bad_tokenizer", f"{path}: is not a SentencePiece model, or is cut short: {error}"
            ) from None
        self.vocab_size = len(self._pieces)
        self.unk_id = self._processor.unk_id()
        self.bos_id = None if self._processor.bos_id() < 0 else self._processor.bos_id()
        self.adds_bos = self.bos_id is not None
        named = {piece: token for token, piece in enumerate(self._pieces)}
        self.eos_id = _special("eos_token", eos_token, self._processor.eos_id(), named, path)
        pad = self._processor.pad_id()
        self.pad_id = _special("pad_token", pad_token, pad if pad >= 0 else self.eos_id, named, path)

    def _encode(self, texts: Sequence[str], holding: Sequence[int] | None = None) -> Encoded:
        arrays = self._processor.encode_as_numpy(list(texts)) if texts else []
        ids = np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.empty(0, np.int32)
        return Encoded(ids, offsets_of(list(map(len, arrays))))

    def model(self) -> bytes:
        model: bytes = self._processor.serialized_model_proto()
        return model

    def token_bytes(self, token: int) -> bytes:
        if token in self._byte_pieces:
            return bytes([self._byte_pieces[token]])
        piece: str = self._pieces[token]
        return (piece if token in self.control_strings else piece.replace("▁", " ")).encode()


class HuggingFaceEncoder(Encoder):
    """The reference for `tokenizer.json`: the tokenizers library, its added tokens and dummy prefix taken out."""

    kind = "huggingface"
    engine = "tokenizers"

    def __init__(
        self, path: Path, settings: Mapping[str, Any], eos_token: str | None = None, pad_token: str | None = None
    ):
        from tokenizers import Tokenizer

        try:
            spec = orjson.loads(path.read_bytes())
            whole = Tokenizer.from_str(orjson.dumps(spec).decode())
        except Exception as error:  # the library raises bare Exceptions
            raise DataError("bad_tokenizer", f"{path}: is not a tokenizer.json that can be read: {error}") from None
        vocab = whole.get_vocab(with_added_tokens=True)
        flags = spec.get("added_tokens") or []
        # The ids that the library gives, which are not always those that the file has.
        added = {token["content"]: vocab[token["content"]] for token in flags if token["content"] in vocab}
        self.controls = {content: token for content, token in added.items() if not _is_blank(content)}
        self.blanks = frozenset(added) - frozenset(self.controls)
        self.strips_left = frozenset(t["content"] for t in flags if t.get("lstrip"))
        self.strips_right = frozenset(t["content"] for t in flags if t.get("rstrip"))
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.leading_space, self.has_space = _take_out_prefix(spec)
        spec["added_tokens"] = _without_controls(flags, whole.get_vocab(with_added_tokens=False))
        spec["post_processor"] = spec["truncation"] = spec["padding"] = None
        self._tokenizer = Tokenizer.from_str(orjson.dumps(spec).decode())
        self._tokens = {token: content for content, token in vocab.items()}
        described = orjson.dumps([spec.get("normalizer"), spec.get("pre_tokenizer"), spec.get("decoder")])
        self._byte_level = b'"ByteLevel"' in described
        self.every_byte = self._byte_level or bool((spec.get("model") or {}).get("byte_fallback"))
        self.underline_is_space = not self._byte_level and (b"Metaspace" in described or "▁".encode() in described)
        model = spec.get("model") or {}
        unk = model.get("unk_token")
        self.unk_id = vocab.get(unk) if isinstance(unk, str) else model.get("unk_id")  # Unigram names it by id
        eos = eos_token or _name(settings.get("eos_token")) or next((e for e in COMMON_EOS if e in added), None)
        self.eos_id = _special("eos_token", eos, -1, vocab, path)
        starts = whole.encode("", add_special_tokens=True).ids
        bos = _name(settings.get("bos_token"))
        self.bos_id = vocab.get(bos) if bos else None
        if self.bos_id is None and starts and starts[0] != self.eos_id:
            self.bos_id = starts[0]  # a tokenizer.json by itself names none, but puts one in front
        self.adds_bos = self.bos_id is not None and starts[:1] == [self.bos_id]
        pad = pad_token or _name(settings.get("pad_token"))
        self.pad_id = _special("pad_token", pad, self.eos_id, vocab, path)
        # EOS and pad are never content, even where the file does not list them among its added tokens.
        for token in {self.eos_id, self.pad_id, self.bos_id} - {None}:
            self.controls.setdefault(self._tokens[token], token)  # type: ignore[index,arg-type]

    def _encode(self, texts: Sequence[str], holding: Sequence[int] | None = None) -> Encoded:
        lengths = np.zeros(len(texts), np.int64)
        arrays = [np.empty(0, np.int32)]
        for owners, pieces in _groups(texts):
            lists = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
            counts = list(map(len, lists))
            np.add.at(lengths, owners, counts)
            arrays.append(np.fromiter(chain.from_iterable(lists), np.int32, sum(counts)))
        return Encoded(np.concatenate(arrays), offsets_of(lengths))

    def model(self) -> bytes:
        return str(self._tokenizer.to_str()).encode()

    def token_bytes(self, token: int) -> bytes:
        content = self._tokens.get(token)
        if content is None:
            return f"<unused {token}>".encode()
        if token in self.control_strings:
            return content.encode()
        if self._byte_level:
            return b"".join(_BYTE_LEVEL.get(char, char.encode()) for char in content)
        if len(content) == 6 and content.startswith("<0x"):
            return bytes([int(content[3:5], 16)])
        return (content.replace("▁", " ") if self.underline_is_space else content).encode()


def _without_controls(added: Sequence[dict[str, Any]], vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """The added tokens that are white space alone. The library numbers those that are not in the vocabulary in their
    order; where it would number one of them anew, a string that no text holds stands for each that is taken out."""
    blanks = [token for token in added if _is_blank(token["content"])]
    if all(token["content"] in vocab for token in blanks):
        return blanks
    kept = [token for token in added if _is_blank(token["content"]) or token["content"] not in vocab]
    return [
        token if _is_blank(token["content"]) else token | {"content": f"\0{number}\0"}
        for number, token in enumerate(kept)
    ]


def _take_out_prefix(spec: dict[str, Any]) -> tuple[LeadingSpace, tuple[str, ...]]:
    """Turn the dummy prefix of a tokenizer.json off (in place); say where it stood and before what it did not."""
    found: LeadingSpace = "none"
    unless: tuple[str, ...] = ()

    def walk(node: Any) -> Any:
        nonlocal found, unless
        if not isinstance(node, dict):
            return node
        if node.get("type") == "Prepend":
            found = "each"
            return None
        if node.get("type") == "Metaspace":
            scheme = node.get("prepend_scheme") or ("always" if node.get("add_prefix_space", True) else "never")
            if scheme != "never":
                found = "first" if scheme == "first" else "each"
                unless = (" ", node.get("replacement", "▁"))
            old = {"add_prefix_space": False} if "add_prefix_space" in node else {}
            return {**node, "prepend_scheme": "never", **old}
        if node.get("type") == "ByteLevel" and node.get("add_prefix_space"):
            found, unless = "each", (" ",)
            return {**node, "add_prefix_space": False}
        for key in ("normalizers", "pretokenizers"):
            if key in node:
                return {**node, key: [kept for child in node[key] if (kept := walk(child)) is not None]}
        return node

    for key in ("normalizer", "pre_tokenizer"):
        spec[key] = walk(spec.get(key))
    return found, unless


def _byte_level_table() -> dict[str, bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the other 68 for U+0100 and what follows."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


def _name(token: Any) -> str | None:
    """A special token as tokenizer_config.json has it: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special(key: str, name: str | None, default: int, vocab: Mapping[str, int], path: Path) -> int:
    if name is None:
        if default < 0:
            raise UsageError(
                "no_such_token", f"{path}: names no {key.removesuffix('_token').upper()}; set `{key}` in the config"
            )
        return default
    if name not in vocab:
        raise UsageError("no_such_token", f"{path}: has no token {name!r}; `{key}` must be one of its tokens")
    return vocab[name]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files that one tokenizer consists of: `main` is a .model or a tokenizer.json, `files` all of them."""

    main: Path
    files: tuple[Path, ...]

    def sha256(self) -> str:
        """Of the file, where it is one; else of the names and digests of all."""
        if len(self.files) == 1:
            return sha256_of(self.files[0])
        named = [[file.name, sha256_of(file)] for file in self.files]
        return hashlib.sha256(orjson.dumps(named)).hexdigest()

    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json over special_tokens_map.json; empty where there are none."""
        merged: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            for file in self.files:
                if file.name == name:
                    try:
                        loaded = orjson.loads(file.read_bytes())
                    except orjson.JSONDecodeError as error:
                        raise DataError("bad_tokenizer", f"{file}: is not JSON: {error}") from None
                    merged |= loaded if isinstance(loaded, dict) else {}
        return merged

    def chat_template(self) -> str | None:
        """The tokenizer's own chat template; of several named ones, the one called default."""
        for file in self.files:
            if file.name == "chat_template.jinja":
                try:
                    return file.read_text(encoding="utf-8")
                except UnicodeDecodeError as error:
                    raise DataError("bad_tokenizer", f"{file}: is not UTF-8: {error}") from None
        found = self.settings().get("chat_template")
        if isinstance(found, list):
            found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
        return found if isinstance(found, str) else None


def find_tokenizer(path: Path) -> TokenizerFiles:
    """The files of the tokenizer at `path`. Raises InputMissing or UsageError, saying what was looked for."""
    if os.path.isdir(path):  # not path.is_dir(), which raises where a name is too long
        models = sorted(found.name for found in path.glob("*.model") if found.is_file())
        only = models[0] if len(models) == 1 else "tokenizer.model"
        files = tuple(path / name for name in dict.fromkeys((*TOKENIZER_FILES, only)) if (path / name).is_file())
        for name in ("tokenizer.json", only):
            if path / name in files:
                kept = tuple(f for f in files if f.suffix != ".model" or f.name == name)
                return TokenizerFiles(path / name, kept)
        several = f"; of {', '.join(models)} name one" if models else ""
        raise InputMissing("tokenizer_missing", f"{path}: holds neither tokenizer.json nor tokenizer.model{several}")
    if not os.path.isfile(path):
        raise InputMissing(
            "tokenizer_missing",
            f"{path}: no such tokenizer: a SentencePiece .model, a tokenizer.json, or a folder with one "
            "was expected (names on a hub are not fetched)",
        )
    if path.stat().st_size == 0:
        raise DataError("bad_tokenizer", f"{path}: is empty; a tokenizer was expected")
    if path.suffix not in (".model", ".json"):
        raise UsageError(
            "unknown_tokenizer", f"{path}: is neither a .model nor a .json; name a tokenizer.json by its folder or file"
        )
    return TokenizerFiles(path, (path,))


def open_encoder(files: TokenizerFiles, eos_token: str | None = None, pad_token: str | None = None) -> Encoder:
    """Load the reference encoder for a tokenizer. Raises DataError or UsageError, naming the file."""
    settings = files.settings()
    if files.main.suffix == ".json":
        return HuggingFaceEncoder(files.main, settings, eos_token, pad_token)
    return SentencePieceEncoder(
        files.main, eos_token or _name(settings.get("eos_token")), pad_token or _name(settings.get("pad_token"))
    )
