"""The time that ranks wait for each other if `balance` does not apply.

Rows have several lengths or no padding, or `balance` has no effect.

    rows ─forecast_rows─▶ the share that follows from every step     corpus ─check, inspect, report─▶ the same sentence
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inspected import page_of, shown
from support.row_shapes import read_corpus
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks.core.errors import InputMissing
from tasks.dry_run.dry_run import predict
from tasks.inspection import waiting as waiting_module
from tasks.inspection.dry_run import DryRun, summarize
from tasks.inspection.waiting import waiting_of
from tasks.packing.balance.waiting import RowsOfLength, forecast_rows
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.manifest import load_manifest

HIDDEN = 64
RECORDS = [*conversations(700, seed=1, longest=9), *conversations(60, seed=2, longest=30)]


def rows(squares: list[int], length: int, all_rows: int = 0, tokens: list[int] | None = None) -> RowsOfLength:
    values, sizes = np.array(squares, np.int64), None if tokens is None else np.array(tokens, np.int64)
    return RowsOfLength(values, np.zeros(len(values), np.int32), length, all_rows or len(values), sizes)


def shares(*parts: RowsOfLength, hidden_size: int = HIDDEN) -> dict[int, float]:
    found = forecast_rows(parts, None, hidden_size)
    assert all(one.balanced is None for one in found)
    return {one.ranks: one.random for one in found}


def test_ranks_take_as_many_tokens_of_short_rows_as_of_a_long_one() -> None:
    """A step has as many tokens of short rows as of long rows.

    With 8 ranks, one step has 16 rows of 50, and one has 8 rows of 100. Only one row needs time for attention.
    """
    line, long = 6 * HIDDEN * 100, 10**5
    found = shares(rows([0] * 16, 50), rows([long] + [0] * 7, 100))
    assert found == {8: pytest.approx(100 * (1 - (16 * line + long) / (8 * (2 * line + long))), abs=0.01)}
    # Half of the long rows were read, so there are twice as many steps of them.
    found = shares(rows([0] * 16, 50), rows([long] + [0] * 7, 100, all_rows=16))
    assert found == {8: pytest.approx(100 * (1 - (24 * line + 2 * long) / (8 * (3 * line + 2 * long))), abs=0.01)}


def test_rows_that_cannot_be_divided_evenly_are_waited_for() -> None:
    """Six of eight ranks wait if a step has ten rows.

    A step of 8 rows of 128 has the tokens of 10 rows of 96, so two ranks have two rows each.
    """
    assert shares(rows([0] * 10, 96), rows([], 128)) == {8: pytest.approx(100 * (1 - 10 / 16), abs=0.01)}


def test_rows_without_padding_cost_as_many_tokens_as_they_have() -> None:
    assert shares(rows([0] * 8, 100, tokens=[100] + [50] * 7)) == {8: pytest.approx(100 * (1 - 450 / 800), abs=0.01)}
    assert shares(rows([0] * 8, 100, tokens=[100] * 8)) == {8: 0.0}
    assert shares(rows([0] * 7, 100, tokens=[100] * 7)) == {}
    assert forecast_rows([], None) == []


# -- whole corpora -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"sequence_length": [48, 96]}, {"padding": "none"}, {"padding": "none", "align": 8}])
def test_the_commands_say_how_long_ranks_wait(given: dict[str, Any], tmp_path: Path) -> None:
    """`check` reads these sources completely, so its rows are those of the corpus."""
    recipe = make_recipe(tmp_path, RECORDS, **{"sequence_length": 96, "max_rejects": 1, **given})
    path = pack_corpus(recipe)
    manifest = load_manifest(path)
    assert all(split.rows >= 16 for name, split in manifest.splits.items() if name.startswith("train"))
    found = waiting_of(manifest, corpus_folder(manifest, path), 4096)
    expected = checked(recipe.config, tmp_path).waiting
    assert [one.ranks for one in found] == [one.ranks for one in expected]
    assert found[0].ranks == 8
    for one, other in zip(found, expected, strict=True):
        assert one.random == pytest.approx(other.random, rel=0.15)
        assert one.balanced is None
    text = f"8 ranks {found[0].random:.2f} % of the time"
    page = page_of(path, tmp_path / "report.html")
    for said in (" ".join(shown(path).split()), page):
        assert text in said
        assert "with balance" not in said
        assert "`balance` is for rows with padding, of one length" in said


def checked(config: Any, folder: Path) -> DryRun:
    return summarize(predict(config, folder, folder), folder / "corpus.yaml", [])


def test_tokens_of_rows_without_padding_are_those_of_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.recipe.SOURCE_BYTES_PER_SHARD", 9000)
    path = pack_corpus(make_recipe(tmp_path, RECORDS[:300], sequence_length=96, padding="none", max_rejects=1))
    manifest, corpus = load_manifest(path), read_corpus(path)
    folder, sizes = corpus_folder(manifest, path), [len(row.columns["input_ids"]) for row in corpus.rows["train"]]
    for most in (3, 20, len(sizes) + 1):
        monkeypatch.setattr(waiting_module, "MOST_COUNTED", most)
        assert waiting_module._tokens_of_rows(manifest, folder, "train").tolist() == sizes[:most]
    shards = manifest.splits["train"].shards
    assert len(shards) > 2
    with monkeypatch.context() as patch:  # whole shards are fetched from a bucket
        patch.setattr(waiting_module, "remote_with", lambda folder: True)
        assert waiting_module._tokens_of_rows(manifest, folder, "train").tolist() == sizes[: shards[0].rows]
    (folder / shards[-1].path).unlink()
    monkeypatch.setattr(waiting_module, "MOST_COUNTED", shards[0].rows)
    assert waiting_of(manifest, folder, 4096)
    (folder / shards[0].path).unlink()
    with pytest.raises(InputMissing, match=shards[0].path):
        waiting_of(manifest, folder, 4096)


def test_more_ranks_than_rows_are_named(tmp_path: Path) -> None:
    """`balance` has no effect if the rows are too few for one step."""
    given = {"balance": {"ranks": 3000, "rows_per_rank": 2}, "sequence_length": 96, "max_rejects": 1}
    recipe = make_recipe(tmp_path, RECORDS[:300], **given)
    path = pack_corpus(recipe)
    rows = load_manifest(path).splits["train"].rows
    [warning] = [each for each in checked(recipe.config, tmp_path).warnings if each.startswith("balance")]
    assert warning == (
        f"balance: {rows} rows are too few for one step of 3,000 ranks × 2 rows, so it has no effect; lower ranks or "
        "rows_per_rank"
    )
    page = page_of(path, tmp_path / "report.html")
    for said in (" ".join(shown(path).split()), page):
        assert "the rows are too few for one step of 3,000 ranks with 2 rows each, so their order is random" in said
        assert "or any divisor of it" not in said
    assert "Rows are ordered so that" not in page
    fits = make_recipe(tmp_path / "fits", RECORDS[:300], **given | {"balance": {"ranks": 4}})
    assert not [each for each in checked(fits.config, tmp_path / "fits").warnings if each.startswith("balance")]
    assert "or any divisor of it" in shown(pack_corpus(fits))
