"""What docs/reference/bad-inputs.md says of each bad input is what the real command says of it."""

from __future__ import annotations

import sys

import pytest
from support.commands import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import bad_inputs

DOCUMENT = (ROOT / "docs" / "reference" / "bad-inputs.md").read_text(encoding="utf-8").splitlines()
# Of the machine, of two runs at once, and what loops for seconds: these have tests of their own, and depend on moments.
NOT_HERE = {20, 24, 27, 29, 30, 34, 35, 36}


def test_every_case_is_in_the_document() -> None:
    told = [line.split(" | ")[0].removeprefix("| ") for line in DOCUMENT if line.startswith("| ") and line[2].isdigit()]
    assert told == [f"{number}. {what}" for number, what, _ in bad_inputs.CASES]
    assert {number for number, *_ in bad_inputs.CASES} == set(range(1, 37))


@pytest.mark.parametrize("number", sorted({number for number, *_ in bad_inputs.CASES} - NOT_HERE))
def test_a_bad_input_is_told_as_the_document_has_it(number: int) -> None:
    rows = bad_inputs.table([case for case in bad_inputs.CASES if case[0] == number]).splitlines()
    assert rows[8:]
    assert [row for row in rows[8:] if row not in DOCUMENT] == []
