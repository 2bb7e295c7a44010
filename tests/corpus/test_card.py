"""The dataset card depends only on the manifest.

`load_dataset` reads it, and it is verified and repaired like all other files.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.damage.kinds import flip
from support.mixtures import project
from support.packed_rows import COLUMNS, folder_of, pack_small, shards_of
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.corpus.publish import CARD, dataset_card, size_category, split_name
from packcorpus.tasks.storage.facts import Split
from packcorpus.tasks.storage.keys import VERSIONS
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.schemas import row_schema
from packcorpus.tasks.verification import repair as repair_module
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

# -- properties ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["3.0", "2.0"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("card"), packing=request.param == "3.0")


def header_of(card: str) -> dict[str, Any]:
    _, header, _ = card.split("---\n", 2)
    return dict(yaml.safe_load(header))


def test_it_follows_from_the_manifest_alone(made: Path) -> None:
    card = (folder_of(made) / CARD).read_bytes()
    manifest = load_manifest(made)
    assert card == dataset_card(manifest)
    others = [file for file in manifest.files if file.path != CARD]
    assert len(others) == len(manifest.files) - 1
    assert card == dataset_card(manifest.model_copy(update={"files": others, "digest": "0" * 64}))
    assert verify(made)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["train", "validation", "train-epoch-2", "epoch-2", "epoch-20"]), st.integers(0, 30), min_size=1
    )
)
def test_every_shard_is_named_by_the_pattern_of_its_split_alone(tmp_card: Any, counts: dict[str, int]) -> None:
    splits = {
        split: Split(rows=count, shards=[tmp_card.shard(f"{split}-{n:05d}-of-{count:05d}.arrow") for n in range(count)])
        for split, count in counts.items()
    }
    card = dataset_card(tmp_card.manifest.model_copy(update={"splits": splits})).decode()
    files = header_of(card)["configs"][0]["data_files"]
    splits = {name: split for name, split in splits.items() if split.rows}
    assert [entry["split"] for entry in files] == [split_name(split) for split in splits]
    assert all(re.fullmatch(r"\w+", entry["split"]) for entry in files)  # `datasets` accepts only such names
    beside = [file.path for file in tmp_card.manifest.files] + ["manifest.json", "run.json"]
    for entry, split in zip(files, splits.values(), strict=True):
        everything = [*beside, *(shard.path for other in splits.values() for shard in other.shards)]
        assert [name for name in everything if fnmatch(name, entry["path"])] == [shard.path for shard in split.shards]


@pytest.fixture(scope="module")
def tmp_card(tmp_path_factory: pytest.TempPathFactory) -> Any:
    class Made:
        manifest = load_manifest(pack_small(tmp_path_factory.mktemp("splits")))

        def shard(self, name: str) -> Any:
            return self.manifest.splits["train"].shards[0].model_copy(update={"path": name})

    return Made()


@given(st.integers(0, 10**14) | st.builds(lambda power, more: 10**power + more, st.integers(3, 13), st.integers(-1, 1)))
def test_a_size_lies_within_its_category(rows: int) -> None:
    units = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    bounds = [int(n) * units[unit] for n, unit in re.findall(r"(\d+)([KMBT]?)", size_category(rows))]
    if size_category(rows).startswith("n>"):
        assert rows >= bounds[0]
    else:
        assert ([0, *bounds][-2]) <= rows < bounds[-1]


def test_golden_text(tmp_card: Any) -> None:
    """The text of the card has the recorded digest.

    Figures are left out, because they depend on the tokenizer of the test.
    """
    text = re.sub(r"[0-9a-f]{64}|\d[\d,.]*", "#", dataset_card(tmp_card.manifest).decode())
    assert (VERSIONS["texts"], hashlib.sha256(text.encode()).hexdigest()[:16]) == (9, "d80bb54ae208d16c"), (
        "the card changed: raise VERSIONS['texts'] in tasks/storage/keys.py, then this digest"
    )


def test_the_card_of_balanced_rows_does_not_shuffle_them(tmp_path: Path) -> None:
    """The card of balanced rows does not shuffle them, because people copy its code."""
    for ranks in (2, None):
        given = {} if ranks is None else {"balance": {"ranks": ranks}}
        card = (folder_of(pack_small(tmp_path / str(ranks), **given)) / CARD).read_text()
        assert f"shuffle={ranks is None}" in card
        assert f"shuffle={ranks is not None}" not in card.replace("DistributedSampler(rows, shuffle=False)", "")
        assert ("Rows are ordered so that 2 ranks, or a divisor of this number," in card) == (ranks == 2)


# -- load_dataset ----------------------------------------------------------------------------------------------------


def test_load_dataset_gives_splits_and_columns_of_the_folder_as_it_lies(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    found = datasets.load_dataset(str(folder_of(made)), cache_dir=str(tmp_path))
    manifest = load_manifest(made)
    assert {name: len(split) for name, split in found.items()} == {
        name: split.rows for name, split in manifest.splits.items()
    }
    assert list(found) == ["train", "validation"]
    for split in found:
        shards = [datasets.Dataset.from_file(str(shard)) for shard in shards_of(made, split)]
        assert found[split].features == shards[0].features
        assert found[split][:] == datasets.concatenate_datasets(shards)[:]
    if manifest.format_version == "3.0":
        assert tuple(found["train"].column_names) == COLUMNS
        assert [f.length for f in found["train"].features.values()] == [manifest.sequence_length] * 4
    else:
        assert found["train"].column_names == ["messages", "tools", "text"]


def test_packings_and_a_mixture_stand_in_the_card_and_each_packing_is_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    sources = [{"path": "few.jsonl", "weight": 2}, {"path": "many.jsonl", "limit": 20}, {"path": "twice.jsonl"}]
    path = pack_corpus(project(tmp_path, sources, epochs=3, duplicates="exact", validation=0.1))
    manifest, card = load_manifest(path), (folder_of(path) / CARD).read_text()
    found = datasets.load_dataset(str(folder_of(path)), cache_dir=str(tmp_path / "cache"))
    assert list(found) == ["train", "validation", "train_epoch_2", "train_epoch_3"]
    assert {name: len(split) for name, split in found.items()} == {n: s.rows for n, s in manifest.splits.items()}
    words = [Counter(np.concatenate(found[name]["input_ids"]).tolist()) for name in found if name != "validation"]
    assert words[0] == words[1] == words[2], "the same conversations"
    assert "packings = ['train', 'train_epoch_2', 'train_epoch_3']" in card
    for entry in manifest.mixture:
        assert re.search(rf"`{entry.path}` \| {entry.weight:g} \| .*\| {entry.tokens:,} \|", card)
    assert "duplicate 5" in card
    assert f"{manifest.ledger.tokens.repeated:,} are additional copies" in card


# -- verify and repair -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_card_is_refused_and_restored_from_the_manifest(tmp_path: Path, damage: Any) -> None:
    path = pack_small(tmp_path)
    card = folder_of(path) / CARD
    whole = card.read_bytes()
    damage(card)
    with pytest.raises(Exception, match=CARD):
        verify(path)
    (restored,) = repair(path)
    assert (restored.path, restored.source) == (card, "the manifest")
    assert card.read_bytes() == whole
    assert verify(path)


def test_a_card_that_this_version_writes_otherwise_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack_small(tmp_path)
    card = folder_of(path) / CARD
    flip(card)
    damaged = card.read_bytes()
    monkeypatch.setattr(repair_module, "dataset_card", lambda _: b"another")
    with pytest.raises(DataError, match="cannot be restored") as caught:
        list(repair(path))
    assert caught.value.reason == "cannot_mend"
    assert card.read_bytes() == damaged


def test_a_corpus_without_a_card_is_still_whole(tmp_path: Path) -> None:
    from support.packed_rows import sign

    path = pack_small(tmp_path)
    (folder_of(path) / CARD).unlink()
    sign(path, lambda values: values.update(files=[file for file in values["files"] if file["path"] != CARD]))
    assert verify(path)
    assert list(repair(path)) == []


# -- contents --------------------------------------------------------------------------------------------------------


def test_license_and_language_are_in_the_header_where_the_config_has_them(tmp_path: Path) -> None:
    plain = make_recipe(tmp_path / "plain", conversations(9))
    given = make_recipe(tmp_path / "given", conversations(9), license=["mit"], language=["en", "no"])
    several = make_recipe(tmp_path / "several", conversations(9), licence=["cc-by-4.0", "mit"])  # the former name
    headers = [header_of((folder_of(pack_corpus(recipe)) / CARD).read_text()) for recipe in (plain, given, several)]
    assert not {"license", "language"} & headers[0].keys()
    assert (headers[1]["license"], headers[1]["language"]) == ("mit", ["en", "no"])
    assert headers[2]["license"] == ["cc-by-4.0", "mit"]
    assert headers[0]["size_categories"] == ["n<1K"]


NASTY = "a|b`c``d<script>alert(1)</script>[x](http:\\x)\x1b[31m\n**b**"


def test_names_from_files_are_shown_as_text(tmp_card: Any) -> None:
    source = tmp_card.manifest.sources[0].model_copy(update={"path": NASTY})
    card = dataset_card(tmp_card.manifest.model_copy(update={"sources": [source]})).decode()
    assert "\x1b" not in card
    shown = MarkdownIt("commonmark").enable("table").parse(card.split("---\n", 2)[2])
    inline = [child for token in shown if token.type == "inline" for child in token.children or []]
    assert not [child for child in inline if child.type in ("html_inline", "link_open")]
    expected = NASTY.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert expected in [child.content for child in inline if child.type == "code_inline"]


def test_the_columns_that_it_names_are_those_of_the_rows(made: Path) -> None:
    manifest, card = load_manifest(made), (folder_of(made) / CARD).read_text()
    named = re.findall(r"^\| `(\w+)` \| [^|\d]", card, re.M)
    if manifest.format_version == "3.0":
        assert set(re.findall(r"^\| `(\w+)` \| int", card, re.M)) == set(row_schema(RowLayout((8,)), 8, "").names)
    else:
        assert named == ["messages", "tools", "text"]
