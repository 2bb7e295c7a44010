"""Whatever can change a row changes the key, and nothing else changes a shard.

The tests take every field of the config from the model, so that a new field without a case fails. They also flip bits
of a source, a tokenizer, and a template.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.config import KEYS, Config
from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.keys import KEYED_BY_CONTENT
from packcorpus.tasks.storage.manifest import load_manifest

RECORDS = conversations(60, longest=6)
BASE: dict[str, Any] = {
    "name": "small", "sources": [{"path": "chat.jsonl", "format": "messages"}], "tokenizer": "hf",
    "template": "own.jinja", "sequence_length": 128,
}  # fmt: skip
# vocab_size has an effect only if a tokenizer is trained.
TRAINED: dict[str, Any] = BASE | {"tokenizer": None, "template": "chatml", "vocab_size": 320}


def project(folder: Path, **changes: Any) -> Path:
    config = write_project(folder, RECORDS)
    for name in ("hf", "hf_copy"):
        shutil.copytree(kind_path("hf_byte_level"), folder / name, dirs_exist_ok=True)
    shutil.copy(folder / "chat.jsonl", folder / "chat_copy.jsonl")
    for name in ("own.jinja", "own_copy.jinja"):
        (folder / name).write_text(CHATML_JINJA)
    (folder / "other.jinja").write_text("{# another #}" + CHATML_JINJA)
    for name, text in (
        ("set.txt", "eleven and the train"),
        ("set_copy.txt", "eleven and the train"),
        ("other.txt", "9 to 5"),
    ):
        (folder / name).write_text(text)
    values = {name: value for name, value in (BASE | changes).items() if value is not None}
    config.write_text(yaml.safe_dump(values))
    return config


def resolved(folder: Path, **changes: Any) -> Recipe:
    made = resolve(project(folder, **changes), folder)
    _ = made.corpus_key
    return made


# For every field in the key: another value, and the settings that give it an effect.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "sequence_length": (64, {}),
    "train_on": ("all", {}),
    "unknown_markers": ("text", {}),
    "pairs": ("both", {}),
    "turns": ("apart", {}),
    "share": ("conversation", {}),
    "reasoning": ("drop", {}),
    "empty_reasoning": ("mask", {}),
    "train_parts": ({"calls": False}, {}),
    "template_options": ({"enable_thinking": False}, {}),
    "default_system": ("Be brief.", {}),
    "overlong": ("drop", {}),
    "split_at": ("tokens", {}),
    "validation": (0.25, {}),
    "validation_by": ("prompt", {"validation": 0.25}),
    "max_rejects": (0.5, {}),
    "weighting": ("token_share", {}),
    "duplicates": ("exact", {}),
    "min_tokens": (30, {}),
    "max_tokens": (90, {}),
    "min_turns": (3, {}),
    "max_turns": (2, {}),
    "epochs": (2, {}),
    "balance": ({"ranks": 2}, {}),
    "neighbors": ("similar", {}),
    "order": ("source", {}),
    "align": (8, {}),
    "padding": ("none", {}),
    "loss_weight": ("conversation", {}),
    "mix": ("blocks", {"sequence_length": [64, 128]}),
    "license": (["cc-by-4.0"], {}),
    "language": (["en"], {}),
    "packing": (False, {}),
    "seed": (43, {}),
    "eos_token": ("<|endoftext|>", {}),
    "pad_token": ("<|endoftext|>", {}),
    "content_tokens": (["-<think>"], {}),
    "roles": ({"system": ["user"]}, {}),
    "vocab_size": (330, TRAINED),
    "template_date": ("2026-01-02", {}),
    "max_record_bytes": (2048, {}),
}

# For every field that names something: another name for the same content, and another content.
NAMED: dict[str, tuple[Any, Any]] = {
    "name": ("other", None),
    "sources": (
        [{"path": "chat_copy.jsonl", "format": "messages"}],
        [{"path": "chat.jsonl", "format": "messages", "columns": {"messages": "x"}}],
    ),
    "tokenizer": ("hf_copy", "tiny.model"),
    "template": ("own_copy.jinja", "other.jinja"),
    "decontaminate": (["set_copy.txt"], ["other.txt"]),
}

# For every field that is declared to have no effect: other values.
NO_EFFECT: dict[str, list[Any]] = {"part_size": [1024, 3000, 1 << 30], "engine": ["reference"]}

# The fields of a source. `format: auto` is resolved, so it has an effect only if it finds another format.
SOURCE = {"path", "format", "columns", "roles", "delimiter", "encoding", "ignore", "weight", "limit"} | {
    "drop_roles",
    "tokenizer_sha256",
    "split",
}


def shard_bytes(made: Recipe) -> list[bytes]:
    manifest = load_manifest(pack_corpus(made))
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return [(made.corpus_folder / shard.path).read_bytes() for shard in shards]


def test_every_field_has_a_case() -> None:
    assert {*OTHER, *NAMED, *NO_EFFECT} == {*Config.model_fields}
    assert {*NAMED} == {*KEYED_BY_CONTENT}
    no_key = {name for name, mark in KEYS.items() if not mark.keys}
    assert {*NO_EFFECT} == no_key - {"roles"}, "roles are part of the sources, which have a key"
    assert {*Source.model_fields} == SOURCE


@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_can_change_the_output_changes_the_key(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, where = OTHER[field]
    if field.startswith("plan_"):  # has an effect only on a corpus with several shards
        monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 2000)
    before, after = resolved(tmp_path, **where), resolved(tmp_path, **where | {field: other})
    assert before.config.model_dump()[field] != after.config.model_dump()[field]
    assert before.corpus_key != after.corpus_key
    assert before.corpus_folder != after.corpus_folder
    assert before.plan_folder != after.plan_folder


@pytest.mark.parametrize("field", NO_EFFECT)
def test_a_field_that_is_declared_to_have_no_effect_has_none(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 4000)
    first = resolved(tmp_path / "0")
    whole = {path.name: path.read_bytes() for path in [pack_corpus(first), *first.corpus_folder.glob("*.*")]}
    for number, value in enumerate(NO_EFFECT[field], 1):
        made = resolved(tmp_path / str(number), **{field: value})
        assert made.corpus_key == first.corpus_key
        found = {path.name: path.read_bytes() for path in [pack_corpus(made), *made.corpus_folder.glob("*.*")]}
        assert {name for name in whole if whole[name] != found[name]} <= {"run.json"}
        assert whole.keys() == found.keys()


@pytest.mark.parametrize("field", NAMED)
def test_a_name_changes_no_byte_of_a_shard_and_other_content_changes_the_key(field: str, tmp_path: Path) -> None:
    same, other = NAMED[field]
    given = {"decontaminate": ["set.txt"]} if field == "decontaminate" else {}
    before, renamed = resolved(tmp_path / "before", **given), resolved(tmp_path / "after", **{field: same})
    assert before.corpus_key == renamed.corpus_key
    assert before.config != renamed.config
    assert shard_bytes(before) == shard_bytes(renamed)
    if other is not None:
        assert resolved(tmp_path / "other", **{field: other}).corpus_key != before.corpus_key


def test_every_field_of_a_source_changes_the_key_where_it_is_read_otherwise(tmp_path: Path) -> None:
    def key(**changes: Any) -> str:
        return resolved(tmp_path, sources=[{"path": "chat.jsonl"} | changes]).corpus_key

    assert key() == key(format="auto") == key(format="messages")
    assert (
        len({key(), key(format="sharegpt"), key(format="messages", columns={"messages": "chat"}), key(format="text")})
        == 4
    )


@pytest.mark.parametrize(
    "field", ["weighting", "duplicates", "min_tokens", "max_turns", "epochs", "balance", "align", "padding"]
)
def test_who_is_packed_and_how_often_does_not_change_a_token_file(field: str, tmp_path: Path) -> None:
    before, after = resolved(tmp_path), resolved(tmp_path, **{field: OTHER[field][0]})
    assert [before.tokens_key(part) for part in before.parts] == [after.tokens_key(part) for part in after.parts]


def test_weights_limits_and_what_they_are_for_change_the_key(tmp_path: Path) -> None:
    """The grouping of files also changes the key, but only if it has an effect."""
    project(tmp_path)
    shutil.copy(tmp_path / "chat.jsonl", tmp_path / "more.jsonl")

    def key(*sources: dict[str, Any], **changes: Any) -> str:
        return resolved(tmp_path, sources=list(sources), **changes).corpus_key

    one, two = {"path": "chat.jsonl"}, {"path": "more.jsonl"}
    both = {"path": "[cm][ho][ar][te].jsonl"}
    assert key(one, two) == key(both) == key(one | {"weight": 1}, two | {"weight": 1.0})
    keys = [
        key(one, two), key(one | {"weight": 2}, two), key(one, two | {"weight": 2}), key(both | {"weight": 2}),
        key(one | {"limit": 5}, two), key(both | {"limit": 5}), key(one | {"limit": 5}, two | {"limit": 5}),
        key(one, two, weighting="token_share"), key(both, weighting="token_share"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flipped")
    project(folder)
    return folder


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_bit_of_source_tokenizer_and_template_changes_the_key(flipped: Path, data: st.DataObject) -> None:
    """A flipped bit of any input changes the key or stops the run.

    A template is the same text only if the bit changes a line end into another kind of line end.
    """
    inputs = {"chat.jsonl": BASE, "own.jinja": BASE} | {f"hf/{path.name}": BASE for path in (flipped / "hf").iterdir()}
    inputs["tiny.model"] = BASE | {"tokenizer": "tiny.model"}
    name = data.draw(st.sampled_from(sorted(inputs)), label="file")
    (flipped / "corpus.yaml").write_text(yaml.safe_dump(inputs[name]))
    file = flipped / name
    original = file.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(original) - 1), label="bit")
    before = whole_keys(flipped, inputs[name]["tokenizer"])
    damaged = bytearray(original)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        file.write_bytes(damaged)
        after = keys(flipped)
    except PackError:
        return
    finally:
        file.write_bytes(original)
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] * 3, "a stale artifact is used"


@cache
def whole_keys(folder: Path, tokenizer: str) -> list[Any]:
    """Return the keys of an undamaged folder, which are the same for every example."""
    assert tokenizer in (folder / "corpus.yaml").read_text()
    return keys(folder)


def keys(folder: Path) -> list[Any]:
    """Return the keys of the corpus, the plan, and the token files."""
    made = resolve(folder / "corpus.yaml", folder)
    return [made.corpus_key, made.plan_folder, {made.tokens_key(part) for part in made.parts}]


@pytest.mark.parametrize("where", ["chat.jsonl", "vocab_size", "template"])
def test_what_a_trained_tokenizer_is_made_from_changes_its_key(where: str, tmp_path: Path) -> None:
    before = resolved(tmp_path, **TRAINED)
    assert before.tokenizer_key
    if where == "chat.jsonl":
        with (tmp_path / where).open("a") as file:
            file.write("\n")
        after = resolve(tmp_path / "corpus.yaml", tmp_path)
    else:
        after = resolved(
            tmp_path, **TRAINED | {"vocab_size": 330} if where == "vocab_size" else TRAINED | {"template": "zephyr"}
        )
    assert before.tokenizer_key != after.tokenizer_key
    assert before.corpus_key != after.corpus_key
