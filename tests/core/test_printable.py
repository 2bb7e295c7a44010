from __future__ import annotations

from pathlib import Path

import pytest

from packcorpus.tasks.core.printable import common_folder, duration, from_here, shown, suggest

DURATIONS = {
    0: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 59.4: "59 s", 59.6: "1 min", 65: "1 min 5 s", 3599: "59 min 59 s",
    3600: "1 h", 7500: "2 h 5 min", 100_000: "27 h 46 min",
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_durations_have_two_units_without_zeros(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "known", "text"),
    [
        ("assistent", ["user", "assistant"], "; did you mean assistant?"),
        ("USER", ["user", "assistant"], "; did you mean user?"),
        ("chat", ["Chat", "cat", "x"], "; did you mean Chat?"),
        ("pineapple", ["user", "assistant"], ""),
        ("x" * 100_000, ["x" * 90], "; did you mean " + "x" * 90 + "?"),
        ("user", [], ""),
    ],
)
def test_a_close_match_is_suggested_whatever_its_case(value: str, known: list[str], text: str) -> None:
    assert suggest(value, known) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Köln, 東京 👍", '"Köln, 東京 👍"'),
        ('a"b\\\n', r'"a\"b\\\n"'),
        ("\x1b[2J\x9b\ud800\u202e", r'"\u001b[2J\u009b\ud800\u202e"'),
        ("⟦a⟧", r'"\u27e6a\u27e7"'),
        ("é" * 61, f'"{"é" * 60}…"'),
        (["a"], "a list"),
    ],
)
def test_values_of_the_data_are_readable_and_harmless(value: object, text: str) -> None:
    assert shown(value) == text


def test_several_matches_are_suggested_the_closest_first() -> None:
    assert suggest("corpus", ["corpse", "corpus-a", "other"], 2) == "; did you mean corpus-a or corpse?"


def test_paths_in_the_working_directory_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, beside = tmp_path / "here", tmp_path / "here2"
    here.mkdir()
    monkeypatch.chdir(here)
    assert (
        from_here(f"{here}/a: is missing; run: packcorpus repair {here}/b") == "a: is missing; run: packcorpus repair b"
    )
    for text in (f"{here}: is empty", f"{beside}/a", f"/x{here}/a", "a/b", f"{tmp_path}/a"):
        assert from_here(text) == text
    monkeypatch.chdir("/")
    assert from_here("/a/b: is missing") == "/a/b: is missing"


@pytest.mark.parametrize(
    ("paths", "folder"),
    [
        (["a/b.jsonl", "a/c/d.jsonl"], "a/"),
        (["s3://bucket/a/b.jsonl", "s3://bucket/a/c/d.jsonl"], "s3://bucket/a/"),
        (["s3://bucket/ab/x", "s3://bucket/ac/x"], "s3://bucket/"),
        (["s3://one/a", "s3://two/a"], ""),
        (["s3://one/a", "gs://one/a"], ""),
        (["s3://one/a", "a/b"], ""),
        (["s3://bucket/a"], ""),
    ],
)
def test_the_folder_that_paths_and_urls_share(paths: list[str], folder: str) -> None:
    assert common_folder(paths) == folder
    assert all(path.startswith(folder) for path in paths), "it is removed from the start of each"
