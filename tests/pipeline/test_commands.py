"""The commands behave the same in forks and in separate processes.

Most tests run them in forks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from support.commands import BIN, Done, command, corpus_bytes, process, write_chats
from support.templates.modern_templates import EMPTY_LAST
from support.tokenizer_kinds import kind_path

CONFIG = "name: a\nsources: [chats.jsonl]\nvocab_size: 300\nsequence_length: 64\n"


@pytest.mark.parametrize("run", [command, process])
def test_a_corpus_is_packed_verified_and_shown(run: Callable[..., Done], tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 30)
    (tmp_path / "corpus.yaml").write_text(CONFIG)
    pack = (str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml")
    done = run(tmp_path, *pack)
    assert done.returncode == 0, done.stderr
    manifest = done.stdout.splitlines()[-1]
    assert run(tmp_path, *pack).stdout == done.stdout
    for words in (["verify"], ["inspect", "--row", "0"], ["list"]):
        done = run(tmp_path, str(BIN / "packcorpus"), *words, COLUMNS="100")
        assert done.returncode == 0, done.stderr
        assert Path(manifest).name in done.stdout + done.stderr


def test_the_summary_counts_answers_that_close_the_reasoning_at_once(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_bytes(b"".join(orjson.dumps({"messages": chat}) + b"\n" for chat in chats))
    (tmp_path / "own.jinja").write_text(EMPTY_LAST)
    trained = []
    for line in ("", "empty_reasoning: mask\n"):
        text = f"{CONFIG}tokenizer: {kind_path('hf_byte_level')}\ntemplate: own.jinja\n{line}"
        (tmp_path / "corpus.yaml").write_text(text.replace("vocab_size: 300\n", ""))
        done = command(tmp_path, str(BIN / "packcorpus"), "pack", "corpus.yaml", "--on", "here")
        assert done.returncode == 0, done.stderr
        note = "note: 20 trained answers close the reasoning at once, and 0 have reasoning."
        assert (note in done.stdout + done.stderr) == (not line)
        manifest = orjson.loads((tmp_path / done.stdout.split()[-1]).read_bytes())
        assert manifest["noticed"]["empty_reasoning"] == 20
        trained.append(manifest["ledger"]["tokens"]["trained"])
    assert trained[0] - trained[1] == 20 * 4, "<think>, line breaks, </think>, line breaks"


def test_errors_and_environment_are_those_of_a_process(tmp_path: Path) -> None:
    for words, environment in (
        (("luigi", "--module", "pipeline", "PackCorpus", "--config", "no.yaml"), {}),
        (("luigi", "--module", "pipeline", "PackCorpus", "--config", "no.yaml"), {"PACKCORPUS_JSON": "1"}),
        (("packcorpus", "verify", "no.json"), {"PACKCORPUS_JSON": "1"}),
        (("packcorpus", "nothing"), {}),
        (("packcorpus", "--help"), {"COLUMNS": "60"}),
    ):
        tool, *rest = words
        forked, started = (run(tmp_path, str(BIN / tool), *rest, **environment) for run in (command, process))
        assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


# On macOS and from Python 3.14, new processes are not forks by default.
STARTED = """
import multiprocessing, sys
multiprocessing.set_start_method("METHOD")
from packcorpus.pipeline import engines
engines.start_method = multiprocessing.get_context
from luigi.cmdline import luigi_run
luigi_run(sys.argv[1:])
"""


def test_a_corpus_is_the_same_however_processes_start(tmp_path: Path) -> None:
    found = []
    for method, on in (("fork", "workers"), ("spawn", "workers"), ("forkserver", "here")):
        folder = tmp_path / method
        folder.mkdir()
        write_chats(folder / "chats.jsonl", 60)
        (folder / "corpus.yaml").write_text(CONFIG + "part_size: 8000\n")
        words = ["--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--workers", "2", "--on", on]
        if method == "fork":  # as on Linux
            done = command(folder, str(BIN / "luigi"), *words)
        else:
            done = process(folder, sys.executable, "-c", STARTED.replace("METHOD", method), *words)
        assert done.returncode == 0, done.stderr
        manifest = folder / done.stdout.strip()
        assert len(list(folder.glob("data/tokens/*/*.arrow"))) == 2, "a part for each worker"
        found.append(corpus_bytes(manifest))
        record = orjson.loads((folder / orjson.loads(manifest.read_bytes())["corpus"] / "run.json").read_bytes())
        assert record["conversations"] == 60, "figures of all processes arrive"
    assert found[0] == found[1] == found[2]


def test_names_of_files_and_arguments_cannot_forge_lines_or_control_the_terminal(tmp_path: Path) -> None:
    forged = "x\nE999 error: forged\x1b[2J\r\u202e"
    write_chats(tmp_path / f"{forged}.jsonl", 30)
    (tmp_path / f"{forged}.yaml").write_text(CONFIG.replace("chats.jsonl", "'*.jsonl'") + "templat: a\n")
    (tmp_path / "corpus.yaml").write_text(CONFIG.replace("chats.jsonl", "'*.jsonl'"))
    (tmp_path / forged).mkdir()
    packcorpus = str(BIN / "packcorpus")
    for words in (
        ["init", "."],
        ["check", "corpus.yaml", "--root", forged],
        ["pack", "corpus.yaml", "--root", forged, "--on", "here"],
        ["pack", f"{forged}.yaml", "--on", "here"],
        ["pack", forged],
        [forged],
        ["pack", f"--{forged}"],
        ["inspect", "--root", forged],
        ["inspect", f"{forged}.jsonl"],
        ["list", "--root", forged],
        ["verify", "--root", forged],
        ["report", "--root", forged],
        ["diff", forged, forged],
        ["export", "--to", "trl", "--root", forged],
    ):
        done = command(tmp_path, packcorpus, *words)
        output = done.stdout + done.stderr
        assert "forged" in output or words[0] in ("init", "list"), words
        assert not [line for line in output.splitlines() if line.startswith("E999")], output
        assert not {"\x1b", "\r", "\u202e"} & set(output), words
