"""The config that `init` writes loads, says what was found, and runs as it is."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.commands import BIN, command, pack
from support.small_corpus import conversations
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from tasks.config import Config, load_config
from tasks.core.errors import PackError, UsageError
from tasks.dry_run.config_draft import Draft, write_draft
from tasks.recipe import resolve
from tasks.stages import Plan, run_all


def write(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def draft(folder: Path, *paths: str, name: str = "corpus.yaml", **options: Any) -> tuple[Draft, Config, str]:
    output = folder / name
    found = write_draft([Path(path) for path in paths], output, options.get("overwrite", False))
    return found, load_config(output), output.read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


ALPACA = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(1, 61)]


# -- what is written --------------------------------------------------------------------------------------------------


def test_every_setting_is_written_with_its_meaning_and_the_schema_is_named(here: Path) -> None:
    write(here / "chats" / "a.jsonl", conversations(30))
    _, config, text = draft(here, "chats")
    told = " ".join(re.sub(r"^# ?", "", line) for line in text.splitlines() if line.startswith("#"))
    for name, setting in Config.model_fields.items():
        assert re.search(rf"^(# )?{name}:", text, re.M), name
        assert str(setting.description) in told, name
    defaults = {name: getattr(config, name) for name in Config.model_fields if name not in ("name", "sources")}
    assert defaults == {name: Config.model_fields[name].get_default(call_default_factory=True) for name in defaults}
    [schema] = re.findall(r"^# yaml-language-server: \$schema=(.*)$", text, re.M)
    assert json.loads((here / schema).read_text()) == Config.model_json_schema()


def test_what_is_written_runs_as_it_is(here: Path) -> None:
    write(here / "chats" / "a.jsonl", conversations(200))
    write(here / "alpaca.jsonl", ALPACA)
    found, config, text = draft(here, "chats", "alpaca.jsonl", name="mine/corpus.yaml")
    assert [(source.path, source.format) for source in config.sources] == [
        ("../chats/a.jsonl", "messages"),
        ("../alpaca.jsonl", "alpaca"),
    ]
    assert config.max_rejects == 0
    assert "messages: all 200 records looked at" in text
    assert "200 conversations (counted)" in text
    manifest = pack(here, "--config", "mine/corpus.yaml")
    assert json.loads(manifest.read_bytes())["ledger"]["conversations"]["read"] == 260
    assert found.found.whole


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("\x85")
@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_file_name_stands_in_yaml_and_comments_as_itself(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path_factory.mktemp("names")
    monkeypatch.chdir(folder)
    file = write(folder / f"x{name}.jsonl", ALPACA)
    _, config, _ = draft(folder, file.name)
    assert [source.path for source in config.sources] == [file.name]


def test_what_init_changes_and_passes_over_is_told(here: Path) -> None:
    wrong = {"messages": [{"role": "assistent", "content": "x"}]}
    write(here / "chats.jsonl", [*conversations(60), wrong])
    write(here / "data" / "mine" / "a.jsonl", ALPACA)
    for written in ("data/tokens/x.jsonl", "data/corpora/c-0/rejects.jsonl", "manifests/c-0.json"):
        write(here / written, [{"text": "ours"}])
    write(here / ".venv" / "x.jsonl", ALPACA)
    found, config, _ = draft(here, ".")
    assert [source.path for source in config.sources] == ["chats.jsonl", "data/mine/a.jsonl"]
    told = "\n".join(found.summary())
    assert "skipped, written by packcorpus: data/corpora/, data/tokens/, manifests/" in told
    assert found.found.files == 2
    resolve(here / "corpus.yaml", here)


def test_records_that_cannot_be_used_are_named_to_be_mended(here: Path) -> None:
    """A limit that lets them pass would let all pass."""
    wrong = [{"messages": [{"role": "assistent", "content": "x"}]}] * 3
    write(here / "chats.jsonl", [*conversations(2), *wrong, {"messages": 1}, {"other": 1}])
    found, config, text = draft(here, "chats.jsonl")
    assert config.max_rejects == 0
    told = found.summary()
    head = "5 of 7 records looked at cannot be used; mend them, or raise max_rejects"
    place = told.index(f"{head}:")
    named = {line.partition(": ")[0]: line.partition(": ")[2] for line in told[place + 1 :]}
    assert named["  E207 bad_role, 3"].startswith('chats.jsonl:3 messages[0].role "assistent" is not a role')
    assert len(named) == len(told) - place - 1 == 3, told
    comment = " ".join(re.sub(r"^# ?", "", line) for line in text.splitlines() if line.startswith("#"))
    assert f"{head}: " in comment
    assert named["  E207 bad_role, 3"] in comment


def test_what_a_row_is_too_short_for_is_no_fault_of_the_data(here: Path) -> None:
    long = [
        {"messages": [{"role": "user", "content": "at 9 " * 1500}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(2)
    ]
    write(here / "chats.jsonl", [*conversations(58), *long])
    shutil.copy(kind_path("sp_bpe_chatml"), here / "near.model")
    found, config, text = draft(here, "chats.jsonl")
    assert config.max_rejects == 0.04
    told = "\n".join(found.summary())
    assert "max_rejects: 0.04 instead of 0: 2 conversations (E236) have no trained token within 1,024 tokens" in told
    assert "cannot be used" not in told
    assert "Raised: 2 conversations (E236) have" in text
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


def test_an_old_config_is_not_written_over(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    (here / "corpus.yaml").write_text("old")
    with pytest.raises(UsageError, match=r"corpus\.yaml: is there already"):
        draft(here, "a.jsonl")
    assert (here / "corpus.yaml").read_text() == "old"
    assert draft(here, "a.jsonl", overwrite=True)[1].sources[0].path == "a.jsonl"


# -- sources ----------------------------------------------------------------------------------------------------------


def test_files_that_are_alike_are_one_entry_and_others_their_own(here: Path) -> None:
    for name in ("a", "b"):
        write(here / "alike" / f"{name}.jsonl", ALPACA)
    write(here / "mixed" / "a.jsonl", ALPACA)
    write(here / "mixed" / "deep" / "b.jsonl", conversations(5))
    _, config, text = draft(here, "alike", "mixed")
    assert [source.path for source in config.sources] == ["alike", "mixed/a.jsonl", "mixed/deep/b.jsonl"]
    assert "2 files, " in text


def test_what_cannot_be_read_is_a_comment_and_the_rest_runs(here: Path) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    (here / "chats" / "empty.jsonl").write_text("")
    write(here / "chats" / "odd.jsonl", [{"a": 1, "b\nname: forged": 2}])
    (here / "chats" / "README.md").write_text("read me")
    (here / "chats" / "old.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-4])
    found, config, text = draft(here, "chats")
    assert [source.path for source in config.sources] == ["chats/a.jsonl"]
    assert config.name == "chats"
    for left_out in ("empty.jsonl", "odd.jsonl", "old.jsonl.gz", "README.md"):
        assert left_out in text
        assert any(left_out in line for line in found.summary())
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"Instruction": "2+2?", "Output": "4"}, {"instruction": "Instruction", "output": "Output"}),
        ({"Question": "2+2?", "Answer": "4"}, {"question": "Question", "answer": "Answer"}),
        ({"query": "2+2?", "reply": "4", "id": 7}, {"prompt": "query", "completion": "reply"}),
    ],
)
def test_columns_of_other_names_are_guessed(here: Path, record: dict[str, Any], columns: dict[str, str]) -> None:
    write(here / "a.jsonl", [record] * 40)
    _, config, text = draft(here, "a.jsonl")
    assert config.sources[0].columns == columns
    assert "guess" in text
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


@pytest.mark.parametrize(("name", "code"), [("gone.jsonl", "E301"), ("notes.txt", "E305"), ("odd.jsonl", "E322")])
def test_where_nothing_can_be_read_nothing_is_written(here: Path, name: str, code: str) -> None:
    write(here / "odd.jsonl", [{"a": 1}])
    (here / "notes.txt").write_text("x")
    with pytest.raises(PackError) as refused:
        draft(here, name)
    assert refused.value.code == code
    assert not (here / "corpus.yaml").exists()


def test_outputs_are_no_sources(here: Path) -> None:
    write(here / "data" / "corpora" / "x" / "a.jsonl", ALPACA)
    with pytest.raises(UsageError, match="is an output of packcorpus"):
        draft(here, "data/corpora/x")


# -- tokenizer and template -------------------------------------------------------------------------------------------


def test_the_nearest_tokenizer_is_found_and_its_template(here: Path) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    shutil.copy(kind_path("sp_bpe_chatml"), here / "chats" / "near.model")
    (here / "models").mkdir()
    shutil.copy(kind_path("sp_unigram"), here / "models" / "far.model")
    (here / "chats" / "broken.model").write_bytes(b"no model")
    _, config, text = draft(here, "chats/a.jsonl")
    assert (config.tokenizer, config.template) == ("chats/near.model", "chatml")
    assert "far.model" in text
    (here / "chats" / "near.model").unlink()
    _, config, text = draft(here, "chats/a.jsonl", overwrite=True)
    assert (config.tokenizer, config.template) == ("models/far.model", "alpaca")
    assert "no control tokens of a chat template" in text


def test_a_tokenizer_of_another_project_is_not_taken(here: Path) -> None:
    """Neither from beside nor from above, and no copy that a corpus has of its own."""
    write(here / "chats" / "a.jsonl", ALPACA)
    corpus = here / "moved"
    for folder in (here.parent, here.parent / "other", here / "chats" / ".." / ".." / "else", corpus / "tokenizer"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(kind_path("sp_bpe_chatml"), folder / "tokenizer.model")
    (corpus / "index.arrow").write_bytes(b"")
    found, config, _ = draft(here, "chats/a.jsonl")
    assert config.tokenizer is None
    told = "tokenizer: none found here: one is trained on the sources; for your model, name its own"
    assert told in found.summary()
    shutil.copy(kind_path("sp_bpe_chatml"), here / "own.model")
    found, config, _ = draft(here, "chats/a.jsonl", overwrite=True)
    assert config.tokenizer == "own.model"
    assert f"tokenizer: {here / 'own.model'}; it must be that of your model" in found.summary()


def test_a_chat_template_of_the_tokenizer_is_taken_where_it_works(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    folder = here / "models" / "tiny"
    shutil.copytree(kind_path("hf_byte_level"), folder)
    (folder / "chat_template.jinja").write_text(CHATML_JINJA)
    _, config, _ = draft(here, "a.jsonl")
    assert (config.tokenizer, config.template) == ("models/tiny", "tokenizer")
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].nothing.at.all }}")
    _, config, text = draft(here, "a.jsonl", overwrite=True)
    assert config.template != "tokenizer"
    assert "the tokenizer's own cannot be used" in text.replace("\n# ", " ")


def test_the_command_says_what_it_found_and_what_comes_next(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    done = command(here, str(BIN / "packcorpus"), "init", "a.jsonl", "--output", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "60 conversations" in done.stdout
    assert done.stdout.endswith("next: packcorpus check mine.yaml\n")
    assert yaml.safe_load((here / "mine.yaml").read_text())["name"] == "a"
