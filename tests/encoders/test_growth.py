"""A tokenizer cannot end the process with a long text, or write to stderr."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.tokenizer_kinds import kind_path

from tasks.core.errors import DataError
from tasks.core.process import hold_panics
from tasks.encoders.growth import _growth
from tasks.encoders.huggingface_encoder import HuggingFaceEncoder

PANIC = "\nthread '<unnamed>' (7015) panicked at /root/onig-6.5.3/src/lib.rs:647:23:\nOnig: Regex search error\n"
NOTE = "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n"


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(nodes)}


BOMBS = {
    "three replacements": sequence(*[replace("a" * 1000, Regex="a")] * 3),
    "many small ones": sequence(*[replace("aa", String="a")] * 34),
    "a pattern that matches nothing": sequence(*[replace("a", Regex="x*")] * 34),
    "nested": sequence(sequence(replace("a" * 9, String="a")), sequence(replace("a" * 9, Regex="(?i:a)"))),
    "a long start": sequence({"type": "Prepend", "prepend": "a" * 1000}),
}


def changed(folder: Path, **values: Any) -> Path:
    spec = orjson.loads(Path(kind_path("hf_byte_level"), "tokenizer.json").read_bytes()) | values
    (folder / "tokenizer.json").write_bytes(orjson.dumps(spec))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("key", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(name: str, key: str, tmp_path: Path) -> None:
    text = orjson.dumps(BOMBS[name])
    node = orjson.loads(text.replace(b"normalizers", b"decoders") if key == "decoder" else text)
    if key == "decoder" and name == "a long start":
        node = {"type": "WordPiece", "prefix": "a" * 1000, "cleanup": False}
    with pytest.raises(DataError, match=rf"tokenizer\.json: its {key} can make a text [\d,]+ times as long"):
        HuggingFaceEncoder(changed(tmp_path, **{key: node}), {})


@pytest.mark.parametrize(
    ("node", "growth"),
    [
        (None, 1),
        (sequence({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")), 1),  # Llama 2
        (sequence({"type": "NFKC"}, replace(" ", Regex=" {2,}"), replace("", Regex="x*")), 1),
        (sequence(*[replace('"', String="``")] * 9), 1),  # ALBERT, XLNet
        (replace("<n>", String="\n"), 3),
        (replace("  ", String="\t\t"), 1),
    ],
)
def test_the_growth_of_published_tokenizers_is_small(node: Any, growth: int) -> None:
    assert _growth(node) == growth


def test_the_padding_of_a_tokenizer_is_not_used(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    assert HuggingFaceEncoder(changed(tmp_path, padding=padding), {}).vocab_size > 0


@pytest.mark.parametrize("panic", [PANIC, PANIC + NOTE, PANIC.replace("\n", "", 1) + NOTE])
def test_the_report_of_a_panic_is_left_out_and_nothing_else(panic: str, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("", "before\n"):
        with hold_panics():
            os.write(2, f"{text}{panic}after\n".encode())
        assert capfd.readouterr().err == f"{text}after\n"
