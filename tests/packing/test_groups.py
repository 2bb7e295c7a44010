"""Groups are planned separately, and together they form the corpus.

Each group is a sample of the corpus.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import OneSecond, conversations, make_groups_small, make_recipe, pack_corpus

from tasks.config import Config
from tasks.core.errors import DataError, StorageError
from tasks.inspection.diff import compare
from tasks.inspection.sources import corpora_of
from tasks.packing import pieces as pieces_module
from tasks.packing import plan as plan_module
from tasks.packing.groups.deal import deal, groups_of, place_of_shard, runs_of, shards_of
from tasks.packing.groups.plan_group import files_of_group
from tasks.packing.placement import pack_group
from tasks.recipe import Recipe, resolve
from tasks.report.figures import read_figures
from tasks.sources.model import Source
from tasks.stages import Publish, run_all
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.files import read_receipt
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
    assert digests == ["44c9c595ae0252c2", "69db2992c19f7911", "47cf2ae4df0cc4b6"], (
        "the groups changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then these digests"
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 30), st.integers(1, 9))
def test_the_runs_of_groups_are_the_corpus_wherever_parts_end(
    parts: list[int], chunk: int, size: int, most: int
) -> None:
    edges, count = np.array([0, *accumulate(parts)]), sum(parts)
    groups = groups_of(count, count, size, chunk, most)
    assert 1 <= groups <= most
    assert groups == 1 or (groups - 1) * size < count
    owner = np.full(count, -1)
    for group in range(groups):
        runs = runs_of(group, groups, np.array([0, count]), chunk, most, 3)
        whole = [number for _, first, last in runs for number in range(first, last)]
        found = []
        for part, first, last in runs_of(group, groups, edges, chunk, most, 3):
            assert 0 <= first < last <= parts[part]
            found += range(edges[part] + first, edges[part] + last)
        assert found == sorted(found) == whole, "the group depends on where parts end"
        assert (owner[found] == -1).all()
        owner[found] = group
        assert found or not count
    assert (owner >= 0).all()
    for top in range(0, count, chunk):
        assert len(set(owner[top : top + chunk].tolist())) == 1, "a chunk is divided"


@given(st.integers(1, 12), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_every_shard_is_the_next_one_of_its_group(groups: int, counts: list[int]) -> None:
    shards = {str(split): count for split, count in enumerate(counts)}
    of_groups: dict[int, list[int]] = {}
    found = [place_of_shard(number, groups, shards) for number in range(sum(counts))]
    for group, number in found:
        of_groups.setdefault(group, []).append(number)
    assert all(numbers == list(range(len(numbers))) for numbers in of_groups.values())
    wanted = [group for count in counts for group in range(groups) for _ in shards_of(group, groups, count)]
    assert [group for group, _ in found] == wanted
    with pytest.raises(IndexError):
        place_of_shard(sum(counts), groups, shards)


def test_groups_of_one_source_need_more_rows_than_groups_of_all() -> None:
    """Groups of one source need at least 2 % more rows than mixed groups.

    Lengths in one source are between a quarter and half of a row, and lengths in the other are short. Alone, the
    first source leaves gaps.
    """
    source = np.random.default_rng(0)
    lengths = np.concatenate([source.integers(30, 60, 20_000), source.integers(4, 16, 20_000)]).astype(np.int32)
    mixed = np.repeat(deal(400, 2, 2, 42, 0), 100)

    def rows(of: np.ndarray) -> int:
        return sum(pack_group(lengths[of == g], config(sequence_length=120), "train", 1, g).rows for g in range(2))

    whole, apart = rows(np.zeros(40_000, int)), rows(np.repeat([0, 1], 20_000))
    assert rows(mixed) <= 1.001 * whole
    assert apart >= 1.02 * whole
    share = np.bincount(mixed[:20_000]) / np.bincount(mixed)
    assert abs(share - 0.5).max() <= 0.01


# -- corpora -----------------------------------------------------------------------------------------------------------

RECORDS = conversations(240, longest=30)
SETTINGS: dict[str, Any] = {
    "sequence_length": 64, "validation": 0.3, "epochs": 2, "overlong": "split", "min_turns": 2,
    "sources": [{"path": "chat.jsonl", "weight": 2}], "plan_chunk": 7,
}  # fmt: skip


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups and shards of very few source bytes."""
    make_groups_small(monkeypatch)


def packed(folder: Path, **changes: Any) -> tuple[Recipe, Manifest, Path]:
    recipe = make_recipe(folder, RECORDS, **SETTINGS | changes)
    published = pack_corpus(recipe)
    return recipe, load_manifest(published), published


@pytest.fixture(scope="module")
def in_one_group(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Manifest, Path]:
    """Pack the corpus of the tests below without groups."""
    with pytest.MonkeyPatch.context() as patch:
        make_groups_small(patch)
        return packed(tmp_path_factory.mktemp("single"), plan_group=10_000)


@pytest.mark.slow
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("plan_group", [1000, 350, 115])
def test_a_corpus_of_groups_holds_all_that_any_other_does(
    plan_group: int, in_one_group: tuple[Recipe, Manifest, Path], tmp_path: Path
) -> None:
    recipe, manifest, published = packed(tmp_path / "a", plan_group=plan_group)
    assert read_receipt(recipe.plan_folder / "plan.json").get("groups", 1) == {1000: 1, 350: 2, 115: 5}[plan_group]
    verify(published)
    assert rebuild(published)
    # The bytes are the same for any part size.
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
    # The conversations, tokens, and bound are those without groups.
    _, single, one = in_one_group
    assert not any((difference := compare(one, published)).conversations.went + difference.conversations.came)
    lengths, other_lengths = (
        read_figures(load_manifest(path), corpus_folder(load_manifest(path), path)).lengths for path in (published, one)
    )
    assert lengths.values.tolist() == other_lengths.values.tolist()
    assert lengths.counts.tolist() == other_lengths.counts.tolist()
    assert len(lengths) == 240
    mine, theirs = manifest.packing_metadata, single.packing_metadata
    assert (mine.lower_bound_rows, mine.lower_bound) == (theirs.lower_bound_rows, theirs.lower_bound)
    assert theirs.rows <= mine.rows <= 1.05 * theirs.rows
    padding = (mine.rows - theirs.rows) * 64
    assert manifest.ledger.tokens.model_dump() == single.ledger.tokens.model_dump() | {
        "padding": single.ledger.tokens.padding + padding
    }


@pytest.mark.usefixtures("small_groups")
def test_the_samples_of_a_conversation_are_in_one_group(tmp_path: Path) -> None:
    """The samples of a conversation stay in one group.

    Chunks have three samples, and conversations up to two. Many edges of chunks are therefore within a conversation.
    """
    settings = {"turns": "apart", "plan_group": 135, "plan_chunk": 3, "sources": [{"path": "chat.jsonl"}]}
    recipe, manifest, published = packed(tmp_path / "a", **settings)
    assert read_receipt(recipe.plan_folder / "plan.json")["groups"] > 2
    assert manifest.ledger.samples
    verify(published)
    _, _, again = packed(tmp_path / "b", **settings, part_size=2000)
    assert again.read_bytes() == published.read_bytes()
    _, single, _ = packed(tmp_path / "c", **settings | {"plan_group": 10_000})
    assert manifest.ledger.samples == single.ledger.samples


@pytest.mark.usefixtures("small_groups")
def test_a_split_that_stays_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"1e-09 is too small to hold out any of 240 .*, or set plan_group to 240"
    ) as found:
        pack_corpus(make_recipe(tmp_path, RECORDS, plan_group=100, validation=1e-9))
    assert found.value.reason == "nothing_held_out"


@pytest.mark.usefixtures("small_groups")
def test_a_damaged_file_of_a_group_is_found_and_made_again(tmp_path: Path) -> None:
    """A damaged file of a group is found where it is read, and is rebuilt.

    It is read when the groups are joined, and by the shards of the group.
    """
    recipe, _, published = packed(tmp_path, plan_group=135)
    whole = published.read_bytes()
    for name in ("index", "rejects", "plan"):
        published.unlink()
        for receipt in recipe.plan_folder.glob("shard-*.json"):
            receipt.unlink()
        if name != "plan":
            (recipe.plan_folder / "plan.json").unlink()
        file = files_of_group(recipe.plan_folder, 1)[name]
        size = file.stat().st_size
        file.write_bytes(b"x" * size)
        if size:
            with pytest.raises(StorageError, match=f"{file.name}: damaged or missing; run again"):
                run_all(Publish(recipe), OneSecond())
        run_all(Publish(recipe), OneSecond())
        assert published.read_bytes() == whole


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
    make_groups_small(monkeypatch)
    cut = make_recipe(tmp_path, RECORDS, plan_group=100)
    published = pack_corpus(cut)
    assert published in corpora_of(cut.config, whole.parent)
    assert published not in corpora_of(cut.config.model_copy(update={"plan_chunk": 5}), whole.parent)


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "values", "message"),
    [
        (pieces_module, "MOST_PIECES", {}, r"small: a plan can have at most 100 conversations, but there are "),
        (
            plan_module,
            "MOST_COMPARED",
            {"duplicates": "drop"},
            r"small: duplicates: drop can handle at most 100 .* 240; .*, or remove the setting",
        ),
        (
            plan_module,
            "MOST_COMPARED",
            {"sources": [{"path": "chat.jsonl", "limit": 5}]},
            r"0\].limit: 5 can handle",
        ),
        (
            plan_module,
            "MOST_COMPARED",
            {"sources": [{"path": "chat.jsonl", "weight": 2.5}]},
            r"0\].weight: 2.5 can handle",
        ),
        (plan_module, "MOST_COMPARED", {"weighting": "token_share"}, "weighting: token_share can handle at most 100"),
    ],
)
def test_more_conversations_than_can_be_counted_are_refused(
    module: Any, name: str, values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, 100)
    made = make_recipe(tmp_path, RECORDS, plan_group=10, **values)
    assert made.most_groups == 1
    with pytest.raises(DataError, match=message) as caught:
        pack_corpus(made)
    assert caught.value.reason == "too_many"


def test_pieces_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "MOST_PIECES", 241)
    with pytest.raises(DataError, match=r"with overlong: split, a plan can have at most 241 .* there are \d+"):
        pack_corpus(make_recipe(tmp_path, RECORDS, overlong="split", sequence_length=16))
