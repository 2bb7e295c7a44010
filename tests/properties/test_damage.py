"""No reader trusts a damaged file, and repair and the next run restore it.

The tests apply damage of every kind to every file of a project. tests/support/damage/matrix.py has the matrix.
bench/reliability/damage.py counts its cells in every state, and flips 10,000 single bits. These tests flip a few
hundred.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from support.commands import ROOT
from support.damage.kinds import DAMAGES
from support.damage.matrix import COLUMNS, KINDS, READERS, Project, expected, kind_of, load, outcomes

sys.path.insert(0, str(ROOT / "bench" / "reliability"))
import damage
from damage import Tally

from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.verify import verify

SEED = 1

# Facts of a manifest that no file of its corpus contradicts. After an edit with a recomputed digest, only
# `verify --rebuild` notices a change. These facts inform people, and no row depends on them.
SAID_ONCE = {
    "tokenizer.engine",
    "sources.0.bytes", "ledger.conversations.split", "ledger.pieces.dropped", "ledger.pieces.inside",
    "held_out.near", "held_out.shared", "ledger.tokens.rejected",
    "noticed.control_text_seen", "noticed.empty_prompts", "noticed.not_round_trip",
    "noticed.unknown_tokens", "noticed.unusual_order", "packing_metadata.algorithm", "packing_metadata.lower_bound",
    "config.sources.0.format", "config.tokenizer", "texts_version",
}  # fmt: skip

# Facts that the loader does not check, because no row depends on them. `verify` recounts them.
INFORMATION = (
    "held_out.", "sources.", "mixture.", "ledger.", "noticed.", "packing_metadata.", "splits.", "texts_version",
    "tokenizer.", "config.", "template.leading_space",
)  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Project]:
    made: dict[str, Project] = {}

    def project_of(kind: str) -> Project:
        if kind not in made:
            made[kind] = Project.make(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return project_of


@pytest.mark.parametrize("column", COLUMNS)
def test_no_damage_is_trusted(column: str, project: Callable[[str], Project]) -> None:
    found = list(outcomes(column, project(kind_of(column))))
    assert {*DAMAGES} <= {how for how, *_ in found}
    wrong = [f"{how}, {file}: {outcome}" for how, file, outcome in found if outcome != expected(column, how)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("column", READERS)
def test_every_reader_accepts_a_whole_corpus(column: str, project: Callable[[str], Project]) -> None:
    """After all damage is restored, every reader accepts the corpus.

    So the readers above refused the damage and nothing else.
    """
    READERS[column].read(project(kind_of(column)))


def test_the_files_that_are_damaged_are_all_that_there_are(project: Callable[[str], Project]) -> None:
    for kind in KINDS:
        made = project(kind)
        assert len(load_manifest(made.published).splits["train"].shards) > (1 if kind == "trained" else 2)
        # test_digest_cache.py damages the digests of sources. A later run adds the digests of new files.
        known = {*made.saved, made.folder / "run.json", *(made.root / "data" / "digests").glob("*.json")}
        found = {path for top in ("data", "manifests") for path in (made.root / top).rglob("*") if path.is_file()}
        assert {path.name for path in found - known} <= {f"{made.published.stem}.lock", ".last", ".runs.lock"}
    assert all(made.kept.values()), "the last of them has a file of each kind that a run reuses"


@pytest.fixture(scope="module")
def tally(project: Callable[[str], Project]) -> Tally:
    return damage.run(project("packed"), 200, SEED)


def test_every_flipped_bit_is_refused_by_verify_and_by_the_loader_and_named(tally: Tally) -> None:
    signed = "a value of both manifests edited, digest recomputed"
    for what, count in tally.injected.items():
        if what != signed:
            assert (tally.verify[what], tally.loader[what], tally.named[what]) == (count, count, count), what
    assert not [line for line in tally.let_in if signed not in line]
    flipped = {what.removeprefix("a bit flipped: ") for what in tally.injected if what.startswith("a bit flipped")}
    beside = {"README.md", "index.arrow", "rejects.jsonl", "tokenizer.json", "tokenizer_config.json", "template.jinja"}
    assert flipped == beside | {"shard", "manifest.json", "manifest, published"}
    assert len(tally.injected) == len(flipped) + 4


def test_what_an_edited_manifest_whose_digest_was_made_again_can_say(tally: Tally) -> None:
    lines = [line.split(", ") for line in tally.let_in]
    assert {value.partition(":")[0] for *_, value in lines if value.endswith("verify")} == SAID_ONCE
    for value in {value.partition(":")[0] for *_, value in lines if value.endswith("loader")}:
        assert value.startswith(INFORMATION), value
        assert "sha256" not in value


def test_files_of_format_2_are_refused_too(project: Callable[[str], Project]) -> None:
    whole, found = project("whole"), Tally()
    damage.flips(whole, 40, random.Random(SEED), found)
    assert found.injected == found.verify == found.loader == found.named
    count, refused = damage.additional(whole)
    assert count == refused
    for check in (verify, load):
        check(whole.published)
