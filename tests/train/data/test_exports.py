"""TRL's collator reads exports, and the recipes of the guide read a corpus.

The recipes are in docs/guides/export.md.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import DatasetDict, load_from_disk
from reference.exports import Piece, expected, flat, pieces
from support.commands import ROOT
from support.packed_rows import folder_of, pack_small
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from packcorpus.tasks.exports.export import export_corpus

GUIDE = (ROOT / "docs" / "guides" / "export.md").read_text(encoding="utf-8")


def recipe(heading: str) -> dict[str, Any]:
    """Run the first code block of a section, and return its variables."""
    section = GUIDE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    values: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", section, re.S)[0], values)  # noqa: S102 - our own documentation
    return values


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the manifest of a corpus with cut conversations and two packings."""
    # The corpus also has a validation split.
    return pack_small(tmp_path_factory.mktemp("corpus"), sequence_length=48, overlong="split", epochs=2)


def test_trl_reads_every_conversation(corpus: Path, tmp_path: Path) -> None:
    found = export_corpus(corpus, "trl", tmp_path / "export", Path())
    splits = load_from_disk(str(found.folder))
    assert isinstance(splits, DatasetDict)
    assert list(splits) == ["train", "validation", "train_epoch_2"]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    for split, rows in splits.items():
        got: list[Piece] = []
        for top in range(0, len(rows), 5):
            batch = collate([rows[number] for number in range(top, min(top + 5, len(rows)))])
            assert "attention_mask" not in batch
            columns = [batch[name][0].tolist() for name in ("input_ids", "labels")]
            got += pieces(*columns, batch["cu_seq_lens_q"].tolist())
        assert got == list(flat(expected(folder_of(corpus), split)))


def test_trl_takes_the_settings_of_a_balanced_corpus(tmp_path: Path) -> None:
    balanced = pack_small(tmp_path, balance={"ranks": 2})
    given = export_corpus(balanced, "trl", tmp_path / "export", Path()).record["settings"]["SFTConfig"]
    config = SFTConfig(str(tmp_path / "run"), report_to="none", use_cpu=True, bf16=False, **given)
    assert config.train_sampling_strategy == "sequential"
    assert config.per_device_train_batch_size == 1


@pytest.mark.parametrize("to", ["axolotl", "llama-factory", "automodel"])
def test_datasets_opens_the_splits(corpus: Path, to: str, tmp_path: Path) -> None:
    found = export_corpus(corpus, to, tmp_path / "export", Path())
    splits = load_from_disk(str(found.folder))
    wanted = ["train", "validation"] + ["train_epoch_2"] * (to != "llama-factory")  # it would ignore this split
    assert list(splits) == wanted
    for split, figures in found.record["splits"].items():
        rows = load_from_disk(str(found.folder / split))
        assert len(rows) == figures["pieces" if to == "axolotl" else "rows"]
        assert split not in splits or splits[split][0] == rows[0]


def test_the_recipe_for_torchtune(corpus: Path) -> None:
    folder = folder_of(corpus)
    rows = recipe("torchtune")["TorchtuneRows"](folder)
    got = []
    for row, wanted in zip((rows[number] for number in range(len(rows))), expected(folder, "train"), strict=True):
        bounds = [0, *row["seq_lens"].cumsum(0).tolist()]
        assert bounds[-1] == len(row["tokens"]) == 48
        for start, end in pairwise(bounds):
            assert row["input_pos"][start:end].tolist() == list(range(end - start))
        got += pieces(row["tokens"].tolist(), row["labels"].tolist(), bounds)[: len(wanted)]
        assert {row[name].dtype for name in ("tokens", "labels", "input_pos")} == {torch.int64}
    assert got == list(flat(expected(folder, "train")))


def test_the_recipe_for_torchtitan(corpus: Path) -> None:
    folder = folder_of(corpus)
    rows = recipe("torchtitan")["TorchtitanRows"](folder)
    got: list[Piece] = []
    for (row, labels), wanted in zip((rows[n] for n in range(len(rows))), expected(folder, "train"), strict=True):
        ids, targets = row["input"].tolist(), labels.tolist()
        starts = [at for at, position in enumerate(row["positions"].tolist()) if position == 0]
        found = [(ids[start:end], targets[start : end - 1]) for start, end in pairwise([*starts, len(ids)])]
        assert all(targets[end - 1] == -100 for end in [*starts[1:], len(ids)])
        got += found[: len(wanted)]
    assert got == list(flat(expected(folder, "train")))
