"""Sessions of Claude Code: `~/.claude/projects/*/*.jsonl`.

    {"type": "user", "uuid": "a", "parentUuid": null, "message": {"role": "user", "content": "2+2?"}, …}
    {"type": "assistant", "uuid": "b", "parentUuid": "a", "message": {"content": [{"type": "text", "text": "4"}], …}, …}

The records are a tree. The conversation is the branch that ends last: the last message and its ancestors. A parallel
call and its result are siblings of this branch, and belong to it. The branch begins at the last summary, as for the
model, and then has the messages that were kept. Messages of other agents in the file (`isSidechain`) are left out,
unless the whole file is such a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from packcorpus.tasks.conversations.model import Record
from packcorpus.tasks.conversations.session_turns import (
    BEFORE_SUMMARY,
    FAILED_ANSWER,
    OTHER_BRANCH,
    SIDECHAIN,
    Turns,
    joined_text,
    parts_of,
    place_of,
    refuse_part,
    said,
    type_of,
)

_OF_ANSWER = ("text", "thinking", "redacted_thinking", "tool_use")


def is_claude_code(record: Record) -> bool:
    """Return whether a record is a message of Claude Code."""
    return (
        record.get("type") in ("user", "assistant")
        and isinstance(record.get("message"), dict)
        and not {"uuid", "parentUuid", "sessionId", "isSidechain"}.isdisjoint(record)
    )


def read_claude_code(records: Sequence[Record]) -> Turns:
    """Return the messages of a session.

    Raises Reject if it is not as Claude Code writes it.
    """
    turns = Turns()
    for index in _chosen(records, turns):
        record, where = records[index], f"{place_of(index)}: message.content"
        message = _message(record)
        if record["type"] == "assistant":
            turns.add_answer(_answer_id(record), message.get("content"), where, _OF_ANSWER, "input")
        elif record["type"] == "user":
            for name, part, place in parts_of(message.get("content"), where):
                if name == "text":
                    turns.ask("user", said(part, "text", place))
                elif name == "tool_result":
                    text = joined_text(part.get("content"), f"{place}.content")
                    turns.result(part.get("tool_use_id"), text, f"{place}.tool_use_id")
                else:
                    raise refuse_part(part, place, ("text", "tool_result"))
        else:
            turns.ask("user", joined_text(_queued(record), f"{place_of(index)}: attachment.prompt"))
    return turns


def _message(record: Record) -> Record:
    message = record.get("message")
    return message if isinstance(message, dict) else {}


def _answer_id(record: Record) -> str:
    """Return the id of the answer that a record of the assistant is part of, or ""."""
    number = _message(record).get("id")
    return number if isinstance(number, str) and record["type"] == "assistant" else ""


def _chosen(records: Sequence[Record], turns: Turns) -> list[int]:
    """Return the indexes of the messages of the conversation, in their order.

    All other records are counted.
    """
    messages = {}
    alone = not any(is_claude_code(record) and not record.get("isSidechain") for record in records)
    seen = set[str]()
    for index, record in enumerate(records):
        uuid = record.get("uuid")
        if not (is_claude_code(record) or _queued(record)) or (isinstance(uuid, str) and uuid in seen):
            turns.left_out[type_of(record)] += 1
        elif record.get("isSidechain") and not alone:
            turns.left_out[SIDECHAIN] += 1
        elif record["type"] == "assistant" and (
            record.get("isApiErrorMessage") or _message(record).get("model") == "<synthetic>"
        ):  # the agent itself wrote it, because the model gave none
            turns.left_out[FAILED_ANSWER] += 1
        elif record.get("isVisibleInTranscriptOnly") and not record.get("isCompactSummary"):
            turns.left_out[type_of(record)] += 1
        else:
            messages[index] = record
        if isinstance(uuid, str):
            seen.add(uuid)
    numbers: dict[object, int] = {}  # of records, by uuid
    for index, record in enumerate(records):
        if isinstance(record.get("uuid"), str):
            numbers.setdefault(record["uuid"], index)
    branch, earlier, summary = _branch(records, messages, numbers)
    branch |= _siblings(messages, branch)
    kept = [index for index in _kept(records, summary, numbers) if index in messages and index not in branch]
    for index in messages.keys() - branch - set(kept):
        turns.left_out[BEFORE_SUMMARY if index in earlier else OTHER_BRANCH] += 1
    order = sorted(branch)
    return [*order[:1], *kept, *order[1:]]  # with a summary first, if there are messages that it keeps


def _branch(
    records: Sequence[Record], messages: dict[int, Record], numbers: dict[object, int]
) -> tuple[set[int], set[int], Record]:
    """Return the messages of the branch that ends last.

    The second result has the messages before its last summary, and the third the record that announces this summary.
    """
    if not any(isinstance(record.get("parentUuid"), str) for record in messages.values()):
        return set(messages), set(), {}  # no tree
    before = {}  # the message before each record, for one whose parent is missing
    last = -1
    for index in range(len(records)):
        before[index] = last
        if index in messages:
            last = index
    branch, earlier = set[int](), set[int]()
    summary: Record = {}
    seen, index, found = set[int](), last, branch
    while index >= 0 and index not in seen:
        seen.add(index)
        record = records[index]
        if index in messages:
            found.add(index)
        parent = record.get("parentUuid")
        if parent is None and record.get("logicalParentUuid") is not None:
            parent, found = record["logicalParentUuid"], earlier  # this record follows a summary of all before it
            summary = summary or record
        if parent is None and "parentUuid" in record:
            break
        index = numbers.get(parent, before[index]) if isinstance(parent, str) else before[index]
    return branch, earlier, summary


def _kept(records: Sequence[Record], summary: Record, numbers: dict[object, int]) -> list[int]:
    """Return the records before a summary that it keeps, in their order.

    The record of the summary lists them, or names the first and the last one.
    """
    facts = summary.get("compactMetadata")
    facts = facts if isinstance(facts, dict) else {}
    listed, ends = facts.get("preservedMessages"), facts.get("preservedSegment")
    if isinstance(listed, dict) and isinstance(listed.get("uuids"), list):
        known = [numbers[uuid] for uuid in listed["uuids"] if isinstance(uuid, str) and uuid in numbers]
        return list(dict.fromkeys(known))
    if not isinstance(ends, dict):
        return []
    found: dict[int, None] = {}
    uuid = ends.get("tailUuid")
    while isinstance(uuid, str) and uuid in numbers and numbers[uuid] not in found:
        found[numbers[uuid]] = None
        if uuid == ends.get("headUuid"):
            return [*found][::-1]
        uuid = records[numbers[uuid]].get("parentUuid")
    return []  # these messages are not before the summary


def _siblings(messages: dict[int, Record], on_branch: set[int]) -> set[int]:
    """Return the parallel calls of answers on a branch, and their results.

    They are other records of the same answer, and results of its calls that the branch lacks.
    """
    answers = {_answer_id(messages[index]) for index in on_branch} - {""}
    added = {index for index, record in messages.items() if index not in on_branch and _answer_id(record) in answers}
    called = {number for index in on_branch | added for number in _ids(messages[index], "tool_use", "id")}
    answered = {number for index in on_branch for number in _ids(messages[index], "tool_result", "tool_use_id")}
    for index, record in messages.items():
        results = set(_ids(record, "tool_result", "tool_use_id"))
        if index not in on_branch and results & called and not results & answered:
            added.add(index)
            answered |= results
    return added


def _ids(record: Record, kind: str, key: str) -> list[str]:
    """Return the ids in the parts of a message with the type `kind`."""
    content = _message(record).get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [number for part in parts if part.get("type") == kind and isinstance(number := part.get(key), str)]


def _queued(record: Record) -> object:
    """Return a request that the user wrote while the agent was working, or None."""
    attachment = record.get("attachment")
    if record.get("type") != "attachment" or not isinstance(attachment, dict):
        return None
    return attachment.get("prompt") if attachment.get("type") == "queued_command" else None
