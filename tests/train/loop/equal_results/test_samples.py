"""Each of several samples of a conversation has the same loss packed as alone.

conversation ─apart▶ [prompt 1 ▓turn 1▓] [prompt 2 ▓turn 2▓]     prompt 2 has turn 1 as the model will see it
row          [prompt 2 ▓turn 2▓ another sample prompt 1 ▓turn 1▓] ── loss of each sample ──┐
each sample alone, from position 0 ────────────────────────────────────────────────────────┴▶ equal
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pytest
import torch
from support.packed_rows import folder_of
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.templates.several_samples import stripping_template
from support.training.step_gradients import token_losses
from support.training.tiny_training import FAMILIES, LENGTH, Row, rows_of, tiny_model

from packcorpus.train.model.attention import Collator


class Sample(NamedTuple):
    """A sample, and its place in the rows that are used."""

    record: int
    turn: int
    row: int
    inside: slice


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], list[Sample]]:
    """Return three rows, and all samples in them."""
    # At least one row has two samples of one conversation.
    with stripping_template():  # of an earlier answer, only the last word is in the prompt
        records = [record for record in conversations(60, longest=6) if len(record["messages"]) > 2]
        manifest = pack_corpus(make_recipe(tmp_path_factory.mktemp("samples"), records, sequence_length=LENGTH, seed=0))
    rows = rows_of(manifest)
    index = pa.ipc.open_stream((folder_of(manifest) / "index.arrow").read_bytes()).read_all().to_pylist()
    together = Counter((place["record"], place["row"]) for place in index)
    twice = {row for (_, row), count in together.items() if count > 1}
    chosen = sorted({place["row"] for place in index}, key=lambda row: (row not in twice, row))[:3]
    found = [
        Sample(
            place["record"],
            place["turn"],
            chosen.index(place["row"]),
            slice(place["start"], place["start"] + place["length"]),
        )
        for place in index
        if place["row"] in chosen
    ]
    return [rows[row] for row in chosen], found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_sample_in_a_row_is_that_of_the_sample_alone(
    packed: tuple[list[Row], list[Sample]], family: str
) -> None:
    rows, samples = packed
    assert len({(s.record, s.turn) for s in samples}) == len(samples) > 2 * len(rows)
    assert max(Counter((s.record, s.row) for s in samples).values()) == 2
    model = tiny_model(family)
    in_rows, alone, unlike = [], [], 0
    with torch.no_grad():
        batch = Collator("sdpa")(rows)
        of_tokens = token_losses(model, batch)
        of_tokens_without = token_losses(model, batch | {"position_ids": torch.arange(LENGTH).expand(len(rows), -1)})
        for sample in samples:
            row = {name: column[sample.inside][None] for name, column in rows[sample.row].items()}
            assert row["position_ids"][0].tolist() == list(range(row["input_ids"].shape[1]))
            alone.append(token_losses(model, row).sum().item())
            in_rows.append(of_tokens[sample.row, sample.inside].sum().item())
            unlike += abs(of_tokens_without[sample.row, sample.inside].sum().item() - alone[-1]) > 1e-2
    assert all(loss > 0 for loss in alone)
    assert in_rows == pytest.approx(alone, rel=1e-5)
    assert of_tokens.sum().item() == pytest.approx(sum(alone), rel=1e-5)
    # Negative control: one run of positions for the whole row lets samples see each other.
    assert unlike > len(samples) / 3


def test_the_loss_of_the_model_is_the_mean_of_all_samples(packed: tuple[list[Row], list[Sample]]) -> None:
    rows, samples = packed
    model = tiny_model()
    with torch.no_grad():
        found = model(**Collator("sdpa")(rows)).loss.item()
        alone = [{name: column[s.inside][None] for name, column in rows[s.row].items()} for s in samples]
        total = sum(token_losses(model, row).sum().item() for row in alone)
    assert found == pytest.approx(total / sum(int((row["labels"] >= 0).sum()) for row in alone), rel=1e-5)
