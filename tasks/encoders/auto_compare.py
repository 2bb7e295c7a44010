"""Compare an encoder with AutoTokenizer, where Transformers is installed.

    texts without control tokens ─┬─encoder───────▶ ids ─┐
                                  └─AutoTokenizer─▶ ids ─┴─▶ the first difference

The rules of `auto_rules` are those of one release. This comparison is with the installed release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.core.printable import shown
from tasks.encoders.encoder import Encoder, Unencodable

TEXTS = 300  # texts to compare
LONGEST = 2000  # characters of a text
_AROUND = 4  # tokens to show on each side of the first difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison: equal texts, and the first difference.

    `failure` is why AutoTokenizer cannot be used. Both strings may be empty.
    """

    texts: int = 0
    difference: str = ""
    failure: str = ""


def is_installed() -> bool:
    return find_spec("transformers") is not None


def compare(encoder: Encoder, folder: Path, texts: Iterable[str]) -> Comparison:
    """Compare with AutoTokenizer of the tokenizer in a folder.

    Texts with a control string are left out: they stay text here, but AutoTokenizer makes control tokens of them.
    """
    name = f"AutoTokenizer of Transformers {metadata.version('transformers')}"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of the library would break later forks
    with _without_torch():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a file can be unusable in many ways
            reason = " ".join(str(error).split())[:200]
            return Comparison(failure=f"{name} cannot load {folder}: {type(error).__name__}: {reason}")
        return _compare(encoder, tokenizer, name, texts)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from an import of Transformers, unless one of them is loaded.

    No tokenizer needs PyTorch, which takes most of the time of the import. What is imported without it is forgotten
    when the block ends.
    """
    before = set(sys.modules)
    if not before.isdisjoint(("torch", "transformers")):
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that no model can be used
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == "transformers":
                del sys.modules[module]


def _compare(encoder: Encoder, tokenizer: Any, name: str, texts: Iterable[str]) -> Comparison:
    for token, number in (*encoder.controls.items(), *encoder.content_tokens.items()):
        theirs = tokenizer.convert_tokens_to_ids(token)
        if theirs != number:
            return Comparison(difference=f"the token {shown(token)} has the id {number} here, but {theirs} with {name}")
    count = 0
    for text, ours in _ours(encoder, _ordinary(encoder, texts)):
        theirs = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if theirs not in ours:
            mine, yours = _excerpts(tokenizer, ours[0], theirs)
            return Comparison(count, f"{shown(text[:80])} becomes {mine} here, but {yours} with {name}")
        count += 1
    return Comparison(count)


def texts_in(encoder: Encoder, rows: Iterable[Sequence[int]]) -> list[str]:
    """Return the texts between the control tokens of rows."""
    texts: dict[str, None] = {}
    for row in rows:
        run: list[int] = []
        for token in (*row, encoder.eos_id):
            if token in encoder.control_strings:
                texts[encoder.decode(run)] = None
                run = []
            else:
                run.append(token)
    return list(texts)


def _ordinary(encoder: Encoder, texts: Iterable[str]) -> list[str]:
    """Return the first texts without control strings, shortened."""
    some = list(islice((text[:LONGEST] for text in texts if text), TEXTS))
    held = set(encoder.holding(some))
    return [text for number, text in enumerate(some) if number not in held]


def _ours(encoder: Encoder, texts: Sequence[str]) -> list[tuple[str, list[list[int]]]]:
    """Return texts, each with its ids at the start of a rendering.

    Texts without an encoding are left out. There are two encodings if the template decides about the leading space.
    """
    spaced = [encoder.with_leading_space(text) for text in texts]
    forms = {"none": [texts], "template": [spaced, texts]}.get(encoder.leading_space, [spaced])
    try:
        encoded = [encoder.encode(form) for form in forms]
    except Unencodable as error:
        pairs = zip(texts, spaced, strict=True)
        return _ours(encoder, [text for text, other in pairs if error.problems.keys().isdisjoint((text, other))])
    return [
        (text, [form.ids[form.offsets[number] : form.offsets[number + 1]].tolist() for form in encoded])
        for number, text in enumerate(texts)
    ]


def _excerpts(tokenizer: Any, ours: list[int], theirs: list[int]) -> list[str]:
    """Return the tokens around the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))
    around = slice(max(0, first - _AROUND), first + _AROUND)
    return [shown(" ".join(map(str, tokenizer.convert_ids_to_tokens(ids[around])))) for ids in (ours, theirs)]
