"""Each view prints the text in __snapshots__.

If the wording was changed, run `pytest tests/cli/test_snapshots.py --snapshot-update` and read the diff. The texts do
not depend on the terminal or the machine: the width is fixed, there are no colors unless requested, and measured
figures are replaced.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli.hostile_corpus import records
from support.inspected import rendered, shown
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from syrupy.assertion import SnapshotAssertion
from typer.testing import CliRunner

from packcorpus.tasks.cli import check_view, corpus_view
from packcorpus.tasks.cli.app import app
from packcorpus.tasks.config import load_config
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.inspection.manifests import list_manifests
from packcorpus.tasks.verification.verify import verify

COMMANDS = [
    "", "init", "check", "pack", "train", "inspect", "list", "diff", "report", "export", "verify", "repair", "clean",
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack three corpora of the same conversations.

    One is packed, one has split conversations, and one is not packed. A fourth manifest cannot be read.
    """
    root = tmp_path_factory.mktemp("project")
    cut = {"overlong": "truncate"}
    for settings in (cut, {"name": "split"}, {"name": "plain", "packing": False}):
        pack_corpus(make_recipe(root, records(), max_rejects=0.1, validation=0.1, **settings))
    write_project(root, records(), max_rejects=0.1, validation=0.1, **cut)
    (root / "manifests" / "broken.json").write_text("{}")
    return root


@pytest.fixture
def manifests(project: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return the manifests by name, relative to the working directory.

    Thus no path depends on the machine.
    """
    monkeypatch.chdir(project)
    return {path.stem.partition("-")[0]: path for path in Path("manifests").glob("*.json")}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "train"])
def test_help(command: str, snapshot: SnapshotAssertion) -> None:
    """The help of each command equals its snapshot.

    `train` is left out, because the training program prints its help.
    """
    result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="packcorpus", terminal_width=100)
    assert result.exit_code == 0
    assert result.stdout == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_overview(manifests: dict[str, Path], width: int, snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["small"], width) == snapshot


def test_overview_of_a_corpus_that_is_not_packed(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["plain"]) == snapshot


def test_overview_of_rows_without_padding(tmp_path: Path) -> None:
    manifest = pack_corpus(make_recipe(tmp_path, conversations(20), padding="none"))
    assert re.search(r"efficiency +[\d.]+ %  of rows × [\d,]+ positions hold a token\n", shown(manifest, 120))


@pytest.mark.parametrize("name", ["small", "plain"])
def test_row(manifests: dict[str, Path], name: str, snapshot: SnapshotAssertion) -> None:
    assert shown(manifests[name], row=0, split="validation") == snapshot


def test_row_in_colors(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["small"], width=60, terminal=True, row=0, split="validation") == snapshot


def test_row_with_token_ids(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["small"], row=0, split="validation", ids=True) == snapshot


def test_conversation_in_pieces(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["split"], at="chat.jsonl:6") == snapshot


@pytest.mark.parametrize("name", ["small", "plain"])
def test_search(manifests: dict[str, Path], name: str, snapshot: SnapshotAssertion) -> None:
    pages = [shown(manifests[name], search=text, limit=2) for text in ("plus 12", "is", "pineapple")]
    assert "\n".join(pages) == snapshot


def test_rejects(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    assert shown(manifests["small"], rejects=True) == snapshot


def test_shard(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    pages = [shown(next(Path("data/corpora").glob(f"{name}-*/validation-*"))) for name in ("small", "plain")]
    assert "\n".join(pages) == snapshot


def test_source(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    source = Path("chat.jsonl")
    pages = [shown(source), shown(source, line=8), shown(source, search="plus 12"), shown(source, search="is", limit=1)]
    assert "\n".join(pages) == snapshot


def test_config(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    other = Path("other.yaml")
    other.write_text(Path("corpus.yaml").read_text() + "seed: 7\n")
    assert shown(Path("corpus.yaml")) + "\n" + shown(other) == snapshot


def test_list(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    run = next(Path("data/corpora").glob("small-*/run.json"))
    run.write_text(json.dumps(json.loads(run.read_text()) | {"finished": "2026-03-04T05:06:07+00:00"}))
    assert rendered(list_manifests(), corpus_view.show_list) == snapshot


def test_checks(manifests: dict[str, Path], snapshot: SnapshotAssertion) -> None:
    page = rendered({"manifest": manifests["small"], "checks": verify(manifests["small"])}, corpus_view.show_checks)
    assert re.sub(r"[\d,]+ bytes", "N bytes", page) == snapshot, "run.json has times in it"


def test_difference(manifests: dict[str, Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    assert rendered(compare(manifests["small"], manifests["split"]), corpus_view.show_difference) == snapshot


def test_difference_of_conversations(manifests: dict[str, Path], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    other = [*records()[2:], *conversations(3), {"messages": [{"role": "user", "content": "no answer"}]}]
    after = pack_corpus(make_recipe(tmp_path, other, max_rejects=0.5, validation=0.1, min_turns=2))
    difference = replace(compare(manifests["small"], after), after=Path("after.json"))
    assert rendered(difference, corpus_view.show_difference) == snapshot


@pytest.mark.parametrize("width", [80, 120])
def test_dry_run(manifests: dict[str, Path], width: int, snapshot: SnapshotAssertion) -> None:
    config = Path("corpus.yaml")
    run = predict(load_config(config), Path(), Path(), 2)
    # These figures are estimated from the speed of this machine.
    run = replace(run, config=config, seconds=65.0, peak_memory_bytes=300_000_000)
    assert rendered(run, check_view.show_prediction, width) == snapshot


def test_dry_run_of_several_lengths(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(40), sequence_length=[96, 192], validation=0.2)
    run = predict(load_config(config), tmp_path, tmp_path, 1)
    printed = rendered(run, check_view.show_prediction, 100)
    assert re.search(r"^    train-96 .*\n    train-192 .*\n    validation .*\n    validation-96 ", printed, re.M), (
        printed
    )


def test_dry_run_of_a_mixture_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = [{"path": "chat.jsonl", "weight": 2}, {"path": "more.jsonl", "limit": 5, "weight": 0.5}]
    config = write_project(Path("p"), [*conversations(30), {"messages": 1}], sources=sources, epochs=3, min_turns=3)
    Path("p/more.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in conversations(12, seed=1, longest=200)))
    run = predict(load_config(config), Path("p"), Path("p"), 1, batches=[8])
    run = replace(run, config=config, seconds=4.21, peak_memory_bytes=300_000_000)
    assert rendered(run, check_view.show_prediction, 100) == snapshot
