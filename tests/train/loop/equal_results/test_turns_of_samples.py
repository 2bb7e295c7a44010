"""Turns that share a sample have the loss and the gradient of separate samples.

conversation ─auto──▶ [prompt 1 ▓turn 1▓ … ▓turn 3▓] [prompt 5 ▓turn 5▓ … ▓turn 7▓]      a sample for each task
             ─apart─▶ [prompt 1 ▓turn 1▓] [prompt 3 ▓turn 3▓] [prompt 5 ▓turn 5▓] …      a sample for each turn
each auto sample, in a row and alone ── loss, gradient ──┐
the apart samples of its turns ── sum ───────────────────┴▶ equal
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch
from support.packed_rows import folder_of
from support.small_corpus import WORDS, make_recipe, pack_corpus
from support.templates.agent_templates import AGENTS
from support.training.step_gradients import error, gradients_of, token_losses
from support.training.tiny_training import FAMILIES, Row, rows_of, tiny_model

from packcorpus.train.model.attention import Collator

TOOLS = [{"type": "function", "function": {"name": "f", "description": "the train"}}]
LENGTH = 1024
# The turn ends with EOS, so no sample has more trained tokens than its turns.
SETTINGS = {"template": "agent.jinja", "eos_token": "<|im_end|>", "sequence_length": LENGTH, "overlong": "error"}


class Place(NamedTuple):
    """A sample in its row; `turns` are the messages that it trains on."""

    record: int
    turns: tuple[int, ...]
    row: Row
    inside: slice

    @property
    def alone(self) -> Row:
        return {name: column[self.inside][None] for name, column in self.row.items()}


def session(seed: int) -> dict[str, Any]:
    """Return a conversation of two tasks."""
    # Each has a call, its result, and an answer. Calls and answers have reasoning.
    source = random.Random(seed)
    messages: list[dict[str, Any]] = []
    for _ in range(2):
        said = [source.choice(WORDS) for _ in range(5)]
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": said[1]}}}
        messages += [
            {"role": "user", "content": said[0]},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": said[2]},
            {"role": "tool", "content": said[3]},
            {"role": "assistant", "content": said[4], "reasoning_content": said[1]},
        ]
    return {"messages": messages, "tools": TOOLS}


def packed(folder: Path, turns: str) -> list[Place]:
    folder.mkdir()
    (folder / "agent.jinja").write_text(AGENTS["after the last user message"])
    manifest = pack_corpus(make_recipe(folder, [session(seed) for seed in range(8)], **SETTINGS, turns=turns))
    rows = rows_of(manifest)
    index = pa.ipc.open_stream((folder_of(manifest) / "index.arrow").read_bytes()).read_all().to_pylist()
    found = []
    for record in sorted({place["record"] for place in index}):
        places = sorted((place for place in index if place["record"] == record), key=lambda place: place["turn"])
        for before, place in pairwise([{"turn": -1}, *places]):
            turns_of = tuple(k for k in (1, 3, 5, 7) if before["turn"] < k <= place["turn"])
            inside = slice(place["start"], place["start"] + place["length"])
            found.append(Place(record, turns_of, rows[place["row"]], inside))
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Place], list[Place]]:
    """Return the samples of `turns: auto` and of `turns: apart`."""
    folder = tmp_path_factory.mktemp("turns")
    auto, apart = packed(folder / "auto", "auto"), packed(folder / "apart", "apart")
    assert {place.turns for place in auto} == {(1, 3), (5, 7)}
    assert {place.turns for place in apart} == {(1,), (3,), (5,), (7,)}
    assert any(place.inside.start > 0 for place in auto)  # rows have several samples
    return auto, apart


def results(model: Any, batch: Row, inside: slice = slice(None)) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a sample in a batch of one row, and its gradient."""
    model.zero_grad()
    loss = token_losses(model, batch)[0, inside].sum()
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_in_one_sample_have_the_results_of_separate_samples(
    samples: tuple[list[Place], list[Place]], family: str
) -> None:
    auto, apart = samples
    model = tiny_model(family, max_position_embeddings=LENGTH).double()  # differences are of the order of the sums only
    for place in auto[:6]:
        own = [other for other in apart if other.record == place.record and set(other.turns) <= set(place.turns)]
        assert [k for other in own for k in other.turns] == list(place.turns)
        count = sum(int((other.alone["labels"] >= 0).sum()) for other in own)
        assert int((place.alone["labels"] >= 0).sum()) == count  # the same tokens count once
        found = [results(model, other.alone) for other in own]
        loss = sum(loss for loss, _ in found)
        gradient = {name: sum(each[name] for _, each in found) for name in found[0][1]}
        in_row = results(model, Collator("sdpa")([place.row]), place.inside)
        for seen_loss, seen in (in_row, results(model, place.alone)):
            assert seen_loss == pytest.approx(loss, rel=1e-6)
            assert error(seen, gradient) < 1e-6


def test_the_loss_and_gradient_of_all_rows_are_equal(samples: tuple[list[Place], list[Place]]) -> None:
    """Both corpora have the same trained tokens, so the same token mean."""
    found = []
    for places in samples:
        model = tiny_model(max_position_embeddings=LENGTH).double()
        rows = list({id(place.row): place.row for place in places}.values())
        loss = model(**Collator("sdpa")(rows)).loss
        loss.backward()
        found.append((loss.item(), gradients_of(model), sum(int((row["labels"] >= 0).sum()) for row in rows)))
    (loss, gradient, count), (other_loss, other, other_count) = found
    assert count == other_count
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert error(gradient, other) < 1e-6
