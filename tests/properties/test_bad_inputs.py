"""bad_inputs.md shows the output of the command for each case."""

from __future__ import annotations

import pytest
from properties import bad_inputs
from support.commands import ROOT

DOCUMENT = (ROOT / "tests" / "properties" / "bad_inputs.md").read_text(encoding="utf-8").splitlines()
# Failures of the machine, two runs at once, and endless loops depend on timing. They have their own tests.
NOT_HERE = {20, 24, 27, 29, 30, 34, 35, 36}


def test_every_case_is_in_the_document() -> None:
    shown = [
        line.split(" | ")[0].removeprefix("| ") for line in DOCUMENT if line.startswith("| ") and line[2].isdigit()
    ]
    assert shown == [f"{number}. {what}" for number, what, _ in bad_inputs.CASES]
    assert {number for number, *_ in bad_inputs.CASES} == set(range(1, 37))


@pytest.mark.parametrize("number", sorted({number for number, *_ in bad_inputs.CASES} - NOT_HERE))
def test_the_document_shows_what_is_printed(number: int) -> None:
    rows = bad_inputs.table([case for case in bad_inputs.CASES if case[0] == number]).splitlines()
    assert rows[8:]
    assert [row for row in rows[8:] if row not in DOCUMENT] == []
