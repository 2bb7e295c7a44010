"""Values of tables are as JSON has them, without the nulls that a table adds."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Message, ToolCall
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.readers.tables import Converter, Date, Decimal, Time, rows_of
from packcorpus.tasks.storage.manifest import load_manifest


def values(array: Any) -> list[Any]:
    return Converter().values(array)


STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (STRUCT, [{"a": 1, "b": None}, None, {}, {"a": 2, "b": []}], [{"a": 1}, None, {}, {"a": 2, "b": []}]),
        (pa.struct([]), [{}, None, {}], [{}, None, {}]),
        (
            pa.list_(STRUCT),
            [[{"a": 1}, None], None, [], [{"b": ["x", None]}]],
            [[{"a": 1}, None], None, [], [{"b": ["x", None]}]],
        ),
        (pa.large_list(pa.int8()), [[1], None, [2, 3]], [[1], None, [2, 3]]),
        (pa.list_(pa.int8(), 2), [[1, 2], None, [3, 4]], [[1, 2], None, [3, 4]]),
        (pa.list_view(pa.int8()), [[1, 2], None, [], [3]], [[1, 2], None, [], [3]]),
        (pa.map_(pa.string(), pa.int8()), [[("a", 1), ("b", None)], None, []], [{"a": 1, "b": None}, None, {}]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"], ["a", None, "a"]),
        (pa.float32(), [0.1, None, 1e20, 3.0], [0.1, None, 1e20, 3.0]),
        (pa.float64(), [0.1, None], [0.1, None]),
        (pa.date32(), [datetime.date(2026, 1, 31), None], [Date("2026-01-31"), None]),
        (pa.time32("s"), [datetime.time(9, 5), None], [Time("09:05:00"), None]),
        (pa.timestamp("ns"), [1, None], [Time("1970-01-01 00:00:00.000000001"), None]),
        (pa.decimal128(10, 2), [decimal.Decimal("0.10"), None], [Decimal("0.10"), None]),
    ],
)
def test_values_of_a_column(kind: pa.DataType, given: list[Any], expected: list[Any]) -> None:
    array = pa.array(given, kind)
    assert values(array) == expected
    for start in range(len(given)):
        assert values(array.slice(start)) == expected[start:]
        assert values(array.slice(0, start)) == expected[:start]


def test_the_json_type_is_parsed_strictly() -> None:
    texts = ['{"a": null}', None, '"2+2?"', "[1]"]
    assert values(pa.array(texts, pa.json_())) == [{"a": None}, None, "2+2?", [1]]
    batch = pa.record_batch({"a": pa.array(['{"b": 1, "b": 2}', "[", "5"], pa.json_())})
    found = rows_of(batch)
    assert [row.reason if isinstance(row, Reject) else row for row in found] == ["duplicate_key", "bad_json", {"a": 5}]


def test_null_fields_are_counted_and_null_structs_are_not() -> None:
    converter = Converter()
    converter.values(pa.array([{"a": 1, "b": None}, None, {"a": None, "b": None}], STRUCT))
    assert converter.left_out == 3


def test_null_fields_are_counted_once_if_a_row_is_a_reject() -> None:
    structs = pa.array([{"a": 1}, {"a": 2}, {"b": []}], STRUCT)
    converter = Converter()
    rows = rows_of(pa.record_batch({"m": structs, "n": pa.array(["1", "[", "2"], pa.json_())}), converter)
    assert [isinstance(row, Reject) for row in rows] == [False, True, False]
    assert converter.left_out == 2


def test_names_that_are_there_twice_are_rejects() -> None:
    twice = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    [found] = rows_of(pa.record_batch({"m": twice}))
    assert (found.reason, found.message) == ("bad_value", 'two fields of a struct are named "a"')
    pairs = pa.array([[("k", 1)], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8()))
    first, second = rows_of(pa.record_batch({"m": pairs}))
    assert first == {"m": {"k": 1}}
    assert (second.reason, second.message) == ("bad_value", 'a map has the key "k" twice')


def table_of(folder: Path, arguments: Any, kind: pa.DataType) -> None:
    """Write a Parquet file with a user, and a call with these arguments."""
    call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", kind)]))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    turns = [
        {"role": "user", "content": "Oslo?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
    ]
    pq.write_table(pa.table({"messages": pa.array([turns], pa.list_(message))}), folder / "a.parquet")


@pytest.mark.parametrize(
    ("kind", "given", "written"),
    [
        (pa.struct([("city", pa.string()), ("a", pa.int64())]), {"city": "Oslo"}, '{"city":"Oslo"}'),
        (pa.struct([("a", pa.struct([("b", pa.int64()), ("c", pa.int64())]))]), {"a": {"c": 1}}, '{"a":{"c":1}}'),
        (pa.map_(pa.string(), pa.string()), [("city", "Oslo"), ("day", None)], '{"city":"Oslo","day":null}'),
        (pa.struct([("v", pa.float32())]), {"v": 0.1}, '{"v":0.1}'),
        (pa.struct([("v", pa.list_(pa.float16()))]), {"v": [0.5, 0.1]}, '{"v":[0.5,0.1]}'),
        (pa.struct([("v", pa.date32())]), {"v": datetime.date(2026, 1, 31)}, '{"v":"2026-01-31"}'),
        (pa.struct([("v", pa.timestamp("us"))]), {"v": 0}, '{"v":"1970-01-01 00:00:00.000000"}'),
        (pa.struct([("v", pa.decimal128(5, 2))]), {"v": decimal.Decimal("0.10")}, '{"v":"0.10"}'),
        (pa.string(), '{"city": null}', '{"city": null}'),
    ],
)
def test_arguments_of_a_table(tmp_path: Path, kind: pa.DataType, given: Any, written: str) -> None:
    table_of(tmp_path, given, kind)
    [row] = rows_of(pq.read_table(tmp_path / "a.parquet").to_batches()[0])
    called = Message("assistant", "", tool_calls=(ToolCall("f", written),))
    assert read_record(row, "messages").messages == (Message("user", "Oslo?"), called)


def test_nan_in_arguments_is_a_reject_and_not_null(tmp_path: Path) -> None:
    table_of(tmp_path, {"v": float("nan")}, pa.struct([("v", pa.float64())]))
    [row] = rows_of(pq.read_table(tmp_path / "a.parquet").to_batches()[0])
    with pytest.raises(Reject, match="arguments cannot be written as JSON: a number in it is NaN or infinite"):
        read_record(row, "messages")


def test_the_manifest_counts_null_fields(tmp_path: Path) -> None:
    table_of(tmp_path, {"city": "Oslo"}, pa.struct([("city", pa.string()), ("a", pa.int64())]))
    recipe = make_recipe(tmp_path, [], sources=[{"path": "a.parquet"}])
    assert load_manifest(pack_corpus(recipe)).noticed["null_fields"] == 2  # tool_calls of the user, and `a`


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, ["prompt", "completion", "completion"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r'a\.parquet: two columns are named "completion"; rename one of them'):
        pack_corpus(make_recipe(tmp_path, [], sources=[{"path": "a.parquet"}]))
