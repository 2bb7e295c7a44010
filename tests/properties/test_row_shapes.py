"""Every shape of rows holds the same conversations, and keeps every invariant of a row.

The files are read in plain Python (tests/support/row_shapes.py), one place after another.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inspected import shown
from support.packed_rows import folder_of, pack_small, shards_of
from support.profiles import examples
from support.row_shapes import IGNORED, Row, Shaped, read_corpus
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core.errors import DataError, UsageError
from tasks.dry_run.dry_run import predict
from tasks.inspection.diff import compare
from tasks.inspection.kinds import shard_figures
from tasks.inspection.rows import row_of_split
from tasks.inspection.search import find_conversations
from tasks.packing.groups import dealt
from tasks.report.report import write_report
from tasks.storage.manifest import load_manifest
from tasks.verification.rebuild import rebuild
from tasks.verification.repair import repair
from tasks.verification.verify import verify

LENGTH = 128
COLUMNS = ("input_ids", "labels", "position_ids")
SHAPES: list[dict[str, Any]] = [{"align": 16}, {"padding": "none"}, {"align": 16, "padding": "none"}]


@st.composite
def settings_of_corpora(draw: st.DrawFn) -> dict[str, Any]:
    """Draw settings that change which pieces there are, or how they are placed."""
    return {
        "overlong": draw(st.sampled_from(["truncate", "split", "drop"])),
        "sequence_length": draw(st.sampled_from([64, LENGTH])),
        "validation": draw(st.sampled_from([0.0, 0.3])),
        "epochs": draw(st.sampled_from([1, 1, 2])),
        "seed": draw(st.integers(0, 9)),
    }


def pack(folder: Path, **given: Any) -> Path:
    return pack_corpus(make_recipe(folder, conversations(25, seed=3, longest=18), max_rejects=1, **given))


def check_row(row: Row, align: int, pad: int, length: int) -> int:
    """Check a row place by place; return the padding that ends at multiples of `align` after its pieces."""
    columns, at, aligned = row.columns, 0, 0
    size = len(columns["input_ids"])
    assert {len(columns[name]) for name in COLUMNS} == {size}
    for number, entry in enumerate(row.entries):
        assert entry["start"] == at, "a piece starts where the one before ends, rounded up"
        assert at % align == 0
        end = at + entry["length"]
        assert columns["position_ids"][at:end] == list(range(entry["length"]))
        assert columns["labels"][at] == IGNORED
        assert sum(label != IGNORED for label in columns["labels"][at:end]) == entry["trained"]
        following = -(-end // align) * align
        aligned += following - end
        is_last = number == len(row.entries) - 1
        after = slice(end, size if is_last else following)
        gap = columns["input_ids"][after]
        assert gap == [pad] * len(gap)
        assert columns["labels"][after] == [IGNORED] * len(gap)
        assert columns["position_ids"][after] == list(range(len(gap))), "each gap is a run of its own"
        if "attention_mask" in columns:
            assert columns["attention_mask"][at:end] == [1] * entry["length"]
            assert columns["attention_mask"][after] == [0] * len(gap)
        at = following
    assert at <= length
    if "attention_mask" not in columns:
        assert size == at, "a row without padding ends where its last piece does"
        assert columns["seq_lens"] == [entry["length"] for entry in row.entries]
        assert columns["max_seqlen"] == max(columns["seq_lens"])
    else:
        assert size == length
    return aligned


def check_corpus(found: Shaped, align: int) -> None:
    manifest = found.manifest
    tokens, rows = manifest.ledger.tokens, [row for own in found.rows.values() for row in own]
    alignment = sum(check_row(row, align, manifest.tokenizer.pad_token_id, manifest.sequence_length) for row in rows)
    packed = sum(entry["length"] for row in rows for entry in row.entries)
    places = sum(len(row.columns["input_ids"]) for row in rows)
    assert tokens.packed == packed
    assert tokens.packed + tokens.padding == places
    assert (tokens.alignment or 0) == alignment
    assert (tokens.alignment is None) == (align == 1)
    if "padding" in manifest.config:
        assert tokens.padding == alignment
    assert manifest.packing_metadata.rows == len(rows) >= manifest.packing_metadata.lower_bound_rows


@settings(max_examples=examples(24), deadline=None)
@given(settings_of_corpora(), st.sampled_from([1, 2, 8, 32, 64]), st.sampled_from(["row", "none"]))
def test_every_shape_keeps_every_conversation_and_invariant(given: dict[str, Any], align: int, padding: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        plain, shaped = (pack(Path(name), **given, **extra) for extra in ({}, {"align": align, "padding": padding}))
        verify(shaped)
        usual, found = read_corpus(plain), read_corpus(shaped)
        check_corpus(usual, 1)
        check_corpus(found, align)
        assert found.contents() == usual.contents()
        is_standard = (align, padding) == (1, "row")
        assert (shaped == plain) == is_standard
        assert found.manifest.format_version == ("3.0" if is_standard else "3.1")
        if align == 1:
            assert found.index == usual.index, "without padding, every conversation is where it was"
        assert found.manifest.packing_metadata.rows >= usual.manifest.packing_metadata.lower_bound_rows


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_with_groups(shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.recipe.SOURCE_BYTES_PER_SHARD", 2000)
    monkeypatch.setattr("tasks.recipe.BYTES_PER_CONVERSATION", 100)
    given = {"plan_group": 9, "plan_chunk": 4, "epochs": 2}
    plain = pack_corpus(make_recipe(tmp_path, conversations(60), **given))
    recipe = make_recipe(tmp_path, conversations(60), **given, **shape)
    shaped = pack_corpus(recipe)
    assert recipe.most_groups > 1
    assert (recipe.plan_folder / dealt.DEAL).is_file()
    verify(shaped)
    found = read_corpus(shaped)
    check_corpus(found, shape.get("align", 1))
    assert found.contents() == read_corpus(plain).contents()


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("aligned"), align=16, epochs=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_corpus_of_another_shape_is_rebuilt_and_repaired(shape: dict[str, Any], tmp_path: Path) -> None:
    shaped = pack(tmp_path, epochs=2, **shape)
    assert rebuild(shaped).endswith("the same bytes")
    shard = shards_of(shaped)[0]
    before = shard.read_bytes()
    shard.unlink()
    assert [file.path for file in repair(shaped)] == [shard]
    assert shard.read_bytes() == before
    verify(shaped)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_other_shapes_are_inspected_and_searched(shape: dict[str, Any], tmp_path: Path) -> None:
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
    plain = pack_small(tmp_path, epochs=2)
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
    assert found.tokens["padding"] == manifest.ledger.tokens.padding
    size = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    assert 0.7 * size < found.disk["shards"] < size * 1.1
    page = write_report(recipe.published, tmp_path / "report.html")[0].read_text()
    card = (folder_of(recipe.published) / "README.md").read_text()
    columns = set(read_corpus(recipe.published).rows["train"][0].columns)
    assert set(re.findall(r"^\| `(\w+)` \| (?:int|list)", card, re.M)) == columns
    assert ("Conversations start at multiples of 32" in card) == ("align" in shape)
    assert ("They have no padding at their end" in page) == ("padding" in shape)
    if "align" not in shape:
        return
    assert f"{manifest.ledger.tokens.alignment:,}" in page
    assert "padding that aligns conversations" in page
    assert re.search(rf"of align: 32 +{manifest.ledger.tokens.alignment:,}", shown(recipe.published))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sequence_length": 100, "align": 16}, r"100 is not a multiple of align: 16; .* are 96 and 112"),
        ({"sequence_length": 12, "align": 16}, r"12 is not a multiple of align: 16; .* are 16"),
        ({"align": 16, "packing": False}, "align: 16 requires packing: true"),
        ({"padding": "none", "packing": False}, "padding: none requires packing: true"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        make_recipe(tmp_path, conversations(2), **given)


def test_a_group_of_an_aligned_corpus_is_in_the_ledger_once(aligned: Path) -> None:
    """What `verify` counts, it compares: another count of alignment is an error."""
    tokens = load_manifest(aligned).ledger.tokens
    assert tokens.alignment
    ledger = load_manifest(aligned).ledger.model_copy(
        update={"tokens": tokens.model_copy(update={"alignment": tokens.padding + 1})}
    )
    with pytest.raises(DataError, match="tokens of alignment"):
        ledger.check(tokens.packed + tokens.padding)
