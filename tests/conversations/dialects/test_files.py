"""Files of every container are read as the same conversations.

The guide shows what is read.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from support.commands import ROOT

from packcorpus.tasks.conversations.formats import detect, read_record
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.dry_run.config_draft import make_draft
from packcorpus.tasks.dry_run.given import Given
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import PartReader, find_parts

USER, COLD = Message("user", "Oslo?"), Message("assistant", "cold")
TURNS = [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "cold"}]
LISTS = {"role": ["user", "assistant"], "content": ["Oslo?", "cold"]}
CHAT = Conversation((USER, COLD))


def conversations_in(path: Path) -> list[Conversation]:
    [(file, parts)] = find_parts([Source(path=path.name)], path.parent, 1 << 20)
    return [file.conversation(record) for part in parts for _, record in PartReader(part)]


def as_csv(values: list[Any], path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "messages"], *([n, json.dumps(value)] for n, value in enumerate(values))])


def as_json_type(values: list[Any], path: Path) -> None:
    pq.write_table(pa.table({"messages": pa.array(list(map(json.dumps, values)), pa.json_())}), path)


def as_json_type_in_arrow(values: list[Any], path: Path) -> None:
    table = pa.table({"messages": pa.array(list(map(json.dumps, values)), pa.json_())})
    pyarrow.feather.write_feather(table, path)


def as_text(values: list[Any], path: Path) -> None:
    pq.write_table(pa.table({"messages": list(map(json.dumps, values))}), path)


def as_texts_of_messages(values: list[Any], path: Path) -> None:
    pq.write_table(pa.table({"messages": [list(map(json.dumps, value)) for value in values]}), path)


def as_structs(values: list[Any], path: Path) -> None:
    pq.write_table(pa.table({"messages": values}), path)


def as_lists(values: list[Any], path: Path) -> None:
    pq.write_table(pa.table({"messages": [LISTS for _ in values]}), path)


def as_maps(values: list[Any], path: Path) -> None:
    maps = [[list(turn.items()) for turn in value] for value in values]
    pq.write_table(pa.table({"messages": pa.array(maps, pa.list_(pa.map_(pa.string(), pa.string())))}), path)


def as_jsonl_of_texts(values: list[Any], path: Path) -> None:
    path.write_text("".join(json.dumps({"messages": json.dumps(value)}) + "\n" for value in values))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (as_csv, "a.csv"),
        (as_json_type, "a.parquet"),
        (as_json_type_in_arrow, "a.arrow"),
        (as_text, "a.parquet"),
        (as_texts_of_messages, "a.parquet"),
        (as_structs, "a.parquet"),
        (as_lists, "a.parquet"),
        (as_maps, "a.parquet"),
        (as_jsonl_of_texts, "a.jsonl"),
    ],
)
def test_messages_in_any_container_and_form(
    write: Callable[[list[Any], Path], None], name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write([TURNS] * 3, path)
    assert conversations_in(path) == [CHAT] * 3
    draft = make_draft([str(path)], tmp_path, Given())
    assert (draft.entries[0].format, draft.entries[0].fitting) == ("messages", 3)
    assert not draft.will_fail


def test_a_struct_of_a_table_has_only_the_keys_of_its_own_row(tmp_path: Path) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        return {"messages": [TURNS[0] | {"tool_calls": None}, called], "tools": [tool]}

    rows = [row("weather", city="Oslo"), row("add", a=2, b=3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = conversations_in(tmp_path / "a.parquet")
    assert found == conversations_in(tmp_path / "a.jsonl")
    assert [each.messages[1].tool_calls[0].arguments for each in found] == ['{"city":"Oslo"}', '{"a":2,"b":3}']
    assert found[0].tools == (json.dumps(rows[0]["tools"][0], separators=(",", ":")),)


# -- the guide --------------------------------------------------------------------------------------------------------

OSLO, WEATHER = '{"city":"Oslo"}', '{"type":"function","function":{"name":"weather","parameters":%s}}'
CITY = '{"type":"object","properties":{"city":{"type":"string"}}}'
DEGREES = Message("assistant", "3 degrees")


def called(arguments: str = OSLO, id: str | None = None, **keys: Any) -> Message:
    return Message("assistant", keys.pop("content", ""), tool_calls=(ToolCall("weather", arguments, id),), **keys)


# Every record of the guide, in order.
SHOWN = [
    Conversation((USER, called(id="a"), Message("tool", "3", tool_call_id="a"), DEGREES)),
    Conversation(
        (USER, called('{"city": "Oslo"}'), Message("tool", "3", name="weather"), DEGREES),
        (WEATHER % '{"type":"object"}',),
    ),
    Conversation((USER, called(reasoning="Look it up."), Message("tool", "3"), DEGREES)),
    Conversation(
        (
            Message("user", "Oslo and Bergen?"),
            Message("assistant", "", tool_calls=(ToolCall("weather", OSLO), ToolCall("weather", '{"city":"Bergen"}'))),
            Message("tool", "3"),
            Message("tool", "5"),
            Message("assistant", "3 and 5 degrees"),
        )
    ),
    Conversation((USER, Message("assistant", "I cannot know that.")), (WEATHER % CITY,)),
    Conversation(
        (
            USER,
            called(id="a", content="Wait.", reasoning="Look it up."),
            Message("tool", "3", tool_call_id="a"),
            DEGREES,
        )
    ),
    Conversation(
        (Message("user", "Oslo?", train=False, loss_weight=0.0), called(reasoning="Look it up.", loss_weight=1.0)),
        (WEATHER % '{"type":"object"}',),
    ),
    Conversation(
        (
            USER,
            called('{"city": "Oslo"}', "a", reasoning="Look it up."),
            Message("tool", "3", tool_call_id="a"),
            DEGREES,
        )
    ),
    Conversation((Message("user", "2+2?"), Message("assistant", "4")), template_options={"enable_thinking": False}),
    Conversation(
        (
            Message("user", "2+2?"),
            Message("assistant", "5", train=False),
            Message("user", "3+3?"),
            Message("assistant", "6", loss_weight=2.0),
        )
    ),
    Conversation((Message("user", "2+2?"), Message("assistant", "4"))),
]


def test_the_records_of_the_guide_are_read_as_it_says() -> None:
    guide = (ROOT / "docs" / "guides" / "agent-data.md").read_text(encoding="utf-8")
    found = []
    for block in guide.partition("\n## Agent data\n")[2].split("```json\n")[1:]:
        text = block.partition("```")[0].strip()
        while text:
            record, end = json.JSONDecoder().raw_decode(text)
            found.append(read_record(record, detect(record) or ""))
            text = text[end:].lstrip()
    assert found == SHOWN
