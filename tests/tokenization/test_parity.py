"""The fast encoder is used only if it equals the reference on texts of the corpus."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import hostile, kind_path, open_kind, records

from packcorpus.pipeline import display
from packcorpus.pipeline.progress import run
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.encoders.encoder import Encoded, Encoder, Unencodable
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.tokenization import checks
from packcorpus.tasks.tokenization.checks import (
    HARD,
    EngineChoice,
    choose_engines,
    chosen_engines,
    difference,
    refused_engines,
    sample,
)
from packcorpus.tasks.tokenization.tokenize_part import tokenize_part
from packcorpus.tasks.work import TokenizePart

JINJA = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def encoder_of(recipe: Recipe) -> Encoder:
    return choose_engines(recipe).encoder(recipe.encoder)


def encoded_by(recipe: Recipe, place: Path) -> list[str]:
    """Return all texts passed to the encoder when the corpus is tokenized."""
    seen: list[str] = []

    class Listening(Fake):
        def encode(self, texts: Sequence[str] | Texts) -> Encoded:
            seen.extend(Texts.of(texts).strings)
            return self.reference.encode(texts)

        def count_content_tokens(self, texts: Sequence[str]) -> list[tuple[int, str]]:
            return self.reference.count_content_tokens(texts)  # this encodes the same texts again

    for part in recipe.parts:
        encoder = Listening(recipe.encoder, lambda text: False)
        tokenize_part(part, encoder, recipe.template, recipe.config, place / "tokens.arrow", place / "receipt.json")
    return seen


class Fake(Encoder):
    """A fast encoder changes the last token of each text that is `wrong`."""

    engine = "gigatoken"

    def __init__(self, reference: Encoder, wrong: Callable[[str], bool]):
        for name in set(Encoder.__annotations__) - {"engine"}:
            setattr(self, name, getattr(reference, name))
        self.reference, self.wrong = reference, wrong

    def encode(self, texts: Sequence[str] | Texts) -> Encoded:
        encoded = self.reference.encode(texts)
        ids = encoded.ids.copy()
        for text, stop in zip(Texts.of(texts).strings, encoded.offsets[1:].tolist(), strict=True):
            if self.wrong(text):
                ids[stop - 1] ^= 1
        return Encoded(ids, encoded.offsets)

    def _encode(self, texts: Texts) -> Encoded:
        return self.encode(texts)

    def token_bytes(self, token: int) -> bytes:
        return self.reference.token_bytes(token)

    def model(self) -> bytes:
        return self.reference.model()


@pytest.fixture
def erring(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make gigatoken encode texts that contain a word incorrectly."""

    def err(word: str) -> None:
        fake = lru_cache(maxsize=2)(lambda reference: Fake(reference, lambda text: word in text))
        monkeypatch.setattr(checks, "_gigatoken", fake)

    return err


# -- the sample -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        *(("sp_bpe_chatml", template) for template in ("chatml", "mistral", "plain", "own.jinja")),
        *(("hf_metaspace", template) for template in ("mistral", "plain")),
        ("sp_bpe_user_defined", "chatml"),
        ("hf_byte_level", "own.jinja"),
    ],
)
def test_every_rendered_text_of_a_small_corpus_is_compared(
    kind: str, template: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = hostile(kind).map(lambda text: text.replace("\0", ""))

    @settings(max_examples=examples(6), deadline=None)
    @given(records(texts, usual=True))
    def check(record: dict[str, Any]) -> None:
        place = tmp_path_factory.mktemp("sample")
        (place / "own.jinja").write_text(JINJA)
        many = [record, *conversations(20)]
        common: dict[str, Any] = {"template": template, "tokenizer": str(kind_path(kind)), "unknown_markers": "text"}
        recipe = make_recipe(place, many, part_size=1024, max_rejects=1, **common)
        assert set(sample(recipe)) == set(encoded_by(recipe, place))

    check()


def small_sample(recipe: Recipe) -> list[str]:
    return sample(recipe, at_least=60, budget=8_000)


def test_texts_from_the_start_middle_and_end_of_a_large_corpus_are_compared(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(600), part_size=4096)
    assert len(recipe.parts) > 9
    texts, found = encoded_by(recipe, tmp_path), small_sample(recipe)
    assert 60 <= len(found) < 140
    assert len(set(found)) == len(found)
    assert set(found) <= set(texts)
    assert {texts[0], texts[-1]} <= set(found)
    places = [texts.index(text) / len(texts) for text in found]
    assert sum(0.1 < place < 0.9 for place in places) > 10
    assert max(np.diff(sorted(places))) < 0.5


def test_the_sample_depends_on_the_sources_alone(tmp_path: Path) -> None:
    first = small_sample(make_recipe(tmp_path / "a", conversations(300)))
    other = make_recipe(tmp_path / "b", conversations(300), part_size=1024, sequence_length=64, seed=1)
    assert first == small_sample(other)
    assert first != small_sample(make_recipe(tmp_path / "c", conversations(301)))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.parquet", "a.csv"])
def test_every_container_is_sampled(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"Ask {i}", "completion": f"Say {i}"} for i in range(400)]
    path = tmp_path / name
    if name.endswith("json"):
        path.write_bytes(orjson.dumps(rows))
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, rows)), mtime=0))
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    else:
        path.write_text("prompt,completion\n" + "\n".join(f"{r['prompt']},{r['completion']}" for r in rows))
    recipe = make_recipe(tmp_path, [], sources=[{"path": name}])
    found = small_sample(recipe)
    assert len(found) >= 60
    assert set(found) <= set(encoded_by(recipe, tmp_path))
    asked = [int(text.split("Ask ")[1].split()[0]) for text in found if "Ask " in text]
    assert min(asked) < 50
    assert max(asked) > 350


def test_the_first_the_last_and_some_of_many_files_are_sampled(tmp_path: Path) -> None:
    for number in range(60):
        line = {"prompt": f"Ask {number:02d}", "completion": f"Say {number:02d}"}
        (tmp_path / f"f{number:02d}.jsonl").write_text(json.dumps(line) + "\n")
    recipe = make_recipe(tmp_path, [], sources=[{"path": "f*.jsonl"}])
    asked = sorted({int(text.split("Ask ")[1][:2]) for text in small_sample(recipe) if "Ask" in text})
    assert asked[0] == 0
    assert asked[-1] == 59
    assert 8 < len(asked) <= 16


def test_an_excerpt_of_a_long_text_is_compared(tmp_path: Path) -> None:
    text = " ".join(map(str, range(5000)))
    record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
    found = sample(make_recipe(tmp_path, [record] * 3))
    assert all(len(piece) <= checks.LONGEST for piece in found)
    assert any(piece in text for piece in found)


def test_unreadable_records_are_left_for_the_task_that_reads_them(tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in conversations(30)]
    lines[3:6] = ["{", "\ufeff[]", '{"messages": [{"role": "user"}]}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    recipe = make_recipe(tmp_path, conversations(5, 1), sources=[{"path": "b.jsonl"}, {"path": "chat.jsonl"}])
    found = sample(recipe)
    assert len(found) > 10
    (tmp_path / "chat.jsonl").unlink()
    assert len(sample(recipe)) < len(found)


# -- the choice ------------------------------------------------------------------------------------------------------


def test_a_single_differing_text_is_found_and_shown() -> None:
    reference = open_kind("sp_bpe_chatml")
    texts = [*HARD, *(f"number {n}" for n in range(100))]
    assert difference(Fake(reference, lambda text: False), reference, texts) is None
    for number in (0, 70, 99):  # texts are compared in blocks
        wrong = f"number {number}"
        assert difference(Fake(reference, wrong.__eq__), reference, texts) == f'"{wrong}"'
    shown = difference(Fake(reference, lambda text: "\x1b" in text), reference, ["x" * 900 + "\x1b here"])
    assert shown is not None
    assert shown.isprintable()
    assert "here" in shown
    assert len(shown) < 100


def test_texts_without_an_encoding_are_left_out_of_the_comparison() -> None:
    class Failing(Fake):
        def encode(self, texts: Sequence[str] | Texts) -> Encoded:
            if problems := {text: "it fails" for text in Texts.of(texts).strings if "bad" in text}:
                raise Unencodable(problems)
            return super().encode(texts)

    texts = [f"{'bad' if n % 7 == 0 else 'number'} {n}" for n in range(100)]  # each block has some of each kind
    reference = Failing(open_kind("sp_bpe_chatml"), lambda text: False)
    assert difference(reference, reference, texts) is None
    wrong = Fake(reference.reference, lambda text: text == "number 71")
    assert difference(wrong, reference, texts) == '"number 71"'
    assert difference(wrong, reference, []) is None


def test_the_comparison_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, conversations(40))
    assert chosen_engines(recipe) is None
    choice = choose_engines(recipe)
    assert (choice.engine, choice.differs, choice.reason) == ("gigatoken", None, None)
    assert choice.texts > len(HARD)
    assert choice.bytes > 1000
    [file] = (tmp_path / "data" / "engines").iterdir()
    assert file.is_relative_to(next(p for p in recipe.layout.outputs() if p.name == "engines"))
    monkeypatch.setattr(checks, "_compare_engines", pytest.fail)
    for same in ({"sequence_length": 64}, {"seed": 1}, {"part_size": 1024}, {"overlong": "drop"}):
        assert choose_engines(make_recipe(tmp_path, conversations(40), **same)) == choice
    for other in ({"template": "plain"}, {"train_on": "all"}, {"eos_token": "<s>"}):
        assert chosen_engines(make_recipe(tmp_path, conversations(40), **other)) is None
    file.write_bytes(b"{")
    assert chosen_engines(recipe) is None


def test_auto_uses_gigatoken_and_records_it(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(40))
    assert encoder_of(recipe).engine == "gigatoken"
    manifest = load_manifest(pack_corpus(recipe))
    assert encoder_facts(recipe) == asdict(choose_engines(recipe))
    assert manifest.tokenizer.engine == "sentencepiece", "the library that defines the tokens"
    assert token_engines(recipe) == {"gigatoken"}


def encoder_facts(recipe: Recipe) -> dict[str, Any]:
    """Return the facts about the encoder in run.json."""
    facts: dict[str, Any] = orjson.loads((recipe.corpus_folder / "run.json").read_bytes())["encoder"]
    return facts


def token_engines(recipe: Recipe) -> set[str]:
    files = [recipe.layout.token_receipt(recipe.tokens_key(part)) for part in recipe.parts]
    return {orjson.loads(file.read_bytes())["engine"] for file in files}


def test_after_one_difference_the_reference_encodes_everything(
    tmp_path: Path, erring: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    many = conversations(40)
    many[20]["messages"][-1]["content"] = "an \x1bodd one"
    plain = pack_corpus(make_recipe(tmp_path / "reference", many, engine="reference"))
    erring("odd one")
    recipe = make_recipe(tmp_path / "auto", many)
    assert encoder_of(recipe) is recipe.encoder
    manifest = load_manifest(pack_corpus(recipe))
    assert token_engines(recipe) == {"sentencepiece"}
    assert encoder_facts(recipe)["engine"] == "sentencepiece"
    assert "odd one" in encoder_facts(recipe)["differs"]
    assert manifest == load_manifest(plain)
    for _ in range(2):
        display.proven(choose_engines(recipe))
    said = capsys.readouterr().err
    assert said.count("note: sentencepiece encodes all texts, because gigatoken encodes ") == 1
    assert "odd one" in said
    assert "\x1b" not in said
    assert encoder_of(make_recipe(tmp_path / "auto", many, engine="gigatoken")).engine == "sentencepiece", "as auto"


def test_gigatoken_tokens_of_another_corpus_are_redone_if_the_comparison_fails(
    tmp_path: Path, erring: Callable[[str], None]
) -> None:
    recipe = make_recipe(tmp_path, conversations(40))
    assert not refused_engines(recipe), "not known yet"
    choose_engines(recipe)
    assert not refused_engines(recipe)
    assert refused_engines(make_recipe(tmp_path, conversations(40), engine="reference"))
    erring("the")
    other = make_recipe(tmp_path, conversations(50))
    assert not refused_engines(other)
    choose_engines(other)
    assert refused_engines(other)
    assert not refused_engines(make_recipe(tmp_path, conversations(40), tokenizer=None)), (
        "a tokenizer that is to be trained"
    )


def test_a_part_tokenized_by_gigatoken_is_not_done_if_the_reference_is_requested(tmp_path: Path) -> None:
    for engine, done in (("auto", True), ("reference", False), ("auto", True)):
        recipe = make_recipe(tmp_path, conversations(5), engine=engine)
        if engine == "auto":
            pack_corpus(recipe)
        assert TokenizePart.all_of(recipe)[0].is_done() is done, engine


def test_the_reference_needs_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_gigatoken", lru_cache(pytest.fail))
    recipe = make_recipe(tmp_path, conversations(5), engine="reference")
    assert encoder_of(recipe) is recipe.encoder
    pack_corpus(recipe)
    assert encoder_facts(recipe) == asdict(EngineChoice("sentencepiece", uses_minijinja=False))
    assert not (tmp_path / "data" / "engines").exists()


@pytest.mark.parametrize(("kind", "engine"), [("sp_unigram", "sentencepiece"), ("hf_unigram", "tokenizers")])
def test_a_tokenizer_that_gigatoken_cannot_read_silently_uses_the_reference(
    kind: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path, conversations(5), tokenizer=str(kind_path(kind)), unknown_markers="text")
    pack_corpus(recipe)
    facts = encoder_facts(recipe)
    assert facts["engine"] == engine
    assert facts["reason"]
    assert facts["texts"] == 0
    display.proven(choose_engines(recipe))
    assert capsys.readouterr().err == ""
    asked = make_recipe(tmp_path, conversations(5), tokenizer=str(kind_path(kind)), engine="gigatoken")
    with pytest.raises(UsageError, match=r"engine: gigatoken cannot replace .*: (.* is not BPE|not every byte)"):
        encoder_of(asked)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    run.begin(1)
    yield
    run.begin(1)


def test_the_hard_texts_reveal_digits_that_are_split_off_first(tmp_path: Path) -> None:
    """The hard texts reveal that digits are split off first.

    The library splits digits off before it looks for white space at the end of a piece. gigatoken does not.
    """
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "t")
    spec = json.loads((tmp_path / "t" / "tokenizer.json").read_bytes())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    words += r"\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    digits = {"type": "Digits", "individual_digits": True}
    for first, differs in (([], False), ([digits], True)):
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*first, split, plain]}
        (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(spec))
        reference = open_encoder(find_tokenizer(tmp_path / "t"))
        assert (difference(GigatokenEncoder(reference), reference, HARD) is not None) == differs
