"""Ranks agree or stop together, and only our lines reach the user."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
from support.commands import NO_PICTURE, ROOT, started
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.gloo_ranks import gloo_ranks
from support.training.tiny_training import tiny_model

from packcorpus.tasks.core.errors import Interrupted
from packcorpus.train.machine import process
from packcorpus.train.machine.ranks import Place, differences, of_lost_rank

# A line of torch or a library, rather than ours.
RAW = re.compile(r"^[WE]\d{4} |Traceback|gloo|\.py:\d|E791|UserWarning|torch\.distributed", re.M)


# -- the end of the ranks of one machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "message", "code"),
    [
        ({0: -9, 1: 75}, "rank 0 was killed by SIGKILL, which", 1),
        ({0: 75, 1: -9}, "rank 1 was killed by SIGKILL, which", 1),
        ({0: 65, 1: -11}, "rank 1 was killed by SIGSEGV; run", 1),
        ({0: -15, 1: 65}, "", 65),
        ({0: 75, 1: 65}, "", 65),
        ({0: 75, 1: 75}, "interrupted; run", 75),
        ({1: 75}, "interrupted; run", 75),
        ({0: -15, 1: 75}, "rank 0 was killed by SIGTERM", 1),
    ],
)
def test_the_launcher_reports_the_rank_that_ended_first(codes: dict[int, int], message: str, code: int) -> None:
    failed = process._failed(codes)
    assert str(failed).startswith(message)
    assert bool(str(failed)) == bool(message)
    assert failed.exit_code == code
    assert isinstance(failed, Interrupted) == (code == 75)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a manifest and the folder of a model."""
    folder = tmp_path_factory.mktemp("ranks")
    manifest = pack_corpus(make_recipe(folder / "c", conversations(60), name="mine", sequence_length=64))
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(folder / "tiny")
    return manifest, folder / "tiny"


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGTERM)])
def test_only_our_lines_reach_the_user(
    corpus: tuple[Path, Path], tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    manifest, model = corpus
    words = ["-m", "packcorpus.train", "--manifest", str(manifest), "--device", "cpu", "--gpus", "2"]
    words += ["--micro-batch", "1", "--tokens-per-step", "128", "--max-steps", "500", "--output", str(tmp_path / "run")]
    words += ["--base-model", str(model)]
    with started(ROOT, *words, **NO_PICTURE) as process:
        output = ""
        for line in process.stderr:
            output += line
            if line.startswith("step 1/"):
                ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
                os.kill(ranks[rank].pid, number)
                break
        output += process.stderr.read()
        code = process.wait()
    assert not RAW.search(output), output
    codes = re.findall(r"^E\d{3}", output, flags=re.M)
    if number == signal.SIGKILL:
        assert (codes, code) == (["E628"], 1), output
        assert "was killed by SIGKILL" in output
    else:
        assert (codes, code) == (["E713"], 75), output
        assert list((tmp_path / "run").glob("checkpoint-*/complete.json"))


# -- agreement ---------------------------------------------------------------------------------------------------------


def test_what_differs_is_named_with_the_ranks_that_have_it() -> None:
    places = [Place(rank, rank % 2, str(rank // 2), "ab"[rank // 2]) for rank in range(4)]
    facts = [{"corpus": "mine 1"}, {"corpus": "mine 1"}, {"corpus": "mine 1"}, {"corpus": "mine 2", "new": "x"}]
    assert differences(places, facts) == [
        "corpus is mine 1 on ranks 0, 1, 2 (a, b), mine 2 on rank 3 (b)",
        "new is absent on ranks 0, 1, 2 (a, b), x on rank 3 (b)",
    ]
    assert not differences(places, facts[:1] * 4)


def test_an_error_of_one_rank_is_raised_on_all_and_shown_once_per_machine() -> None:
    code = """
from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.train.machine.ranks import together
try:
    with together():
        if rank == 1:
            raise DataError("bad_row", "row 7 is wrong")
        if rank == 2:
            raise DataError("bad_row", "row 9 is wrong")
except PackError as error:
    result = [error.reason, str(error), error.exit_code, error.facts]
"""
    first, own, third, fourth = gloo_ranks(4, code, GROUP_RANK=["0", "0", "1", "1"], LOCAL_RANK=["0", "1", "0", "1"])
    assert own == ["bad_row", "row 7 is wrong", 65, {}]
    assert first == fourth == ["rank_failed", "", 65, {}]
    assert third[0] == "bad_row"
    assert re.fullmatch(r"row 7 is wrong \(on \S+\)", third[1])
    assert third[2:] == [65, {"rank": 1}]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ("aaa", [[True, True], [True, False], [True, False]]),
        ("abc", [[False, True]] * 3),
        ("aab", "share it, but rank 2"),
    ],
)
def test_shared_and_separate_folders_are_distinguished(folders: str, expected: object, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from packcorpus.tasks.core.errors import PackError
from packcorpus.train.loop.checkpoints import find_disk
try:
    disk = find_disk(Path(given[rank]) / "run")
    result = [disk.shared, disk.writes]
except PackError as error:
    result = str(error)
"""
    given = [str(tmp_path / name) for name in folders]
    results = gloo_ranks(3, code, given, GROUP_RANK=["0", "1", "2"], LOCAL_RANK=["0", "0", "0"])
    if isinstance(expected, str):
        assert all(expected in result for result in results)
    else:
        assert results == expected
    assert not list(tmp_path.rglob(".rank-*"))


def test_only_a_lost_connection_is_taken_for_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    assert of_lost_rank(lost) is lost, "one process"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "another rank ended" in str(of_lost_rank(lost))
    for other in (
        RuntimeError("CUDA out of memory; reserved by PyTorch"),
        ValueError("Connection closed"),
        Interrupted("interrupted", "x"),
    ):
        assert of_lost_rank(other) is other
