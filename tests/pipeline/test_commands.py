"""The commands do the same as processes of their own as in the forks that most tests run them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import BIN, Done, command, process, write_chats

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
