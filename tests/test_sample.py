"""The sample corpus equals the output of its script, and its claims are true.

The checks read the files, not the script's makers: sums are parsed from the text and recomputed with fractions,
weekdays are checked with `datetime`, and programs are run.
"""

from __future__ import annotations

import csv
import doctest
import gzip
import io
import json
import operator
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from datetime import date, datetime
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

Rows = list[dict[str, Any]]
SAMPLE = Path(__file__).parent.parent / "data" / "sample"
COUNTS = {
    "chat.jsonl": 64,
    "tools.jsonl": 30,
    "sharegpt.json": 38,
    "alpaca.json": 44,
    "dolly.parquet": 30,
    "oasst.jsonl.gz": 20,
    "questions.csv": 26,
    "prompts.jsonl.zst": 24,
    "prompts_as_messages.jsonl": 6,
    "notes.arrow": 18,
}
# The compressors that wrote the committed files. Other versions may write other bytes for the same records.
ZLIB, ZSTD = "1.2.13", (1, 5, 7)


def read(path: Path) -> Rows:
    data = path.read_bytes()
    rows: Rows
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompress(data)
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".arrow":
        with pa.ipc.open_stream(data) as stream:
            rows = stream.read_all().to_pylist()
    elif path.suffix == ".json":
        rows = json.loads(data)
    elif path.suffix == ".csv":
        rows = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    else:
        rows = [json.loads(line) for line in data.decode().split("\n") if line]
    return rows


def strings(value: object) -> Iterator[str]:
    """Yield every string in a record, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


@pytest.fixture(scope="module")
def records() -> dict[str, Rows]:
    return {name: read(SAMPLE / name) for name in COUNTS}


@pytest.fixture(scope="module")
def texts(records: dict[str, Rows]) -> list[str]:
    return [text for rows in records.values() for text in strings(rows)]


def test_script_reproduces_the_committed_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SAMPLE / "generator" / "generate.py", tmp_path], check=True)
    assert {p.name for p in tmp_path.iterdir()} == set(COUNTS)
    for name in COUNTS:
        assert read(tmp_path / name) == read(SAMPLE / name), f"{name} is not what generate.py writes; run it again"
        same_writer = {".gz": ZLIB == zlib.ZLIB_RUNTIME_VERSION, ".zst": zstandard.ZSTD_VERSION == ZSTD}
        if same_writer.get(Path(name).suffix, Path(name).suffix in (".json", ".jsonl", ".csv")):
            assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes(), f"{name}: same records, other bytes"


def test_gzip_header_holds_no_name_and_no_time() -> None:
    header = (SAMPLE / "oasst.jsonl.gz").read_bytes()[:8]
    assert header[3] == 0
    assert header[4:] == bytes(4)


def test_counts_and_uniqueness(records: dict[str, Rows]) -> None:
    assert {name: len(rows) for name, rows in records.items()} == COUNTS
    assert sum(COUNTS.values()) == 300
    bodies = [
        json.dumps([t for key, value in row.items() if key != "tools" for t in strings(value)])
        for rows in records.values()
        for row in rows
    ]
    assert len(set(bodies)) == len(bodies)


def test_config_and_readme_name_every_file() -> None:
    config = yaml.safe_load((SAMPLE / "corpus.yaml").read_text())
    assert [source["path"] for source in config["sources"]] == list(COUNTS)
    assert "tokenizer" not in config
    readme = (SAMPLE / "README.md").read_text()
    for name, n in COUNTS.items():
        assert re.search(rf"^\| `{re.escape(name)}` .*\| {n} \|$", readme, re.M), f"{name} with {n} records"


def test_size() -> None:
    assert sum(p.stat().st_size for p in SAMPLE.iterdir() if p.is_file()) < 500_000


NUMBER = r"−?\d+(?:\.\d+)?(?:/\d+)?"
TERM = rf"{NUMBER}(?: [+−×÷] {NUMBER})*"
CLAIM = re.compile(rf"(?<![\w./…])(?<![+−×÷=≈…] ){TERM}(?: [=≈] {TERM})+(?![\w./]*[\d/])")
OPERATORS = {"+": operator.add, "−": operator.sub, "×": operator.mul, "÷": operator.truediv}


def value(term: str) -> Fraction:
    """Evaluate a term: products and quotients first, then sums, left to right."""
    sums: list[Fraction] = []
    tokens = ["+", *term.split(" ")]
    for sign, number in zip(tokens[::2], tokens[1::2], strict=True):
        n = Fraction(number.replace("−", "-"))
        if sign in "×÷":
            sums[-1] = OPERATORS[sign](sums[-1], n)
        else:
            sums.append(n if sign == "+" else -n)
    return sum(sums, Fraction(0))


def holds(claim: str) -> bool:
    left, *rest = re.split(r" ([=≈]) ", claim)
    for sign, right in zip(rest[::2], rest[1::2], strict=True):
        half_a_digit = Fraction(1, 2 * 10 ** len(right.partition(".")[2])) if sign == "≈" else Fraction(0)
        if "." not in right and sign == "≈":
            half_a_digit = Fraction(1, 20)  # trailing zeros are not written: 3.04 rounded to one decimal is 3
        if abs(value(left) - value(right)) > half_a_digit:
            return False
    return True


def test_the_checker_can_fail() -> None:
    assert holds("2 + 3 × 4 = 14")
    assert holds("1 ÷ 3 ≈ 0.3333")
    assert holds("3/4 + 5/6 = 19/12")
    assert not holds("2 + 3 × 4 = 20")
    assert not holds("1 ÷ 3 ≈ 0.34")
    assert not holds("1 ÷ 3 = 0.3333")
    assert CLAIM.findall("so 1. 7 × 8 = 56.") == ["7 × 8 = 56"]


def test_every_sum_is_right(texts: list[str]) -> None:
    claims = [claim for text in texts for claim in CLAIM.findall(text)]
    assert len(claims) > 800
    assert [claim for claim in claims if not holds(claim)] == []


WEEKDAYS = {
    "en": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "de": "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
    "fr": "lundi mardi mercredi jeudi vendredi samedi dimanche",
    "es": "lunes martes miércoles jueves viernes sábado domingo",
    "ru": "понедельник вторник среда четверг пятница суббота воскресенье",
    "zh": "星期一 星期二 星期三 星期四 星期五 星期六 星期日",
    "ja": "月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日",
    "ar": "الاثنين الثلاثاء الأربعاء الخميس الجمعة السبت الأحد",
}
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
    "zh": "1 2 3 4 5 6 7 8 9 10 11 12",
    "ja": "1 2 3 4 5 6 7 8 9 10 11 12",
    "ar": "يناير فبراير مارس أبريل مايو يونيو يوليو أغسطس سبتمبر أكتوبر نوفمبر ديسمبر",
}
DATED = {  # day of the month, month, year, weekday
    "en": r"(?P<d>\d+) (?P<m>[A-Z]\w+) (?P<y>\d{4})(?: is a | was a |, a )(?P<w>\w+day)",
    "de": r"(?P<d>\d+)\. (?P<m>\w+) (?P<y>\d{4}) ist ein (?P<w>\w+)",
    "fr": r"(?P<d>\d+) (?P<m>\w+) (?P<y>\d{4}) est un (?P<w>\w+)",
    "es": r"(?P<d>\d+) de (?P<m>\w+) de (?P<y>\d{4}) es (?P<w>\w+)",
    "ru": r"(?P<d>\d+) (?P<m>\w+) (?P<y>\d{4}) года — это (?P<w>\w+)",
    "zh": r"(?P<y>\d{4})年(?P<m>\d+)月(?P<d>\d+)日是(?P<w>星期[^几])",
    "ja": r"(?P<y>\d{4})年(?P<m>\d+)月(?P<d>\d+)日は(?P<w>[^何]曜日)",
    "ar": r"(?P<d>\d+) (?P<m>\w+) (?P<y>\d{4}) هو يوم (?P<w>\w+)",
}


def is_weekday(day: date, name: str, lang: str) -> bool:
    return WEEKDAYS[lang].split()[day.weekday()] == name


@pytest.mark.parametrize("lang", DATED)
def test_every_weekday_is_right(texts: list[str], lang: str) -> None:
    months = MONTHS[lang].split()
    found = [match for text in texts for match in re.finditer(DATED[lang], text)]
    assert len(found) >= (50 if lang == "en" else 1)
    for match in found:
        day = date(int(match["y"]), months.index(match["m"]) + 1, int(match["d"]))
        assert is_weekday(day, match["w"], lang), match[0]


def test_every_full_date_is_right(texts: list[str]) -> None:
    found = [match for text in texts for match in re.finditer(r"(\w+day), (\d+ [A-Z]\w+ \d{4})", text)]
    assert len(found) > 100
    for match in found:
        assert is_weekday(datetime.strptime(match[2], "%d %B %Y"), match[1], "en"), match[0]


def test_programs_run_and_give_the_results_shown(records: dict[str, Rows]) -> None:
    ran = 0
    for rows in records.values():
        for row in rows:
            scope: dict[str, Any] = {}
            # In order of appearance, a function precedes its examples. In a tree, replies may come in any order.
            blocks = [b for text in strings(row) for b in re.findall(r"```python\n(.*?)```", text, re.S)]
            for block in sorted(blocks, key=lambda b: b.startswith(">>>")):
                if not block.startswith(">>>"):
                    exec(block, scope)  # noqa: S102 - written by generate.py
                    continue
                test = doctest.DocTestParser().get_doctest(block, scope, "sample", None, 0)
                assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 0, block
                ran += len(test.examples)
                scope = {**scope, **test.globs}
    assert ran >= 30


def test_json_answers_parse(texts: list[str]) -> None:
    blocks = [b for text in texts for b in re.findall(r"```json\n(.*?)```", text, re.S)]
    assert len(blocks) >= 8
    for block in blocks:
        assert json.loads(block)


def test_tool_calls_are_answered_and_right(records: dict[str, Rows]) -> None:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for row in records["tools.jsonl"]:
        offered = {tool["function"]["name"] for tool in row["tools"]}
        open_calls: dict[str, dict[str, Any]] = {}
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in offered
                open_calls[call["id"]] = call["function"]
            if message["role"] == "tool":
                call = open_calls.pop(message["tool_call_id"])
                pairs.append(({**call, "arguments": json.loads(call["arguments"])}, json.loads(message["content"])))
        assert not open_calls
    for row in records["sharegpt.json"]:
        turns = row["conversations"]
        for call, answer in pairwise(turns):
            if call["from"] == "function_call":
                assert answer["from"] == "observation"
                pairs.append((json.loads(call["value"]), json.loads(answer["value"])))
    assert len(pairs) > 50
    for call, answer in pairs:
        arguments = call["arguments"]
        if call["name"] == "calculate" and "error" in answer:
            with pytest.raises(ZeroDivisionError):
                eval(arguments["expression"])  # noqa: S307 - written by generate.py
        elif call["name"] == "calculate":
            assert eval(arguments["expression"]) == answer["result"]  # noqa: S307 - written by generate.py
        elif call["name"] == "weekday":
            assert is_weekday(date.fromisoformat(arguments["date"]), answer["weekday"], "en")
        elif call["name"] == "add_days":
            later = date.fromisoformat(answer["date"])
            assert (later - date.fromisoformat(arguments["date"])).days == arguments["days"]
            assert is_weekday(later, answer["weekday"], "en")


def test_the_traits_that_packcorpus_must_handle_are_there(records: dict[str, Rows]) -> None:
    chats = [message for row in records["chat.jsonl"] for message in row["messages"]]
    assert {message["role"] for message in chats} == {"system", "user", "assistant"}
    assert {message.get("weight") for message in chats} == {None, 0, 1}
    assert any("name" in message for message in chats)
    assert all(
        any(m["role"] == "assistant" and m.get("weight", 1) for m in r["messages"]) for r in records["chat.jsonl"]
    )
    speakers = {turn["from"] for row in records["sharegpt.json"] for turn in row["conversations"]}
    assert speakers == {"system", "human", "gpt", "function_call", "observation"}
    for key in ("system", "history", "input"):
        assert sum(bool(row.get(key)) for row in records["alpaca.json"]) >= 4, key
    assert len({row["category"] for row in records["dolly.parquet"]}) >= 5
    trees = [row["prompt"]["replies"] for row in records["oasst.jsonl.gz"]]
    assert sum(len(replies) > 1 for replies in trees) >= 8
    assert any(replies[0]["rank"] > 0 for replies in trees), "the best reply is not always the first"
    assert any(reply["replies"] for replies in trees for reply in replies)
    assert any("\n" in row["answer"] for row in records["questions.csv"])
    assert all(isinstance(row["prompt"], list) for row in records["prompts_as_messages.jsonl"])
    assert pq.ParquetFile(SAMPLE / "dolly.parquet").num_row_groups == 3
