"""Defaults of the config, refused values, and settings that enter the key.

Each refused value has its own message.
"""

from __future__ import annotations

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.config import (
    IF_SET,
    KEYS,
    NOT_TOGETHER,
    NOT_WITH_LENGTHS,
    REMOVED,
    WITHOUT_EFFECT,
    WITHOUT_PACKING,
    Config,
    load_config,
)
from packcorpus.tasks.core.errors import InputMissing, PackError, UsageError
from packcorpus.tasks.core.yaml_settings import parse_settings
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.keys import ONE_PLAN, corpus_key
from packcorpus.tasks.templates.sections import ALL_SECTIONS, Sections, sections_of_config

DEFAULTS = {
    "name": "corpus",
    "sources": [{"path": "x.jsonl", "format": "auto", "columns": {}, "weight": 1.0, "limit": None}],
    "tokenizer": None,
    "template": "chatml",
    "sequence_length": 1024,
    "mix": "tokens",
    "align": 1,
    "padding": "row",
    "train_on": "assistant",
    "pairs": "chosen",
    "turns": "auto",
    "train_parts": {"reasoning": True, "content": True, "calls": True},
    "empty_reasoning": "train",
    "overlong": "split",
    "split_at": "turns",
    "validation": 0.0,
    "validation_by": "conversation",
    "max_rejects": 0.01,
    "weighting": "repeat",
    "duplicates": "keep",
    "decontaminate": [],
    "min_tokens": None,
    "max_tokens": None,
    "min_turns": None,
    "max_turns": None,
    "neighbors": "random",
    "order": "random",
    "epochs": 1,
    "balance": None,
    "license": [],
    "language": [],
    "packing": True,
    "roles": {},
    "seed": 42,
    "eos_token": None,
    "pad_token": None,
    "content_tokens": [],
    "share": "none",
    "loss_weight": "none",
    "reasoning": "keep",
    "template_options": {},
    "unknown_markers": "error",
    "default_system": None,
    "vocab_size": 8192,
    "template_date": "2026-01-01",
    "engine": "auto",
    "part_size": 4 * 1024 * 1024,
    "max_record_bytes": 16_000_000,
}


def load(folder: Path, text: str | bytes, sequence_length: str = "") -> Config:
    path = folder / "corpus.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, sequence_length)


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, text)
    message = str(caught.value)
    assert "corpus.yaml: " in message
    assert caught.value.exit_code == 64
    return message


def test_every_removed_setting_has_an_error(tmp_path: Path) -> None:
    assert not set(REMOVED) & set(Config.model_fields)
    assert set(WITHOUT_EFFECT) <= set(REMOVED)
    for name in REMOVED:
        with pytest.raises(UsageError, match=rf"corpus\.yaml: line 2: {name} was removed; ") as caught:
            load(tmp_path, f"sources: [{{path: x}}]\n{name}: 1\n")
        assert caught.value.reason == "removed_setting"


def test_removed_settings_name_their_line_and_what_to_use() -> None:
    removed = {"cache": "remove it", "load: stream": "use load: mmap"}
    assert parse_settings("load: mmap", "a.yaml", removed) == {"load": "mmap"}
    with pytest.raises(UsageError) as caught:
        parse_settings("epochs: 2\nload: stream\n\ncache: /tmp\n", "a.yaml", removed)
    assert caught.value.reason == "removed_setting"
    assert str(caught.value).splitlines() == [
        "a.yaml: line 2: load: stream was removed; use load: mmap",
        "a.yaml: line 4: cache was removed; remove it",
    ]


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, "sources: [{path: x.jsonl}]\n")
    assert config.model_dump() == DEFAULTS
    absent = {name for name, mark in KEYS.items() if not mark.keys or mark.if_set} | {"template_date"}
    settings = config.settings()
    assert [*settings][-2:] == ["plan_group", "max_record_bytes"]
    assert settings.pop("plan_group") == ONE_PLAN, "so that corpora keep their keys"
    assert settings == {key: value for key, value in DEFAULTS.items() if key not in absent}
    assert list(settings) == [field for field in Config.model_fields if field not in absent]
    assert set(Config.model_fields) >= absent, "a setting that is gone is still listed"
    assert load(tmp_path, "sources: [{path: x.jsonl}]\nturns: apart\n").settings()["turns"] == "apart"
    assert all(field.description for model in (Config, Source) for field in model.model_fields.values())


def test_every_key_can_be_set(tmp_path: Path) -> None:
    values = {
        "name": "a.b-c_1",
        "sources": [{"path": "a*", "format": "alpaca", "columns": {"instruction": "frage"}}, {"path": "b"}],
        "roles": {"user": ["customer"]},
        "tokenizer": "t.model",
        "template": "llama2",
        "sequence_length": [8, 16],
        "mix": "blocks",
        "padding": "row",
        "train_on": "last",
        "pairs": "both",
        "turns": "apart",
        "reasoning": "drop",
        "empty_reasoning": "mask",
        "train_parts": {"reasoning": False, "content": True, "calls": True},
        "template_options": {"enable_thinking": False},
        "unknown_markers": "text",
        "default_system": "Be brief.",
        "share": "none",
        "overlong": "split",
        "split_at": "tokens",
        "validation": 0.5,
        "validation_by": "prompt",
        "max_rejects": 1,
        "weighting": "token_share",
        "duplicates": "exact",
        "decontaminate": ["mmlu/*.jsonl"],
        "min_tokens": 2,
        "max_tokens": 500,
        "min_turns": 1,
        "max_turns": 9,
        "neighbors": "distinct",
        "epochs": 3,
        "license": ["cc-by-4.0", "mit"],
        "language": ["en", "zh-Hant"],
        "packing": True,
        "seed": (1 << 63) - 1,
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "content_tokens": ["-<think>", "[INST]"],
        "loss_weight": "both",
        "vocab_size": 300,
        "template_date": "1999-12-31",
        "engine": "gigatoken",
        "part_size": 1024,
        "max_record_bytes": 1024,
    }
    with_one_length = {"sequence_length": 8, "mix": "tokens", "align": 4, "balance": {"ranks": 8, "rows_per_rank": 4}}
    elsewhere = {"padding", "order"}  # which exclude other settings of these
    assert {*with_one_length} - {*values} == {*NOT_WITH_LENGTHS} - elsewhere
    assert {*values, *with_one_length, "order"} == set(Config.model_fields)
    for chosen in (values, values | with_one_length):
        config = load(tmp_path, yaml.safe_dump(chosen))
        unset = {"sources", *NOT_WITH_LENGTHS} - ({*chosen} - {"sources"})
        assert config.model_dump(exclude=unset) == {k: v for k, v in chosen.items() if k != "sources"}
        assert isinstance(config.max_rejects, float), "1 and 1.0 must give the same key"
        assert config.sources[0].columns == {"instruction": "frage"}


def test_settings_that_few_need_are_in_advanced(tmp_path: Path) -> None:
    nested = load(tmp_path, "sources: x.jsonl\nadvanced: {align: 4, loss_weight: data}\n")
    flat = load(tmp_path, "sources: x.jsonl\nalign: 4\nloss_weight: data\n")
    assert nested.model_dump() == flat.model_dump()
    assert (nested.notes, flat.notes) == (
        [],
        ["config: align, loss_weight: now a part of `advanced`; both places work"],
    )
    assert load(tmp_path, "sources: x.jsonl\nadvanced:\n").model_dump() == DEFAULTS, "all of it may be comments"
    top = {
        "sources",
        "name",
        "tokenizer",
        "template",
        "sequence_length",
        "train_on",
        "pairs",
        "reasoning",
        "overlong",
        "seed",
    }
    assert top <= {name for name, mark in KEYS.items() if not mark.advanced}
    for lines, said in (
        ("align: 4\nadvanced: {align: 8}", "align is set twice; keep the one in `advanced`"),
        ("advanced: {sequence_length: 512}", "sequence_length belongs outside of `advanced`"),
        ("advanced: {sources: x.jsonl}", "sources belongs outside of `advanced`"),
        ("advanced: 0", "advanced: must be `key: value` pairs, found 0"),
        ("advanced: 5", "advanced: must be `key: value` pairs, found 5"),
        ("advanced: {aling: 5}", "aling: unknown key; did you mean align?"),
    ):
        assert said in refusal(tmp_path, f"sources: x.jsonl\n{lines}\n")


def test_a_tokenizer_with_a_way_to_load_it(tmp_path: Path) -> None:
    def config(line: str) -> Config:
        return load(tmp_path, f"sources: x.jsonl\n{line}\n")

    plain, files = config("tokenizer: hf"), config("tokenizer: {path: hf, as: files}")
    assert (plain.tokenizer_as, files.tokenizer, files.tokenizer_as) == ("transformers", "hf", "files")
    assert files.settings()["tokenizer"] == {"path": "hf", "as": "files"}
    assert Config.model_validate(files.model_dump()).tokenizer_as == copy.deepcopy(files).tokenizer_as == "files"
    for usual in ("tokenizer: {path: hf, as: transformers}", "tokenizer: {path: hf}"):
        assert config(usual).settings() == plain.settings()
    for line in ("{path: hf, as: file}", "{as: files}", "{path: 5}", "{path: hf, way: files}", "{}"):
        with pytest.raises(UsageError) as error:
            config(f"tokenizer: {line}")
        assert "tokenizer: expected a path, or {path: FOLDER, as: transformers | files}" in str(error.value)


def test_several_lengths(tmp_path: Path) -> None:
    def config(line: str) -> Config:
        return load(tmp_path, f"sources: x.jsonl\n{line}\n")

    several, one = config("sequence_length: [1024, 512]"), config("sequence_length: [512]")
    assert (several.sequence_length, several.row_lengths) == (1024, (512, 1024))
    assert several.settings()["sequence_length"] == [512, 1024]
    assert Config.model_validate(several.model_dump()) == several == copy.deepcopy(several)
    assert one == config("sequence_length: 512")
    assert one.settings() == config("sequence_length: 512").settings()
    file = tmp_path / "corpus.yaml"
    assert load_config(file, "256,64").row_lengths == (64, 256)
    for line, problem in (
        ("sequence_length: []", "sequence_length: expected 1 to 8 lengths, each once, such as [512, 1024], found []"),
        ("sequence_length: [512, 512]", "each once"),
        ("sequence_length: [512, 4]", "sequence_length: 4 in [512, 4] must be an integer from 8 to 1,048,576"),
        ("sequence_length: [512, '1024']", "'1024' in [512, '1024'] must be an integer"),
        ("sequence_length: [512, 1024]\npacking: false", "sequence_length: [512, 1024] requires packing: true"),
        ("mix: blocks", "mix: blocks requires several lengths"),
        (
            "sequence_length: [512, 1024]\nalign: 8",
            "[512, 1024] and align cannot be combined: the row of a conversation is chosen by",
        ),
        ("sequence_length: [512, 1024]\nbalance: {ranks: 8}", "balance, or keep one length"),
    ):
        assert problem in refusal(tmp_path, f"sources: x.jsonl\n{line}\n"), line


def test_roles_of_the_config_hold_for_all_sources(tmp_path: Path) -> None:
    text = "sources: [a.jsonl, {path: b.jsonl, roles: {user: kunde, assistant: x}}]\nroles: {user: [X, customer]}\n"
    config = load(tmp_path, text)
    assert [source.roles for source in config.sources] == [
        {"user": ["X", "customer"]},
        {"user": ["kunde", "customer"], "assistant": ["x"]},
    ], "a source's own names come first"
    apart = load(tmp_path, "sources: [{path: a.jsonl, roles: {user: customer}}]\n")
    together = load(tmp_path, "sources: [a.jsonl]\nroles: {user: [customer]}\n")
    assert apart.settings() == together.settings(), "the same corpus, the same key"
    assert "  roles.user: " in refusal(tmp_path, "sources: [a.jsonl]\nroles: {user: 5}\n")
    assert refusal(tmp_path, "sources: [a.jsonl]\nroles: {agent: assistant}\n").count("agent") == 3, "said once"


def test_license_is_accepted_by_its_former_name(tmp_path: Path) -> None:
    now, then = (load(tmp_path, f"sources: x.jsonl\n{name}: [mit]\n") for name in ("license", "licence"))
    assert now == then
    assert now.license == ["mit"]
    both = refusal(tmp_path, "sources: x.jsonl\nlicence: [mit]\nlicense: [mit]\n")
    assert both.endswith("\n  license and licence are the same setting; keep only license")
    assert "  license[0]: " in refusal(tmp_path, "sources: x.jsonl\nlicence: ['-']\n")
    assert "did you mean license?" in refusal(tmp_path, "sources: x.jsonl\nlicens: [mit]\n")


@pytest.mark.parametrize("line", ["{}", "advanced: {{{}}}"])
def test_neighbors_are_accepted_by_their_former_words_with_a_note(line: str, tmp_path: Path) -> None:
    words = ("neighbors: distinct", "company: distinct", "company: apart", "neighbors: apart")
    configs = [load(tmp_path, f"sources: x.jsonl\n{line.format(word)}\n") for word in words]
    assert {config.neighbors for config in configs} == {"distinct"}
    note = "config: `company` is now `neighbors`, and its value `apart` is `distinct`; the old words work, too"
    assert [note in config.notes for config in configs] == [False, True, True, True]
    moved = "config: neighbors: now a part of `advanced`; both places work"
    assert [moved in config.notes for config in configs] == [line == "{}"] * 4
    both = refusal(tmp_path, "sources: x.jsonl\ncompany: apart\nneighbors: distinct\n")
    assert both.endswith("\n  neighbors and company are the same setting; keep only neighbors")
    assert "  neighbors: must be " in refusal(tmp_path, "sources: x.jsonl\ncompany: alike\n")


@pytest.mark.parametrize("line", ["duplicates: drop", "duplicates: exact"])
def test_duplicates_are_accepted_by_their_former_word_with_a_note(line: str, tmp_path: Path) -> None:
    config = load(tmp_path, f"sources: x.jsonl\n{line}\n")
    note = "config: `duplicates: drop` is now `duplicates: exact`; the old word works, too"
    assert config.duplicates == config.settings()["duplicates"] == "exact"
    assert config.notes == [note] * line.endswith("drop")
    key = corpus_key(config.settings(), [], [], "", "")
    assert key == corpus_key(config.settings() | {"duplicates": "drop"}, [], [], "", ""), "the key of earlier versions"


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    text = "sources: [{path: x}]\nsequence_length: 512\n"
    assert load(tmp_path, text, "2048").sequence_length == 2048
    assert load(tmp_path, text).sequence_length == 512
    with pytest.raises(UsageError, match="sequence_length: must be greater than or equal to 8, found 7"):
        load(tmp_path, text, "7")
    with pytest.raises(UsageError, match="sequence_length: must be an integer, found '1k'"):
        load(tmp_path, text, "1k")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sequence_lenght: 5", "sequence_lenght: unknown key; did you mean sequence_length?"),
        ("overlap: 5", "overlap: unknown key; did you mean overlong?"),
        ("zzz: 5", "zzz: unknown key"),
        ("weight: 5", "weight: unknown key here; it belongs to a source, an entry of `sources`"),
        ("1: 2", "1: Keys should be strings, found 1"),
        ("sequence_length: 0", "sequence_length: must be greater than or equal to 8, found 0"),
        ("sequence_length: '512'", "sequence_length: must be an integer, found '512'"),
        ("sequence_length: 1:00", "sequence_length: must be an integer, found '1:00'"),
        ("sequence_length: 512, 1024", "several lengths are a list, such as [512, 1024], found '512, 1024'"),
        ("padding: null", "padding: must be 'row' or 'none', found null"),
        ("balance: 8", "balance: must be `key: value` pairs, found 8"),
        ("align: 2048", "sequence_length: 1,024 is not a multiple of align: 2,048; the nearest multiple is 2,048"),
        ("sequence_length: 0128", "sequence_length: must be an integer, found '0128'"),
        ("max_rejects: 0:00.5", "max_rejects: must be a number, found '0:00.5'"),
        ("template_date: 12:30:45", "template_date: "),
        ("sequence_length: 1.5", "sequence_length: must be an integer"),
        ("sequence_length: 99999999", "sequence_length: must be less than or equal to 1048576"),
        ("seed: true", "seed: must be an integer, found true"),
        ("seed: -1", "seed: "),
        ("packing: 1", "packing: must be true or false, found 1"),
        ("packing: 'no'", "packing: must be true or false, found 'no'"),
        ("validation: 1.0", "validation: must be less than 1, found 1.0"),
        ("validation: .nan", "validation: "),
        ("max_rejects: .nan", "max_rejects: "),
        ("max_rejects: 1.1", "max_rejects: "),
        ("train_on: assistent", "train_on: must be 'assistant', 'all', 'last' or 'rounds', found 'assistent'"),
        ("overlong: cut", "overlong: must be 'truncate', 'turns', 'drop', 'split' or 'error', found 'cut'"),
        ("name: a/b", "name: "),
        ("name: ../x", "name: "),
        ("name: ''", "name: "),
        ("tokenizer: ''", "tokenizer: "),
        ("template: 5", "template: must be a string, found 5"),
        ("template_options: {messages: 1}", "messages comes from the conversations and cannot be an option"),
        ("template_options: {a: [.inf]}", "inf is not a JSON number"),
        ("template_options: {a: {b: 123456789012345678901234567890}}", "cannot be written as JSON"),
        ('template_options: {a: "\\ud800"}', "cannot be written as JSON"),
        ("template_date: 2026-02-30", "template_date: must be a valid date, found '2026-02-30'"),
        ("template_date: tomorrow", "template_date: "),
        ("engine: fast", "engine: must be 'auto', 'gigatoken' or 'reference', found 'fast'"),
        ("part_size: 10", "part_size: "),
        ("packing: false\noverlong: split", "overlong: split requires packing: true"),
        ("packing: false\noverlong: turns", "overlong: turns requires packing: true"),
        ("train_on: all\noverlong: turns", "overlong: turns and train_on: all cannot be combined"),
    ],
)
def test_a_wrong_value_is_named(line: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, f"sources: [{{path: x}}]\n{line}\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-7", -7), ("+8", 8), ("4_096", 4096), ("0x1F", 31), ("1.5", 1.5), (".5", 0.5), ("-2.", -2.0),
        ("1e-4", 1e-4), ("2E+3", 2000.0), ("1.5e3", 1500.0), ("-.inf", float("-inf")),
        ("1:00", "1:00"), ("1:30.5", "1:30.5"), ("010", "010"), ("0o17", "0o17"), ("0b11", "0b11"), ("e5", "e5"),
        ("1e", "1e"), (".", "."), ("1.2.3", "1.2.3"), ("2026-01-01", "2026-01-01"),
    ],
)  # fmt: skip
def test_numbers_are_what_they_look_like(text: str, value: Any) -> None:
    """YAML 1.1 reads some numbers in base 60 and, after a leading zero, in base 8."""
    found = parse_settings(f"x: {text}", "a.yaml", {})["x"]
    assert (found, type(found)) == (value, type(value))


def test_a_source_may_be_a_path_by_itself(tmp_path: Path) -> None:
    for text in ("x.jsonl", "[x.jsonl]", "[{path: x.jsonl}]"):
        assert [source.path for source in load(tmp_path, f"sources: {text}\n").sources] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("", "sources: "),
        ("[]", "sources: List should have at least 1 item"),
        ("5", "sources: must be a list, found 5"),
        ("[5]", "sources[0]: "),
        ("[{path: a}, {path: b, fromat: auto}]", "sources[1].fromat: unknown key; did you mean format?"),
        ("[{format: auto}]", "sources[0].path: missing"),
        ("[{path: ''}]", "sources[0].path: "),
        ("[{path: a, format: jsonl}]", 'sources[0].format: format "jsonl" is not known; known are messages, sharegpt'),
        ("[{path: a, columns: {text: 1}}]", "sources[0].columns"),
    ],
)
def test_a_wrong_source_is_named(sources: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, f"sources: {sources}\n")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "sources: []\nsede: 1\npacking: 3\n")
    assert len(message.splitlines()) == 4
    assert "did you mean seed?" in message
    assert "sources: missing" in refusal(tmp_path, "name: x\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; add at least `sources:`"),
        ("- a\n", "expected `key: value` lines, found list"),
        ("hello", "expected `key: value` lines, found str"),
        ("name: a\nname: b\n", 'line 2, column 1: duplicate key "name"'),
        ("sources:\n  - path: a\n    path: b\n", 'line 3, column 5: duplicate key "path"'),
        ("a: [1\n", "line 2, column 1: "),
        ("a: b: c", "line 1, column 5: "),
        ("a: 1\n---\nb: 2\n", "found another document"),
        ("? [a]\n: 1\n", "line 1, column 3: found unhashable key"),
        ("!!map [a]", "expected a mapping node"),
        ("x: !!timestamp y", "is not YAML"),
        ("x: !!bool y", "is not YAML"),
        ("x: !!int ''", "is not YAML"),
        ("x: !!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("\0", "is not YAML"),
        (b"name: \xff", "cannot be read as a config: 'utf-8' codec can't decode byte 0xff"),
        ("sources: [{path: a}]".encode("utf-16"), "cannot be read as a config"),
        ("[" * 100_000, "is not YAML: maximum recursion depth exceeded"),
    ],
)
def test_what_is_not_a_config(text: str | bytes, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, text)


def test_a_yaml_bomb_is_refused_at_once(tmp_path: Path) -> None:
    bomb = 'a: &a ["lol", "lol"]\n' + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    started = time.process_time()
    assert "line 2, column 8: aliases are not supported; write the value out" in refusal(tmp_path, bomb)
    assert time.process_time() - started < 5


def test_a_byte_order_mark_is_skipped_and_a_date_is_text(tmp_path: Path) -> None:
    config = load(tmp_path, "\ufeffsources: [{path: 2026-01-01}]\ntemplate_date: 2026-11-20\r\n")
    assert config.template_date == "2026-11-20"
    assert config.sources[0].path == "2026-01-01"


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "corpus.yaml").touch()
    with pytest.raises(InputMissing, match=r"corpus\.yml: no such config.*did you mean .*corpus\.yaml"):
        load_config(tmp_path / "corpus.yml")
    with pytest.raises(InputMissing, match=r"no/x\.yaml: no such config.*no is not a folder"):
        load_config(tmp_path / "no" / "x.yaml")
    with pytest.raises(UsageError, match="cannot be read as a config"):
        load_config(tmp_path)


def test_a_data_file_that_is_named_as_the_config_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"sources": ["a.jsonl"]}')
    assert load_config(tmp_path / "corpus.json").sources[0].path == "a.jsonl", "YAML includes JSON"
    for name, text in (("a.jsonl", '{"messages": []}'), ("a.json", "[{}]"), ("a.jsonl.gz", "\x1f"), ("a.csv", "a: b")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=rf"/{name}: is a data file, not a config.* packcorpus init .*{name}$"):
            load_config(tmp_path / name)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
TAGS = [
    "!!map",
    "!!seq",
    "!!set",
    "!!omap",
    "!!pairs",
    "!!binary",
    "!!float",
    "!!int",
    "!!null",
    "!!str",
    "!!timestamp",
]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(st.sampled_from(["advanced", *Config.model_fields]), VALUES, max_size=3),
    st.sampled_from(["", *TAGS]),
)
def test_whatever_stands_in_a_config_there_is_a_message(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], tag: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(f"{tag} " + yaml.safe_dump({"sources": [{"path": "x"}]} | values, default_flow_style=True))
    try:
        load_config(path)
    except PackError as error:
        assert "any.yaml: " in str(error)  # noqa: PT017 - or no error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight: 0", "sources[0].weight: must be greater than 0, found 0"),
        ("weight: -2", "sources[0].weight: must be greater than 0, found -2"),
        ("weight: 1e9", "sources[0].weight: must be less than or equal to 1000, found 1000000000.0"),
        ("weight: .nan", "sources[0].weight: must be a finite number, found nan"),
        ("weight: .inf", "sources[0].weight: must be a finite number, found inf"),
        ("weight: half", "sources[0].weight: must be a number, found 'half'"),
        ("limit: 0", "sources[0].limit: must be greater than or equal to 1, found 0"),
        ("weigth: 2", "sources[0].weigth: unknown key; did you mean weight?"),
    ],
)
def test_a_bad_weight_or_limit_is_named(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, f"sources: [{{path: x.jsonl, {text}}}]\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "min_tokens: 9\nmax_tokens: 8",
            "min_tokens (9) is greater than max_tokens (8); every conversation would be dropped",
        ),
        ("min_turns: 3\nmax_turns: 2", "min_turns (3) is greater than max_turns (2)"),
        ("epochs: 0", "epochs: must be greater than or equal to 1, found 0"),
        ("epochs: 2\npacking: false", "epochs: more than 1 requires packing: true"),
        ("weighting: token-share", "weighting: must be 'repeat', 'subsample', 'proportions' or 'token_share', found"),
        (
            "weighting: subsample",
            "sources[0].weight: 1.5 is above 1, but 1 already keeps all of x.jsonl; to pack",
        ),
        ("duplicates: true", "duplicates: must be 'keep', 'exact' or 'near', found true"),
    ],
)
def test_settings_that_cannot_go_together_are_named(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, f"sources: [{{path: x.jsonl, weight: 1.5}}]\n{text}\n")


@pytest.mark.parametrize(("one", "other"), [pair[:2] for pair in NOT_TOGETHER])
def test_settings_that_exclude_each_other_are_refused(one: str, other: str, tmp_path: Path) -> None:
    values = {"padding": "none", "loss_weight": "conversation", "balance": "{ranks: 2}"}
    values |= {"order": "source", "neighbors": "distinct", "epochs": "2", "share": "conversation", "align": "4"}
    text = f"sources: [{{path: x.jsonl}}]\n{one}: {values[one]}\n"
    load(tmp_path, text)
    assert f"{one} and {other} cannot be set together" in refusal(tmp_path, f"{text}{other}: {values[other]}\n")


def test_every_setting_of_rows_needs_packing(tmp_path: Path) -> None:
    values = {"neighbors": "distinct", "loss_weight": "both", "balance": "{ranks: 2}", "align": "4", "padding": "none"}
    values |= {"order": "source", "share": "conversation"}
    of_rows = {name for name, mark in KEYS.items() if mark is IF_SET} - {"mix", "unknown_markers"} | {"share"}
    assert {*values} == {*WITHOUT_PACKING} == of_rows
    for name, value in values.items():
        text = f"sources: [{{path: x.jsonl}}]\n{name}: {value}\n"
        load(tmp_path, text)
        assert re.search(rf"{name}(: \w+)? requires packing: true", refusal(tmp_path, f"{text}packing: false\n"))


def test_sections_are_recorded_only_if_one_is_left_out(tmp_path: Path) -> None:
    plain = load(tmp_path, "sources: x.jsonl\n")
    same = load(tmp_path, "sources: x.jsonl\ntrain_parts: {reasoning: true, calls: true}\nempty_reasoning: train\n")
    assert (same.settings(), same.in_key("tokens")) == (plain.settings(), plain.in_key("tokens"))
    less = load(tmp_path, "sources: x.jsonl\ntrain_parts: {reasoning: false}\nempty_reasoning: mask\n")
    parts = {"reasoning": False, "content": True, "calls": True}
    assert less.in_key("tokens") == plain.in_key("tokens") | {"train_parts": parts, "empty_reasoning": "mask"}
    assert less.settings() == plain.settings() | less.in_key("tokens")
    assert sections_of_config(less.settings()) == less.sections == Sections(reasoning=False, empty=False)
    assert sections_of_config(plain.settings()) == plain.sections == ALL_SECTIONS


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("train_on: all\ntrain_parts: {calls: false}", "train_parts and train_on: all cannot be set together"),
        ("train_on: all\nempty_reasoning: mask", "empty_reasoning and train_on: all cannot be set together"),
        ("train_parts: {reasoning: false, content: false, calls: false}", "are all false; keep one of them"),
        ("train_parts: {content: false}\nloss_weight: data", "loss weights of the data cannot be set together"),
        ("train_parts: {calls: false}\noverlong: turns", "and overlong: turns cannot be set together"),
        ("train_parts: {content: false}\noverlong: turns", "{content: false} and overlong: turns cannot"),
        ("train_parts: {contents: false}", "train_parts.contents: unknown key"),
    ],
)
def test_sections_that_cannot_be_left_out(lines: str, problem: str, tmp_path: Path) -> None:
    assert problem in refusal(tmp_path, f"sources: x.jsonl\n{lines}\n")


def test_sections_may_have_weights_if_each_turn_is_one_run(tmp_path: Path) -> None:
    for lines in ("train_parts: {content: false, calls: false}", "empty_reasoning: mask"):
        load(tmp_path, f"sources: x.jsonl\n{lines}\nloss_weight: data\n")
    load(tmp_path, "sources: x.jsonl\ntrain_parts: {reasoning: false}\noverlong: turns\n")


def test_options_of_a_template_are_json_with_sorted_keys() -> None:
    given: Any = {"b": [{"d": 1, "c": None}], "a": {"z": 1.5, "y": True}}
    config = Config(sources=[Source(path="x")], template_options=given)
    assert str(config.template_options) == "{'a': {'y': True, 'z': 1.5}, 'b': [{'c': None, 'd': 1}]}"


@pytest.mark.parametrize("name", ["c.json", "c.yaml"])
@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_a_config_may_be_json_as_any_program_writes_it(name: str, indent: int | str | None, tmp_path: Path) -> None:
    values = {"sources": ["x.jsonl"], "default_system": "be \U0001f600, \x7f, \x85, \u2028", "roles": {}}
    (tmp_path / name).write_text(json.dumps(values, indent=indent, ensure_ascii=indent is None), encoding="utf-8")
    assert load_config(tmp_path / name).default_system == values["default_system"]


def test_an_escaped_emoji_of_a_yaml_file_is_one_character() -> None:
    assert parse_settings(r'a: "\ud83d\ude00"', "c.yaml", {}) == {"a": "\U0001f600"}
    assert parse_settings(r'a: "\ud83d"', "c.yaml", {}) == {"a": "\ud83d"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a",\n "name": "b"}', 'line 2, column 2: duplicate key "name"'),
        ('{"name": "a",\n "seed": }{', "line 2"),
        ('{"validation": NaN}', "validation: must be a number, found 'NaN'"),
    ],
)
def test_an_error_in_a_json_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_config(tmp_path / "c.yaml")
