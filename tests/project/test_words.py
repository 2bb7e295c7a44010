"""bench/words.py finds the words that this project does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import ROOT


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def is_told(x): ...", True),
        ("class Mended:", True),
        ("Colours of the terminal", True),
        ("the file lies in data/", True),
        ("We recommend to amend this; there is no file, and it is no longer read.", False),
        ("the artifact is stored in data/; if x is None: y", False),
    ],
)
def test_a_word_is_found_in_names_and_texts_but_not_within_words(line: str, found: bool) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    import words

    assert bool(list(words.find(f"\n{line}\n"))) is found
    assert all(number == 2 for number, *_ in words.find(f"\n{line}\n"))


def test_the_command_names_file_and_line() -> None:
    path = ROOT / "docs" / "changelog.md"
    done = subprocess.run([sys.executable, "bench/words.py", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), "excused"
