"""Groups: each is planned by itself, all together are the corpus, and each is a sample of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks import recipe as recipe_module
from tasks.config import Config
from tasks.core.errors import DataError
from tasks.inspection.diff import compare
from tasks.inspection.sources import corpora_of
from tasks.packing import bin_packing, filters, mixture
from tasks.packing import pieces as pieces_module
from tasks.packing.groups import ONE_GROUP, Groups, deal, group_pieces, shards_of
from tasks.packing.pieces import Accepted, Pieces
from tasks.packing.placement import pack_group, place, remember, repack
from tasks.packing.row_companions import Companions
from tasks.recipe import Recipe, resolve
from tasks.sources.model import Source
from tasks.storage.keys import ONE_PLAN
from tasks.storage.manifest import Manifest, load_manifest
from tasks.verification.rebuild import rebuild
from tasks.verification.repair import repair
from tasks.verification.verify import verify


def config(**values: Any) -> Config:
    return Config(sources=[Source(path="x")], **values)


# -- dealing -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_every_group_gets_its_share_of_every_stretch_of_the_corpus(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 40))
    chunks = data.draw(st.integers(1, 400))
    groups = data.draw(st.integers(1, min(shards, chunks)))
    dealt = deal(chunks, shards, groups, data.draw(st.integers(0, 9)), 0)
    assert dealt.dtype == np.uint16
    assert len(dealt) == chunks
    assert set(dealt.tolist()) == set(range(groups))
    assert [shard for group in range(groups) for shard in shards_of(group, groups, shards)] == list(range(shards))
    for group in range(groups):
        own, share = len(shards_of(group, groups, shards)), np.cumsum(dealt == group)
        assert abs(share[-1] - chunks * own / shards) < 2, "in proportion to its shards"
        expected = share[-1] / chunks * np.arange(1, chunks + 1)
        # One stretch of the group itself, and one of every other group, may be cut.
        assert (abs(share - expected) <= 1 + groups * share[-1] / chunks + 1e-6).all()


def test_chunks_are_dealt_by_the_seed_and_the_same_for_ever() -> None:
    dealt = [deal(1000, 30, 7, seed, stream) for seed, stream in ((1, 0), (1, 1), (2, 0))]
    assert not any((dealt[0] == other).mean() > 0.3 for other in dealt[1:])
    lengths = np.array([(37 * i * i + 11 * i) % 29 + 3 for i in range(16)], np.int32)
    packed = [pack_group(lengths, config(sequence_length=32), "train", epoch, 3).row for epoch in (1, 2)]
    digests = [hashlib.sha256(values.astype("<i4").tobytes()).hexdigest()[:16] for values in (dealt[0], *packed)]
    assert digests == ["44c9c595ae0252c2", "f632c5772f4c25a2", "47cf2ae4df0cc4b6"], (
        "the groups changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then these digests"
    )


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Pieces, np.ndarray, np.ndarray, Config, dict[str, int], int]:
    """Pieces with further copies and cut conversations, their lengths, and what groups depend on."""
    count, validation = draw(st.integers(1, 60)), draw(st.booleans())
    held_out = np.array([validation and draw(st.booleans()) for _ in range(count)], bool)
    copies = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.uint16)
    copies[held_out] = copies[held_out].clip(max=1)
    cut = draw(st.lists(st.integers(0, count - 1), max_size=4))
    cut_of = np.sort(np.array(cut, np.int32))
    # A cut conversation has as many pieces as it has cuts; the others are one piece.
    whole = np.setdiff1d(np.arange(count), cut_of)
    owner = np.concatenate([whole, cut_of])
    number = np.concatenate([whole, count + np.arange(len(cut_of))])
    order = np.lexsort((number, owner))
    passes = [number[order][copies[owner[order]] > n] for n in range(3)]
    accepted = Accepted(
        np.array([0, count]), np.full(count, 9, np.int32), np.zeros(count, bool), held_out, np.zeros(count, np.uint8)
    )
    cuts = np.array([[0, 4, 1, 1]] * len(cut_of), np.int32).reshape(-1, 4)
    found = Pieces(accepted, np.concatenate(passes).astype(np.int32), len(passes[0]), cut_of, cuts, copies)
    lengths = np.array(draw(st.lists(st.integers(1, 16), min_size=len(found), max_size=len(found))), np.int32)
    shards = {"train": draw(st.integers(1, 9)), "validation": draw(st.integers(1, 3))}
    made = config(
        sequence_length=16, plan_group=draw(st.integers(1, 30)), plan_chunk=draw(st.integers(1, 9)), seed=5,
        packing=draw(st.booleans()),
    )  # fmt: skip
    return found, found.held_out(), lengths, made, shards, draw(st.integers(1, 9))


@settings(max_examples=examples(300), deadline=None)
@given(grouped())
def test_groups_part_the_pieces_of_each_split(
    case: tuple[Pieces, np.ndarray, np.ndarray, Config, dict[str, int], int],
) -> None:
    pieces, held_out, _, made, shards, most = case
    found = group_pieces(pieces, held_out, made, shards, most)
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        groups, count = found[split], int(chosen.sum())
        assert 1 <= groups.count <= max(1, min(most, shards[split], -(-count // made.plan_group)))
        if groups.count == 1:
            assert groups.of is None
            continue
        assert groups.of is not None
        assert len(groups.of) == count
        members = [groups.members(group) for group in range(groups.count)]
        assert all(len(own) for own in members), "a group without pieces"
        assert sorted(np.concatenate(members).tolist()) == list(range(count))
        conversation = pieces.conversations(np.flatnonzero(chosen))
        assert all((own[:-1] < own[1:]).all() for own in members), "the pieces of a group are in the order of all"
        together: dict[int, set[int]] = {}
        for own, group in zip(conversation.tolist(), groups.of.tolist(), strict=True):
            together.setdefault(own, set()).add(group)
        assert all(len(own) == 1 for own in together.values()), "copies of a conversation are in two groups"
        if not len(pieces.cut_of):
            firsts = groups.of[: int((~held_out if split == "train" else held_out)[: pieces.once].sum())]
            inside = [firsts[top : top + made.plan_chunk] for top in range(0, len(firsts), made.plan_chunk)]
            assert all(len(set(chunk.tolist())) == 1 for chunk in inside), "a chunk is divided"


# -- placing -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(grouped())
def test_each_group_fills_its_own_shards_and_depends_on_nothing_else(
    case: tuple[Pieces, np.ndarray, np.ndarray, Config, dict[str, int], int],
) -> None:
    pieces, held_out, lengths, made, shards, most = case
    groups = group_pieces(pieces, held_out, made, shards, most)
    placed = place(lengths, held_out, groups, made, shards)
    assert placed.row.dtype == placed.start.dtype == np.int32
    assert len(placed.edges) == sum(shards.values()) + 1
    assert placed.rows == placed.edges[-1] == len(set(placed.row.tolist()))
    shard = placed.shard(slice(None))
    assert ((shard >= shards["train"]) == held_out).all()
    first = 0
    for number, (split, chosen) in enumerate((("train", ~held_out), ("validation", held_out))):
        own, (bound, _) = groups[split], placed.lower_bounds[number]
        if made.packing:
            counts = bin_packing.histogram(lengths[chosen], made.sequence_length)
            assert bound == bin_packing.lower_bound(counts, made.sequence_length)[0], "the bound is that of the whole"
        for group in range(own.count):
            inside = shards_of(group, own.count, shards[split])
            members = np.flatnonzero(chosen)[own.members(group)]
            assert set(shard[members].tolist()) <= {first + number for number in inside}
            edges = placed.edges[first + inside.start : first + inside.stop + 1]
            assert np.diff(edges).max() - np.diff(edges).min() <= 1, "its rows are dealt evenly"
            alone = pack_group(lengths[members], made, split, 1, group)
            assert alone.rows == edges[-1] - edges[0]
            assert (alone.row + edges[0] == placed.row[members]).all()
            assert (alone.start == placed.start[members]).all()
        first += shards[split]


@settings(max_examples=examples(100), deadline=None)
@given(grouped())
def test_an_epoch_keeps_the_groups(
    case: tuple[Pieces, np.ndarray, np.ndarray, Config, dict[str, int], int],
) -> None:
    pieces, held_out, lengths, made, shards, most = case
    made = made.model_copy(update={"packing": True})
    groups, of, own = group_pieces(pieces, held_out, made, shards, most), pieces.of[~held_out], lengths[~held_out]
    placed = place(lengths, held_out, groups, made, shards)
    placed = replace(placed, row=placed.row[~held_out], start=placed.start[~held_out])
    train = groups["train"]
    companions = [Companions() for _ in range(train.count)]
    remember(companions, placed, of, train, shards["train"])
    again = repack(own, of, train, companions, made, 2, "train_epoch_2", shards["train"])
    assert again.edges.tolist() == placed.edges[: shards["train"] + 1].tolist(), "as many rows in every shard"
    for group in range(train.count):
        members = np.arange(len(of))[train.members(group)]
        for row in set(again.row[members].tolist()):
            assert np.isin(np.flatnonzero(again.row == row), members).all(), "a row of two groups"


def test_who_shared_a_row_is_parted_in_each_group() -> None:
    """Of 12 conversations a group, each pair could share a row again in every epoch."""
    lengths, of = np.full(48, 8, np.int32), np.arange(48, dtype=np.int32)
    groups, made = Groups(4, np.repeat(np.arange(4, dtype=np.uint16), 12)), config(sequence_length=16)
    companions = [Companions() for _ in range(4)]
    placed = place(
        lengths, np.zeros(48, bool), {"train": groups, "validation": ONE_GROUP}, made, {"train": 4, "validation": 0}
    )
    seen: set[tuple[int, ...]] = set()
    for epoch in range(2, 6):
        pairs = {tuple(np.flatnonzero(placed.row == row).tolist()) for row in range(24)}
        assert not pairs & seen
        seen |= pairs
        remember(companions, placed, of, groups, 4)
        placed = repack(lengths, of, groups, companions, made, epoch, f"train_epoch_{epoch}", 4)
    assert len(seen) == 4 * 24


def test_groups_of_one_source_need_more_rows_than_groups_of_all() -> None:
    """One source is all between a quarter and half of a row, the other is short: apart, the first leaves gaps."""
    source = np.random.default_rng(0)
    lengths = np.concatenate([source.integers(30, 60, 20_000), source.integers(4, 16, 20_000)]).astype(np.int32)
    made, shards = config(sequence_length=120, plan_group=20_000, plan_chunk=100), {"train": 2, "validation": 0}
    accepted = Accepted(
        np.array([0, len(lengths)]), lengths, np.zeros(len(lengths), bool), np.zeros(len(lengths), bool),
        np.zeros(len(lengths), np.uint8),
    )  # fmt: skip
    pieces = Pieces(
        accepted, np.arange(len(lengths), dtype=np.int32), len(lengths), np.empty(0, np.int32),
        np.empty((0, 4), np.int32),
    )  # fmt: skip
    mixed = group_pieces(pieces, accepted.held_out, made, shards, 2)
    assert mixed["train"].count == 2
    whole = {"train": Groups(), "validation": Groups()}
    apart = whole | {"train": Groups(2, np.repeat(np.arange(2, dtype=np.uint16), 20_000))}
    rows = [place(lengths, accepted.held_out, groups, made, shards).rows for groups in (whole, mixed, apart)]
    assert rows[1] <= 1.001 * rows[0]
    assert rows[2] >= 1.03 * rows[0]
    share = np.bincount(mixed["train"].of[:20_000]) / np.bincount(mixed["train"].of)  # type: ignore[index, arg-type]
    assert abs(share - 0.5).max() <= 0.01


# -- corpora -----------------------------------------------------------------------------------------------------------

RECORDS = conversations(240, longest=30)
SETTINGS: dict[str, Any] = {
    "sequence_length": 64, "validation": 0.3, "epochs": 2, "overlong": "split", "duplicates": "drop",
    "sources": [{"path": "chat.jsonl", "weight": 1.5}], "plan_chunk": 7,
}  # fmt: skip


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group, and a shard, for very few bytes of source."""
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 8000)
    monkeypatch.setattr(recipe_module, "BYTES_PER_CONVERSATION", 64)


def packed(folder: Path, **changes: Any) -> tuple[Recipe, Manifest, Path]:
    recipe = make_recipe(folder, RECORDS, **SETTINGS | changes)
    published = pack_corpus(recipe)
    return recipe, load_manifest(published), published


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("plan_group", [1000, 350, 135])
def test_a_corpus_of_groups_holds_all_that_any_other_does(
    plan_group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counting(*given: Any) -> dict[str, Groups]:
        found = group_pieces(*given)
        counts.append(found["train"].count)
        return found

    monkeypatch.setattr("tasks.packing.plan.group_pieces", counting)
    recipe, manifest, published = packed(tmp_path / "a", plan_group=plan_group)
    assert counts[0] == {1000: 1, 350: 2, 135: 5}[plan_group]
    verify(published)
    assert rebuild(published)
    # Same bytes for any part size.
    other, _, again = packed(tmp_path / "b", plan_group=plan_group, part_size=2000)
    assert len(other.parts) > 3
    assert recipe.corpus_folder.name == other.corpus_folder.name
    assert again.read_bytes() == published.read_bytes()
    # A shard is restored to its bytes.
    shard = recipe.corpus_folder / manifest.splits["train"].shards[-1].path
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert [each.path for each in repair(published)]
    assert shard.read_bytes() == whole
    # As many conversations and tokens as without groups; the same bound.
    _, single, one = packed(tmp_path / "c", plan_group=10_000)
    assert not any((difference := compare(one, published)).conversations.went + difference.conversations.came)
    mine, theirs = manifest.packing_metadata, single.packing_metadata
    assert (mine.lower_bound_rows, mine.lower_bound) == (theirs.lower_bound_rows, theirs.lower_bound)
    assert theirs.rows <= mine.rows <= 1.05 * theirs.rows
    padding = (mine.rows - theirs.rows) * 64
    assert manifest.ledger.tokens.model_dump() == single.ledger.tokens.model_dump() | {
        "padding": single.ledger.tokens.padding + padding
    }


@pytest.mark.usefixtures("small_groups")
def test_settings_without_effect_are_not_in_the_key(tmp_path: Path) -> None:
    bytes_ = make_recipe(tmp_path, RECORDS).files[0].bytes

    def made(**changes: Any) -> Recipe:
        return make_recipe(tmp_path, RECORDS, **changes)

    one = made()
    assert one.most_groups == 1
    assert one.settings()["plan_group"] == ONE_PLAN
    assert "plan_chunk" not in one.settings()
    assert made(plan_group=bytes_ // 64, plan_chunk=3).corpus_key == one.corpus_key, "one group at most"
    cut = made(plan_group=bytes_ // 64 - 1)
    assert cut.most_groups == 2
    assert (cut.settings()["plan_group"], cut.settings()["plan_chunk"]) == (bytes_ // 64 - 1, 1000)
    keys = [one.corpus_key, cut.corpus_key]
    keys += [made(plan_group=bytes_ // 64 - 1, plan_chunk=3).corpus_key, made(plan_group=10).corpus_key]
    assert len(set(keys)) == 4
    assert made(plan_group=10).most_groups == made(plan_group=10).shards["train"] == -(-bytes_ // 8000)


def test_the_corpora_of_a_config_are_found_whether_or_not_they_are_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack_corpus(make_recipe(tmp_path, RECORDS))
    assert corpora_of(resolve(tmp_path / "corpus.yaml", tmp_path).config, whole.parent) == [whole]
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 8000)
    monkeypatch.setattr(recipe_module, "BYTES_PER_CONVERSATION", 64)
    cut = make_recipe(tmp_path, RECORDS, plan_group=100)
    published = pack_corpus(cut)
    assert published in corpora_of(cut.config, whole.parent)
    assert published not in corpora_of(cut.config.model_copy(update={"plan_chunk": 5}), whole.parent)


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "name", "values", "message"),
    [
        ([pieces_module], "MOST_PIECES", {}, r"small: a plan can number at most 100 conversations, but there are "),
        (
            [filters],
            "MOST_COMPARED",
            {"duplicates": "drop"},
            r"duplicates: drop compares at most 100 .* 240; .*, or remove the setting",
        ),
        ([mixture], "MOST_COMPARED", {"sources": [{"path": "chat.jsonl", "limit": 5}]}, "weights and limits order at "),
        ([mixture], "MOST_COMPARED", {"weighting": "token_share"}, "weighting: token_share orders at most 100"),
    ],
)
def test_more_conversations_than_can_be_counted_are_refused(
    modules: list[Any], name: str, values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setattr(module, name, 100)
    with pytest.raises(DataError, match=message) as caught:
        pack_corpus(make_recipe(tmp_path, RECORDS, **values))
    assert caught.value.reason == "too_many"


def test_pieces_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MOST_PIECES", 241)
    with pytest.raises(DataError, match=r"with overlong: split, a plan can number at most 241 .* there are \d+"):
        pack_corpus(make_recipe(tmp_path, RECORDS, overlong="split", sequence_length=16))
