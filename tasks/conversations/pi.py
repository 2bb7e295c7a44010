"""Sessions of Pi: `~/.pi/agent/sessions/**/*.jsonl`.

    {"type": "session", "version": 3, "id": "…", "cwd": "…"}
    {"type": "message", "id": "b", "parentId": "a", "message": {"role": "user", "content": "2+2?"}}
    {"type": "message", "id": "c", "parentId": "b", "message": {"role": "assistant", "content": [{"type": "text", …}]}}

The records are a tree. The conversation is the branch that ends last: the last record and its ancestors. After a
summary (`compaction`), the model has the summary and the records from `firstKeptEntryId` on, and so has the
conversation. The summary of a branch that the user left (`branch_summary`) is a message of the user. Files without
ids are read in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from packcorpus.tasks.conversations.model import Record
from packcorpus.tasks.conversations.session_turns import (
    BEFORE_SUMMARY,
    FAILED_ANSWER,
    OTHER_BRANCH,
    Turns,
    joined_text,
    place_of,
    said,
    type_of,
)
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import shown

_SUMMARIES = ("compaction", "branch_summary")

# Types of records that add to the conversation.
_READ = ("message", "custom_message", *_SUMMARIES)

_ROLES = ("user", "assistant", "toolResult", "bashExecution", "custom", "branchSummary", "compactionSummary")


def is_pi(record: Record) -> bool:
    """Return whether a record is the first one of a session of Pi."""
    return record.get("type") == "session" and isinstance(record.get("id"), str) and "harness" not in record


def read_pi(records: Sequence[Record]) -> Turns:
    """Return the messages of a session.

    Raises Reject if it is not as Pi writes it.
    """
    turns = Turns()
    for record in records[1:]:
        if type_of(record) not in _READ:
            turns.left_out[type_of(record)] += 1
    branch = [index for index in _branch(records) if type_of(records[index]) in _READ]
    kept = _after_summary(records, branch)
    on_branch, shown_to_model = set(branch), set(kept)
    for index, record in enumerate(records):
        if type_of(record) in _READ and index not in shown_to_model:
            turns.left_out[BEFORE_SUMMARY if index in on_branch else OTHER_BRANCH] += 1
    for index in kept:
        _add(records[index], place_of(index), turns)
    return turns


def _branch(records: Sequence[Record]) -> list[int]:
    """Return the records of the branch that ends last, from its root to its end."""
    numbers: dict[object, int] = {}
    for index, record in enumerate(records):
        if index and isinstance(record.get("id"), str):
            numbers.setdefault(record["id"], index)
    if not numbers:
        return list(range(1, len(records)))
    found: list[int] = []
    index, seen = max(numbers.values()), set[int]()
    while index > 0 and index not in seen:
        seen.add(index)
        found.append(index)
        parent = records[index].get("parentId")
        index = numbers.get(parent, 0) if isinstance(parent, str) else 0
    return found[::-1]


def _after_summary(records: Sequence[Record], branch: list[int]) -> list[int]:
    """Return the records of a branch that the model has.

    They are its last summary, the records that this one keeps, and those that follow.
    """
    last = max((n for n, index in enumerate(branch) if type_of(records[index]) == "compaction"), default=None)
    if last is None:
        return branch
    first = records[branch[last]].get("firstKeptEntryId")
    start = next((n for n in range(last) if first is not None and records[branch[n]].get("id") == first), last)
    between = [index for index in branch[start:last] if type_of(records[index]) != "compaction"]
    return [branch[last], *between, *branch[last + 1 :]]


def _add(record: Record, place: str, turns: Turns) -> None:
    """Add a record of the conversation to the messages."""
    if record["type"] in _SUMMARIES:
        turns.ask("user", said(record, "summary", place))
        return
    if record["type"] == "custom_message":
        turns.ask("user", joined_text(record.get("content"), f"{place}: content"))
        return
    message, where = record.get("message"), f"{place}: message"
    if not isinstance(message, dict):
        raise Reject("bad_session", f"{where} is missing")
    role, content, place = message.get("role"), message.get("content"), f"{where}.content"
    if role == "assistant":
        if message.get("stopReason") in ("error", "aborted"):  # Pi does not send it to the model
            turns.left_out[FAILED_ANSWER] += 1
        else:  # each message is an answer of its own
            turns.add_answer(place, content, place, ("text", "thinking", "toolCall"), "arguments")
    elif role == "toolResult":
        text, tool = joined_text(content, place), said(message, "toolName", where)
        turns.result(message.get("toolCallId"), text, f"{where}.toolCallId", tool or None)
    elif role == "bashExecution":
        if message.get("excludeFromContext"):
            turns.left_out["message.bashExecution"] += 1
        else:
            turns.ask("user", f"$ {said(message, 'command', where)}\n{said(message, 'output', where)}")
    elif role in ("branchSummary", "compactionSummary"):
        turns.ask("user", said(message, "summary", where))
    elif role in ("user", "custom"):
        turns.ask("user", joined_text(content, place))
    else:
        raise Reject("bad_role", f"{where}.role is {shown(role)}; expected one of {', '.join(_ROLES)}")
