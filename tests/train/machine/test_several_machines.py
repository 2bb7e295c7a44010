"""Two machines train one adapter, also after an interruption.

Their file systems are shared or separate.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import tiny_model
from support.training.two_nodes import Node, two_nodes

LENGTH = 64
STEPS = 12


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora of the same name, `first` and `second`, and the model `tiny`."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("first", "second")):
        pack_corpus(
            make_recipe(
                folder / name, conversations(120, seed=seed), name="mine", sequence_length=LENGTH, validation=0.1
            )
        )
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(folder / "tiny")
    return folder


def words(corpora: Path, *options: str, corpus: str = "first") -> list[str]:
    (manifest,) = (corpora / corpus / "manifests").glob("*.json")
    common = ["--manifest", str(manifest), "--base-model", str(corpora / "tiny"), "--device", "cpu", "--output", "run"]
    common += ["--activation-checkpointing", "false"]  # the rows are short
    steps = ["--micro-batch", "1", "--tokens-per-step", str(4 * LENGTH), "--max-steps", str(STEPS), "--save-every", "5"]
    return [*common, *steps, *options]


def ours(node: Node) -> str:
    """Return the lines that our rank wrote, without the lines of torchrun."""
    return re.split(r"^(?:Traceback|[WE]\d{4} )", node.stderr, flags=re.M)[0]


@pytest.fixture(scope="module")
def whole(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Node]]:
    """An uninterrupted run of two nodes that share a folder."""
    folder = tmp_path_factory.mktemp("whole")
    given = words(corpora)
    return folder / "run", two_nodes([folder, folder], [given, given])


def test_the_record_names_every_rank_and_its_own_speed(whole: tuple[Path, list[Node]]) -> None:
    run, nodes = whole
    assert [node.code for node in nodes] == [0, 0], nodes
    assert [node.stdout.splitlines()[-1] for node in nodes] == ["run/training.json"] * 2
    record = json.loads((run / "training.json").read_text())
    assert [(one["rank"], one["device"][:3], one["steps"] > STEPS - 5) for one in record["ranks"]] == [
        (0, "CPU", True),
        (1, "CPU", True),
    ]
    for one in record["ranks"]:
        # A rank computes for only a part of a step: it also waits for the other rank and for the optimizer.
        assert 0 < one["step_seconds"] < record["result"]["seconds"] / STEPS
        assert 0 <= one["data_wait"] < 1
        assert one["tokens_per_second"] == pytest.approx(2 * LENGTH / one["step_seconds"], rel=0.1)
    assert "step 1/" in nodes[0].stderr
    assert "step 1/" not in nodes[1].stderr, "the first machine shows the progress"
    assert not list(run.glob(".rank-*"))


@pytest.mark.parametrize(("layout", "stop"), [("shared", "0 INT"), ("separate", "1 TERM")])
def test_a_resumed_run_on_two_machines_has_the_same_adapter(
    whole: tuple[Path, list[Node]], corpora: Path, tmp_path: Path, layout: str, stop: str
) -> None:
    folders = [tmp_path, tmp_path] if layout == "shared" else [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    given = words(corpora)
    stopped = two_nodes(folders, [given, given], stop)
    steps = set()
    for node in stopped:
        assert node.code != 0
        [line] = [line for line in node.stderr.splitlines() if line.startswith("E713 ")]
        steps.add(int(re.search(r"interrupted after step (\d+)", line)[1]))  # type: ignore[index]
    [step] = steps
    assert step < STEPS
    for folder in folders:
        newest = max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        names = {path.name for path in newest.iterdir()}
        assert (newest.name, names >= {"complete.json", "rng_state_0.pth", "rng_state_1.pth"}) == (
            f"checkpoint-{step}",
            True,
        )
    if layout == "separate":  # a new machine gets a copy, whose path differs
        shutil.rmtree(folders[1] / "run")
        refused = two_nodes(folders, [given, given])
        for node in refused:
            assert "E630 error: " in ours(node)
            assert "rank 0 has checkpoint-" in ours(node)
            assert "rank 1 has none" in ours(node)
        shutil.copytree(folders[0] / "run", folders[1] / "run", dirs_exist_ok=True)
    resumed = two_nodes(folders, [given, given])
    assert [node.code for node in resumed] == [0, 0], resumed
    assert f"starts          from checkpoint-{step}" in resumed[0].stderr
    for folder in folders:
        for name in ("adapter_model.safetensors", f"checkpoint-{STEPS}/optimizer.pt"):
            assert (folder / "run" / name).read_bytes() == (whole[0] / name).read_bytes()


def test_ranks_with_different_corpora_settings_or_models_do_not_start(corpora: Path, tmp_path: Path) -> None:
    nodes = two_nodes([tmp_path] * 2, [words(corpora), words(corpora, "--lora-r", "8", corpus="second")])
    keys = [json.loads(next((corpora / name / "manifests").glob("*.json")).read_text()) for name in ("first", "second")]
    for node in nodes:
        [line] = [line for line in node.stderr.splitlines() if line.startswith("E629 error: ")]
        for rank, manifest in enumerate(keys):
            assert re.search(rf"mine {manifest['key'][:12]} on rank {rank} \(", line)
            assert re.search(rf"{manifest['digest'][:16]} on rank {rank} \(", line)
        assert re.search(r"lora_r is 16 on rank 0 \(\S+\), 8 on rank 1 \(", line)
        assert "Traceback" not in ours(node)
        assert re.search(r"exitcode *: 65", node.stderr)
    assert not (tmp_path / "run").exists()


def test_a_fault_of_one_machine_is_reported_on_all(corpora: Path, tmp_path: Path) -> None:
    nodes = two_nodes([tmp_path] * 2, [words(corpora), words(corpora, "--lora-rr", "8")])
    for node in nodes:
        [line] = [line for line in node.stderr.splitlines() if line.startswith("E101 error: ")]
        assert line.startswith("E101 error: rank 1: unrecognized arguments: --lora-rr;")
        assert re.search(r"exitcode *: 64", node.stderr)
