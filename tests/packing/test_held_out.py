"""Which conversations are held out: sources with a split.

Everything is recounted from the records of the sources and the index.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mixtures import FEW, MANY, TWICE, project
from support.profiles import examples
from support.small_corpus import pack_corpus

from packcorpus.tasks.core.errors import DataError, PackError, UsageError
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.packing import plan
from packcorpus.tasks.packing.held_out import HeldOut
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

TEST = [{"path": "many.jsonl"}, {"path": "few.jsonl", "split": "validation"}]


def packed(recipe: Recipe) -> tuple[Manifest, list[dict[str, Any]]]:
    """Pack a corpus; return the manifest, checked by `verify`, and the index."""
    path = pack_corpus(recipe)
    verify(path)
    with pa.memory_map(str(recipe.corpus_folder / "index.arrow")) as file:
        return load_manifest(path), pa.ipc.open_stream(file).read_all().to_pylist()


def sides(index: list[dict[str, Any]]) -> dict[int, Counter[str]]:
    """Count the places of each source by kind of split."""
    found: dict[int, Counter[str]] = {}
    for entry in index:
        if entry["split"]:
            found.setdefault(entry["source"], Counter())[entry["split"].partition("-")[0]] += 1
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": False},
        {"sequence_length": [64, 256]},
        {"epochs": 3},
        {"duplicates": "drop", "overlong": "truncate", "max_turns": 4},
        {"part_size": 1 << 10, "neighbors": "similar"},
    ],
    ids=str,
)
def test_a_source_for_validation_is_held_out_and_nothing_else(settings: dict[str, Any], tmp_path: Path) -> None:
    manifest, index = packed(project(tmp_path, TEST, **settings))
    found = sides(index)
    assert found[1].keys() == {"validation"}
    assert "validation" not in found[0]
    assert [source.split for source in manifest.sources] == ["", "validation"]
    assert manifest.splits[next(name for name in manifest.splits if name.startswith("validation"))].shards
    assert rebuild(manifest_path(tmp_path))


def manifest_path(root: Path) -> Path:
    [path] = (root / "manifests").glob("*.json")
    return path


@pytest.mark.parametrize("weighting", ["repeat", "proportions", "token_share"])
def test_it_is_packed_once_and_has_no_share(weighting: str, tmp_path: Path) -> None:
    sources = [
        {"path": "few.jsonl", "weight": 3},
        {"path": "twice.jsonl", "weight": 1},
        {"path": "many.jsonl", "split": "validation"},
    ]
    recipe = project(tmp_path, sources, weighting=weighting)
    manifest, index = packed(recipe)
    held = [(entry["record"], entry["first"]) for entry in index if entry["source"] == 2 and entry["split"]]
    assert len(held) == len(set(held)), "each piece is packed once"
    assert len({record for record, _ in held}) == len(MANY)
    few, twice, many = manifest.mixture
    assert (many.copies, many.tokens_percent, many.split) == (0, 0.0, "validation")
    assert round(few.tokens_percent + twice.tokens_percent) == 100
    alone, _ = packed(project(tmp_path / "alone", sources[:2], weighting=weighting))
    assert [entry.copies for entry in alone.mixture] == [few.copies, twice.copies]
    run = predict(recipe.config, recipe.folder, tmp_path)
    assert run.rows == {name: split.rows for name, split in manifest.splits.items()}
    assert run.mixture == manifest.mixture
    assert [source.split for source in run.sources] == ["", "", "validation"]


def test_equal_contents_of_other_sources_follow(tmp_path: Path) -> None:
    """Five of FEW are also in twice.jsonl: they are nowhere trained on."""
    sources = [{"path": "few.jsonl"}, {"path": "many.jsonl"}, {"path": "twice.jsonl", "split": "validation"}]
    _, index = packed(project(tmp_path, sources))
    assert [e["record"] for e in index if e["source"] == 0 and e["split"] == "validation"] == [1, 2, 3, 4, 5]
    _, index = packed(project(tmp_path / "once", sources, duplicates="drop"))
    dropped = [(entry["source"], entry["record"]) for entry in index if entry["dropped"] == "duplicate"]
    assert dropped == [(0, number) for number in range(1, 6)], "those of the source for validation stay"


def test_a_source_for_training_is_kept_out(tmp_path: Path) -> None:
    sources = [{"path": "many.jsonl", "split": "train"}, {"path": "few.jsonl"}]
    _, index = packed(project(tmp_path, sources, validation=0.5))
    found = sides(index)
    assert "validation" not in found[0]
    assert found[1].keys() == {"train", "validation"}
    sources = [{"path": "few.jsonl", "split": "train"}, {"path": "twice.jsonl"}, {"path": "many.jsonl"}]
    _, index = packed(project(tmp_path / "both", sources, validation=0.9))
    assert sides(index)[1] == {"train": 5}, "equal contents of other sources follow"


def test_a_source_for_training_with_a_content_of_one_for_validation(tmp_path: Path) -> None:
    sources = [{"path": "twice.jsonl", "split": "train"}, {"path": "few.jsonl", "split": "validation"}]
    message = r"twice\.jsonl:1: its source has split: train, but the same content is held out as few\.jsonl:5"
    with pytest.raises(DataError, match=message):
        packed(project(tmp_path, sources))
    with pytest.raises(DataError, match="no conversation is left to pack"):
        packed(project(tmp_path / "drop", sources, duplicates="drop"))
    _, index = packed(project(tmp_path / "more", [*sources, {"path": "many.jsonl"}], duplicates="drop"))
    assert sides(index)[1] == {"validation": len(FEW)}
    assert 0 not in sides(index)
    assert len(TWICE) == 5


def test_the_corpus_has_another_key_and_the_same_token_files(tmp_path: Path) -> None:
    plain = project(tmp_path, [{"path": "few.jsonl"}, {"path": "many.jsonl"}])
    before = pack_corpus(plain)
    held = project(tmp_path, TEST[::-1])
    after = pack_corpus(held)
    assert plain.token_keys == held.token_keys
    assert plain.corpus_key != held.corpus_key
    assert ("few.jsonl split", None, "validation") in [
        (change.name, change.before, change.after) for change in compare(before, after).settings
    ]


@pytest.mark.parametrize(
    ("sources", "given", "message"),
    [
        ([{"path": "few.jsonl", "split": "validation"}], {}, "all have split: validation, so nothing is trained on"),
        ([TEST[1], {"path": "many.jsonl", "split": "train"}], {"validation": 0.1}, "validation: 0.1 has no source"),
        ([TEST[0], TEST[1] | {"weight": 2}], {}, r"sources\[1\]\.weight: 2 has no effect"),
        ([TEST[0], TEST[1] | {"split": "test"}], {}, "split"),
        ([{"path": "[fm]*.jsonl"}, TEST[1]], {}, "few.jsonl is the same file as few.jsonl, but two entries of sources"),
    ],
    ids=range(5),
)
def test_settings_without_a_meaning(
    sources: list[dict[str, Any]], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        project(tmp_path, sources, **given)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sources_with_splits(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = ["few.jsonl", "many.jsonl", "twice.jsonl"]
    splits = [data.draw(st.sampled_from([None, None, "train", "validation"])) for _ in names]
    given = {
        "validation": data.draw(st.sampled_from([0, 0.3])),
        "duplicates": data.draw(st.sampled_from(["keep", "drop"])),
    }
    folder = tmp_path_factory.mktemp("splits")
    try:
        recipe = project(
            folder, [{"path": n} | ({"split": s} if s else {}) for n, s in zip(names, splits, strict=True)], **given
        )
        _, index = packed(recipe)
    except PackError as error:
        assert error.reason in ("bad_setting", "both_splits", "nothing_to_pack")  # noqa: PT017 - or no error
        return
    said = [
        [
            "\0".join(turn["content"] for turn in json.loads(line)["messages"])
            for line in (folder / n).read_text().splitlines()
        ]
        if n != "twice.jsonl"
        else [
            "\0".join(turn["value"] for turn in json.loads(line)["conversations"])
            for line in (folder / n).read_text().splitlines()
        ]
        for n in names
    ]
    in_split: dict[str, set[str]] = {"train": set(), "validation": set()}
    for entry in index:
        if entry["split"]:
            assert splits[entry["source"]] in (None, entry["split"])
            in_split[entry["split"]].add(said[entry["source"]][entry["record"] - 1])
    assert not in_split["train"] & in_split["validation"]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_verify_recounts_the_split_of_a_source(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_others(tokens: TokenColumns, recipe: Recipe) -> HeldOut:
        return HeldOut(np.arange(tokens.edges[-1]) < len(FEW) + len(MANY) - 1)

    monkeypatch.setattr(plan, "hold_out", choose_others)
    monkeypatch.setattr(plan, "check_sides", lambda *_: None)
    sources = [{"path": "many.jsonl"}, {"path": "few.jsonl", "split": split}]
    with pytest.raises(DataError, match=f"few.jsonl:{1 if split == 'train' else 30} is not in {split}, the split of"):
        packed(project(tmp_path, sources, validation=0.5))
