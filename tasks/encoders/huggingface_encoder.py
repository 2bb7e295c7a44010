"""Encode text with a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.encoders.encoder import (
    Encoded,
    Encoder,
    LeadingSpace,
    TooSlow,
    Unencodable,
    content_tokens_of,
    special_id,
    token_name,
)
from packcorpus.tasks.encoders.native import Panic, read_spec, run_native, tokenizer_of
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.storage.schemas import offsets_of

# Characters passed to the tokenizers library per call.
LONGEST = 1 << 20
# All ids are below this limit. It is many times the size of any vocabulary, but a table of as many flags is small.
MOST_TOKENS = 1 << 24
# Overhead of each text, in characters, when texts are grouped into calls.
_EACH = 8

_WORD_ENDS = re.compile(r"(?<=\w)(?= [^\W\d])")

# EOS tokens to try, in this order, if neither the config nor the tokenizer names one.
COMMON_EOS = ("</s>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|end|>")


def _groups(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Split texts into groups of up to LONGEST characters.

    Yields the indexes of the texts, and the texts. The tokenizers library takes 130 bytes of memory per character, or
    570 if the character has four bytes, and panics at a run of ten million spaces. So a text of more than LONGEST
    characters is cut before a space between words, where a model starts a new token anyway. If there is no such place
    within 64 Ki characters, the text is cut anywhere.
    """
    owners: list[int] = []
    group: list[str] = []
    room = LONGEST
    for owner, text in enumerate(texts):
        start, is_first = 0, True
        while start < len(text) or is_first:
            end = min(start + LONGEST, len(text))
            if end < len(text):
                near = max(start + 1, end - (1 << 16))
                for match in _WORD_ENDS.finditer(text[near : end + 2]):
                    end = near + match.start()
            if group and end - start + _EACH > room:
                yield owners, group
                owners, group, room = [], [], LONGEST
            owners.append(owner)
            group.append(text[start:end])
            room -= end - start + _EACH
            start, is_first = end, False
    if group:
        yield owners, group


class HuggingFaceEncoder(Encoder):
    """The tokenizers library without control tokens and dummy prefix."""

    kind = "huggingface"
    engine = "tokenizers"

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        eos_token: str | None = None,
        pad_token: str | None = None,
        content_tokens: Sequence[str] = (),
        spec: dict[str, Any] | None = None,
    ):
        """Load a tokenizer.json, or `spec`, which was made from the file at `path`."""
        self._path = path
        spec = read_spec(path) if spec is None else spec
        spec |= {"truncation": None, "padding": None}  # the padding of an empty text may take all memory
        whole = tokenizer_of(spec, path)
        if dropout := (spec.get("model") or {}).get("dropout"):
            raise DataError(
                "random_tokenizer",
                f"{path}: model.dropout is {dropout}, so tokenization is random; set it to null",
            )
        vocab = whole.get_vocab(with_added_tokens=True)
        flags = spec.get("added_tokens") or []
        # Use the ids that the library assigns, which may differ from the ids in the file.
        added = {token["content"]: vocab[token["content"]] for token in flags if token["content"] in vocab}
        self.strips_left = frozenset(t["content"] for t in flags if t.get("lstrip"))
        self.strips_right = frozenset(t["content"] for t in flags if t.get("rstrip"))
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MOST_TOKENS:
            last = max(vocab, key=vocab.__getitem__)
            raise DataError(
                "bad_tokenizer",
                f"{path}: {shown(last)} has the id {vocab[last]:,}, but ids must be below {MOST_TOKENS:,}: damaged?",
            )
        self._tokens = {token: content for content, token in vocab.items()}
        model = spec.get("model") or {}
        unk = model.get("unk_token")
        self.unk_id = vocab.get(unk) if isinstance(unk, str) else model.get("unk_id")  # Unigram stores the id
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
        ends = {self._tokens[token] for token in (self.eos_id, self.pad_id, self.bos_id) if token is not None}
        special = {token["content"]: bool(token.get("special")) for token in flags if token["content"] in vocab}
        reserved = ends | {self._tokens[self.unk_id]} if self.unk_id in self._tokens else ends
        allowed = content_tokens_of(special, content_tokens, reserved, path)
        self.content_tokens = {content: added[content] for content in sorted(allowed)}
        # EOS and padding are never content, even if the file does not list them among its added tokens.
        self.controls = {content: vocab[content] for content in (*added, *sorted(ends)) if content not in allowed}
        self._content_ids = frozenset(self.content_tokens.values())
        self._load(spec, [token for token in flags if token["content"] in allowed], whole)

    def _load(self, spec: dict[str, Any], matched: Sequence[dict[str, Any]], whole: Any) -> None:
        """Load the model without its prefix, and with only the added tokens `matched`."""
        from tokenizers import Tokenizer

        normalizes = spec.get("normalizer") is not None
        self.irregular = frozenset(
            token["content"]
            for token in matched
            if any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip"))
            or (token.get("normalized") and normalizes)
        )
        kept = {token["content"] for token in matched}
        spec["added_tokens"] = _only(kept, spec.get("added_tokens") or [], whole.get_vocab(with_added_tokens=False))
        spec["post_processor"] = None
        with_prefix = orjson.dumps(spec).decode()
        self.leading_space, self.has_space = _disable_prefix(spec)
        self._tokenizer = Tokenizer.from_str(orjson.dumps(spec).decode())
        described = orjson.dumps([spec.get("normalizer"), spec.get("pre_tokenizer"), spec.get("decoder")])
        self._byte_level = b'"ByteLevel"' in described
        self.every_byte = self._byte_level or bool((spec.get("model") or {}).get("byte_fallback"))
        self.underline_is_space = not self._byte_level and (b"Metaspace" in described or "▁".encode() in described)
        self._prefixing: Any = None
        if self.leading_space != "none":
            # The library puts no space before an added token, unless the normalizer adds it before it is matched.
            early = b'"Prepend"' in with_prefix.encode()
            self.has_space += tuple(t["content"] for t in matched if not (early and t.get("normalized")))
        if self.leading_space == "each" and matched:
            self._prefixing = Tokenizer.from_str(with_prefix)
            self.space_follows = tuple(sorted(kept))
            self.irregular = frozenset(kept)

    def _encode(self, texts: Texts) -> Encoded:
        lengths = np.zeros(len(texts), np.int64)
        arrays = [np.empty(0, np.int32)]
        problems: dict[str, str] = {}
        for owners, pieces in _groups(texts.strings):
            try:
                lists = self._ids(pieces)
            except Unencodable as error:
                failed = zip(owners, map(error.problems.get, pieces), strict=True)
                problems |= {texts.strings[owner]: problem for owner, problem in failed if problem}
                continue
            counts = list(map(len, lists))
            np.add.at(lengths, owners, counts)
            arrays.append(np.fromiter(chain.from_iterable(lists), np.int32, sum(counts)))
        if problems:
            raise Unencodable(problems)
        return Encoded(np.concatenate(arrays), offsets_of(lengths))

    def _ids(self, texts: list[str]) -> list[list[int]]:
        try:
            return run_native(lambda: self._ids_at_once(texts))
        except TimeoutError as error:
            starts: list[float] = []

            def encode_singly() -> None:
                for text in texts:
                    starts.append(time.monotonic())
                    self._ids_at_once([text])

            with suppress(Exception):
                run_native(encode_singly)
            # The text that takes most of the time, or takes all that is left.
            text = texts[int(np.argmax(np.diff([*starts, time.monotonic()])))]
            raise TooSlow(
                text,
                f"{self._path}: takes {error} for a text of {len(text):,} characters that begins with "
                f"{shown(text[:40])}; fix the patterns in the {self._path.name}, or remove the record",
            ) from None
        except Exception as error:  # the library raises bare Exceptions, such as for an unknown token that is missing
            if type(error) not in (Panic, Exception):
                raise
            problem = f"the tokenizer fails on the text that begins with {shown(texts[0][:40])} ({error})"
        if len(texts) == 1:
            raise Unencodable({texts[0]: f"{problem}; remove the record, or fix the {self._path.name}"})
        problems: dict[str, str] = {}
        for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :]):
            try:
                self._ids(half)
            except Unencodable as failed:
                problems |= failed.problems
        raise Unencodable(problems)

    def _ids_at_once(self, texts: list[str]) -> list[list[int]]:
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        for number, text in enumerate(texts) if self._prefixing else ():
            if self._content_ids.isdisjoint(ids[number]):
                continue
            # Take the spaces that the tokenizer puts after content tokens. The text before the first content token
            # already has its leading space, if it needs one. Unlike `encode`, `encode_batch` releases the GIL.
            [whole] = self._prefixing.encode_batch([text], add_special_tokens=False)
            first = next((place for place, token in enumerate(whole.ids) if token in self._content_ids), None)
            if first is not None:
                before = text[: whole.offsets[first][0]]
                [start] = self._tokenizer.encode_batch_fast([before], add_special_tokens=False)
                ids[number] = [*start.ids, *whole.ids[first:]]
        return ids

    def model(self) -> bytes:
        return str(self._tokenizer.to_str()).encode()

    def token_bytes(self, token: int) -> bytes:
        content = self._tokens.get(token)
        if content is None:
            return f"<unused {token}>".encode()
        if token in self.control_strings or (self._byte_level and token in self._content_ids):
            return content.encode()
        if self._byte_level:
            return b"".join(_BYTE_LEVEL.get(char, char.encode()) for char in content)
        if len(content) == 6 and content.startswith("<0x"):
            return bytes([int(content[3:5], 16)])
        return (content.replace("▁", " ") if self.underline_is_space else content).encode()


def _only(contents: Collection[str], added: Sequence[dict[str, Any]], vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """Keep only the added tokens that are in `contents`.

    The library numbers added tokens that are not in the vocabulary in their order. If removing tokens would change the
    number of a kept token, each removed token is replaced by a string that no text contains (see `is_placeholder`).
    """
    kept = [token for token in added if token["content"] in contents]
    if all(token["content"] in vocab for token in kept):
        return kept
    numbered = [token for token in added if token["content"] in contents or token["content"] not in vocab]
    return [
        token if token["content"] in contents else token | {"content": f"\0{number}\0"}
        for number, token in enumerate(numbered)
    ]


def is_placeholder(token: Mapping[str, Any]) -> bool:
    """Return whether an added token replaces a removed token."""
    return str(token["content"]).startswith("\0")


def _disable_prefix(spec: dict[str, Any]) -> tuple[LeadingSpace, tuple[str, ...]]:
    """Disable the dummy prefix of a tokenizer.json (in place).

    Returns where the tokenizer adds it, and the beginnings of texts to which it does not.
    """
    place: LeadingSpace = "none"
    unless: tuple[str, ...] = ()

    def walk(node: Any) -> Any:
        nonlocal place, unless
        if not isinstance(node, dict):
            return node
        if node.get("type") == "Prepend":
            place = "each"
            return None
        if node.get("type") == "Metaspace":
            scheme = node.get("prepend_scheme") or ("always" if node.get("add_prefix_space", True) else "never")
            if scheme != "never":
                place = "first" if scheme == "first" else "each"
                unless = (" ", node.get("replacement", "▁"))
            old = {"add_prefix_space": False} if "add_prefix_space" in node else {}
            return {**node, "prepend_scheme": "never", **old}
        if node.get("type") == "ByteLevel" and node.get("add_prefix_space"):
            place, unless = "each", (" ",)
            return {**node, "add_prefix_space": False}
        for key in ("normalizers", "pretokenizers"):
            if key in node:
                return {**node, key: [kept for child in node[key] if (kept := walk(child)) is not None]}
        return node

    for key in ("normalizer", "pre_tokenizer"):
        spec[key] = walk(spec.get(key))
    return place, unless


# GPT-2's alphabet of bytes: printable bytes are represented by themselves, and the other 68 bytes by U+0100 and the
# characters that follow.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_LEVEL = {chr(byte): bytes([byte]) for byte in _PRINTABLE}
_BYTE_LEVEL |= {chr(code): bytes([byte]) for code, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}), 256)}
