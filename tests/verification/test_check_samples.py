"""`verify` compares every sample with the token files, where these exist.

Each damage keeps all other invariants and signs the manifest again, so that only this comparison can find it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from support.trees import IGNORED, agent_records, pack_trees

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.files import sha256_of, to_json
from packcorpus.tasks.storage.manifest import manifest_digest
from packcorpus.tasks.verification import check_samples
from packcorpus.tasks.verification import verify as verify_module
from packcorpus.tasks.verification.verify import verify

Rows = dict[str, np.ndarray]
KINDS: dict[str, dict[str, Any]] = {
    "conversation": {"loss_weight": "conversation", "validation": 0.2, "epochs": 2},
    "split": {"share": "all", "overlong": "split", "sequence_length": 128},
    "truncate": {"share": "all", "overlong": "truncate", "sequence_length": 128, "validation": 0.2},
    "copies": {"sources": [{"path": "chat.jsonl", "weight": 1.5}], "epochs": 2},
    "none": {"share": "none", "overlong": "split", "sequence_length": 128},
    "lists": {"share": "none", "padding": "none", "align": 8},
}


def samples_check(path: Path) -> str:
    return next(check.found for check in verify(path) if check.name == "samples")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_trees(tmp_path_factory.mktemp("made") / "project", agent_records(30))


@pytest.fixture
def trees(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent.parent, tmp_path / "project")
    return tmp_path / "project" / "manifests" / made.name


@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_are_compared(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_samples, "READ", 50)
    path = pack_trees(tmp_path, agent_records(30), **KINDS[kind])
    pieces = orjson.loads(path.read_bytes())["ledger"]["pieces"]["packed"]
    assert samples_check(path) == f"compared with the token files ({pieces:,} samples)"


def shared_token(rows: Rows) -> None:
    """Change a token that several samples begin with."""
    row, place = np.argwhere((rows["position_ids"] == 1) & (rows["end"] > 60))[0]
    rows["input_ids"][row, place] += 1 if rows["input_ids"][row, place] < 50 else -1


def other_labels(rows: Rows) -> None:
    """Train on the token before a trained one instead of the one after it."""
    is_trained = rows["labels"][0] != IGNORED
    place = np.flatnonzero(is_trained[1:-1] & is_trained[2:] & ~is_trained[:-2])[0] + 1
    assert rows["position_ids"][0, place - 2] == rows["position_ids"][0, place] - 2
    rows["labels"][0, place - 1] = rows["input_ids"][0, place - 1]
    rows["labels"][0, place] = IGNORED


@pytest.mark.parametrize(
    ("damage", "said"),
    [(shared_token, "differs from its token file: token 1 is "), (other_labels, "is trained on, there it is not")],
)
def test_a_sample_that_differs(
    damage: Callable[[Rows], None], said: str, trees: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = orjson.loads(trees.read_bytes())
    folder = trees.parent.parent / manifest["corpus"]
    shard = manifest["splits"]["train"]["shards"][0]
    with pa.OSFile(str(folder / shard["path"])) as file:
        table = pa.ipc.open_stream(file).read_all()
    rows = {name: np.array(table[name].to_pylist()) for name in table.schema.names}
    damage(rows)
    arrays = [
        pa.FixedSizeListArray.from_arrays(
            pa.array(rows[field.name].reshape(-1), field.type.value_type), type=field.type
        )
        for field in table.schema
    ]
    with pa.OSFile(str(folder / shard["path"]), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=table.schema))
    shard |= {"bytes": (folder / shard["path"]).stat().st_size, "sha256": sha256_of(folder / shard["path"])}
    manifest["digest"] = manifest_digest(manifest)
    for copy in (trees, folder / "manifest.json"):
        copy.write_bytes(to_json(manifest))
    with pytest.raises(DataError, match=r"row \d+: the sample of chat\.jsonl:\d+ differs") as caught:
        verify(trees)
    assert said in str(caught.value)
    assert f"delete {folder}" in str(caught.value)
    monkeypatch.setattr(verify_module, "check_samples", lambda *_: "")
    verify(trees)


def test_a_path_by_the_definition_of_end() -> None:
    """A last token must see exactly its sample, whatever the rows' own check says."""
    ids, ends = np.array([5, 6, 7, 8]), np.array([[4, 4, 4, 4]], np.int32)
    plan = {name: np.array(values) for name, values in {"row": [0, 0], "start": [0, 2], "taken": [2, 2]}.items()}
    plan |= {name: np.zeros(2, np.int32) for name in ("closed", "repeated", "shared", "first", "position")}
    with pytest.raises(check_samples._Different, match="its last token sees others"):
        check_samples._compare_paths(ids, ends, plan, check_samples.TokenFiles([]))


def test_without_token_files_nothing_is_compared(trees: Path) -> None:
    data = trees.parent.parent / "data"
    next((data / "tokens").glob("*/*.arrow")).unlink()
    assert samples_check(trees).startswith("not compared, because data/tokens/")
    shutil.rmtree(data / "plans")
    assert samples_check(trees) == "not compared, because the plan of the corpus is gone or damaged"
