"""Damage of every kind to every file of a corpus: every reader refuses it and names the file, and repair restores it.

tests/support/damage.py has the damages of one file, bench/reliability/damage.py those of a whole corpus. It injects
10,000 flips, these tests a few hundred.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT
from support.damage import DAMAGES, undo

sys.path.insert(0, str(ROOT / "bench" / "reliability"))
import damage
from damage import Corpus, Tally

from tasks.core.errors import PackError
from tasks.inspection.rows import row_of_split
from tasks.report.report import write_report
from tasks.storage.manifest import load_manifest
from tasks.verification.repair import repair
from tasks.verification.verify import verify

SEED = 1

# What a manifest says and nothing in its corpus can contradict: whoever can make its digest again can edit these, and
# `verify --rebuild` alone notices. They inform people; no row depends on them.
SAID_ONCE = {
    "tokenizer.engine", "tokenizer.parity.texts", "tokenizer.parity.bytes", "tokenizer.parity.differs",
    "tokenizer.parity.reason", "sources.0.bytes", "ledger.conversations.split", "ledger.pieces.dropped",
    "ledger.tokens.rejected", "noticed.control_text_seen", "noticed.not_round_trip", "noticed.unknown_tokens",
    "noticed.unusual_order", "packing_metadata.algorithm", "packing_metadata.lower_bound",
    "config.sources.0.format", "config.tokenizer", "texts_version",
}  # fmt: skip

# What the loader does not look at: no row that it gives depends on it. verify counts it again.
INFORMATION = (
    "sources.", "mixture.", "ledger.", "noticed.", "packing_metadata.", "splits.", "texts_version",
    "tokenizer.", "config.", "template.leading_space",
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
    assert len(tally.injected) == len(flipped) + 9 + len(DAMAGES)


def test_what_an_edited_manifest_whose_digest_was_made_again_can_say(tally: Tally) -> None:
    lines = [line.split(", ") for line in tally.let_in]
    assert {value.partition(":")[0] for *_, value in lines if value.endswith("verify")} == SAID_ONCE
    for value in {value.partition(":")[0] for *_, value in lines if value.endswith("loader")}:
        assert value.startswith(INFORMATION), value
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


# A reader, and the files that it reads. `inspect` shows the first row.
READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "verify": (verify, ("*",)),
    "loader": (damage.load, ("*",)),
    "report": (lambda path: write_report(path, path.with_suffix(".html")), ("*.arrow", "rejects.jsonl", "manifest")),
    "inspect": (lambda path: row_of_split(path, 0, "train"), ("train-00000-*", "manifest")),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(damage.make(tmp_path_factory.mktemp("readers") / "corpus"))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_every_damage_and_names_the_file(reader: str, how: str, whole: Corpus) -> None:
    read, patterns = READERS[reader]
    for file in whole.files:
        name = "manifest" if file == whole.path else file.name
        data = file.read_bytes()
        if len(data) < 8 or (name, how) == ("manifest", "link"):  # that link is allowed
            continue
        if not any(Path(name).match(pattern) for pattern in patterns):
            continue
        DAMAGES[how](file)
        try:
            with pytest.raises(PackError) as caught:
                read(whole.path)
            assert str(file) in str(caught.value)
        finally:
            undo(file, data)
    read(whole.path)


@pytest.mark.parametrize("how", DAMAGES)
def test_repair_restores_every_damage(how: str, whole: Corpus) -> None:
    for file in whole.files:
        data = file.read_bytes()
        if len(data) < 8 or how == "folder" or (file == whole.path and "link" in how):
            continue
        DAMAGES[how](file)
        try:
            assert [restored.path for restored in repair(whole.path)] == [file]
            assert file.read_bytes() == data
            assert not file.is_symlink()
        finally:
            undo(file, data)
