"""The config that `init` writes loads, reports all findings, and runs as is."""

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
from support.profiles import examples
from support.small_corpus import conversations
from support.tokenizer_kinds import CHATML_JINJA, kind_path
from tokenizers import AddedToken, Tokenizer

from packcorpus.tasks.config import KEYS, Config, load_config
from packcorpus.tasks.core.errors import DataError, PackError, UsageError
from packcorpus.tasks.dry_run.config_draft import Draft, settings_of_sources, write_draft
from packcorpus.tasks.dry_run.given import Given
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.work import Plan, run_all


def write(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


OF_SOURCES = ("format", "columns", "roles", "ignore")


def draft(
    folder: Path, *paths: str, name: str = "corpus.yaml", overwrite: bool = True, full: bool = False, **options: Any
) -> tuple[Draft, Config, str]:
    output = folder / name
    of_sources = settings_of_sources(**{name: options.pop(name) for name in OF_SOURCES if name in options})
    given = Given(**options, of_sources=of_sources)
    found = write_draft(paths, output, overwrite, given, full)
    return found, load_config(output), output.read_text(encoding="utf-8")


def said(text: str) -> str:
    """Return the comments of a config as one line."""
    return " ".join(line.strip(" #") for line in re.findall(r"#.*", text))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


ALPACA = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(1, 61)]


# -- the config ------------------------------------------------------------------------------------------------------


def test_every_setting_has_its_description(here: Path) -> None:
    write(here / "chats" / "a.jsonl", conversations(30))
    _, config, text = draft(here, "chats", full=True)
    comments = " ".join(re.sub(r"^# ?", "", line) for line in text.splitlines() if line.startswith("#"))
    for name, setting in Config.model_fields.items():
        assert re.search(rf"^(# )?( *){name}:", text, re.M), name
        assert (str(setting.description) in comments) == (not KEYS[name].advanced), name
    advanced = text.partition("# advanced:\n")[2].replace("#   ", "  ")
    (here / "all.yaml").write_text(text + "advanced:\n" + advanced)
    assert load_config(here / "all.yaml") == config
    defaults = {name: getattr(config, name) for name in Config.model_fields if name not in ("name", "sources")}
    assert defaults == {name: Config.model_fields[name].get_default(call_default_factory=True) for name in defaults}
    assert "$schema" not in text, "an absolute path is of this machine only"


def test_the_config_runs_as_it_is(here: Path) -> None:
    write(here / "chats" / "a.jsonl", conversations(200))
    write(here / "alpaca.jsonl", ALPACA)
    found, config, text = draft(here, "chats", "alpaca.jsonl", name="mine/corpus.yaml")
    assert [source.path for source in config.sources] == ["../chats/a.jsonl", "../alpaca.jsonl"]
    assert len(text.splitlines()) <= 10
    assert "../alpaca.jsonl  # 60 conversations, alpaca" in text
    _, whole, text = draft(here, "chats", "alpaca.jsonl", name="mine/full.yaml", full=True)
    assert [source.format for source in whole.sources] == ["messages", "alpaca"]
    assert whole.model_copy(update={"sources": config.sources}) == config
    assert "messages: all 200 sampled records" in text
    assert "200 conversations (counted)" in text
    manifest = pack(here, "--config", "mine/corpus.yaml")
    assert json.loads(manifest.read_bytes())["ledger"]["conversations"]["read"] == 260
    assert found.found.whole


@settings(deadline=None, max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("\x85")
@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_file_name_is_quoted(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path_factory.mktemp("names")
    monkeypatch.chdir(folder)
    file = write(folder / f"x{name}.jsonl", ALPACA)
    _, config, _ = draft(folder, file.name)
    assert [source.path for source in config.sources] == [file.name]


def test_skipped_folders_are_reported(here: Path) -> None:
    wrong = {"messages": [{"role": "assistent", "content": "x"}]}
    write(here / "chats.jsonl", [*conversations(60), wrong])
    write(here / "data" / "mine" / "a.jsonl", ALPACA)
    for written in ("data/tokens/x.jsonl", "data/corpora/c-0/rejects.jsonl", "manifests/c-0.json"):
        write(here / written, [{"text": "ours"}])
        write(here / "other_root" / written, [{"text": "ours"}])
    write(here / ".venv" / "x.jsonl", ALPACA)
    found, config, _ = draft(here, ".")
    assert [source.path for source in config.sources] == ["chats.jsonl", "data/mine/a.jsonl"]
    summary = "\n".join(found.summary())
    skipped = "data/corpora/, data/tokens/, manifests/, other_root/data/corpora/, other_root/data/tokens/ and 1 more"
    assert f"skipped, written by packcorpus: {skipped}" in summary
    assert found.found.files == 2
    resolve(here / "corpus.yaml", here)


def test_unusable_records_are_reported(here: Path) -> None:
    """Unusable records are reported with the choice that the user has; none is made."""
    wrong = [{"messages": [{"role": "assistent", "content": "x"}]}] * 3
    write(here / "chats.jsonl", [*conversations(2), *wrong, {"messages": 1}, {"other": 1}])
    found, config, text = draft(here, "chats.jsonl")
    assert config.max_rejects == 0.01
    summary = found.summary()
    first_line = "5 of 7 sampled records cannot be used and are rejected"
    assert re.fullmatch("1 file, .*, 7 records, 2 can be packed", summary[0])
    choice = "check will fail: 71.4 % of the records are rejected, and max_rejects allows 1 %; fix the records, or set "
    choice += "max_rejects: 0.72 to leave them out"
    assert choice in summary
    assert choice[1:] in said(text)
    assert found.will_fail
    assert "7 records, messages, 2 of 7 sampled can be used" in text
    place = summary.index(f"{first_line}:")
    named = {line.partition(": ")[0]: line.partition(": ")[2] for line in summary[place + 1 :]}
    assert named["  E207 bad_role, 3"].startswith('chats.jsonl:3 messages[0].role "assistent" is not a role')
    assert len(named) == len(summary) - place - 1 == 3, summary
    with pytest.raises(DataError, match="max_rejects"):
        run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)
    (here / "corpus.yaml").write_text(text + "max_rejects: 0.72\n")
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


@pytest.mark.parametrize(
    ("tokens", "limit", "length", "note"),
    [
        ([100] * 100, None, 1024, "all conversations fit; the longest has 1"),
        ([100] * 99 + [5000], None, 1024, "99.0 % of the conversations fit; the longest has 5,"),
        ([100] * 98 + [5000] * 2, None, 5120, "all conversations fit; the longest has 5,"),
        ([100] * 90 + [2100] * 10, None, 3072, "all conversations fit; the longest has 2,"),
        ([100] * 90 + [2100] * 10, 2048, 2048, "90.0 % of the conversations fit; the longest has 2,"),
        ([100] * 98 + [900] * 2, 600, 512, "98.0 % of the conversations fit; the longest has 9"),
    ],
)
def test_99_percent_fit_the_rows_if_the_model_reads_as_much(
    here: Path, tokens: list[int], limit: int | None, length: int, note: str
) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "9" * count}, {"role": "assistant", "content": f"{number}"}]}
        for number, count in enumerate(tokens)
    ]
    write(here / "chats.jsonl", chats)
    shutil.copytree(kind_path("hf_byte_level"), here / "model")
    (here / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": limit} if limit else {}))
    found, config, text = draft(here, "chats.jsonl")
    assert config.sequence_length == length
    assert f"sequence_length: {length}  # {note}" in text
    assert re.findall("; the model reads ([0-9,]+)", text) == ([f"{limit:,}"] if limit else [])
    assert any(line.startswith(f"sequence_length: {length} ({note}") for line in found.summary())
    _, config, text = draft(here, "chats.jsonl", sequence_length="256")
    assert config.sequence_length == 256
    assert "% of the conversations fit" in text


def test_a_file_without_a_usable_record_is_left_out(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    write(here / "b.jsonl", [{"messages": [{"speaker": "user", "utterance": "a"}]}] * 3)
    found, config, _ = draft(here, "a.jsonl", "b.jsonl")
    assert [source.path for source in config.sources] == ["a.jsonl"]
    problem = (
        "none of its first 3 records can be used; the first problem: messages[0].role is missing; the keys found are: "
    )
    assert f"left out: b.jsonl: {problem}speaker, utterance; " in "\n".join(found.summary())
    with pytest.raises(DataError, match=r"b\.jsonl: none of its first 3 records can be used"):
        draft(here, "b.jsonl")
    silent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}]}
    shutil.copy(kind_path("sp_bpe_chatml"), here / "near.model")
    write(here / "silent.jsonl", [silent])
    with pytest.raises(DataError, match=r"silent\.jsonl: no conversation can be packed: "):
        draft(here, "silent.jsonl")
    assert load_config(here / "corpus.yaml") == config, "nothing is written"


def test_files_that_are_named_twice_are_counted_once(here: Path) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    write(here / "chats" / "b.jsonl", ALPACA)
    found, config, text = draft(here, "chats/a.jsonl", "chats/a.jsonl", "chats")
    assert [source.path for source in config.sources] == ["chats/a.jsonl", "chats/b.jsonl"]
    assert text.count("# 60 conversations, alpaca") == 2
    assert found.summary()[0].endswith("120 conversations")


# -- given formats and columns ----------------------------------------------------------------------------------------


def test_columns_and_format_are_used_for_all_files(here: Path) -> None:
    rows = "".join(f'Wie groß ist {n}?;"{n} m; etwa"\n' for n in range(30))
    (here / "a.csv").write_text("Frage;Antwort\n" + rows, encoding="cp1252")
    chats = [{"dialog": [{"speaker": "Human", "text": "2+2?"}, {"speaker": "bot", "text": "4"}]}] * 30
    write(here / "b.jsonl", chats)
    columns = ["prompt=Frage", "completion=Antwort"]
    _, config, text = draft(here, "a.csv", format="prompt_completion", columns=columns)
    [source] = config.sources
    assert (source.format, source.columns) == ("prompt_completion", {"prompt": "Frage", "completion": "Antwort"})
    comment = said(text)
    assert "30 conversations, prompt_completion; " in comment
    assert "a.csv: found delimiter ';' and encoding windows-1252; if that is wrong, set it in its source" in comment
    assert "guessed" not in comment
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)
    columns = ["messages=dialog", "role=speaker", "content=text"]
    _, config, _ = draft(here, "b.jsonl", columns=columns)
    assert config.sources[0].columns == {"messages": "dialog", "role": "speaker", "content": "text"}
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


def test_roles_and_ignored_keys_are_used_for_all_files(here: Path) -> None:
    chat = {"dialog": [{"speaker": "Kunde", "text": "2+2?"}, {"speaker": "Agent", "text": "4"}], "images": ["x"]}
    write(here / "a.jsonl", [chat] * 30)
    with pytest.raises(DataError, match=r"a\.jsonl:1: the record has images") as refused:
        draft(here, "a.jsonl")
    assert refused.value.reason == "media_data"
    assert str(refused.value).endswith("to train on its text alone, add  --ignore images")
    with pytest.raises(DataError, match=r'dialog\[0\]\.speaker "Kunde" is not a role; map it to .*\[Kunde\]'):
        draft(here, "a.jsonl", ignore=["images"])
    _, config, _ = draft(here, "a.jsonl", ignore=["images"], roles=["user=Kunde", "assistant=Agent", "user=Gast"])
    [source] = config.sources
    assert (source.roles, source.ignore) == ({"user": ["Kunde", "Gast"], "assistant": ["Agent"]}, ["images"])
    assert source.columns == {"messages": "dialog", "role": "speaker", "content": "text"}, "guessed"
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


def test_the_options_for_preference_data_are_named(here: Path) -> None:
    pair = {"prompt": "2+2?", "chosen_response": "4", "rejected_response": "5"}
    write(here / "dpo" / "a.jsonl", [pair] * 30)
    write(here / "dpo" / "b.jsonl", [pair] * 30)
    options = "--columns prompt=prompt --columns completion=chosen_response --ignore rejected_response"
    with pytest.raises(DataError, match=f"nonetheless, add  {options}$"):
        draft(here, "dpo")
    draft(here, "dpo", columns=["prompt=prompt", "completion=chosen_response"], ignore=["rejected_response"])


def test_roles_are_guessed_by_their_names(here: Path) -> None:
    """Roles are guessed from their names.

    Without guesses, the draft would reject two thirds of the data, although the names reveal the roles.
    """

    def chat(*names: str) -> dict[str, object]:
        return {"dialog": [{"who": name, "text": "2 + 2?"} for name in names]}

    write(here / "a.jsonl", [chat("human", "bot")] * 9 + [chat("Customer", "Support Agent")] * 20)
    found, config, text = draft(here, "a.jsonl")
    [source] = config.sources
    assert source.roles == {"user": ["Customer"], "assistant": ["Support Agent"]}
    assert "29 conversations, messages; columns guessed by their names; roles guessed by their names" in said(text)
    assert "a.jsonl: guessed roles: {user: [Customer], assistant: [Support Agent]}" in found.summary()
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)
    # The user must set names that reveal no role. Guesses do not add to the settings of the user.
    write(here / "b.jsonl", [chat("Anna", "agent")] * 9 + [chat("human", "agent")] * 20)
    _, config, _ = draft(here, "b.jsonl")
    assert config.sources[0].roles == {"assistant": ["agent"]}
    with pytest.raises(DataError, match='"Anna" is not a role'):
        draft(here, "b.jsonl", overwrite=True, roles=["assistant=human"])
    _, config, _ = draft(here, "b.jsonl", overwrite=True, roles=["assistant=agent", "user=anna"])
    assert config.sources[0].roles == {"assistant": ["agent"], "user": ["anna"]}


def test_roles_guessed_in_some_files_of_a_folder_are_those_of_one_entry(here: Path) -> None:
    for name, speaker in (("a", "agent"), ("b", "bot"), ("c", "Tutor 1")):
        messages = [{"role": "user", "content": "2 + 2?"}, {"role": speaker, "content": "4"}]
        write(here / "chats" / f"{name}.jsonl", [{"messages": messages}] * 30)
    _, config, _ = draft(here, "chats")
    [source] = config.sources
    assert source.roles == {"assistant": ["agent", "Tutor 1"]}


def test_format_and_columns_that_are_wrong(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    for options, error, message in (
        ({"format": "alpacca"}, UsageError, "--format: invalid config\n  format: .*did you mean alpaca"),
        ({"columns": ["instruction"]}, UsageError, "--columns instruction: expected OURS=YOURS, such as"),
        ({"roles": ["kunde=user"]}, UsageError, "--roles: invalid config\n  roles.kunde"),
        ({"roles": ["user"]}, UsageError, "--roles user: expected OURS=YOURS, such as --roles user=customer"),
        ({"ignore": ["image_"]}, UsageError, "--ignore: .*\n.* cannot be ignored; did you mean image"),
        ({"columns": ["frage=instruction"]}, UsageError, "packcorpus names go on the left"),
        ({"columns": ["instruction=frage"]}, DataError, "columns: instruction: no key `frage`; keys found: "),
        (
            {"format": "messages"},
            DataError,
            "none of its first 60 records can be used; the first problem: messages is missing",
        ),
    ):
        with pytest.raises(error, match=message):
            draft(here, "a.jsonl", **options)
    assert not (here / "corpus.yaml").exists()


def test_an_existing_config_is_not_overwritten(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    (here / "corpus.yaml").write_text("old")
    with pytest.raises(UsageError, match=r"corpus\.yaml: already exists"):
        draft(here, "a.jsonl", overwrite=False)
    assert (here / "corpus.yaml").read_text() == "old"
    assert draft(here, "a.jsonl")[1].sources[0].path == "a.jsonl"


# -- sources ----------------------------------------------------------------------------------------------------------


def test_files_of_one_format_share_an_entry(here: Path) -> None:
    for name in ("a", "b"):
        write(here / "alike" / f"{name}.jsonl", ALPACA)
    write(here / "mixed" / "a.jsonl", ALPACA)
    write(here / "mixed" / "deep" / "b.jsonl", conversations(5))
    _, config, text = draft(here, "alike", "mixed")
    assert [source.path for source in config.sources] == ["alike", "mixed/a.jsonl", "mixed/deep/b.jsonl"]
    assert "2 files, " in text


def test_unreadable_files_become_comments(here: Path) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    (here / "chats" / "empty.jsonl").write_text("")
    write(here / "chats" / "odd.jsonl", [{"a": 1, "b\nname: forged": 2}])
    (here / "chats" / "README.md").write_text("read me")
    (here / "chats" / "old.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-4])
    found, config, text = draft(here, "chats")
    assert [source.path for source in config.sources] == ["chats/a.jsonl"]
    assert config.name == "chats"
    full = draft(here, "chats", name="full.yaml", full=True)[2]
    for left_out in ("empty.jsonl", "odd.jsonl", "old.jsonl.gz", "README.md"):
        assert left_out in full
        assert (left_out in text) == (left_out != "README.md")
        assert any(left_out in line for line in found.summary())
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


def test_other_data_is_left_out_with_its_reason(here: Path) -> None:
    chats = conversations(20)
    write(here / "chats" / "good.jsonl", chats)
    write(here / "chats" / "vision.jsonl", [*chats[:9], chats[9] | {"images": ["x"]}])
    write(here / "chats" / "dpo.jsonl", [{"prompt": "a", "chosen_response": "b", "rejected_response": "c"}])
    found, config, text = draft(here, "chats")
    assert [source.path for source in config.sources] == ["chats/good.jsonl"]
    comments = " ".join(line.lstrip(" #") for line in text.splitlines())
    for reason in ("vision.jsonl:10: the record has images", "dpo.jsonl: its records have chosen_response and rej"):
        assert reason in comments
        assert any(reason in line for line in found.summary())


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"Instruction": "2+2?", "Output": "4"}, {"instruction": "Instruction", "output": "Output"}),
        ({"Question": "2+2?", "Answer": "4"}, {"question": "Question", "answer": "Answer"}),
        ({"query": "2+2?", "reply": "4", "id": 7}, {"prompt": "query", "completion": "reply"}),
        ({"Customer": "2+2?", "Agent": "4", "topic": "x"}, {"prompt": "Customer", "completion": "Agent"}),
        (
            {"tags": ["a"], "chat": [{"Sender": "human", "Text": "2+2?"}, {"Sender": "bot", "Text": "4"}]},
            {"messages": "chat", "role": "Sender", "content": "Text"},
        ),
    ],
)
def test_columns_of_other_names_are_guessed(here: Path, record: dict[str, Any], columns: dict[str, str]) -> None:
    write(here / "a.jsonl", [record] * 40)
    _, config, text = draft(here, "a.jsonl")
    assert config.sources[0].columns == columns
    assert "guess" in text
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


@pytest.mark.parametrize(("name", "code"), [("gone.jsonl", "E301"), ("notes.txt", "E305"), ("odd.jsonl", "E322")])
def test_nothing_is_written_if_nothing_can_be_read(here: Path, name: str, code: str) -> None:
    write(here / "odd.jsonl", [{"a": 1}])
    (here / "notes.txt").write_text("x")
    with pytest.raises(PackError) as refused:
        draft(here, name)
    assert refused.value.code == code
    assert not (here / "corpus.yaml").exists()


def test_outputs_are_refused_as_sources(here: Path) -> None:
    write(here / "data" / "corpora" / "x" / "a.jsonl", ALPACA)
    with pytest.raises(UsageError, match="is an output of packcorpus"):
        draft(here, "data/corpora/x")


# -- tokenizer and template -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["[SYSTEM_PROMPT]"]])
def test_a_tokenizer_of_a_later_mistral_is_named(here: Path, more: list[str]) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    folder = here / "chats" / "model"
    shutil.copytree(kind_path("hf_byte_level"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())
    for token in model["added_tokens"]:  # without the tokens of other templates
        token["content"] = token["content"].replace("im_", "x_").replace("header", "x").replace("|", "!")
    tokenizer = Tokenizer.from_str(json.dumps(model))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ["[INST]", "[/INST]", "</s>", *more]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    _, config, text = draft(here, "chats/a.jsonl")
    assert config.template == "mistral"
    said = " ".join(text.replace("#", " ").split())
    assert ("[SYSTEM_PROMPT] belongs to later versions; use the model's own template" in said) == bool(more)


@pytest.mark.parametrize("has_template", [False, True])
def test_reasoning_that_the_template_does_not_write_is_reported_and_kept(here: Path, has_template: bool) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
    write(here / "a.jsonl", [{"messages": [{"role": "user", "content": "2+2?"}, answer]}] * 30)
    if has_template:
        shutil.copytree(kind_path("hf_byte_level"), here / "model")
        settings = json.loads((here / "model" / "tokenizer_config.json").read_text())
        (here / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML_JINJA}))
    found, config, text = draft(here, "a.jsonl")
    assert (config.template, config.reasoning) == ("tokenizer" if has_template else "chatml", "keep")
    choice = "check will fail: the template writes no reasoning, which 30 conversations have (E418); for a model that "
    choice += "reasons, use its tokenizer and template; to train without the reasoning, set reasoning: drop"
    assert choice in found.summary()
    assert choice[1:] in said(text)
    assert found.will_fail
    (here / "corpus.yaml").write_text(text + "reasoning: drop\n")
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)


def test_the_tokenizer_nearby_is_found_and_its_template(here: Path) -> None:
    write(here / "chats" / "a.jsonl", ALPACA)
    shutil.copy(kind_path("sp_bpe_chatml"), here / "chats" / "near.model")
    (here / "models").mkdir()
    shutil.copy(kind_path("sp_unigram"), here / "models" / "far.model")
    (here / "chats" / "broken.model").write_bytes(b"no model")
    for number in range(600):  # more folders than are searched
        (here / "a" / str(number)).mkdir(parents=True)
    with pytest.raises(UsageError) as several:
        draft(here, "chats/a.jsonl")
    assert str(several.value).splitlines()[1:] == [
        f"  --tokenizer {here / name}".replace(f"{here}/", "") for name in ("chats/near.model", "models/far.model")
    ]
    _, config, text = draft(here, "chats/a.jsonl", tokenizer="chats/near.model")
    assert (config.tokenizer, config.template) == ("chats/near.model", "chatml")
    (here / "models" / "copy").mkdir()
    shutil.copy(here / "models" / "far.model", here / "models" / "copy" / "tokenizer.model")
    (here / "chats" / "near.model").unlink()
    _, config, text = draft(here, "chats/a.jsonl")
    assert (config.tokenizer, config.template) == ("models/far.model", "alpaca")
    assert "no control tokens of a chat template" in text


def test_tokenizers_of_other_projects_are_ignored(here: Path) -> None:
    """Tokenizers of other projects are ignored.

    They are in a parent folder, next to the project, or copies in a corpus.
    """
    write(here / "chats" / "a.jsonl", ALPACA)
    corpus = here / "moved"
    for folder in (here.parent, here.parent / "other", here / "chats" / ".." / ".." / "else", corpus / "tokenizer"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(kind_path("sp_bpe_chatml"), folder / "tokenizer.model")
    (corpus / "index.arrow").write_bytes(b"")
    found, config, _ = draft(here, "chats/a.jsonl")
    assert config.tokenizer is None
    expected = "none is nearby: name that of your model; without one, a new one is trained on the data"
    assert f"tokenizer: {expected}" in found.summary()
    shutil.copy(kind_path("sp_bpe_chatml"), here / "own.model")
    found, config, _ = draft(here, "chats/a.jsonl")
    assert config.tokenizer == "own.model"
    expected = "tokenizer: own.model (found nearby; make sure that it is the tokenizer of your model)"
    assert expected in found.summary()


def test_the_tokenizers_own_template_is_used_if_it_works(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    folder = here / "models" / "tiny"
    shutil.copytree(kind_path("hf_byte_level"), folder)
    (folder / "chat_template.jinja").write_text(CHATML_JINJA)
    _, config, _ = draft(here, "a.jsonl")
    assert (config.tokenizer, config.template) == ("models/tiny", "tokenizer")
    run_all(Plan(resolve(here / "corpus.yaml", here)), check_content=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].nothing.at.all }}")
    _, config, text = draft(here, "a.jsonl")
    assert config.template != "tokenizer"
    assert "the tokenizer's own template cannot be used" in said(text)


def test_what_the_own_template_refuses_is_said_and_no_other_template_chosen(here: Path) -> None:
    records = conversations(30)
    for record in records[::2]:
        record["messages"].insert(0, {"role": "system", "content": "Be brief."})
    write(here / "a.jsonl", records)
    folder = here / "tiny"
    shutil.copytree(kind_path("hf_byte_level"), folder)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusal + CHATML_JINJA)
    found, config, text = draft(here, "a.jsonl")
    assert config.template == "tokenizer"
    refused = (
        "the tokenizer's own template refuses 15 of 30 sampled conversations: System role not supported; the model"
    )
    assert refused in " ".join(found.summary())
    assert "set template: chatml, which writes them" in said(text)
    assert found.will_fail


def test_init_prints_findings_and_the_next_command(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    done = command(here, str(BIN / "packcorpus"), "init", "a.jsonl", "--output", "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "60 conversations" in done.stdout
    assert done.stdout.endswith("next: packcorpus check mine.yaml\n")
    assert yaml.safe_load((here / "mine.yaml").read_text())["name"] == "a"


# -- models among the paths --------------------------------------------------------------------------------------------


def model(folder: Path) -> Path:
    shutil.copytree(kind_path("hf_byte_level"), folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_a_model_among_the_paths_is_the_tokenizer(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    model(here / "qwen")
    shutil.copy(kind_path("sp_bpe_chatml"), here / "near.model")
    found, config, _ = draft(here, "a.jsonl", "qwen")
    assert ([source.path for source in config.sources], config.tokenizer) == (["a.jsonl"], "qwen")
    assert "tokenizer: qwen" in found.summary()
    for tokenizer in ("qwen/tokenizer.json", "near.model"):
        _, config, _ = draft(here, tokenizer, "a.jsonl")
        assert (config.name, config.tokenizer) == ("a", tokenizer)
    assert draft(here, "a.jsonl", "qwen", tokenizer="./qwen")[1].tokenizer == "qwen"
    for paths, tokenizer, problem in (
        (
            ["a.jsonl", "qwen", "near.model"],
            "",
            "qwen and near.model are tokenizers, not data; keep one of them",
        ),
        (["a.jsonl", "qwen"], "near.model", "near.model and qwen are tokenizers, not data; keep one"),
        (["qwen"], "", "qwen: is a tokenizer, not data; name files with conversations"),
    ):
        with pytest.raises(UsageError, match=problem):
            draft(here, *paths, tokenizer=tokenizer)


def test_files_of_models_are_no_data(here: Path) -> None:
    write(here / "chats.jsonl", conversations(30))
    model(here / "models" / "qwen")
    found, config, _ = draft(here, ".", "models/qwen/tokenizer.json")
    assert [source.path for source in config.sources] == ["chats.jsonl"]
    assert "left out, belongs to a model: models/qwen/" in found.summary()
    (here / "models" / "qwen" / "more.json").write_text(json.dumps(ALPACA))
    found, config, _ = draft(here, "models", tokenizer="models/qwen")
    assert [source.path for source in config.sources] == ["models/qwen/more.json"]
    assert "models/qwen/tokenizer.json" in "\n".join(found.summary())


def test_a_tokenizer_and_a_template_are_given(here: Path) -> None:
    write(here / "a.jsonl", ALPACA)
    model(here / "qwen")
    (here / "mine.jinja").write_text(CHATML_JINJA)
    options = {"tokenizer": "qwen", "template": "mine.jinja", "sequence_length": "512,1024"}
    _, config, _ = draft(here, "a.jsonl", name="configs/corpus.yaml", **options)
    assert (config.tokenizer, config.template, config.row_lengths) == ("../qwen", "../mine.jinja", (512, 1024))
    assert draft(here, "a.jsonl", tokenizer="qwen", template="chatml")[1].template == "chatml"
    for wrong, problem in (
        ({"template": "chatlm"}, "did you mean chatml"),
        (
            {"sequence_length": "1k"},
            "--sequence-length: .*\n  sequence_length: must be an integer, found '1k'",
        ),
        ({"tokenizer": "gone.model"}, "gone.model: no such tokenizer"),
    ):
        with pytest.raises(PackError, match=problem):
            draft(here, "a.jsonl", **{"tokenizer": "qwen"} | wrong)


def test_trees_are_proposed_where_they_save_much(here: Path) -> None:
    shutil.copy(kind_path("sp_bpe_chatml"), here / "tiny.model")
    (here / "last.jinja").write_text(  # which leaves earlier reasoning out, so each answer is a sample
        "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and loop.last %}"
        "{{ m.reasoning_content }} {% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    answer = {"role": "assistant", "content": "9", "reasoning_content": "and"}
    long = "the train leaves at 9 and takes 40 minutes"
    for system, asked, answers, proposed in (("", long, 2, "conversation"), (long, "so", 1, "all"), ("", "the", 1, "")):
        turns = [{"role": "user", "content": asked}, answer, {"role": "user", "content": "so"}, answer][: 2 * answers]
        begin = [{"role": "system", "content": f"{system} {system} {system}"}] * bool(system)
        asks = [{"role": "user", "content": f"{number:04} {asked}"} for number in range(30)]
        write(here / "a.jsonl", [{"messages": [*begin, ask, *turns[1:]]} for ask in asks])
        _, config, text = draft(here, "a.jsonl", tokenizer="tiny.model", template="last.jinja")
        assert re.findall(r"# share: (\w+)", text) == [proposed] * bool(proposed)
        assert config.share == "none"
        if proposed:
            share = re.search(rf"# share: {proposed}  # (\d+) % fewer tokens", text)
            assert share
            text = text.replace(f"# share: {proposed}", f"share: {proposed}")
            (here / "corpus.yaml").write_text(text)
            recipe = resolve(here / "corpus.yaml", here)
            run_all(Plan(recipe))
            tokens = json.loads((recipe.plan_folder / "plan.json").read_bytes())["ledger"]["tokens"]
            assert abs(100 * tokens["shared"] / (tokens["packed"] + tokens["shared"]) - int(share[1])) <= 2
