"""A tokenizer has limited time and memory, and cannot write to stderr."""

from __future__ import annotations

import base64
import io
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from sentencepiece import SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as proto
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders import native
from packcorpus.tasks.encoders.encoder import TooSlow
from packcorpus.tasks.encoders.huggingface_encoder import HuggingFaceEncoder
from packcorpus.tasks.encoders.native import run_native
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import find_parts
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Turns
from packcorpus.tasks.tokenization.tokenize_part import tokenize_part

PANIC = "\nthread '<unnamed>' (7015) panicked at /root/onig-6.5.3/src/lib.rs:647:23:\nOnig: Regex search error\n"
TRACE = "stack backtrace:\n   0: rust_begin_unwind\n             at /rustc/1/library/std/src/panicking.rs:7:5\n"
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
    assert native._growth(node) == growth


def test_the_padding_of_a_tokenizer_is_not_used(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    assert HuggingFaceEncoder(changed(tmp_path, padding=padding), {}).vocab_size > 0


@pytest.mark.parametrize("panic", [PANIC, PANIC + NOTE, PANIC + TRACE + NOTE, PANIC.replace("\n", "", 1) + NOTE])
def test_the_report_of_a_panic_is_left_out_and_nothing_else(panic: str, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("", "before\n"):
        run_native(lambda text=text: os.write(2, f"{text}{panic}after\n".encode()))
        assert capfd.readouterr().err == f"{text}after\n"


def test_stderr_is_back_after_calls_in_two_threads(capfd: pytest.CaptureFixture[str]) -> None:
    """The call that began first ends first."""
    started, ended = threading.Event(), threading.Event()

    def first() -> None:
        run_native(started.wait)
        ended.set()

    thread = threading.Thread(target=first)

    def second() -> None:
        thread.start()
        while native._blocks < 2:
            time.sleep(0.001)
        started.set()
        ended.wait()

    run_native(second)
    thread.join()
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_a_report_is_not_held_if_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "dup", lambda _: os.close(-1))
    assert run_native(lambda: 7) == 7


# -- charsmaps --------------------------------------------------------------------------------------------------------


def charsmap(longest: int) -> bytes:
    """Return the map of a model that replaces "a" by a longer text."""
    with tempfile.TemporaryDirectory() as place:
        rules = Path(place, "rules.tsv")
        rules.write_text(f"61\t{' '.join(['62'] * longest)}\n")
        model = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(["hello world"] * 9), model_writer=model, model_type="bpe", vocab_size=270,
            hard_vocab_limit=False, byte_fallback=True, minloglevel=2, normalization_rule_tsv=str(rules),
        )  # fmt: skip
    return model.getvalue()


def test_a_sentencepiece_model_that_makes_texts_far_longer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(charsmap(18))
    assert len(open_encoder(find_tokenizer(path)).encode(["a"]).ids) == 18
    path.write_bytes(charsmap(1000))
    with pytest.raises(DataError, match=r"tokenizer\.model: its normalizer can make a text 56 times as long"):
        open_encoder(find_tokenizer(path))


def test_a_charsmap_that_makes_texts_far_longer_or_is_damaged_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library panics on the damaged one."""
    model = proto.ModelProto.FromString(charsmap(1000)).normalizer_spec.precompiled_charsmap
    for content, problem in ((model, "its normalizer can make a text 56 times"), (b"", "not a valid")):
        node = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}
        with pytest.raises(DataError, match=rf"tokenizer\.json: {problem}"):
            HuggingFaceEncoder(changed(tmp_path, normalizer=node), {})
    assert capfd.readouterr().err == ""


# -- time -------------------------------------------------------------------------------------------------------------

SLOW = "a" * 1200  # two seconds, with a pattern that takes up to a million steps from each place


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HuggingFaceEncoder:
    """Return a tokenizer that is slow for many "a"."""
    spec = orjson.loads(Path(kind_path("hf_byte_level"), "tokenizer.json").read_bytes())
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"a*a*b|\s+|\S"}
    encoder = HuggingFaceEncoder(changed(tmp_path, pre_tokenizer=spec["pre_tokenizer"]), {})
    monkeypatch.setattr(native, "SECONDS", 0.2)
    return encoder


def test_a_text_on_which_a_pattern_takes_too_long_is_named(slow: HuggingFaceEncoder) -> None:
    problem = r"tokenizer\.json: takes more than 0\.2 s for a text of 1,200 characters that begins with \"aaaa"
    with pytest.raises(TooSlow, match=problem) as caught:
        slow.encode(["quick", SLOW, "brown"])
    assert caught.value.text == SLOW


@pytest.mark.parametrize("turns", ["together", "apart"])
def test_the_place_of_a_slow_text_is_named(turns: Turns, slow: HuggingFaceEncoder, tmp_path: Path) -> None:
    records = [{"prompt": "Hi", "completion": text} for text in ("quick", SLOW, "brown")]
    (tmp_path / "chats.jsonl").write_bytes(b"\n".join(map(orjson.dumps, records)) + b"\n")
    source = Source(path="chats.jsonl", format="prompt_completion")
    [(_, [part])] = find_parts([source], tmp_path, 1 << 30)
    config = Config(sources=[source], turns=turns)
    template = JinjaTemplate("chatml", CHATML_JINJA, slow, config.train_on, "2026-01-01", turns)
    with pytest.raises(DataError, match=r"^chats\.jsonl:2: .*tokenizer\.json: takes more than") as caught:
        tokenize_part(part, slow, template, config, tmp_path / "tokens.arrow", tmp_path / "receipt.json")
    assert caught.value.code == "E410"
