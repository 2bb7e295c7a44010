"""Damage of every kind to every file of a corpus: refused by verify and by the loader, the file named. bench/damage.py
has the damages and injects 10,000 flips; here are a few hundred."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import damage
from damage import Corpus, Tally

from tasks.storage.manifest import load_manifest

SEED = 1

# What a manifest says and nothing in its corpus can contradict: whoever can make its digest again can edit these, and
# `verify --rebuild` alone notices. They are told to people; no row depends on them.
SAID_ONCE = {
    "tokenizer.engine", "tokenizer.parity.texts", "tokenizer.parity.bytes", "tokenizer.parity.differs",
    "tokenizer.parity.reason", "sources.0.bytes", "ledger.conversations.split", "ledger.pieces.dropped",
    "ledger.tokens.rejected", "noticed.control_text_seen", "noticed.not_round_trip", "noticed.unknown_tokens",
    "noticed.unusual_order", "packing_metadata.algorithm", "packing_metadata.lower_bound",
    "config.sources.0.format", "config.tokenizer",
}  # fmt: skip

# What the loader does not look at: no row that it gives depends on it. verify counts it again.
TOLD_TO_PEOPLE = (
    "sources.", "mixture.", "ledger.", "noticed.", "packing_metadata.", "splits.", "tokenizer.", "config.",
    "template.leading_space",
)  # fmt: skip


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> Tally:
    return damage.run(tmp_path_factory.mktemp("damage"), 200, SEED)


def test_every_damage_is_refused_by_verify_and_by_the_loader_and_named(tally: Tally) -> None:
    signed = "a value of both manifests edited, digest made again"
    for what, count in tally.injected.items():
        if what != signed:
            assert (tally.verify[what], tally.loader[what], tally.named[what]) == (count, count, count), what
    assert not [line for line in tally.let_in if signed not in line]
    flipped = {what.removeprefix("a bit flipped: ") for what in tally.injected if what.startswith("a bit flipped")}
    beside = {"README.md", "index.arrow", "rejects.jsonl", "tokenizer.json", "tokenizer_config.json", "template.jinja"}
    assert flipped == beside | {"shard", "manifest.json", "manifest, published"}
    assert len(tally.injected) == len(flipped) + 15


def test_what_an_edited_manifest_whose_digest_was_made_again_can_say(tally: Tally) -> None:
    lines = [line.split(", ") for line in tally.let_in]
    assert {value.partition(":")[0] for *_, value in lines if value.endswith("verify")} == SAID_ONCE
    for value in {value.partition(":")[0] for *_, value in lines if value.endswith("loader")}:
        assert value.startswith(TOLD_TO_PEOPLE), value
        assert "sha256" not in value


def test_files_of_format_2_are_refused_too(tmp_path: Path) -> None:
    corpus, tally = Corpus(damage.make(tmp_path / "whole", packing=False)), Tally()
    damage.flips(corpus, 40, random.Random(SEED), tally)
    assert tally.injected == tally.verify == tally.loader == tally.named
    count, refused = damage.additional(corpus)
    assert count == refused


def test_the_files_that_are_damaged_are_all_that_there_are(tmp_path: Path) -> None:
    corpus = Corpus(damage.make(tmp_path / "all"))
    found = {path for path in corpus.folder.rglob("*") if path.is_file()} - {corpus.folder / "run.json"}
    assert {*corpus.files} == found | {corpus.path}
    assert len(load_manifest(corpus.path).splits["train"].shards) > 1
