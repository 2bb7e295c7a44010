"""CSV files are read with any delimiter and encoding.

Both are detected from the beginning of the file, or set.
"""

from __future__ import annotations

import csv
import gzip
import io
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.profiles import examples

from packcorpus.tasks.core.errors import DataError, Reject, UsageError
from packcorpus.tasks.readers.csv_file import DELIMITERS, Csv, as_utf8, check_delimiter, check_encoding, find_encoding
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.sources.parts import PartReader, find_parts
from packcorpus.tasks.sources.sample_files import sample_files

GERMAN = [("Größe?", "Die Straße ist 3 m breit; außerdem: „schön“."), ("Wie heißt du?", "Käthe, sagte sie.\nJa.")]
HEADER = ("prompt", "completion")


def table(rows: list[Any], delimiter: str = ",", header: tuple[str, ...] = HEADER) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([header, *rows])
    return out.getvalue()


def read(path: Path, data: bytes, **source: Any) -> tuple[SourceFile, list[Any]]:
    path.write_bytes(data)
    [(file, [part])] = find_parts([Source(path=path.name, **source)], path.parent, 1 << 26)
    return file, [record for _, record in PartReader(part)]


def as_records(rows: list[Any]) -> list[dict[str, str]]:
    return [dict(zip(HEADER, row, strict=True)) for row in rows]


def refusal(path: Path, data: bytes, **source: Any) -> str:
    with pytest.raises((DataError, UsageError)) as error:
        read(path, data, **source)
    return str(error.value)


# -- well-formed files -------------------------------------------------------------------------------------------------

cell = st.text(st.characters(codec="cp1252", exclude_characters="\0\r"), min_size=1, max_size=20)


@settings(deadline=None, max_examples=examples(100))
@given(
    rows=st.lists(st.tuples(cell, cell), min_size=1, max_size=5),
    delimiter=st.sampled_from(DELIMITERS),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "windows-1252"]),
    extension=st.sampled_from(["csv", "tsv"]),
)
@example(rows=[("a;b|c", "d;e|f")], delimiter="\t", encoding="utf-16", extension="csv")
def test_every_delimiter_and_encoding_gives_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], delimiter: str, encoding: str, extension: str
) -> None:
    """Every delimiter and encoding gives the same records.

    The delimiter is detected, and so is each encoding except windows-1252, which few bytes cannot prove.
    """
    path = tmp_path_factory.mktemp("csv") / f"a.{extension}"
    data = table(rows, delimiter).encode(encoding)
    file, found = read(path, data, encoding=encoding if encoding == "windows-1252" else "auto")
    assert found == as_records(rows)
    assert file.delimiter == ("" if delimiter == {"csv": ",", "tsv": "\t"}[extension] else delimiter)
    assert file.encoding == ("" if encoding.startswith("utf-8") else encoding)
    named, again = read(path, data, encoding=encoding, delimiter=delimiter)
    assert (named.reading, again) == (file.reading, found)


@settings(deadline=None, max_examples=examples(300))
@given(
    data=st.binary(max_size=60),
    encoding=st.sampled_from(["windows-1252", "utf-16-le", "gb18030", "iso8859-3"]),
    size=st.integers(1, 9),
)
@example(data=b"\xc3\xa5", encoding="iso8859-3", size=1)
@example(data="\U0001f600".encode("utf-16-le")[:2], encoding="utf-16-le", size=3)
def test_bytes_become_their_text_or_no_text(data: bytes, encoding: str, size: int) -> None:
    """Bytes that an encoding does not have are never read as characters."""
    refused = True
    read, pieces = as_utf8(io.BytesIO(data).read, encoding, "a.csv"), []
    with suppress(DataError):
        while piece := read(size):
            pieces.append(piece)
        refused = False
    assert all(len(piece) == size for piece in pieces[:-1])
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        assert refused or not is_utf8(b"".join(pieces))
    else:
        assert (refused, b"".join(pieces).decode()) == (False, text)


def is_utf8(data: bytes) -> bool:
    try:
        return bool(data.decode()) or not data
    except UnicodeDecodeError:
        return False


# -- detection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", DELIMITERS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "windows-1252"])
def test_a_file_of_a_spreadsheet_is_read_as_it_is(tmp_path: Path, delimiter: str, encoding: str) -> None:
    data = table(GERMAN * 20, delimiter).encode(encoding)
    for name, pack in (("a.csv", bytes), ("b.csv.gz", gzip.compress)):
        file, found = read(tmp_path / name, pack(data))
        assert found == as_records(GERMAN * 20)
        facts = {"delimiter": delimiter.replace(",", ""), "encoding": encoding.replace("utf-8", "")}
        assert file.reading == {key: value for key, value in facts.items() if value}
        [sample] = sample_files([file], 900, 1 << 20)
        assert sample.records
        assert all(record.value in as_records(GERMAN) for record in sample.records)
    window = Csv().window(replace(file, path=tmp_path / "a.csv", bytes=len(data), blocks=None), 1 << 20)
    assert (window is None) == (encoding != "utf-8")
    if window:
        with (tmp_path / "a.csv").open("rb") as source:
            assert [record.value for record in window(source, 0, len(data))[0]] == as_records(GERMAN * 20)


@pytest.mark.parametrize(
    ("rows", "header", "expected"),
    [
        ([("a;b", "c;d")], HEADER, ""),
        ([("a;b", "c;d")], ("frage", "antwort"), ""),
        ([("a,b", "c,d")], ("frage", "antwort"), ";"),
        ([("a,b", "c"), ("x", "y,z")], ("id, as a number", "text"), "\t"),
        ([("a;b",)], ("text",), ""),
    ],
)
def test_the_delimiter_follows_from_the_header_and_the_rows(
    tmp_path: Path, rows: list[Any], header: tuple[str, ...], expected: str
) -> None:
    columns = {"prompt": "frage", "completion": "antwort"} if "frage" in header else {}
    assert read(tmp_path / "a.csv", table(rows, expected or ",", header).encode(), columns=columns)[0].delimiter == (
        expected
    )


def test_a_header_of_unknown_keys_is_split_as_the_rows_are(tmp_path: Path) -> None:
    unknown = table([("a, b", "c")] * 3, ";", ("spalte", "wert")).encode()
    assert "columns in the first row: spalte, wert; " in refusal(tmp_path / "a.csv", unknown)
    both = b"a;b|c\nd;e|f\n"
    message = refusal(tmp_path / "a.csv", both)
    assert message == (
        "a.csv: its cells may be separated by ';' or '|'; set delimiter, such as delimiter: ';' or delimiter: tab"
    )
    named = "columns in the first row: "
    assert f"{named}a, b;c;" in refusal(tmp_path / "a.csv", b"a,b;c\nd,e;f\n"), "the usual one of two"
    assert f"{named}a, b|c;" in refusal(tmp_path / "a.csv", both, delimiter=";")


def test_a_few_words_in_another_script_are_not_western(tmp_path: Path) -> None:
    rows = [("Say hello in Russian, please, and explain the word.", "Привет is a greeting among friends.")] * 9
    assert "its encoding is not clear" in refusal(tmp_path / "a.csv", table(rows).encode("cp1251"))
    with_quotes = [("Say hello in French.", "“Salut” – it’s a greeting…")] * 9
    assert read(tmp_path / "a.csv", table(with_quotes).encode("cp1252"))[0].encoding == "windows-1252"


OTHERS = {
    "windows-1251": "Как дела? Всё хорошо, спасибо.",
    "gb18030": "你好，今天天气怎么样？",
    "shift_jis": "こんにちは、お元気ですか。",
    "windows-1250": "Czy możesz wysłać mi wiadomość o tym, co się zdarzyło?",
    "windows-1253": "Τι κάνεις;",
}


@pytest.mark.parametrize("encoding", OTHERS)
def test_another_encoding_has_to_be_named(tmp_path: Path, encoding: str) -> None:
    data = table([("Hello?", OTHERS[encoding])] * 9).encode(encoding)
    assert refusal(tmp_path / "a.csv", data) == (
        "a.csv: is not UTF-8, and its encoding is not clear; set encoding, such as encoding: windows-1252"
    )
    file, found = read(tmp_path / "a.csv", data, encoding=encoding)
    assert found == as_records([("Hello?", OTHERS[encoding])] * 9)
    assert file.reading == {"encoding": encoding}


def test_a_damaged_file_in_utf8_stays_one(tmp_path: Path) -> None:
    data = table(GERMAN * 3).encode().replace("ö".encode(), b"\xf6", 1)
    file, found = read(tmp_path / "a.csv", data)
    assert file.reading == {}
    assert isinstance(found[0], Reject)
    assert found[1:] == as_records(GERMAN * 3)[1:]
    assert find_encoding("ö".encode() + b"\xf6") == ""
    assert find_encoding("ö".encode() + b"\xf6\xf6") is None
    assert find_encoding("aö".encode()[:-1]) == "", "the last character may be cut"


def test_a_file_that_is_not_in_its_encoding_at_all(tmp_path: Path) -> None:
    for data, encoding, problem in (
        (b"text\nx", "utf-16", "no byte order mark; use utf-16-le or utf-16-be"),
        (b"text", "utf-32", "no byte order mark; use utf-32-le or utf-32-be"),
        ("text\nx".encode("utf-16-le") + b"\n", "utf-16-le", "truncated data"),
    ):
        expected = f"a.csv: is not {encoding}: {problem}; set another encoding"
        assert refusal(tmp_path / "a.csv", data, encoding=encoding) == expected


def test_a_row_that_is_not_in_the_encoding_is_rejected(tmp_path: Path) -> None:
    data = table(GERMAN).encode("cp1252") + b"\x81,x\r\n"
    _, found = read(tmp_path / "a.csv", data, encoding="windows-1252")
    assert found[:2] == as_records(GERMAN)
    assert (found[2].reason, found[2].message) == (
        "bad_utf8",
        "the row is not windows-1252; set another encoding, or fix the row",
    )


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_checked(tmp_path: Path) -> None:
    assert [check_delimiter(value) for value in ("tab", "\\t", "\t", ";", " ", "auto")] == [*"\t\t\t; ", "auto"]
    names = {"UTF8": "utf-8", "utf-8-sig": "utf-8", "cp1252": "windows-1252", "latin-1": "iso8859-1", "u16": "utf-16"}
    assert {name: check_encoding(name) for name in names} == names
    for value in ("", ";;", "a", '"', "\n", "ä"):
        with pytest.raises(ValidationError, match="is not a delimiter; use `tab` or a single character"):
            Source(path="a.csv", delimiter=value)
    for value in ("utf-9", "rot13", "idna", "base64", "utf-7", "unicode_escape", "../x", "\0", ""):
        with pytest.raises(ValidationError, match=r"is not a known encoding; (did you mean|typical are) "):
            Source(path="a.csv", encoding=value)
    for key, value in (("delimiter", ";"), ("encoding", "utf-16")):
        message = refusal(tmp_path / "a.jsonl", b'{"text": "x"}\n', **{key: value})
        assert message.startswith(f"a.jsonl: `{key}` applies only to CSV and TSV files; ")
