"""Rows of every shape have the same conversations and keep every invariant.

The files are read in plain Python (tests/support/row_shapes.py), one place after another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.inspected import page_of, shown
from support.packed_rows import folder_of, pack_small, shards_of
from support.row_shapes import Shaped, check_corpus, read_corpus
from support.small_corpus import conversations, make_recipe, make_shards_small, pack_corpus

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.inspection.rows import row_of_split, shard_figures
from packcorpus.tasks.inspection.search import find_conversations
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

SHAPES: list[dict[str, Any]] = [{"align": 16}, {"padding": "none"}, {"align": 16, "padding": "none"}]


def pack(folder: Path, **given: Any) -> Path:
    return pack_corpus(make_recipe(folder, conversations(25, seed=3, longest=18), max_rejects=1, **given))


def pack_shards(folder: Path, **shape: Any) -> Path:
    """Pack a corpus of several shards."""
    with pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, shard=2000)
        recipe = make_recipe(folder, conversations(60), epochs=2, **shape)
        path = pack_corpus(recipe)
        assert recipe.shards["train"] > 1
    return path


@pytest.fixture(scope="module")
def plain_shards(tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    return read_corpus(pack_shards(tmp_path_factory.mktemp("shards")))


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_with_several_shards(shape: dict[str, Any], plain_shards: Shaped, tmp_path: Path) -> None:
    shaped = pack_shards(tmp_path, **shape)
    verify(shaped)
    found, usual = read_corpus(shaped), plain_shards
    check_corpus(found)
    assert found.contents() == usual.contents()
    assert "align" in shape or found.index == usual.index, "without padding, every conversation is where it was"
    assert (usual.manifest.format_version, found.manifest.format_version) == ("3.0", "3.1")


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("aligned"), align=16, epochs=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("plain"), epochs=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_corpus_of_another_shape_is_rebuilt_and_repaired(shape: dict[str, Any], tmp_path: Path) -> None:
    shaped = pack(tmp_path, epochs=2, **shape)
    assert rebuild(shaped).endswith(": identical")
    shard = shards_of(shaped)[0]
    before = shard.read_bytes()
    shard.unlink()
    assert [file.path for file in repair(shaped)] == [shard]
    assert shard.read_bytes() == before
    verify(shaped)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_shapes_are_inspected_and_searched(shape: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    aligned = pack_small(tmp_path, epochs=2, **shape)
    corpus = read_corpus(aligned)
    number, row = next((n, row) for n, row in enumerate(corpus.rows["train"]) if len(row.entries) > 1)
    held = row_of_split(aligned, number, "train")
    assert [(piece["start"], piece["length"], piece["trained"], piece["record"]) for piece in held.conversations] == [
        (entry["start"], entry["length"], entry["trained"], entry["record"]) for entry in row.entries
    ]
    assert held.columns == row.columns
    assert held.tokens + held.padding == len(row.columns["input_ids"])
    figures = shard_figures(shards_of(aligned)[0])
    own = corpus.rows["train"][: corpus.manifest.splits["train"].shards[0].rows]
    assert figures.tokens == sum(entry["length"] for row in own for entry in row.entries)
    assert figures.conversations == sum(len(row.entries) for row in own)
    words = held.conversations[1]["spans"][-2].text
    wanted = [entry for rows in ("train", "validation") for row in corpus.rows[rows] for entry in row.entries]
    found = find_conversations(aligned, words, len(wanted)).conversations
    assert row.entries[1]["record"] in [each["record"] for each in found]
    assert {each["record"] for each in found} == {
        each["record"] for each in find_conversations(plain, words, len(wanted)).conversations
    }
    changes = {change.name: change.after for change in compare(plain, aligned).settings}
    assert changes == shape | {"format_version": "3.1"}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_dry_run_the_report_and_the_card_know_the_shape(shape: dict[str, Any], tmp_path: Path) -> None:
    given = shape | ({"align": 32} if "align" in shape else {})
    recipe = make_recipe(tmp_path, conversations(30), max_rejects=1, **given)
    manifest = load_manifest(pack_corpus(recipe))
    found = predict(recipe.config, tmp_path, tmp_path)
    assert found.rows == {name: split.rows for name, split in manifest.splits.items()}
    assert found.ledger.tokens.padding == manifest.ledger.tokens.padding
    size = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    assert 0.7 * size < found.bytes_on_disk["shards"] < size * 1.1
    page = page_of(recipe.published, tmp_path / "report.html")
    card = (folder_of(recipe.published) / "README.md").read_text()
    columns = set(read_corpus(recipe.published).rows["train"][0].columns)
    assert set(re.findall(r"^\| `(\w+)` \| (?:int|list)", card, re.M)) == columns
    assert ("Conversations start at multiples of 32" in card) == ("align" in shape)
    assert ("their lengths differ (padding: none)" in page) == ("padding" in shape)
    if "align" not in shape:
        return
    assert f"{manifest.ledger.tokens.alignment:,}" in page
    assert "padding that aligns conversations" in page
    assert re.search(rf"of align: 32 +{manifest.ledger.tokens.alignment:,}", shown(recipe.published))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sequence_length": 100, "align": 16}, r"100 is not a multiple of align: 16; .* are 96 and 112"),
        ({"sequence_length": 12, "align": 16}, r"12 is not a multiple of align: 16; .* is 16"),
        ({"align": 16, "packing": False}, "align: 16 requires packing: true"),
        ({"padding": "none", "packing": False}, "padding: none requires packing: true"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        make_recipe(tmp_path, conversations(2), **given)


def test_the_alignment_in_the_ledger_is_checked(aligned: Path) -> None:
    """`verify` recounts the alignment, so a wrong number in the ledger is an error."""
    tokens = load_manifest(aligned).ledger.tokens
    assert tokens.alignment
    ledger = load_manifest(aligned).ledger.model_copy(
        update={"tokens": tokens.model_copy(update={"alignment": tokens.padding + 1})}
    )
    with pytest.raises(DataError, match="tokens of alignment"):
        ledger.check(tokens.packed + tokens.padding)
