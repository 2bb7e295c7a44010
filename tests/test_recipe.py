"""Settings change the keys that they must change, and no other key.

Golden digests pin the content that keys identify.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import yaml
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.config import KEYS, Config
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.encoders.encoder import Encoded, Encoder
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import find_parts
from packcorpus.tasks.storage.keys import VERSIONS, corpus_key, key_of
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.templates import built_in
from packcorpus.tasks.templates.built_in import BUILT_IN, BuiltIn
from packcorpus.tasks.templates.spans import Template, trained_turns
from packcorpus.tasks.tokenization.tokenize_part import tokenize_part
from packcorpus.tasks.work import Plan, run_all

LINES = [
    json.dumps({"messages": [{"role": "user", "content": f"{i} " * 200}, {"role": "assistant", "content": "b"}]})
    for i in range(12)
]
BASE: dict[str, Any] = {"name": "a", "sources": [{"path": "chat.jsonl"}], "tokenizer": "t.model"}


def project(folder: Path, **changes: Any) -> Path:
    """Write a folder with a config; no key needs to open its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat.jsonl").write_text("".join(f"{line}\n" for line in LINES))
    (folder / "t.model").write_bytes(b"one tokenizer")
    (folder / "u.model").write_bytes(b"another tokenizer")
    (folder / "own.jinja").write_text("{{ messages }}")
    values = {key: value for key, value in (BASE | changes).items() if value is not None}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(values))
    return folder / "corpus.yaml"


def recipe(folder: Path, **changes: Any) -> Recipe:
    made = resolve(project(folder, **changes), folder)
    _ = made.corpus_key  # computed from the present files
    return made


def token_keys(made: Recipe) -> list[str]:
    return [made.tokens_key(part) for part in made.parts]


# For every field: another value, and whether it changes token files, too. A new field needs a decision here.
CHANGES: dict[str, tuple[Any, bool]] = {
    "sources": ([{"path": "chat.jsonl", "columns": {"messages": "chat"}, "format": "messages"}], True),
    "tokenizer": ("u.model", True),
    "template": ("llama2", True),
    "sequence_length": (512, False),
    "train_on": ("all", True),
    "pairs": ("both", True),
    "turns": ("apart", True),
    "reasoning": ("drop", True),
    "empty_reasoning": ("mask", True),
    "train_parts": ({"calls": False}, True),
    "template_options": ({"enable_thinking": False}, True),
    "default_system": ("Be brief.", True),
    "overlong": ("drop", False),
    "split_at": ("tokens", False),
    "validation": (0.1, False),
    "max_rejects": (0.1, False),
    "weighting": ("subsample", False),
    "duplicates": ("exact", False),
    "decontaminate": (["chat.jsonl"], True),
    "min_tokens": (5, False),
    "max_tokens": (50, False),
    "min_turns": (2, False),
    "max_turns": (4, False),
    "neighbors": ("similar", False),
    "order": ("source", False),
    "share": ("conversation", False),
    "epochs": (3, False),
    "balance": ({"ranks": 8, "rows_per_rank": 1}, False),
    "license": (["mit"], False),
    "language": (["en"], False),
    "packing": (False, True),
    "align": (8, False),
    "padding": ("none", False),
    "seed": (43, False),
    "eos_token": ("</s>", True),
    "pad_token": ("<pad>", True),
    "content_tokens": (["-*"], True),
    "loss_weight": ("data", True),
    "max_record_bytes": (1 << 20, True),
    "unknown_markers": ("text", False),
}


# No effect in BASE, which has a tokenizer and a built-in template that uses no date.
SOMETIMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "vocab_size": (9000, {"tokenizer": None}),
    "template_date": ("2026-01-02", {"template": "own.jinja"}),
}


# Settings that need other settings: a value, the other settings, and whether it changes token files, too.
OF_ROWS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "mix": ("blocks", {"sequence_length": [64, 128]}, False),
    "validation_by": ("prompt", {"validation": 0.1}, False),
}


def test_every_setting_is_decided_on() -> None:
    assert {*CHANGES, *SOMETIMES, *OF_ROWS} == {name for name, mark in KEYS.items() if mark.keys} - {"name"}


@pytest.mark.parametrize("field", SOMETIMES)
def test_a_setting_changes_the_corpus_key_only_where_it_has_an_effect(field: str, tmp_path: Path) -> None:
    value, where = SOMETIMES[field]
    assert recipe(tmp_path).corpus_key == recipe(tmp_path, **{field: value}).corpus_key
    assert field not in recipe(tmp_path).config.settings()
    before, after = recipe(tmp_path, **where), recipe(tmp_path, **where, **{field: value})
    assert before.corpus_key != after.corpus_key
    assert not set(token_keys(before)) & set(token_keys(after))
    assert after.config.settings()[field] == value


@pytest.mark.parametrize("field", OF_ROWS)
def test_a_setting_of_the_rows_changes_the_corpus_key(field: str, tmp_path: Path) -> None:
    value, where, tokens_too = OF_ROWS[field]
    before, after = recipe(tmp_path, **where), recipe(tmp_path, **where, **{field: value})
    assert before.corpus_key != after.corpus_key
    assert (token_keys(before) != token_keys(after)) == tokens_too
    assert field not in before.config.settings()
    assert after.config.settings()[field] == value


def test_a_plan_belongs_to_its_parts_and_names(tmp_path: Path) -> None:
    before = recipe(tmp_path)
    parted, named = recipe(tmp_path, part_size=1024), recipe(tmp_path, name="b")
    assert before.corpus_key == parted.corpus_key == named.corpus_key
    assert len({made.plan_folder for made in (before, parted, named)}) == 3


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_setting_changes_the_corpus_key(field: str, tmp_path: Path) -> None:
    value, tokens_too = CHANGES[field]
    before, after = recipe(tmp_path), recipe(tmp_path, **{field: value})
    assert after.corpus_key != before.corpus_key
    assert after.corpus_folder != before.corpus_folder
    assert after.plan_folder != before.plan_folder
    shared = set(token_keys(before)) & set(token_keys(after))
    assert not shared if tokens_too else token_keys(before) == token_keys(after)


def test_what_cannot_change_the_output_changes_no_key(tmp_path: Path) -> None:
    before = recipe(tmp_path / "here")
    assert {"part_size", "engine", "roles"} == {name for name, mark in KEYS.items() if not mark.keys}
    parted = recipe(tmp_path / "here", part_size=1024)
    assert len(parted.parts) > 1
    assert parted.corpus_key == before.corpus_key
    other = recipe(tmp_path / "here", engine="reference")
    assert (other.corpus_key, token_keys(other)) == (before.corpus_key, token_keys(before))
    named = recipe(tmp_path / "here", name="b")
    assert (named.corpus_key, token_keys(named)) == (before.corpus_key, token_keys(before))
    assert named.published.name == f"b-{before.corpus_key[:12]}.json"


def test_places_change_no_key(tmp_path: Path) -> None:
    before = recipe(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "far" / "away")
    moved = resolve(tmp_path / "far" / "away" / "corpus.yaml", tmp_path)
    assert (moved.corpus_key, token_keys(moved)) == (before.corpus_key, token_keys(before))
    folder = tmp_path / "renamed"
    project(folder)
    for old, new in (("chat.jsonl", "talk.jsonl"), ("t.model", "v.model"), ("own.jinja", "mine.jinja")):
        (folder / old).rename(folder / new)
    (folder / "corpus.yaml").write_text(yaml.safe_dump(BASE | {"sources": [{"path": "talk*"}], "tokenizer": "v.model"}))
    renamed = resolve(folder / "corpus.yaml", tmp_path)
    assert (renamed.corpus_key, token_keys(renamed)) == (before.corpus_key, token_keys(before))


def test_the_home_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "chats.jsonl").write_text('{"text": "a"}\n')
    (home / "mine.jinja").write_text("{{ messages }}")
    (home / "mine.model").write_bytes(b"x")
    for path in ("~/chats.jsonl", "~/*.jsonl"):
        made = recipe(tmp_path, sources=[{"path": path}], tokenizer="~/mine.model", template="~/mine.jinja")
        assert [file.path for file in made.files] == [home / "chats.jsonl"]
        assert made.tokenizer_files.main == home / "mine.model"
        assert made.template_sources == {"template.jinja": "{{ messages }}"}
        assert made.config.sources[0].path == path


def test_places_change_no_key_of_a_trained_tokenizer(tmp_path: Path) -> None:
    before = recipe(tmp_path / "a", tokenizer=None, template="own.jinja")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other.jinja").write_text("{{ messages }}")
    after = recipe(tmp_path / "b", tokenizer=None, template="other.jinja", part_size=1024, sequence_length=16)
    assert before.tokenizer_key == after.tokenizer_key is not None
    for change in ({"vocab_size": 9000}, {"template": "llama3"}, {"max_record_bytes": 1 << 20}):
        changed = recipe(tmp_path / "a", **({"tokenizer": None, "template": "own.jinja"} | change))
        assert changed.tokenizer_key != before.tokenizer_key
        assert changed.corpus_key != before.corpus_key


def test_bytes_change_keys(tmp_path: Path) -> None:
    jinja = {"template": "own.jinja"}
    before, with_jinja = recipe(tmp_path), recipe(tmp_path, **jinja)
    for file, settings in (("t.model", {}), ("own.jinja", jinja)):
        path = project(tmp_path, **settings)
        old = with_jinja if settings else before
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b" ")
        changed = resolve(path, tmp_path)
        assert changed.corpus_key != old.corpus_key, file
        assert not set(token_keys(changed)) & set(token_keys(old)), file
    dated = recipe(tmp_path, **jinja, template_date="2026-01-02")
    assert not set(token_keys(dated)) & set(token_keys(with_jinja)), "a Jinja template sees the date"


def test_a_changed_letter_changes_its_part(tmp_path: Path) -> None:
    before = recipe(tmp_path, part_size=1024)
    path = tmp_path / "chat.jsonl"
    path.write_text(path.read_text().replace('"b"', '"c"', 1))
    after = resolve(tmp_path / "corpus.yaml", tmp_path)
    old, new = token_keys(before), token_keys(after)
    assert [a == b for a, b in zip(old, new, strict=True)] == [False] + [True] * (len(old) - 1)
    assert after.corpus_key != before.corpus_key


def test_one_appended_line_changes_one_part(tmp_path: Path) -> None:
    before = recipe(tmp_path, part_size=1024)
    assert len(before.parts) > 3
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write(LINES[0] + "\n")
    after = resolve(tmp_path / "corpus.yaml", tmp_path)
    old, new = token_keys(before), token_keys(after)
    assert len(set(new) - set(old)) == 1
    assert after.corpus_key != before.corpus_key


def test_how_a_source_is_read_is_part_of_keys_only_if_it_is_unusual(tmp_path: Path) -> None:
    text = "prompt;completion\nGröße?;3 m\n"
    tables = {"comma": text.replace(";", ","), "utf-8-sig": text.replace(";", ","), "semicolon": text, "cp1252": text}
    for name, table in tables.items():
        encoding = name if name in ("utf-8-sig", "cp1252") else "utf-8"
        (tmp_path / f"{name}.csv").write_text(table, encoding=encoding)

    def of(name: str, **source: Any) -> Recipe:
        return recipe(tmp_path, sources=[{"path": name, **source}], tokenizer="u.model")

    usual = of("comma.csv")
    assert Recipe._content(usual.files[0])[1:] == ["csv", "", "prompt_completion", []]
    assert usual.config.settings()["sources"] == [
        {"path": "comma.csv", "format": "auto", "columns": {}, "weight": 1.0, "limit": None}
    ]
    assert of("comma.csv", delimiter=",", encoding="UTF-8").corpus_key == usual.corpus_key
    assert Recipe._content(of("utf-8-sig.csv").files[0])[5:] == []
    for name, reading in (
        ("semicolon.csv", {"delimiter": ";"}),
        ("cp1252.csv", {"delimiter": ";", "encoding": "windows-1252"}),
    ):
        found, named = of(name), of(name, **reading)
        assert Recipe._content(found.files[0])[5:] == [reading]
        assert (found.corpus_key, token_keys(found)) == (named.corpus_key, token_keys(named))
        other = of(name, **reading | {"encoding": "iso8859-1"})
        assert not set(token_keys(other)) & set(token_keys(found))
        assert other.corpus_key != found.corpus_key
    chat, own = of("chat.jsonl"), of("chat.jsonl", roles={"user": ["Kunde"]})
    assert Recipe._content(own.files[0])[5:] == [{"roles": {"kunde": "user"}}]
    assert own.corpus_key != chat.corpus_key
    assert token_keys(own) != token_keys(chat)


def test_the_order_of_sources_is_part_of_the_corpus(tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / "more.jsonl").write_text(LINES[0] + "\n")
    keys = {
        recipe(tmp_path, sources=[{"path": name} for name in names]).corpus_key
        for names in (("chat.jsonl", "more.jsonl"), ("more.jsonl", "chat.jsonl"), ("chat.jsonl",))
    }
    assert len(keys) == 3


def test_stages_and_versions_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"a": 1, "b": [2, None]}
    keys = [key_of(stage, content) for stage in VERSIONS]
    assert len(set(keys)) == len(VERSIONS)
    assert all(len(key) == 64 and set(key) <= set("0123456789abcdef") for key in keys)
    assert key_of("tokens", {"b": [2, None], "a": 1}) == key_of("tokens", content), "the order of the keys"
    for number, stage in enumerate(list(VERSIONS)):
        monkeypatch.setitem(VERSIONS, stage, VERSIONS[stage] + 1)
        assert key_of(stage, content) != keys[number]


def test_the_version_of_texts_changes_token_keys_and_no_corpus_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe(tmp_path)
    keys, plan_folder = token_keys(before), before.plan_folder
    monkeypatch.setitem(VERSIONS, "texts", VERSIONS["texts"] + 1)
    after = recipe(tmp_path)
    assert not set(keys) & set(token_keys(after))
    assert after.plan_folder != plan_folder
    assert after.corpus_key == before.corpus_key


def test_the_version_of_jinja_templates_is_in_their_keys_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.jinja").write_text(CHATML_JINJA)
    project(tmp_path)
    given: list[dict[str, Any]] = [{}, {"template": "own.jinja"}, {"reasoning": "drop"}]

    def keys() -> list[list[str]]:
        return [token_keys(recipe(tmp_path, **settings)) for settings in given]

    before = keys()
    monkeypatch.setitem(VERSIONS, "jinja", VERSIONS["jinja"] + 1)
    after = keys()
    assert after[0] == before[0]
    for one, other in zip(before[1:], after[1:], strict=True):
        assert not set(one) & set(other)


def test_the_key_of_a_corpus_does_not_depend_on_how_license_is_spelled(tmp_path: Path) -> None:
    """The digest is the same as in versions that only had `licence`."""
    settings = {"language": ["en"], "seed": 42, "packing": True, "sources": []}
    keys = {
        corpus_key(settings | {name: ["mit"]}, [["a" * 64, "jsonl", "", "messages", []]], [], "t", "u", version=4)
        for name in ("license", "licence")
    }
    assert keys == {"b4db3061493b3004a1da619615f7b0418d5759f55b420ef21fb311b07f341d07"}
    made = [recipe(tmp_path, **{name: ["mit"]}) for name in ("license", "licence")]
    assert made[0].corpus_key == made[1].corpus_key
    assert [each.config.settings()["license"] for each in made] == [["mit"], ["mit"]]
    assert not any("licence" in each.config.settings() for each in made)


@pytest.mark.parametrize(
    ("now", "before", "digest"),
    [
        ("similar", "similar", "9685325eb9efc4cba1808b7496125fe58861edb1d23801c02be345a19d47bf22"),
        ("distinct", "apart", "bf4091ca336e36cdf2f6718c49d90959b136d22f25e42c50e171f5d556a21e48"),
    ],
)
def test_the_key_of_a_corpus_has_the_former_name_of_neighbors(
    now: str, before: str, digest: str, tmp_path: Path
) -> None:
    """The digest is the same as in versions that had `company`."""
    settings = {"language": ["en"], "seed": 42, "packing": True, "sources": [], "neighbors": now}
    assert corpus_key(settings, [["a" * 64, "jsonl", "", "messages", []]], [], "t", "u", version=4) == digest
    made = [recipe(tmp_path, neighbors=now), recipe(tmp_path, company=before), recipe(tmp_path, neighbors=before)]
    assert len({each.corpus_key for each in made}) == 1
    assert [each.config.settings()["neighbors"] for each in made] == [now] * 3


def test_layout() -> None:
    layout, key = Layout(Path("/root")), "0123456789abcdef" * 4
    assert layout.corpus("x", key) == Path("/root/data/corpora/x-0123456789ab")
    assert layout.published("x", key) == Path("/root/manifests/x-0123456789ab.json")
    assert layout.token_file(key) == Path(f"/root/data/tokens/01/{key}.arrow")
    assert layout.token_receipt(key) == Path(f"/root/data/tokens/01/{key}.json")
    assert layout.corpus("a.b", key).name == "a.b-0123456789ab"


@pytest.mark.parametrize(
    ("bytes_", "validation", "expected"),
    [
        (1, 0.0, (1, 0)),
        (1, 0.001, (1, 1)),
        (8 << 20, 0.0, (1, 0)),
        ((8 << 20) + 1, 0.5, (2, 1)),
        (65 << 20, 0.0, (3, 0)),
        (1 << 40, 0.1, (256, 26)),
    ],
)
def test_shards_follow_from_the_sources(
    bytes_: int, validation: float, expected: tuple[int, int], tmp_path: Path
) -> None:
    made = recipe(tmp_path, validation=validation)
    made = replace(made, files=(replace(made.files[0], bytes=bytes_),))
    assert tuple(made.shards.values()) == expected
    names = made.shard_names
    assert len(names) == len(set(names)) == sum(expected)
    assert names[0] == f"train-00000-of-{expected[0]:05d}.arrow"
    assert names == sorted(names[: expected[0]]) + sorted(names[expected[0] :])


def test_what_a_config_names_and_is_not_there(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], type[PackError], str]] = [
        (
            {"template": "no.jinja"},
            InputMissing,
            r"template: 'no\.jinja' is neither built in \(chatml, .*tokenizer\) nor",
        ),
        ({"template": "tokenizer"}, UsageError, "template: tokenizer: t.model has no chat template"),
        (
            {"template": "tokenizer", "tokenizer": None},
            UsageError,
            "the tokenizer that this run trains has no chat template",
        ),
        ({"tokenizer": "no.model"}, InputMissing, r"no\.model: no such tokenizer"),
        ({"sources": [{"path": "no.jsonl"}]}, InputMissing, r"no\.jsonl"),
    ]
    for changes, kind, said in cases:
        with pytest.raises(kind, match=said):
            _ = resolve(project(tmp_path, **changes), tmp_path).corpus_key
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"bad\.jinja: is not UTF-8"):
        recipe(tmp_path, template="bad.jinja")


@pytest.mark.parametrize("when", ["before it is opened", "while it is opened", "before it is copied"])
def test_a_tokenizer_that_changes_in_place_during_a_run_is_never_used(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_recipe(tmp_path, conversations(5))
    assert made.corpus_key
    path, other = tmp_path / "tiny.model", kind_path("sp_unigram").read_bytes()
    original = path.read_bytes()

    def change(content: bytes = other) -> None:
        times = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    if when == "before it is opened":
        change()
    elif when == "while it is opened":
        recipe_module._open_once.cache_clear()
        opened = recipe_module.open_encoder
        monkeypatch.setattr(recipe_module, "open_encoder", lambda *given: (change(), opened(*given))[1])
    else:
        run_all(Plan(made))
        change()
    with pytest.raises(DataError, match=r"tiny\.model: the tokenizer changed during the run; run again"):
        pack_corpus(made)
    assert not made.published.exists()
    # No output of the other tokenizer is kept either.
    monkeypatch.undo()
    change(original)
    expected = pack_corpus(make_recipe(tmp_path / "again", conversations(5)))
    assert pack_corpus(resolve(tmp_path / "corpus.yaml", tmp_path)).read_bytes() == expected.read_bytes()


def test_a_jinja_template_is_compiled_once_for_all_recipes_that_render_alike(tmp_path: Path) -> None:
    """Each worker gets its own recipe, and inherits the compiled template."""
    (tmp_path / "own.jinja").write_text(CHATML_JINJA)

    def template_of(**changes: Any) -> Template:
        settings = {"template": "own.jinja", "template_date": "2026-01-01"} | changes
        return make_recipe(tmp_path, conversations(2), **settings).template

    template = template_of()
    assert template_of(name="other", sequence_length=16) is template
    other = [
        {"template_date": "2026-01-02"},
        {"template_options": {"a": 1}},
        {"turns": "apart"},
        {"train_on": "last"},
        {"reasoning": "drop"},
    ]
    assert template not in [template_of(**change) for change in other]
    (tmp_path / "own.jinja").write_text(CHATML_JINJA + "{# other #}")
    assert template_of() is not template


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = project(tmp_path, sources=[{"path": "in"}])
    (tmp_path / "in").mkdir()
    (tmp_path / "chat.jsonl").rename(tmp_path / "in" / "b\udcff.jsonl")
    with pytest.raises(UsageError, match=r"b\\udcff\.jsonl': the file name is not UTF-8; rename the file"):
        resolve(path, tmp_path)
    (tmp_path / "in" / "b\udcff.jsonl").rename(tmp_path / "in" / "größe.jsonl")
    assert resolve(path, tmp_path).files[0].name == "in/größe.jsonl"


# -- golden digests --------------------------------------------------------------------------------------------------


class Bytes(Encoder):
    """A tokenizer that needs no file.

    Its tokens are UTF-8 bytes, and control tokens for the frames of three templates.
    """

    kind, engine = "bytes", "bytes"
    controls = {  # noqa: RUF012 - the interface has it so
        marker: 260 + i
        for i, marker in enumerate(
            [
                "<s>",
                "</s>",
                "<|im_start|>",
                "<|im_end|>",
                "<|begin_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eot_id|>",
                "[INST]",
                "[/INST]",
            ]
        )
    }
    vocab_size = 300
    bos_id, eos_id, pad_id, unk_id = 260, 261, 0, None
    adds_bos, leading_space, underline_is_space = True, "template", False

    def _encode(self, texts: Texts) -> Encoded:
        data = [text.encode() for text in texts.strings]
        ids = np.frombuffer(b"".join(data), np.uint8).astype(np.int32)
        return Encoded(ids, np.cumsum([0, *map(len, data)]).astype(np.int64))

    def model(self) -> bytes:
        return b""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.control_strings[token].encode()


def said(*turns: tuple[str, str], **more: Any) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), **more)


GOLDEN_CONVERSATIONS = [
    said(("user", "How many?"), ("assistant", "12"), ("user", "And\n\ntwice? </s>"), ("assistant", " 24 ")),
    said(("system", "Be brief."), ("user", "Ulm?"), ("assistant", "Yes.")),
    Conversation(
        (
            Message("user", "Weather?", context="In Ulm."),
            Message("assistant", "I look.", tool_calls=(ToolCall("weather", '{"town": "Ulm"}', "c1"),)),
            Message("tool", "18 °C", name="weather", tool_call_id="c1"),
            Message("assistant", "18 degrees", train=False),
        ),
        tools=('{"name": "weather"}',),
    ),
    said(("text", "Once upon a time.")),
]
NOT_COUNTED = ("bytes", "xxh3", "rejects", "engine")
SPANS = {
    "chatml": "521a165d0e9d3ac9",
    "llama2": "a359bda7bbe8c957",
    "llama3": "6cd5fe75f0c93eda",
    "zephyr": "711d9afe892c5dab",
    "alpaca": "2cfeed31afb6d06e",
    "plain": "3321377dd0a8ca2c",
    "mistral": "a60d34847bee7add",
}


@pytest.mark.parametrize("template", BUILT_IN)
def test_golden_spans(template: str) -> None:
    digest = hashlib.sha256()
    for train_on in ("assistant", "all", "last"):
        bound = BuiltIn(template, Bytes(), train_on)  # type: ignore[arg-type]
        for conversation in GOLDEN_CONVERSATIONS:
            spans = bound.spans(conversation, trained_turns(conversation, train_on))  # type: ignore[arg-type]
            digest.update(orjson.dumps([list(span) for span in spans]))
    found = digest.hexdigest()[:16]
    assert template in SPANS, f'a new template: add "{template}": "{found}" to SPANS'
    assert (built_in.VERSION, found) == (3, SPANS[template]), (
        f"the spans of {template} changed: raise VERSION in tasks/templates/built_in.py, then this digest"
    )


def test_golden_tokens(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": m.role, "content": m.content} for m in conversation.messages]}
        for conversation in GOLDEN_CONVERSATIONS[:2]
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(["", *map(json.dumps, records), "{", ""]))
    [(_, [part])] = find_parts([Source(path="chat.jsonl", format="messages")], tmp_path, 1 << 20)
    encoder, digest = Bytes(), hashlib.sha256()
    for packing in (True, False):
        config = Config.model_validate(BASE | {"packing": packing})
        path = tmp_path / "tokens.arrow"
        receipt = tokenize_part(
            part, encoder, BuiltIn("chatml", encoder, "assistant"), config, path, tmp_path / "r.json"
        )
        with pa.memory_map(str(path)) as file:
            rows = pa.ipc.open_file(file).read_all().to_pylist()
        assert list(rows[0])[: len(TOKENS_SCHEMA)] == TOKENS_SCHEMA.names
        assert [row["record"] for row in rows] == [1, 2]
        assert [(record, code) for record, code, _ in receipt["rejects"]] == [(3, "bad_json")]
        counted = {name: value for name, value in receipt.items() if name not in NOT_COUNTED}
        digest.update(orjson.dumps([rows, counted]))
    assert (VERSIONS["tokens"], digest.hexdigest()[:16]) == (15, "bc9625991909e6f5"), (
        "what a token file holds changed: raise VERSIONS['tokens'] in tasks/storage/keys.py, then this digest"
    )
