"""The list of errors contains all errors that the code raises.

docs/reference/errors.md is generated from the list.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import BIN, ROOT, command, luigi

from packcorpus.pipeline.graph import TrainingFailed
from packcorpus.tasks.core import errors
from packcorpus.tasks.core.error_codes import CODES, EXITS, GROUPS
from packcorpus.tasks.core.errors import Bug, DataError, Interrupted, PackError, Reject, UsageError
from packcorpus.tasks.core.messages import as_json, as_text, to_pack_error
from packcorpus.tasks.core.printable import one_line
from packcorpus.train.machine.process import RankFailed

CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), TrainingFailed, RankFailed)
    if isinstance(kind, type) and issubclass(kind, PackError | Reject)
}
# Files that raise errors without a literal reason. They take the reason from another error or from a caller.
PASSED_ON = {
    "tensors",
    "checks",
    "lists",
    "tables",
    "command",
    "tokenize_part",
    "prepare",
    "token_batch",
    "source_files",
    "json_files",
    "repair",
    "manifests",
    "chat",
    "oasst",
    "formats",
    "instruction",
    "values",
    "ranks",
    "graph",
}


# Words of a cause or a fix that say nothing: the line is left out instead.
EMPTY = re.compile(
    r"message (suggests|names)|(line|byte|setting) in the message|follow the message|mistyped|"
    r"\bfix (it|the (path|pattern|URL|cause))\b"
)


class Modules(NamedTuple):
    """What all modules contain.

    `raised` has (file, class, first argument) of each error that they create, and `literals` has their strings.
    """

    raised: list[tuple[str, str, ast.expr]]
    literals: set[str]


@cache
def modules() -> Modules:
    found = Modules([], set())
    for folder in ("packcorpus", "tasks", "pipeline", "train"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                    found.raised.append((path.stem, node.func.id, node.args[0]))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.stem != "error_codes":
                    found.literals.add(node.value)
    return found


def test_every_error_is_listed_with_the_exit_code_of_its_class() -> None:
    for file, name, reason in modules().raised:
        if not isinstance(reason, ast.Constant):
            assert file in PASSED_ON, f"{file}.py: {name}({ast.unparse(reason)}, …)"
            continue
        code = CODES[reason.value]
        of_conversations = (code.code[:2] == "E2" and code.code < "E250") or code.code in ("E417", "E418")
        assert of_conversations == (name == "Reject"), (file, code)
        if name != "Reject":
            assert code.exit == CLASSES[name].exit_code, (file, name, code)


def test_every_code_is_raised_somewhere() -> None:
    raised = modules().literals | {"incomplete_copy"}  # by packcorpus/__init__.py, in a copy without error_codes.py
    assert set(CODES) <= raised, sorted(set(CODES) - raised)


def test_each_reason_has_one_code_and_no_empty_advice() -> None:
    assert Counter(code.code for code in CODES.values()).most_common(1)[0][1] == 1
    assert [code.code for code in CODES.values()] == sorted(code.code for code in CODES.values())
    for code in CODES.values():
        assert code.code[1] in GROUPS
        assert code.exit in EXITS
        assert code.meaning.endswith(".")
        advice = f"{code.cause}; {code.fix}"
        assert not EMPTY.search(advice), (code.code, advice)
        assert "|" not in "".join(map(str, code))


def test_the_codes_that_were_published_stay() -> None:
    """Published codes stay, because scripts use them. Only ever add codes."""
    fixed = {"E207": "bad_role", "E211": "bad_json", "E251": "too_many_rejects", "E510": "wrong_digest", "E711": "busy"}
    assert fixed.items() <= {code.code: code.reason for code in CODES.values()}.items()


@given(st.sampled_from(sorted(CODES)), st.text(min_size=1))
def test_a_message_follows_its_code_and_is_one_line_of_json(reason: str, message: str) -> None:
    error = DataError(reason, message, place="a\udcff")
    first, *_ = as_text(error).split("\n")
    assert first.startswith(f"{CODES[reason].code} error: ")
    advice = {"cause": CODES[reason].cause, "fix": CODES[reason].fix}
    said = "; ".join(f"{name}: {text}" for name, text in advice.items() if text)
    assert as_text(error).endswith(f"\n  {said}" if said else one_line(message))
    assert all(char.isprintable() or char.isspace() for char in first)
    line = as_json(error)
    assert "\n" not in line
    assert json.loads(line)["error"]["message"] == one_line(message)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (again.reason, str(again), again.facts) == (reason, one_line(message), error.facts)


@pytest.mark.parametrize("error", [DataError, Reject])
def test_a_name_cannot_add_a_line_and_a_list_of_lines_can(error: Any) -> None:
    """Names of files, keys, and URLs are in messages, and may contain anything."""
    found = error("bad_json", ["a\nE999 error: forged\x1b[2J\u202e", "  second\rline"])
    expected = "a\\nE999 error: forged\\x1b[2J\\u202e\n  second\\rline"
    assert str(found) == expected
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
    assert str(again) == expected
    assert str(error("bad_json", "a\nb")) == "a\\nb"


def test_an_interrupt_is_not_reported_as_an_error() -> None:
    assert as_text(Interrupted("interrupted", "stopped")) == "E713 stopped"


def test_an_unexpected_error_is_one_line_with_its_place() -> None:
    try:
        [][3]
    except IndexError as error:
        found = to_pack_error(error)
    assert isinstance(found, Bug)
    assert str(found).startswith("IndexError: list index out of range (test_codes.py:")
    known = UsageError("bad_setting", "x")
    assert to_pack_error(known) is known
    assert to_pack_error(ValueError("SchemaError: Error building `x`: KeyboardInterrupt: ")).exit_code == 75
    assert to_pack_error(OSError(28, "No space left on device", "/x")).exit_code == 74


# -- the commands ----------------------------------------------------------------------------------------------------

LINE = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, %d"}]}\n'
BAD = '{"messages": [{"role": "assistent", "content": "%d"}]}\n'


def project(folder: Path, good: int, bad: int, max_rejects: float) -> None:
    (folder / "chats.jsonl").write_text("".join(LINE % i for i in range(good)) + "".join(BAD % i for i in range(bad)))
    (folder / "corpus.yaml").write_text(
        f"name: t\nsources: [{{path: chats.jsonl}}]\nsequence_length: 64\nvocab_size: 300\nmax_rejects: {max_rejects}\n"
    )


@pytest.mark.slow
def test_rejects_that_stop_a_run_are_a_line_for_each_code(tmp_path: Path) -> None:
    project(tmp_path, good=40, bad=25, max_rejects=0.1)
    done = luigi(tmp_path, "--config", "corpus.yaml")
    assert done.returncode == 65
    advice = "did you mean assistant? Or map it with roles: {assistant: [assistent]}"
    first = f'chats.jsonl:41 messages[0].role "assistent" is not a role; {advice}'
    assert f"  E207 bad_role, 25: {first}\n" in done.stderr
    assert done.stderr.count("E207") == 1
    assert "E251 error: 25 of 65" in done.stderr
    assert "\nset max_rejects: 0.3847 to accept this\n" in done.stderr
    assert done.stderr.count("fix the data") == 1
    [listed] = (tmp_path / "data" / "plans").glob("*/rejects.jsonl")
    assert [json.loads(line)["code"] for line in listed.read_text().splitlines()] == ["E207"] * 25
    as_json_lines = luigi(tmp_path, "--config", "corpus.yaml", PACKCORPUS_JSON="1")
    [line] = [line for line in as_json_lines.stderr.splitlines() if line.startswith('{"error"')]
    error = json.loads(line)["error"]
    assert (error["code"], error["exit_code"], len(error["rejects"])) == ("E251", 65, 20)
    assert error["rejects"][0]["place"] == "chats.jsonl:41"


@pytest.mark.slow
def test_a_successful_run_shows_the_first_reject_of_each_reason(tmp_path: Path) -> None:
    project(tmp_path, good=40, bad=3, max_rejects=0.5)
    done = luigi(tmp_path, "--config", "corpus.yaml")
    assert done.returncode == 0, done.stderr
    assert "  E207 bad_role, 3: chats.jsonl:41 messages[0].role" in done.stderr
    for words in (["verify"], ["inspect"], ["inspect", "--row", "0"], ["repair", done.stdout.split()[-1]]):
        shown = command(tmp_path, str(BIN / "packcorpus"), *words, "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["manifest"]


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (["--workers", "two"], "E101 error: --workers: invalid literal", 64),
        (["--sequence-length", "0"], "E104 error: ", 64),
        (["--workers", "0"], "E101 error: --workers 0: must be at least 1", 64),
        (["--config", "nope.yaml"], "E102 error: nope.yaml", 66),
    ],
)
def test_luigis_command_line_is_refused_without_a_traceback(
    tmp_path: Path, words: list[str], code: str, exit_code: int
) -> None:
    project(tmp_path, good=1, bad=0, max_rejects=0)
    done = luigi(tmp_path, *(["--config", "corpus.yaml"] if "--config" not in words else []), *words)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.startswith(code)
    assert "Traceback" not in done.stderr


def test_an_unknown_task_is_refused_without_a_traceback(tmp_path: Path) -> None:
    done = command(tmp_path, str(BIN / "luigi"), "--module", "pipeline", "PackCorps")
    assert (done.returncode, done.stderr[:34]) == (64, "E101 error: No task PackCorps. Did"), done.stderr
    assert "Traceback" not in done.stderr


def test_packcorpus_reports_a_mistake_in_one_form(tmp_path: Path) -> None:
    tool = str(BIN / "packcorpus")
    assert command(tmp_path, tool, "verify", "a", "b").stderr.startswith("E101 error: Got unexpected extra argument")
    missing = command(tmp_path, tool, "verify", "nope.json", "--json")
    assert (missing.returncode, missing.stderr) == (66, "")
    assert json.loads(missing.stdout)["error"]["code"] == "E501"
    by_environment = command(tmp_path, tool, "verify", "nope.json", PACKCORPUS_JSON="1")
    assert by_environment.stdout == missing.stdout


def test_a_mistake_in_a_command_refers_to_the_help_of_that_command(tmp_path: Path) -> None:
    tool = str(BIN / "packcorpus")
    for words, helped in (
        (["pack", "--sequence"], "packcorpus pack --help"),
        (["diff", "a"], "packcorpus diff --help"),
        (["export", "--to"], "packcorpus export --help"),
        (["--nosuch"], "packcorpus --help"),
        (["nosuch"], "packcorpus --help"),
    ):
        assert command(tmp_path, tool, *words).stderr.splitlines()[0].endswith(f"; see {helped}")


def test_without_a_config_corpus_yaml_is_read(tmp_path: Path) -> None:
    tool = str(BIN / "packcorpus")
    for name in ("check", "pack"):
        done = command(tmp_path, tool, name)
        assert (done.returncode, done.stderr[:37]) == (66, "E102 error: corpus.yaml: no such conf")
    (tmp_path / "corpus.yaml").write_text("sources: gone.jsonl\n")
    for name in ("check", "pack"):
        done = command(tmp_path, tool, name)
        assert (done.returncode, done.stderr[:23]) == (66, "E301 error: gone.jsonl:")


@pytest.mark.slow
def test_a_fault_of_the_program_shows_where_only_with_debug(tmp_path: Path) -> None:
    """A bug of the program shows its place only with PACKCORPUS_DEBUG.

    A function that only this command calls is replaced to simulate the bug.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import packcorpus.tasks.verification.verify as module\nmodule.verify = None\n"
    )
    (tmp_path / "manifest.json").write_text("{}")
    words = (str(BIN / "packcorpus"), "verify", "manifest.json")
    done = command(tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr[:23]) == (70, "E791 error: TypeError: ")
    assert "Traceback" not in done.stderr
    assert "Traceback" in command(tmp_path, *words, PYTHONPATH=str(tmp_path), PACKCORPUS_DEBUG="1").stderr
