"""Encode text with a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tasks.core.errors import DataError
from tasks.encoders.encoder import Encoded, Encoder, LeadingSpace, is_blank, special_id, token_name
from tasks.storage.arrow import offsets_of

# Characters passed to the tokenizers library per call.
LONGEST = 1 << 20
# Overhead of each text, in characters, when texts are grouped into calls.
_EACH = 8

_WORD_ENDS = re.compile(r"(?<=\w)(?= [^\W\d])")

# EOS tokens to try, in this order, if neither the config nor the tokenizer names one.
COMMON_EOS = ("</s>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|end|>")


def _groups(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Split texts into groups of up to LONGEST characters.

    Yields the indexes of the texts, and the texts.

    The tokenizers library takes 130 bytes of memory per character, 570 for one of four bytes, and panics at a run of
    ten million spaces. A longer text is cut before a space between words, where a model starts a new token anyway. If
    there is no such place within 64 Ki characters, it is cut anywhere.
    """
    owners: list[int] = []
    group: list[str] = []
    room = LONGEST
    for owner, text in enumerate(texts):
        start = 0
        while True:
            end = len(text) if len(text) - start <= LONGEST else _between_words(text, start + 1, start + LONGEST)
            if group and end - start + _EACH > room:
                yield owners, group
                owners, group, room = [], [], LONGEST
            owners.append(owner)
            group.append(text[start:end])
            room -= end - start + _EACH
            start = end
            if start >= len(text):
                break
    if group:
        yield owners, group


def _between_words(text: str, start: int, limit: int) -> int:
    """Return the last offset up to `limit` that is before a space between words."""
    start = max(start, limit - (1 << 16))
    ends = [match.start() for match in _WORD_ENDS.finditer(text[start : limit + 2])]
    return start + ends[-1] if ends else limit


class HuggingFaceEncoder(Encoder):
    """The reference encoder for `tokenizer.json`.

    Uses the tokenizers library without added tokens and dummy prefix.
    """

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
            raise DataError("bad_tokenizer", f"{path}: not a valid tokenizer.json: {error}") from None
        vocab = whole.get_vocab(with_added_tokens=True)
        flags = spec.get("added_tokens") or []
        # Use the ids that the library assigns, which are not always those in the file.
        added = {token["content"]: vocab[token["content"]] for token in flags if token["content"] in vocab}
        self.controls = {content: token for content, token in added.items() if not is_blank(content)}
        self.blanks = frozenset(added) - frozenset(self.controls)
        self.strips_left = frozenset(t["content"] for t in flags if t.get("lstrip"))
        self.strips_right = frozenset(t["content"] for t in flags if t.get("rstrip"))
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.leading_space, self.has_space = _disable_prefix(spec)
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
        self.unk_id = vocab.get(unk) if isinstance(unk, str) else model.get("unk_id")  # Unigram stores its id
        eos = eos_token or token_name(settings.get("eos_token")) or next((e for e in COMMON_EOS if e in added), None)
        self.eos_id = special_id("eos_token", eos, -1, vocab, path)
        starts = whole.encode("", add_special_tokens=True).ids
        bos = token_name(settings.get("bos_token"))
        self.bos_id = vocab.get(bos) if bos else None
        if self.bos_id is None and starts and starts[0] != self.eos_id:
            self.bos_id = starts[0]  # tokenizer.json does not name a BOS, but may prepend one
        self.adds_bos = self.bos_id is not None and starts[:1] == [self.bos_id]
        pad = pad_token or token_name(settings.get("pad_token"))
        self.pad_id = special_id("pad_token", pad, self.eos_id, vocab, path)
        # EOS and padding are never content, even if the file does not list them among its added tokens.
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
    """Keep only the added tokens that are white space.

    The library numbers added tokens that are not in the vocabulary in their order. If removing tokens would change the
    number of one that is kept, each removed token is replaced by a string that no text contains.
    """
    blanks = [token for token in added if is_blank(token["content"])]
    if all(token["content"] in vocab for token in blanks):
        return blanks
    kept = [token for token in added if is_blank(token["content"]) or token["content"] not in vocab]
    return [
        token if is_blank(token["content"]) else token | {"content": f"\0{number}\0"}
        for number, token in enumerate(kept)
    ]


def _disable_prefix(spec: dict[str, Any]) -> tuple[LeadingSpace, tuple[str, ...]]:
    """Disable the dummy prefix of a tokenizer.json (in place).

    Returns where the tokenizer adds it, and the prefixes of texts to which it does not add one.
    """
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
    """Return GPT-2's alphabet of bytes.

    Printable bytes map to themselves, the other 68 to U+0100 and following.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()
