"""Shards have the rows of a slow reference, and training libraries can read them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, disable_progress_bars, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import EOS, PAD, Tokens, make_recipe, pack_corpus, token_file, tokens_of

from packcorpus.tasks.core.errors import StorageError
from packcorpus.tasks.corpus import shards
from packcorpus.tasks.corpus.shards import Rows, build_rows, write_shard
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.keys import VERSIONS, WHOLE_MESSAGES
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.schemas import IGNORED, PLAN_SCHEMA, conversation_schema, row_schema
from packcorpus.tasks.storage.token_files import TokenFiles, places_of
from packcorpus.tasks.verification.verify import verify
from packcorpus.train.data.conversations import sft_dataset
from packcorpus.train.data.corpus import open_corpus

COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")
KEY = "ab" * 32
SPECIAL = EOS, PAD

Placed = tuple[int, int, int, int, int, int, bool]  # the columns of PLAN_SCHEMA


@st.composite
def shard_plans(draw: st.DrawFn) -> tuple[list[list[Tokens]], list[Placed], int, int]:
    """Draw token files, the plan of a shard, the number of rows, and their length.

    Some conversations are in pieces.
    """
    align = draw(st.sampled_from([1, 1, 2, 4]))
    length = draw(st.integers(8 // align, 24 // align)) * align
    parts = draw(st.lists(st.lists(tokens_of(3 * length), max_size=4), min_size=1, max_size=3))
    pieces: list[tuple[int, int, int, int, bool]] = []
    for part, rows in enumerate(parts):
        for conversation, (values, _) in enumerate(rows):
            first = 0
            while first < len(values):
                rest = len(values) - first
                closed = rest > length or (rest > 1 and draw(st.booleans()))
                taken = draw(st.integers(1, min(length, rest) - 1)) if closed else rest
                pieces.append((part, conversation, first, taken, closed))
                first += taken
    plan: list[Placed] = []
    row = start = 0
    for part, conversation, first, taken, closed in draw(st.permutations(pieces)):
        if start + taken + closed > length or (start and draw(st.booleans())):
            row, start = row + 1, 0
        plan.append((row, start, part, conversation, first, taken, closed))
        start += -(-(taken + closed) // align) * align
    return parts, plan, row + bool(plan), length


def reference(parts: list[list[Tokens]], plan: list[Placed], rows: int, length: int, pad: int) -> list[dict[str, Any]]:
    """Build rows one token at a time."""
    found = []

    def fill(row: dict[str, list[int]], end: int) -> None:
        for position in range(end - len(row["input_ids"])):
            for name, value in zip(COLUMNS, (pad, 0, -100, position), strict=True):
                row[name].append(value)

    for number in range(rows):
        row: dict[str, list[int]] = {name: [] for name in COLUMNS}
        for at, start, part, conversation, first, taken, closed in plan:
            if at != number:
                continue
            fill(row, start)
            for position, value in enumerate(parts[part][conversation][0][first : first + taken]):
                token, trained = (value, True) if value >= 0 else (-1 - value, False)
                row["input_ids"].append(token)
                row["labels"].append(token if trained and position > 0 else -100)
                row["position_ids"].append(position)
            if closed:
                row["input_ids"].append(EOS)
                row["labels"].append(-100)
                row["position_ids"].append(taken)
            row["attention_mask"] += [1] * (taken + closed)
        fill(row, length)
        found.append(row)
    return found


def open_parts(parts: list[list[Tokens]], folder: Path) -> TokenFiles:
    for number, rows in enumerate(parts):
        token_file(folder / f"{number}.arrow", rows)
    return TokenFiles([folder / f"{number}.arrow" for number in range(len(parts))])


def as_batch(plan: list[Placed]) -> pa.RecordBatch:
    columns = [pa.array([piece[i] for piece in plan], field.type) for i, field in enumerate(PLAN_SCHEMA)]
    return pa.record_batch(columns, schema=PLAN_SCHEMA)


@settings(max_examples=examples(200), deadline=None)
@given(shard_plans(), st.sampled_from([PAD, EOS]))
def test_rows_equal_the_slow_reference(drawn: tuple[list[list[Tokens]], list[Placed], int, int], pad: int) -> None:
    parts, plan, rows, length = drawn
    with tempfile.TemporaryDirectory() as name:
        tokens = open_parts(parts, Path(name))
        batch = as_batch(plan)
        columns = {field: batch.column(field).to_numpy(zero_copy_only=False) for field in batch.schema.names}
        built = Rows.room(rows + 1, length).first(rows)
        for column in COLUMNS:
            getattr(built, column).fill(77)  # earlier values do not matter
        columns["position"] = tokens.locate(columns)
        build_rows(columns, tokens, built, EOS, pad)
        assert tokens_are_unchanged(parts, tokens), "the token files were written to"
    expected = reference(parts, plan, rows, length, pad)
    for column, kind in zip(COLUMNS, (np.int32, np.int8, np.int32, np.int32), strict=True):
        found = getattr(built, column)
        assert found.dtype == kind
        assert found.shape == (rows, length)
        assert found.tolist() == [row[column] for row in expected], column


def tokens_are_unchanged(parts: list[list[Tokens]], tokens: TokenFiles) -> bool:
    return all(
        tokens.tokens(part, number).tolist() == values
        for part, rows in enumerate(parts)
        for number, (values, _) in enumerate(rows)
    )


def test_a_token_file_that_ends_early_is_named(tmp_path: Path) -> None:
    tokens = open_parts([[(list(range(3000)), True)]], tmp_path)
    columns = {field.name: np.zeros(1, field.type.to_pandas_dtype()) for field in PLAN_SCHEMA}
    columns["taken"] = np.array([3000], np.int32)
    columns["position"] = tokens.locate(columns)
    with (tmp_path / "0.arrow").open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(StorageError, match=r"0\.arrow: is truncated; delete it, then run again"):
        tokens.gather(columns, np.zeros(1, np.int64), np.empty(3000, np.int32))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the numbers of opened record batches."""
    numbers: list[int] = []

    class Counting(pa.RecordBatchFileReader):
        def get_batch(self, number: int) -> pa.RecordBatch:
            numbers.append(number)
            return super().get_batch(number)

    monkeypatch.setattr(pa.ipc, "open_file", Counting)
    return numbers


def test_a_token_file_is_opened_once_unless_it_changes(tmp_path: Path, opened: list[int]) -> None:
    path, plan = tmp_path / "0.arrow", as_batch([(0, 0, 0, 1, 0, 2, False), (0, 2, 0, 4, 0, 2, False)])
    columns = {field: plan.column(field).to_numpy(zero_copy_only=False) for field in plan.schema.names}
    token_file(path, [([~1, 2], True)] * 6, batch=2)
    first = TokenFiles([path]).locate(columns).tolist()
    opened.clear()
    assert TokenFiles([path]).locate(columns).tolist() == first
    assert opened == []
    token_file(path, [([~1, 2, 3], True)] * 6, batch=2)
    os.utime(path, (1, 1))
    second = TokenFiles([path]).locate(columns).tolist()
    assert opened
    assert second != first
    assert [np.fromfile(path, np.int32, 3, offset=place).tolist() for place in second] == [[~1, 2, 3]] * 2


@pytest.mark.parametrize("change", ["size", "inode", "time"])
def test_a_token_file_in_another_state_is_opened_again(tmp_path: Path, opened: list[int], change: str) -> None:
    path, other = tmp_path / "0.arrow", tmp_path / "other.arrow"
    token_file(path, [([~1, 2], True)] * 6, batch=2)
    before = path.stat()
    rows = np.array([0, 5])
    assert places_of(path, rows).tolist()
    token_file(other, [([~3, 4], True)] * (9 if change == "size" else 6), batch=2)
    if change == "time":  # written in place
        with path.open("r+b") as file:
            file.write(other.read_bytes())
    else:
        os.rename(other, path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    opened.clear()
    places = places_of(path, rows)
    assert opened
    assert [np.fromfile(path, np.int32, 2, offset=place).tolist() for place in places] == [[~3, 4]] * 2


def test_a_token_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "0.arrow", tmp_path / "other.arrow"
    for each in (path, other):
        token_file(each, [([~1, 2], True)] * 6, batch=2)
    first = os.fstat

    def look_and_replace(handle: int) -> os.stat_result:
        found = first(handle)
        os.rename(other, path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", look_and_replace)
        with pytest.raises(StorageError, match=r"0\.arrow: was replaced while it was read; run again"):
            places_of(path, np.array([5]))
    assert len(places_of(path, np.array([5]))) == 1


def test_no_file_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "0.arrow"
    token_file(path, [([~1, 2], True)] * 6, batch=2)
    before = len(os.listdir("/dev/fd"))
    for rows in ([0], [5], [6]):
        with suppress(IndexError):
            places_of(path, np.array(rows))
    assert len(os.listdir("/dev/fd")) <= before, "fewer, if garbage of another test held one"


def test_rows_are_found_in_their_record_batches(tmp_path: Path) -> None:
    path = tmp_path / "0.arrow"
    token_file(path, [([~number, number], True) for number in range(7)], batch=2)
    places = places_of(path, np.array([1, 4, 5, 5, 6]))
    assert [np.fromfile(path, np.int32, 2, offset=place)[1] for place in places] == [1, 4, 5, 5, 6]
    with pytest.raises(IndexError, match=r"0\.arrow: has 7 conversations, but the plan refers to number 7"):
        places_of(path, np.array([7]))


def test_a_conversation_that_a_token_file_lacks(tmp_path: Path) -> None:
    tokens = open_parts([[([~1, 2], True)]], tmp_path)
    columns = {field.name: np.ones(1, field.type.to_pandas_dtype()) for field in PLAN_SCHEMA} | {
        "part": np.zeros(1, int)
    }
    with pytest.raises(IndexError, match=r"0\.arrow: has 1 conversations, but the plan refers to number 1"):
        tokens.locate(columns)


@settings(max_examples=examples(40), deadline=None)
@given(shard_plans())
def test_a_shard_is_the_same_rows_in_batches_of_any_size(
    drawn: tuple[list[list[Tokens]], list[Placed], int, int],
) -> None:
    parts, plan, rows, length = drawn
    expected = reference(parts, plan, rows, length, PAD)
    with tempfile.TemporaryDirectory() as name:
        tokens = open_parts(parts, Path(name))
        path = Path(name) / "shard.arrow"
        for batch_tokens in (1, length, 2 * length, 1 << 20):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shards, "BATCH_TOKENS", batch_tokens)
                receipt = write_shard(path, as_batch(plan), rows, tokens, SPECIAL, RowLayout((length,)), length, KEY)
            with pa.memory_map(str(path)) as file:
                batches = list(pa.ipc.open_stream(file))
            assert max(len(batch) for batch in batches) <= max(1, batch_tokens // length)
            assert [row for batch in batches for row in batch.to_pylist()] == expected
            assert receipt == {
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
                "rows": rows,
                "packed": sum(sum(row["attention_mask"]) for row in expected),
                "trained": sum(label != IGNORED for row in expected for label in row["labels"]),
            }


FIXED_PARTS: list[list[Tokens]] = [
    [([~5, ~6, 7, 8, 2], True), ([~9, 10, 11, ~12, ~13, 14, 15, 16, 17, 18, 19, 20], False)],
    [([~21, 22], False), ([~23, ~24, ~25, 26, 27, ~2], True)],
]
FIXED_PLAN: list[Placed] = [
    (0, 0, 0, 0, 0, 5, False),
    (0, 5, 1, 0, 0, 2, False),
    (1, 0, 0, 1, 0, 7, True),
    (2, 0, 1, 1, 0, 6, False),
    (3, 0, 0, 1, 7, 5, False),
]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    tokens = open_parts(FIXED_PARTS, tmp_path / "tokens")
    write_shard(tmp_path / "shard.arrow", as_batch(FIXED_PLAN), 4, tokens, SPECIAL, RowLayout((8,)), 8, KEY)
    return tmp_path / "shard.arrow"


def test_golden_rows(shard: Path) -> None:
    with pa.memory_map(str(shard)) as file:
        table = pa.ipc.open_stream(file).read_all()
    digest = hashlib.sha256()
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(table[name].combine_chunks().flatten().to_numpy()).tobytes())
    assert (VERSIONS["corpus"], digest.hexdigest()) == (
        11,
        "f6a1558068bc7401efb32a5fa37a69c852bca1dd905f6bee72fc191bbc762f7d",
    ), "the rows of a plan changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then this golden digest"


def test_schema_and_metadata(shard: Path) -> None:
    with pa.memory_map(str(shard)) as file:
        schema = pa.ipc.open_stream(file).schema
    assert schema.equals(row_schema(RowLayout((8,)), 8, KEY), check_metadata=True)
    assert schema.metadata == {b"format_version": b"3.0", b"manifest_key": KEY.encode(), b"sequence_length": b"8"}
    kinds = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "labels": pa.int32(), "position_ids": pa.int32()}
    assert schema.names == list(kinds)
    for name, kind in kinds.items():
        field = schema.field(name)
        assert pa.types.is_fixed_size_list(field.type)
        assert (field.type.list_size, field.type.value_type, field.nullable) == (8, kind, False)


def test_datasets_opens_it(shard: Path, tmp_path: Path) -> None:
    disable_progress_bars()
    expected = reference(FIXED_PARTS, FIXED_PLAN, 4, 8, PAD)
    mapped = Dataset.from_file(str(shard))
    assert mapped.to_list() == expected
    loaded = load_dataset("arrow", data_files=str(shard), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.to_list() == expected
    assert loaded.column_names == list(COLUMNS)


def test_numpy_sees_it_without_a_copy(shard: Path) -> None:
    mapped = Dataset.from_file(str(shard))
    before = pa.total_allocated_bytes()
    for name in COLUMNS:
        for chunk in mapped.data.column(name).chunks:
            view = chunk.flatten().to_numpy(zero_copy_only=True)
            assert view.reshape(-1, 8).shape == (4, 8)
            assert not view.flags.owndata
    assert pa.total_allocated_bytes() == before


def test_a_shard_without_rows(tmp_path: Path) -> None:
    disable_progress_bars()
    tokens = open_parts(FIXED_PARTS, tmp_path / "tokens")
    path = tmp_path / "empty.arrow"
    receipt = write_shard(path, as_batch([]), 0, tokens, SPECIAL, RowLayout((8,)), 8, KEY)
    assert (receipt["rows"], receipt["packed"], receipt["trained"]) == (0, 0, 0)
    with_rows = tmp_path / "rows.arrow"
    write_shard(with_rows, as_batch(FIXED_PLAN), 4, tokens, SPECIAL, RowLayout((8,)), 8, KEY)
    assert len(Dataset.from_file(str(path))) == 0
    both = load_dataset("arrow", data_files=[str(path), str(with_rows)], cache_dir=str(tmp_path / "c"), split="train")
    assert len(both) == 4


def test_rows_hold_their_arrays() -> None:
    assert list(Rows.__slots__) == row_schema(RowLayout((8,), loss_weight="data", share="conversation"), 8, "").names, (
        "a column is in Rows and not in the schema"
    )
    assert row_schema(RowLayout((8,)), 8, "").names == list(COLUMNS)


# -- format 2.0 ------------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
WHOLE = [
    {"messages": [{"role": "user", "content": "How long is 85 minutes?"}, {"role": "assistant", "content": "1:25"}]},
    {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "18 °C", "tool_call_id": "c1", "name": "weather"},
            {"role": "assistant", "content": "18 degrees <|im_end|>"},
        ],
    },
]


def test_format_2_gives_the_conversations_back(tmp_path: Path) -> None:
    disable_progress_bars()
    recipe = make_recipe(tmp_path, WHOLE, packing=False)
    pack_corpus(recipe)
    [path] = recipe.corpus_folder.glob("train-*.arrow")
    mapped = Dataset.from_file(str(path))
    assert pa.ipc.open_stream(pa.memory_map(str(path))).schema.metadata[b"format_version"] == b"2.0"
    assert mapped.column_names == ["messages", "tools", "text"]
    rows = {row["messages"][0]["content"]: row for row in mapped.to_list()}

    plain = rows["How long is 85 minutes?"]
    assert [(m["role"], m["content"]) for m in plain["messages"]] == [
        ("user", "How long is 85 minutes?"), ("assistant", "1:25"),
    ]  # fmt: skip
    assert plain["tools"] is None
    assert plain["text"] == (
        "<|im_start|>user\nHow long is 85 minutes?<|im_end|>\n<|im_start|>assistant\n1:25<|im_end|>"
    )

    called = rows["Weather?"]
    assert [m["role"] for m in called["messages"]] == ["user", "assistant", "tool", "assistant"]
    [call] = called["messages"][1]["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("c1", "function", "weather")
    assert eval(call["function"]["arguments"]) == {"town": "Ulm"}  # noqa: S307 - our own literal
    assert called["messages"][2]["tool_call_id"] == "c1"
    assert called["messages"][2]["name"] == "weather"
    assert called["messages"][3]["content"] == "18 degrees <|im_end|>"
    assert '"name":"weather"' in called["tools"].replace(" ", "")
    assert called["text"].endswith("18 degrees <|im_end|><|im_end|>")

    loaded = load_dataset("arrow", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded.to_list() == mapped.to_list()


def test_format_2_has_the_reasoning_and_the_flags(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }};{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [
        {"role": "user", "content": "a", "train": True},
        {"role": "assistant", "content": "b", "thinking": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "training": False},
    ]
    recipe = make_recipe(tmp_path, [{"messages": messages}], packing=False, template="own.jinja")
    pack_corpus(recipe)
    [path] = recipe.corpus_folder.glob("train-*.arrow")
    [row] = Dataset.from_file(str(path)).to_list()
    assert [(m["reasoning_content"], m["weight"], m["train"]) for m in row["messages"]] == [
        (None, 1, True), ("hm", 1, None), (None, 1, None), (None, 0, False),
    ]  # fmt: skip
    assert "[assistant]hm;b" in row["text"]


def test_format_2_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, "corpus", WHOLE_MESSAGES - 1)
    monkeypatch.setattr(
        "packcorpus.tasks.corpus.shards.conversation_schema", partial(conversation_schema, key_version=1)
    )
    path = pack_corpus(make_recipe(tmp_path, WHOLE, packing=False))
    monkeypatch.undo()
    verify(path)
    corpus = open_corpus(path)
    _, counts = sft_dataset(corpus)
    assert counts.read == len(WHOLE)
