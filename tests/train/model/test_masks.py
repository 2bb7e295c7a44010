"""Models that build masks without positions see each conversation of a row alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from support.training.architectures import EXPERTS, HEAD, WINDOW, build
from support.training.tiny_training import LENGTH, packed_rows, tiny_model

from packcorpus.train.model.attention import Collator, separate_by_positions
from packcorpus.train.model.isolation import check_isolation, choose_rows


def gpt_oss() -> Any:
    torch.manual_seed(3)
    model = build("gpt_oss", **EXPERTS | HEAD | WINDOW)  # a window shorter than most conversations
    model.config.use_cache = False
    return model.eval()


def test_a_conversation_of_a_row_has_the_logits_that_it_has_alone() -> None:
    model = gpt_oss()
    separate_by_positions(model)
    [row] = choose_rows(packed_rows(), 1)
    batch = Collator("eager")([packed_rows()[row]])
    batch.pop("labels")
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    with torch.no_grad():
        packed = model(**batch).logits[0]
        for start, stop in pairwise([*starts, LENGTH]):
            alone = model(input_ids=batch["input_ids"][:, start:stop]).logits[0]
            assert torch.allclose(packed[start:stop], alone, atol=1e-4)


def test_without_it_they_see_each_other() -> None:
    rows = [packed_rows()[row] for row in choose_rows(packed_rows(), 2)]
    model, batch = gpt_oss(), Collator("eager")(rows)
    assert not check_isolation(model, batch, rows, seed=1).passed
    separate_by_positions(model)
    assert check_isolation(model, batch, rows, seed=1).passed
    ones = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    assert not check_isolation(model, ones, rows, seed=1).passed, "a mask that is passed on is not hidden"


def test_other_models_are_left_alone() -> None:
    model = tiny_model()
    hooks = len(model.get_decoder()._forward_pre_hooks)
    separate_by_positions(model)
    assert len(model.get_decoder()._forward_pre_hooks) == hooks
