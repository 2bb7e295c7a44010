"""pack, check, and verify run the real commands, and raise their errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import corpus_bytes, pack, write_chats
from support.packed_rows import pack_small, shards_of
from support.tokenizer_kinds import kind_path

import packcorpus
from packcorpus import commands


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chats(tmp_path / "chats.jsonl", 40)


def settings(**others: Any) -> dict[str, Any]:
    return {"sources": ["chats.jsonl"], "tokenizer": kind_path("hf_byte_level"), "sequence_length": 64} | others


@pytest.mark.usefixtures("_here")
def test_settings_give_the_bytes_of_a_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {*tmp_path.iterdir()}
    corpus = packcorpus.pack(**settings(name="same", validation=0.1), root="other", workers=1)
    shown = capfd.readouterr()
    assert (shown.out, "packed" in shown.err) == ("", True)
    assert {*tmp_path.iterdir()} == before | {tmp_path / "other"}
    (tmp_path / "config.yaml").write_text(json.dumps(settings(name="same", validation=0.1), default=str))
    manifest = pack(tmp_path, "--config", "config.yaml")
    assert corpus_bytes(corpus.path) == corpus_bytes(manifest)
    again = packcorpus.pack("config.yaml", progress=False)
    assert (again.key, again.path.resolve()) == (corpus.key, manifest.resolve())
    assert capfd.readouterr() == ("", "")
    assert [check.name for check in packcorpus.verify(again, rebuild=True)][-1] == "rebuild"


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("function", [packcorpus.pack, packcorpus.check])
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"sequnce_length": 8}, "UsageError", "settings: invalid config\n  sequnce_length: unknown key; did you mean"),
        ({"sources": "chat.jsonl"}, "InputMissing", "chat.jsonl"),
        ({"tokenizer": print}, "UsageError", "is not a value of a setting"),
        ({"config": "my.yaml"}, "UsageError", "pass a config or settings, not both: my.yaml, and sources"),
    ],
)
def test_a_mistake_is_an_error_of_packcorpus(function: Any, given: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(getattr(packcorpus, kind)) as failed:
        function(**settings(**given), progress=False)
    assert message in failed.value.message
    assert failed.value.__notes__[0].startswith(failed.value.code)


@pytest.mark.usefixtures("_here")
def test_a_prediction_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n' * 20)
    found = packcorpus.check(**settings(sources=["chats.jsonl", "bad.jsonl"]), batch_sizes=[4])
    assert found.run_fails
    assert "max_rejects" in found.failures[0]
    assert [steps.rows_per_step for steps in found.steps] == [4]
    assert "chats.jsonl:1" in repr(found)
    assert "chats.jsonl:1" in found._repr_html_()
    assert not (tmp_path / "data").exists()


def test_a_damaged_corpus_fails_with_its_facts(tmp_path: Path) -> None:
    manifest = pack_small(tmp_path)
    for shard in shards_of(manifest)[:2]:
        shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(packcorpus.DataError) as failed:
        packcorpus.verify(manifest)
    assert (failed.value.code, len(failed.value.facts["files"])) == ("E509", 2)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", packcorpus.Busy, "was killed by SIGKILL"),
        ("1 / 0", packcorpus.Bug, "ended with exit code 1: .*ZeroDivisionError"),
    ],
)
def test_a_process_that_ends_without_an_error(code: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        commands._run([sys.executable, "-c", code])


def test_an_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Started(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            started.append(self)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(commands._Progress, "show", stop)
    with pytest.raises(KeyboardInterrupt):
        commands._run([sys.executable, "-c", "import os, time; os.write(2, b'x\\n'); time.sleep(600)"])
    assert started[0].returncode == -signal.SIGTERM
