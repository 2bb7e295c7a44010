"""Samples → token ids and labels, with the tokenizer's own library.

    [("\0BOS\0[INST] 2+2? [/INST]", False), (" 4 \0EOS\0", True)] ─▶ ids [1, 733, …, 2], trained [False, …, True]

- A marker of the template becomes the id of its control token, or text if the tokenizer lacks the token.
- Adjacent texts that are both trained on, or neither, are encoded together as one text.
- The library does not match special tokens in texts. It matches other added tokens.
- SentencePiece adds a space at the start of a string; see `Library.starts`.
- EOS is added to a sample that does not end with it. It is trained on if the text before it is.
- The first token of a sample is never trained on.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Sample = Sequence[tuple[str, bool | str]]  # text, and whether it is trained on, or a name (see `whole_texts`)
Text = tuple[str, bool]  # text, and whether a space is added to it
Written = tuple[str, str | int, bool | str]  # see `written`
Encoded = tuple[list[int], list[bool]]  # ids, and whether each is trained on


class Library(ABC):
    """A tokenizer, read by its own library."""

    controls: dict[str, int]
    bos: int | None
    eos: int
    adds_space: bool
    """Whether the library adds spaces to texts."""
    after_added: str = r"(?!)"
    """A pattern of texts after which the library adds a space, too."""

    @abstractmethod
    def starts(self, before: str, is_string: bool) -> bool:
        """Return whether a space is added to a text.

        `before` is "nothing", "control", or "text", depending on the item before the text.
        """

    @abstractmethod
    def encode(self, texts: Sequence[Text]) -> list[list[int]]:
        """Encode texts; no content becomes a control token."""


class SentencePiece(Library):
    """A `.model` file, read twice: with and without `add_dummy_prefix`."""

    adds_space = True

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as proto

        model = proto.ModelProto()
        model.ParseFromString(path.read_bytes())
        assert model.normalizer_spec.add_dummy_prefix
        self.own = SentencePieceProcessor(model_proto=model.SerializeToString())
        model.normalizer_spec.add_dummy_prefix = False
        self.bare = SentencePieceProcessor(model_proto=model.SerializeToString())
        tokens = range(self.own.vocab_size())
        self.controls = {self.own.id_to_piece(token): token for token in tokens if self.own.is_control(token)}
        self.bos = self.own.bos_id() if self.own.bos_id() >= 0 else None
        self.eos = self.own.eos_id()

    def starts(self, before: str, is_string: bool) -> bool:
        return before == "nothing" or (before == "control" and is_string)

    def encode(self, texts: Sequence[Text]) -> list[list[int]]:
        return [(self.own if adds_space else self.bare).encode(text) for text, adds_space in texts]


class HuggingFace(Library):
    """A folder as AutoTokenizer loads it, with and without the added space.

    The tokenizer itself defines where a space is added; see `rule_of`.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        auto = AutoTokenizer.from_pretrained(str(path))
        written = json.loads(auto.backend_tokenizer.to_str())
        self.own = Tokenizer.from_str(json.dumps(written))
        self.rule, self.spaces = rule_of(written)
        self.bare = Tokenizer.from_str(json.dumps(without_prefix(written)))
        for tokenizer in (self.own, self.bare):
            tokenizer.encode_special_tokens = True  # split_special_tokens of transformers
        added = written["added_tokens"]
        self.controls = {token["content"]: token["id"] for token in added if token["special"]}
        self.eos = self.controls[auto.eos_token]
        self.bos = self.controls.get(auto.bos_token)
        if self.own.encode("").ids[:1] != [self.bos]:
            self.bos = None
        self.adds_space = self.rule != "never"
        model = written["model"]
        unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
        self.unknown = self.controls.get(unknown)
        self.added = "|".join(re.escape(token["content"]) for token in added if not token["special"]) or r"(?!)"
        if self.rule == "always":
            self.after_added = rf"(?:{self.added})\Z"

    def starts(self, before: str, is_string: bool) -> bool:
        return before == "nothing" if self.rule == "first" else self.rule == "always" and before != "text"

    def encode(self, texts: Sequence[Text]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in texts]
        for tokenizer, of_own in ((self.own, True), (self.bare, False)):
            numbers = [number for number, (_, adds_space) in enumerate(texts) if adds_space == of_own]
            found = tokenizer.encode_batch_fast([texts[number][0] for number in numbers], add_special_tokens=False)
            for number, encoding in zip(numbers, found, strict=True):
                ids[number] = encoding.ids
        for number, (text, adds_space) in enumerate(texts):
            if self.rule == "always" and not adds_space and re.search(self.added, text):
                ids[number] = self._after_added(text)
            if self._has_control(ids[number], text):
                ids[number] = self._in_parts(text, adds_space)
        return ids

    def _after_added(self, text: str) -> list[int]:
        """Encode a text without a space at its start.

        The library still adds a space after each added token.
        """
        found = re.search(self.added, text)
        assert found
        first = self.bare.encode(text[: found.start()], add_special_tokens=False).ids
        return [*first, *self.own.encode(text[found.start() :], add_special_tokens=False).ids]

    def _has_control(self, ids: Iterable[int], text: str) -> bool:
        """Return whether a text became a control token.

        In a Unigram vocabulary, control tokens are ordinary pieces, so a text can match them.
        """
        forged = set(ids) & set(self.controls.values())
        return bool(forged - {self.unknown}) or (self.unknown in forged and "<unk>" in text)

    def _in_parts(self, text: str, adds_space: bool) -> list[int]:
        """Encode a text in parts, so that no control string stays in one part.

        The text is cut around each control string, and after the first character of each.
        """
        text = " " * (adds_space and not text.startswith(self.spaces)) + text
        strings = sorted(self.controls, key=len, reverse=True)
        parts: list[str] = []
        for part in re.split(f"({'|'.join(map(re.escape, strings))})", text):
            parts += [part[0], part[1:]] if part in self.controls else [part]
        ids = [token for part in parts for token in self.bare.encode(part, add_special_tokens=False).ids]
        assert not set(ids) & (set(self.controls.values()) - {self.unknown}), text
        return ids


def rule_of(written: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the texts to which a tokenizer.json adds a space.

    Also returns the starts of texts that already have one. "never" stands for no text, "first" for only the first, and
    "always" includes each text after an added token.
    """
    for step in steps_of(written, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            return str(step["prepend_scheme"]), (" ", "▁")
        if step["type"] == "ByteLevel" and step["add_prefix_space"]:
            return "always", (" ",)
    prepends = any(step["type"] == "Prepend" for step in steps_of(written, "normalizer"))
    return "always" if prepends else "never", (" ", "▁")


def steps_of(written: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    whole = written[part] or {"pretokenizers": []}
    return list(whole.get("normalizers") or whole.get("pretokenizers") or [whole] * ("type" in whole))


def without_prefix(written: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that adds no space."""
    none = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    splits = [step | none.get(step["type"], {}) for step in steps_of(written, "pre_tokenizer")]
    kept = [step for step in steps_of(written, "normalizer") if step["type"] != "Prepend"]
    return {
        **written,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
    }


# -- samples → ids ----------------------------------------------------------------------------------------------------


def encoded(samples: Sequence[Sample], library: Library) -> list[Encoded]:
    """Return the ids and the labels of samples. Equal texts are encoded once."""
    prepared = [segments(sample, library) for sample in samples]
    texts = list(dict.fromkeys(item for each in prepared for item, _ in each if not isinstance(item, int)))
    ids_of = dict(zip(texts, library.encode(texts), strict=True))
    found: list[Encoded] = []
    for each in prepared:
        ids: list[int] = []
        trained: list[bool] = []
        for item, flag in each:
            new = [item] if isinstance(item, int) else ids_of[item]
            ids += new
            trained += [flag] * len(new)
        trained[:1] = [False]
        found.append((ids, trained))
    return found


def segments(sample: Sample, library: Library) -> list[tuple[int | Text, bool]]:
    """Return the control tokens and texts of a sample, each with its trained flag.

    The list ends with the EOS that ends the sample.
    """
    found: list[tuple[int | Text, bool]] = []
    before, is_string = "nothing", False
    for kind, value, flag, alone in whole_texts(written(sample, library)):
        if kind == "string":
            is_string = True
            continue
        if kind == "control":
            found.append((int(value), flag))
            before = "control"
        elif value and before == "text" and found[-1][1] == flag and not alone:
            text, adds_space = found[-1][0]  # type: ignore[misc]
            found[-1] = ((text + str(value), adds_space), flag)
        elif value:
            if before == "text" and re.search(library.after_added, found[-1][0][0]):  # type: ignore[index]
                before = "control"
            found.append(((str(value), library.starts(before, is_string)), flag))
            before = "text"
        is_string = is_string and kind == "text" and not value
    ends = [item for item in found if isinstance(item[0], int) or item[0][0].strip()][-1:] or found[-1:]
    if ends[0][0] != library.eos:
        found.append((library.eos, ends[0][1]))
    return found


def shares_its_text(sample: Sample, library: Library) -> bool:
    """Return whether a turn that a flag adds is in one text with another turn."""
    groups = runs_of(written(sample, library))
    return any(
        any(flag == "added" and value for _, value, flag in run)
        and any(flag in ("content", "other answer") and str(value).strip() for _, value, flag in run)
        for run in groups
    )


def runs_of(items: Iterable[Written]) -> list[list[Written]]:
    """Return runs of items: control tokens, pieces of trained answers, and other text."""
    runs: list[list[Written]] = [[]]
    for item in items:
        if item[0] == "control" or item[2] == "answer":
            runs += [[item], []]
        else:
            runs[-1].append(item)
    return [run for run in runs if run]


def whole_texts(items: Iterable[Written]) -> Iterable[tuple[str, str | int, bool, bool]]:
    """Yield the items with flags that are true or false.

    The last value is true for a text that is not joined with the one before it. The names of flags are "answer" and
    "added" for what is trained on, "other answer" and "content" for what is not, and "around" for the rest. The whole
    text around added content is trained on, with the control token after it.
    """
    after_added = False
    for run in runs_of(items):
        added = any(flag == "added" and value for _, value, flag in run)
        first = True
        for kind, value, flag in run:
            trained = added or flag in (True, "answer")
            if after_added and kind == "control" and flag not in ("answer", "other answer"):
                trained = True
            yield kind, value, trained, (added or after_added) and first
            first = first and not (kind == "text" and value)
        after_added = added and run[0][0] != "control"


def written(sample: Sample, library: Library) -> Iterable[Written]:
    """Yield the control tokens, texts, and starts of strings of a sample.

    They are ("control", id), ("text", text), and ("string", ""), each followed by its trained flag.
    """
    for text, flag in sample:
        for number, part in enumerate(text.split("\0")):
            if number % 2 == 0:
                yield "text", part, flag
            elif part == "STRING":
                yield "string", "", flag
            elif part in ("BOS", "EOS"):
                token = library.bos if part == "BOS" else library.eos
                if token is not None:
                    yield "control", token, flag
            elif part in library.controls:
                yield "control", library.controls[part], flag
            else:
                yield "text", part, flag
