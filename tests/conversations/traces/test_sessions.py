"""A session of an agent is the conversation that it ends with.

Everything else of a session is counted by name.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conversations.traces.session_records import (
    HEADER,
    META,
    PARALLEL,
    TREE,
    TURN,
    answered,
    asked,
    claude,
    codex,
    entry,
    item,
    lines,
    pi,
    text,
    thinking,
    tool_result,
    tool_use,
    write,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.containers import as_parquet
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.conversations.formats import FORMAT_OF, detect, read_record
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.sources import record_of
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.verify import verify

Records = list[dict[str, Any]]


def read(records: Records) -> tuple[Message, ...]:
    return read_record({"trace": records}, "session").messages


def counts(records: Records) -> dict[str, int]:
    left_out = FORMAT_OF["session"].left_out
    assert left_out
    return {name.removeprefix("trace[]."): count for name, count in left_out({"trace": records}).items()}


def call(name: str, number: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":")), number)


def user(said: str) -> Message:
    return Message("user", said)


def answer(said: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", said, reasoning=reasoning, tool_calls=calls)


def result(number: str, said: str, name: str | None = None) -> Message:
    return Message("tool", said, name=name, tool_call_id=number)


# -- one golden session of each agent ----------------------------------------------------------------------------------

GOLDEN: dict[str, tuple[Records, tuple[Message, ...], dict[str, int]]] = {
    "Claude Code": (
        PARALLEL,
        (
            user("Rain?"),
            answer("I look.", "Look it up.", call("weather", "t1", city="Oslo"), call("weather", "t2", city="Köln")),
            result("t1", "rain"),
            result("t2", "sun\n25 °C"),
            answer("Rain in Oslo."),
        ),
        {"summary": 1, "file-history-snapshot": 1, "system": 1},
    ),
    "Codex": (
        TURN,
        (
            Message("system", "You code.\nBe brief."),
            user("<environment_context>\n  <cwd>/work</cwd>\n</environment_context>\nRain?"),
            answer("", "Look it up.", ToolCall("weather", '{"city": "Oslo"}', "c1")),
            result("c1", "rain"),
            answer("", "", call("apply_patch", "c2", input="*** Begin Patch")),
            result("c2", "done"),
            answer("Yes."),
        ),
        {"turn_context": 1, "event_msg": 2},
    ),
    "Pi": (
        TREE,
        (
            user("Rain?"),
            answer("", "Look it up.", call("weather", "k", city="Oslo")),
            result("k", "rain", "weather"),
            answer("Yes."),
        ),
        {"(other branch)": 1, "model_change": 1},
    ),
}

each_agent = pytest.mark.parametrize("agent", GOLDEN)


@each_agent
def test_a_session_is_read_and_the_rest_is_counted(agent: str) -> None:
    records, expected, left_out = GOLDEN[agent]
    assert detect({"trace": records}) == detect({"traces": json.dumps(records)}) == "session"
    assert read(records) == expected
    assert read_record({"traces": json.dumps(records), "trace": None}, "session").messages == expected
    assert read_record({"trace": [json.dumps(record) for record in records]}, "session").messages == expected
    assert counts(records) == left_out


# -- files -------------------------------------------------------------------------------------------------------------


def found(path: Path, **source: Any) -> SourceFile:
    [file] = find_files([Source(path=path.name, **source)], path.parent)
    return file


@each_agent
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_one_file_is_one_conversation(agent: str, ending: str, tmp_path: Path) -> None:
    records, expected, _ = GOLDEN[agent]
    path = tmp_path / f"a.jsonl{ending}"
    data = lines(records).replace(b"}\n", b"}\n\n", 2)  # a blank line is not a record
    path.write_bytes(gzip.compress(data) if ending else data)
    for source in ({}, {"format": "session"}):
        file = found(path, **source)
        assert (file.container, file.format) == ("session", "session")
        assert record_of(file, 1) == Conversation(expected)


def test_other_lines_are_not_a_session(tmp_path: Path) -> None:
    typed = [{"type": "user", "message": {"role": "user", "content": "a"}}]  # no id of a session or message
    for records in (conversations(3), [record | {"type": "session", "id": "a"} for record in conversations(3)]):
        file = found(write(tmp_path / "a.jsonl", records))
        assert (file.container, file.format) == ("jsonl", "messages")
    with pytest.raises(DataError, match="no known format"):
        found(write(tmp_path / "a.jsonl", typed))
    file = found(write(tmp_path / "a.jsonl", PARALLEL), format="messages")
    assert (file.container, file.format) == ("jsonl", "messages")


def test_rows_of_the_hub_are_sessions_or_messages(tmp_path: Path) -> None:
    about = {"harness": "codex", "session_id": "c", "file_name": "a.jsonl"}
    tools = [{"name": "weather", "parameters": {"type": "object"}}]
    rows = [about | {"trace": json.dumps(records), "tools": json.dumps(tools)} for records in (TURN, TREE)]
    (tmp_path / "a.parquet").write_bytes(as_parquet(rows))
    write(tmp_path / "a.jsonl", [about | {"trace": TURN, "tools": tools}, about | {"trace": TREE, "tools": tools}])
    for name in ("a.parquet", "a.jsonl"):
        file = found(tmp_path / name)
        assert (file.container, file.format) == (name.partition(".")[2], "session")
        for number, agent in ((1, "Codex"), (2, "Pi")):
            conversation = record_of(file, number)
            assert isinstance(conversation, Conversation)
            assert conversation.messages == GOLDEN[agent][1]
            assert json.loads(conversation.tools[0])["function"]["name"] == "weather"
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]
    row = about | {"trace": TURN, "messages": turns, "prompt": "Rain?", "tools": tools}
    file = found(write(tmp_path / "b.jsonl", [row]))
    assert file.format == "messages"
    conversation = record_of(file, 1)
    assert isinstance(conversation, Conversation)
    assert (conversation.messages, len(conversation.tools)) == ((user("Rain?"), answer("Yes.")), 1)


def test_sessions_are_packed_one_row_of_the_index_each(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    for number in range(5):
        said = claude("assistant", "a5", "s1", text(f"Rain in Oslo, {number}."), id="m2")
        write(folder / f"{number}.jsonl", [*PARALLEL[:-1], said])
    write(folder / "9.jsonl", [*PARALLEL[:3], {"type": "progress", "data": {}}])
    settings = {"sources": ["sessions"], "reasoning": "drop", "max_rejects": 0.5, "validation": 0}
    made = make_recipe(tmp_path, [], **settings)
    predicted = predict(made.config, made.folder, tmp_path)
    path = pack_corpus(made)
    verify(path)
    manifest = load_manifest(path)
    assert load_manifest(path).ledger.conversations.packed == predicted.ledger.conversations.packed == 5
    [line] = (corpus_folder(manifest, path) / "rejects.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["source"], found["code"], found["record"]) == ("sessions/9.jsonl", "E204", 1)
    left_out = {"trace[].system": 1, "trace[].summary": 1, "trace[].file-history-snapshot": 1}
    assert manifest.unused_keys == {f"sessions/{number}.jsonl": left_out for number in range(5)}


# -- branches ----------------------------------------------------------------------------------------------------------


def test_the_branch_that_ends_last_is_the_conversation() -> None:
    records = [
        claude("user", "u1", None, "Rain?"),
        claude("assistant", "a1", "u1", text("No.")),
        claude("user", "u2", "a1", "Sure?"),
        claude("user", "u3", "a1", "Sun?"),
        claude("assistant", "a3", "u3", text("Yes.")),
        claude("assistant", "a2", "u2", text("Quite.")),
    ]
    assert read(records) == (user("Rain?"), answer("No."), user("Sure?"), answer("Quite."))
    assert counts(records) == {"(other branch)": 2}
    assert read(records[:-1]) == (user("Rain?"), answer("No."), user("Sun?"), answer("Yes."))


def test_a_call_has_one_result() -> None:
    records = [
        *PARALLEL[2:9],
        claude("user", "r3", "a3", tool_result("t1", "snow")),
        claude("user", "r4", "r2", "Well?"),
        claude("assistant", "a5", "r4", text("Rain in Oslo."), id="m2"),
    ]
    assert [message.content for message in read(records) if message.role == "tool"] == ["rain", "sun\n25 °C"]
    assert counts(records) == {"(other branch)": 1}


def test_messages_of_other_agents_are_left_out_unless_they_are_all() -> None:
    side = [
        claude("user", "s1", None, "Search.", isSidechain=True),
        claude("assistant", "s2", "s1", text("Found."), isSidechain=True),
    ]
    main = [claude("user", "u1", None, "Rain?"), claude("assistant", "a1", "u1", text("Yes."))]
    assert read([*main, *side]) == (user("Rain?"), answer("Yes."))
    assert counts([*main, *side]) == {"(other agent)": 2}
    assert read(side) == (user("Search."), answer("Found."))
    assert counts(side) == {}


def test_what_the_agent_wrote_instead_of_the_model_is_left_out() -> None:
    records = [
        claude("user", "u1", None, "Rain?"),
        claude("assistant", "e1", "u1", text("API Error: 529"), isApiErrorMessage=True),
        claude("user", "u2", "e1", "Rain?"),
        {"type": "attachment", "uuid": "q", "parentUuid": "u2", "isSidechain": False,
         "attachment": {"type": "queued_command", "prompt": "In Oslo."}},
        claude("assistant", "a1", "q", text("Yes.")),
        claude("user", "u3", "a1", "[Request interrupted by user]"),
    ]  # fmt: skip
    assert read(records) == (user("Rain?\nRain?\nIn Oslo."), answer("Yes."))
    assert counts(records) == {"(failed answer)": 1, "(after the last answer)": 1}
    pi_records = [
        HEADER,
        pi("1", None, "user", "Rain?"),
        pi("2", "1", "assistant", [text("Y")], stopReason="aborted"),
        pi("3", "2", "assistant", [text("Yes.")], stopReason="stop"),
    ]
    assert read(pi_records) == (user("Rain?"), answer("Yes."))
    assert counts(pi_records) == {"(failed answer)": 1}


def test_a_turn_that_was_rolled_back_is_left_out() -> None:
    for events in (True, False):
        records = [META]
        for number in range(3):
            records += [asked(f"{number}?"), *[codex("event_msg", type="user_message", message="")] * events]
            records.append(answered(f"{number}."))
        back = codex("event_msg", type="thread_rolled_back", num_turns=2)
        records += [back, asked("3?"), answered("3.")]
        said = [message.content for message in read(records)]
        assert said == ["You code.", "0?", "0.", "3?", "3."]
        assert counts(records)["(other branch)"] == 4
    with pytest.raises(Reject, match=r'record 8: payload.num_turns: expected a number, found "2"'):
        read([*records[:7], codex("event_msg", type="thread_rolled_back", num_turns="2")])


# -- summaries ---------------------------------------------------------------------------------------------------------


def test_after_a_summary_the_conversation_is_what_the_model_has() -> None:
    before = [claude("user", "u1", None, "Rain?"), claude("assistant", "a1", "u1", text("No."))]
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None,
                "logicalParentUuid": "a1", "isSidechain": False, "content": "Conversation compacted"}  # fmt: skip
    summary = claude("user", "s", "c", "They asked.", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    records = [*before, boundary, summary, claude("assistant", "a2", "s", text("Yes."))]
    assert read(records) == (user("They asked."), answer("Yes."))
    assert counts(records) == {"(before a summary)": 2, "system": 1}


def test_messages_that_a_summary_keeps_follow_it() -> None:
    def boundary(**facts: Any) -> dict[str, Any]:
        return {"type": "system", "subtype": "compact_boundary", "uuid": "c", "parentUuid": None,
                "logicalParentUuid": "a3", "isSidechain": False, "compactMetadata": facts}  # fmt: skip

    before = [
        claude("user", "u1", None, "Rain?"),
        claude("assistant", "a1", "u1", text("No.")),
        claude("user", "u2", "a1", "Sun?"),
        claude("assistant", "a2", "u2", text("Yes.")),
        claude("user", "u3", "a2", "Wind?"),
        claude("assistant", "a3", "u3", text("No wind.")),
    ]
    summary = claude("user", "s", "c", "They asked.", isCompactSummary=True)
    end = [claude("user", "u4", "s", "Snow?"), claude("assistant", "a4", "u4", text("No snow."))]
    expected = (
        user("They asked."), answer("Yes."), user("Wind?"), answer("No wind."), user("Snow?"), answer("No snow."),
    )  # fmt: skip
    for facts in (
        {"preservedMessages": {"anchorUuid": "s", "uuids": ["a2", "a2", "u3", "a3"]}},
        {"preservedSegment": {"headUuid": "a2", "anchorUuid": "s", "tailUuid": "a3"}},
    ):
        records = [*before, boundary(**facts), summary, *end]
        assert read(records) == expected
        assert counts(records) == {"system": 1, "(before a summary)": 3}
    for lost in ({"preservedMessages": {"uuids": [5, "x"]}}, {"preservedSegment": {"headUuid": "x", "tailUuid": "a3"}}):
        records = [*before, boundary(**lost), summary, *end]
        assert read(records) == (user("They asked.\nSnow?"), answer("No snow."))


def test_a_summary_of_codex_replaces_the_history() -> None:
    start = [META, asked("Rain?"), answered("No.")]
    replaced = [asked("Rain?")["payload"], asked("They asked.")["payload"]]
    end = [asked("Sun?"), answered("Yes.")]
    compacted = codex("compacted", message="They asked.", replacement_history=replaced)
    expected = ["You code.", "Rain?\nThey asked.\nSun?", "Yes."]
    assert [message.content for message in read([*start, compacted, *end])] == expected
    assert counts([*start, compacted, *end]) == {"(before a summary)": 2}
    compacted = codex("compacted", message="They asked.")
    assert [message.content for message in read([*start, compacted, *end])] == expected
    assert counts([*start, compacted, *end]) == {"(before a summary)": 1}
    for unreadable in (
        codex("compacted", message=""),
        codex("compacted", message="", replacement_history=[{"type": "compaction", "encrypted_content": "x"}]),
    ):
        assert [message.content for message in read([*start, unreadable, *end])] == [
            "You code.", "Rain?", "No.", "Sun?", "Yes.",
        ]  # fmt: skip
        assert counts([*start, unreadable, *end]) == {"compacted": 1}


def test_a_summary_of_pi_keeps_the_last_messages() -> None:
    records = [
        HEADER,
        pi("1", None, "user", "Rain?"),
        pi("2", "1", "assistant", [text("No.")]),
        pi("3", "2", "user", "Sun?"),
        pi("4", "3", "assistant", [text("Yes.")]),
        entry("compaction", "5", "4", summary="They asked.", firstKeptEntryId="3", tokensBefore=9),
        entry("branch_summary", "6", "5", summary="They tried.", fromId="4"),
        pi("7", "6", "bashExecution", None, command="ls", output="a.py", exitCode=0),
        pi("8", "7", "user", "Wind?"),
        pi("9", "8", "assistant", [text("No wind.")]),
    ]
    assert read(records) == (
        user("They asked.\nSun?"),
        answer("Yes."),
        user("They tried.\n$ ls\na.py\nWind?"),
        answer("No wind."),
    )
    assert counts(records) == {"(before a summary)": 2}


# -- older and odd sessions --------------------------------------------------------------------------------------------


def test_an_older_file_of_codex_has_its_items_without_a_frame() -> None:
    records = [
        {"id": "c", "timestamp": "t", "instructions": None, "git": {}},
        {"record_type": "state"},
        *(record["payload"] for record in (asked("Rain?"), answered("Yes."))),
    ]
    assert read(records) == (user("Rain?"), answer("Yes."))
    assert counts(records) == {"(no type)": 1}


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def test_records_without_ids_are_read_in_their_order() -> None:
    for records in (
        [without(record, "uuid", "parentUuid") for record in PARALLEL],
        [record | {"parentUuid": None} for record in PARALLEL],
    ):
        assert read(records) == GOLDEN["Claude Code"][1]
    records = [without(record, "id", "parentId") for record in TREE[1:]]
    assert [message.content for message in read([HEADER, *records])] == ["Rain?", "No idea.", "", "rain", "Yes."]


def test_a_record_whose_parent_is_missing_follows_the_one_before() -> None:
    records = [
        claude("user", "u1", "elsewhere", "Rain?"),
        claude("assistant", "a1", "lost", text("Yes.")),
        claude("user", "u2", "a1", "Sure?"),
        claude("assistant", "a2", "u2", text("Quite.")),
    ]
    assert len(read(records)) == 4
    records[0]["parentUuid"] = "a2"  # a circle
    assert len(read(records)) == 4


def test_parts_that_have_no_place_are_counted() -> None:
    records = [
        claude("user", "u1", None, "Rain?"),
        claude("assistant", "a1", "u1", {"type": "redacted_thinking", "data": "x"}, tool_use("t", "f"), text("Wait.")),
        claude("user", "u2", "a1", tool_result("t", None), tool_result("gone", "x")),
        claude("user", "u3", "u2", "Sure?"),
        claude("assistant", "a2", "u3", thinking("Hm.")),
        claude("user", "u4", "a2", "Say it."),
        claude("assistant", "a3", "u4", text("Yes.")),
    ]
    assert read(records) == (
        user("Rain?"), answer("Wait.", "", ToolCall("f", "{}", "t")), result("t", ""),
        user("Sure?\nSay it."), answer("Yes."),
    )  # fmt: skip
    assert counts(records) == {
        "(reasoning without text)": 1,
        "(part moved before calls)": 1,
        "(result without a call)": 1,
        "(answer without text and calls)": 1,
    }


BAD: list[tuple[Any, str, str]] = [
    ([], "bad_session", "none of its first 100 records is one of Claude Code, Codex, or Pi"),
    ([{"type": "user"}], "bad_session", "none of its first 100 records"),
    ({"a": 1}, "bad_type", "trace: expected a list, found an object"),
    ("[{", "bad_session", "trace is not JSON"),
    ([*TURN, "x"], "bad_session", "record 14 is not JSON"),
    ([*TURN, 7], "bad_session", "record 14: expected an object, found a number"),
    ([claude("user", "u", None, "Rain?")], "empty", "the session has no answer of the model"),
    (
        [claude("user", "u", None, {"type": "document", "source": {}}), claude("assistant", "a", "u", text("b"))],
        "bad_content",
        'record 1: message.content[0].type is "document"; only text, and tool_result parts can be packed',
    ),
    ([claude("assistant", "a", None, text("a\0"))], "nul", "record 1: message.content[0].text holds a NUL character"),
    ([claude("assistant", "a", None, {"type": "text", "text": 5})], "bad_type", "record 1: message.content[0].text"),
    ([claude("assistant", "a", None, tool_use("t", ""))], "bad_tool_call", "content[0].name: expected a string"),
    ([META, item("function_call", name="f", arguments=[1], call_id="c")], "bad_tool_call", "found a list"),
    ([META, item("function_call", name="f", arguments="{", call_id="c")], "bad_tool_call", "arguments is not JSON"),
    ([META, item("function_call_output", call_id=5, output="x")], "bad_tool_call", "expected a string, found a number"),
    ([META, asked("a", "robot"), answered("b")], "bad_role", 'record 2: payload.role is "robot"; expected user,'),
    ([HEADER, pi("1", None, "robot", "a")], "bad_role", 'record 2: message.role is "robot"'),
    ([HEADER, entry("message", "1", None)], "bad_session", "record 2: message is missing"),
]


@pytest.mark.parametrize(("trace", "code", "message"), BAD)
def test_a_bad_session_is_rejected_with_its_place(trace: Any, code: str, message: str) -> None:
    with pytest.raises(Reject) as caught:
        read_record({"trace": trace}, "session")
    assert caught.value.reason == code
    assert message in caught.value.message


def test_a_file_with_a_bad_line_is_rejected_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TURN) + b'\n{"type": "event_m')
    rejected = record_of(found(path), 1)
    assert isinstance(rejected, Reject)
    assert rejected.reason == "bad_json"
    assert rejected.message.startswith("line 15: ")


def test_a_session_over_the_limit_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "long.jsonl", [META, *[asked("a" * 300), answered("b")] * 9])
    write(tmp_path / "short.jsonl", [META, asked("a"), answered("b")])
    settings = {"sources": ["long.jsonl", "short.jsonl"], "max_record_bytes": 1024, "max_rejects": 0.5, "validation": 0}
    path = pack_corpus(make_recipe(tmp_path, [], **settings))
    rejects = (corpus_folder(load_manifest(path), path) / "rejects.jsonl").read_text()
    assert "the session is longer than max_record_bytes, 1,024 bytes" in rejects


def test_an_image_ends_the_run_unless_it_is_ignored(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    records = [
        claude("user", "u", None, text("Look."), image),
        claude("assistant", "a", "u", tool_use("t", "f")),
        claude("user", "r", "a", tool_result("t", [text("seen"), image])),
        claude("assistant", "b", "r", text("Yes.")),
    ]
    write(tmp_path / "a.jsonl", records)
    source: dict[str, Any] = {"path": "a.jsonl"}
    with pytest.raises(DataError, match=r"ignore: \[image\]"):
        pack_corpus(make_recipe(tmp_path, [], sources=[source], validation=0))
    path = pack_corpus(make_recipe(tmp_path, [], sources=[source | {"ignore": ["image"]}], validation=0))
    assert sum(load_manifest(path).unused_keys["a.jsonl"].values()) == 2


# -- every record is in the conversation, or counted -------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(st.data())
def test_each_message_of_a_tree_is_on_the_branch_or_counted(data: st.DataObject) -> None:
    """A message is on the branch if it is the last one or an ancestor of it."""
    size = data.draw(st.integers(2, 12))
    parents = [data.draw(st.integers(-1, number - 1)) for number in range(size)]
    assume(max(parents) >= 0)  # else it is a list
    branch, at = set[int](), size - 1
    while at >= 0:
        branch.add(at)
        at = parents[at]
    roles = ["assistant"] * size
    of_claude = [
        claude(role, str(n), None if parent < 0 else str(parents[n]), text(f"said {n}"))
        for n, (role, parent) in enumerate(zip(roles, parents, strict=True))
    ]
    of_pi = [HEADER] + [
        pi(str(n), None if parent < 0 else str(parent), "assistant", [text(f"said {n}")])
        for n, parent in enumerate(parents)
    ]
    for records in (of_claude, of_pi):
        messages = read(records)
        assert [message.content for message in messages] == [f"said {n}" for n in sorted(branch)]
        assert Counter(counts(records)) == Counter({"(other branch)": size - len(branch)} if size > len(branch) else {})


def inside(value: Any) -> list[Any]:
    """Return the objects and lists within a value that are not empty."""
    values = value.values() if isinstance(value, dict) else value
    return [each for each in values if isinstance(each, (dict, list)) and each]


@settings(max_examples=examples(300))
@given(st.randoms(use_true_random=False))
def test_any_change_of_a_session_is_read_or_rejected(random: Any) -> None:
    records = json.loads(json.dumps(random.choice([PARALLEL, TURN, TREE])))
    for _ in range(random.randint(1, 4)):
        target: Any = records
        for _ in range(random.randint(1, 4)):
            target = random.choice(inside(target) or [target])
        value = random.choice([None, 5, "", "x", [], {}, [7], [{}], True, "\0"])
        if isinstance(target, dict):
            target[random.choice([*target, "type", "content", "output", "prompt"])] = value
        else:
            target[random.randrange(len(target))] = value
    with suppress(Reject):
        assert read(records)[-1].role == "assistant"
    counts(records)
