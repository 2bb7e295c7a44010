"""A trained tokenizer is reproducible, and any text round-trips.

Its control tokens are the markers of the template, <pad>, <s>, and </s>.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from support.profiles import examples
from support.small_corpus import conversations

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.sources.model import Part, Source
from packcorpus.tasks.sources.parts import find_parts
from packcorpus.tasks.templates.built_in import BUILT_IN, MARKERS
from packcorpus.tasks.tokenization import train_tokenizer as trainer_module
from packcorpus.tasks.tokenization.train_tokenizer import train_tokenizer

RECORDS = [
    *conversations(60),
    {
        "messages": [
            {"role": "user", "content": 'Wie viele?\n\t"12"'},
            {"role": "assistant", "content": "  漢字 🙂 <|im_end|>"},
        ]
    },
]


def parts_of(
    folder: Path, records: Sequence[Any], format: str = "messages", part_size: int = 1 << 20
) -> tuple[Part, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tuple(
        p for _, parts in find_parts([Source(path="chat.jsonl", format=format)], folder, part_size) for p in parts
    )


def train(parts: tuple[Part, ...], path: Path, template: str = "chatml", vocab_size: int = 400) -> bytes:
    train_tokenizer(parts, template, vocab_size, 1 << 20, path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(parts_of(folder, RECORDS), folder / "tokenizer.model")
    return folder / "tokenizer.model"


@pytest.mark.slow
def test_the_same_bytes_in_any_part_folder_and_process(model: Path, tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "other", RECORDS, part_size=1 << 10)
    assert len(parts) > 5
    assert train(parts, tmp_path / "again.model") == model.read_bytes()
    script = (
        "import sys; from pathlib import Path\n"
        "from packcorpus.tasks.sources.model import Source; from packcorpus.tasks.sources.parts import find_parts\n"
        "from packcorpus.tasks.tokenization.train_tokenizer import train_tokenizer\n"
        "folder = Path(sys.argv[1])\n"
        "[(_, parts)] = find_parts([Source(path='chat.jsonl', format='messages')], folder, 1 << 20)\n"
        "train_tokenizer(tuple(parts), 'chatml', 400, 1 << 20, folder / 'x.model')\n"
    )
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C"}
        subprocess.run([sys.executable, "-c", script, str(model.parent)], check=True, env=environment)
        digest = hashlib.sha256((model.parent / "x.model").read_bytes())
        assert digest.hexdigest() == hashlib.sha256(model.read_bytes()).hexdigest()


@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁"), max_size=30))
def test_any_text_round_trips(model: Path, text: str) -> None:
    encoder = open_encoder(find_tokenizer(model))
    ids = encoder.encode([text]).ids
    assert encoder.decode(ids) == text
    assert encoder.unk_id not in ids.tolist()


def test_digits_are_separate_pieces_and_every_byte_has_a_piece(model: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(model))
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces)
    assert not [
        piece for piece in pieces if len(piece.strip("▁")) > 1 and any(c.isdigit() for c in piece) and piece[0] != "<"
    ]
    assert len(pieces) <= 400
    ids = [processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()]
    assert ids == [0, 1, 2, 3]


@pytest.mark.parametrize("template", [*BUILT_IN, "my.jinja"])
def test_the_markers_of_the_template_are_control_tokens(template: str, tmp_path: Path) -> None:
    train(parts_of(tmp_path, RECORDS), tmp_path / "x.model", template, 450)
    processor = SentencePieceProcessor(model_file=str(tmp_path / "x.model"))
    controls = {processor.id_to_piece(i) for i in range(processor.vocab_size()) if processor.is_control(i)}
    assert controls == {"<pad>", "<s>", "</s>", *MARKERS.get(template, ())}
    encoder = open_encoder(find_tokenizer(tmp_path / "x.model"))
    for marker in MARKERS.get(template, ()):
        assert encoder.controls[marker] == processor.piece_to_id(marker)
        assert encoder.controls[marker] not in encoder.encode([f"a{marker}b"]).ids.tolist(), (
            "text became a control token"
        )


def test_a_wrong_format_is_reported(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, ['{"messages": [{"role": "user", "content": "x"}]}'] * 2, "sharegpt")
    message = (
        r"chat\.jsonl:1: does not fit format: sharegpt \(conversations is missing; the keys found are: messages\); its "
        "keys match the format messages; remove `format`$"
    )
    with pytest.raises(DataError, match=message) as error:
        train_tokenizer(parts, "chatml", 400, 1 << 20, tmp_path / "x.model")
    assert error.value.reason == "wrong_format"


def test_sources_without_text_are_reported_with_the_first_reject(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, ['{"text": ""}'] * 2, "text")
    with pytest.raises(DataError, match="the sources contain no text to train a tokenizer on"):
        train(parts, tmp_path / "x.model")
    parts = parts_of(tmp_path, [{"messages": [{"role": "assistent", "content": "x"}]}] * 3)
    with pytest.raises(DataError, match=r"the first of 3 rejects: chat\.jsonl:1: .*assistent"):
        train(parts, tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_a_vocabulary_too_small_for_the_characters(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(500))
    parts = parts_of(tmp_path, [{"text": text}], "text")
    with pytest.raises(
        DataError, match=r"300 vs 76[0-9].*raise vocab_size, which is 300, or name a tokenizer in the config"
    ):
        train(parts, tmp_path / "x.model", vocab_size=300)
    assert not (tmp_path / "x.model").exists()


def test_little_text_gives_a_small_vocabulary(tmp_path: Path) -> None:
    train(parts_of(tmp_path, [{"text": "hello"}], "text"), tmp_path / "x.model", vocab_size=8192)
    encoder = open_encoder(find_tokenizer(tmp_path / "x.model"))
    assert 256 < encoder.vocab_size < 300
    assert encoder.decode(encoder.encode(["hello, wörld"]).ids) == "hello, wörld"


def test_errors_while_reading_are_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in conversations(2000)).encode()
    (tmp_path / "chat.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    [(_, parts)] = find_parts([Source(path="chat.jsonl.gz", format="messages")], tmp_path, 1 << 20)
    with pytest.raises(DataError, match=r"chat\.jsonl\.gz.*(truncated|ends)") as caught:
        train(tuple(parts), tmp_path / "x.model")
    assert "vocab_size" not in str(caught.value)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer_module, "PartReader", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tuple(parts), tmp_path / "x.model")


def test_the_amount_of_text_read_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [{"text": f"word {i} " * 10} for i in range(100)]
    parts = parts_of(tmp_path, texts, "text")

    def read() -> list[str]:
        return list(trainer_module.sentences_of(trainer_module.placed(parts, 1 << 20), 1000, trainer_module.Seen()))

    whole = read()
    assert 900 < sum(map(len, whole)) <= 1000
    assert whole == [text["text"] for text in texts[: len(whole)]]
    monkeypatch.setattr(trainer_module, "LONGEST_SENTENCE", 7)
    assert max(map(len, read())) == 7
    assert "".join(read()) == "".join(whole)
