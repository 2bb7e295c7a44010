"""Advice comes from one table: one entry per figure that misses its target.

The advice is in the order of the table.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import ROOT

from packcorpus.train.measures import RULES, advise

FIGURES = {"data": 0.01, "gpu": 0.9, "optimizer": 0.02, "padding": 0.001, "memory_high": 0.8, "checkpointed": 0.8,
           "small_batch": 0.8, "steps": 500, "share_in_4_bits": 0.95, "wsl": 0, "workers": 0}  # fmt: skip


def test_good_figures_need_no_advice_and_each_rule_has_one() -> None:
    assert FIGURES.keys() == {rule.figure for rule in RULES}
    assert advise(FIGURES) == []


@pytest.mark.parametrize(
    ("figure", "value", "found", "target"),
    [
        ("data", 0.11, "11 %", "5 % or less"),
        ("gpu", 0.5, "50 %", "85 % or more"),
        ("optimizer", 0.2, "20 %", "10 % or less"),
        ("padding", 0.038, "3.8 %", "3 % or less"),
        ("memory_high", 0.97, "97 %", "95 % or less"),
        ("checkpointed", 0.2, "20 %", "70 % or more"),
        ("small_batch", 0.2, "20 %", "70 % or more"),
        ("steps", 42, "42", "100 or more"),
        ("share_in_4_bits", 0.06, "6 %", "80 % or more"),
        ("wsl", 1, "1", "0 or less"),
        ("workers", 4, "4", "0 or less"),
    ],
)
def test_a_figure_that_misses_its_target_is_named_with_it(figure: str, value: float, found: str, target: str) -> None:
    (advice,) = advise(FIGURES | {figure: value})
    assert (advice.found, advice.target) == (found, target)
    assert advice.action


def test_the_guide_names_every_figure() -> None:
    guide = (ROOT / "docs" / "guides" / "diagnose.md").read_text()
    assert [rule.name for rule in RULES if f"| {rule.name}" not in guide and rule.figure != "wsl"] == []


@given(st.dictionaries(st.sampled_from(sorted(FIGURES)), st.floats(0, 1000)))
def test_only_figures_that_are_there_are_judged_each_on_its_own(figures: dict[str, float]) -> None:
    names = [
        rule.name
        for rule in RULES
        if (value := figures.get(rule.figure)) is not None
        and (value < rule.at_least if rule.at_most is None else value > rule.at_most)  # type: ignore[operator]
    ]
    assert [advice.name for advice in advise(figures)] == names
    assert sum(len(advise({figure: value})) for figure, value in figures.items()) == len(names)
