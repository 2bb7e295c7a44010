"""The formats `messages` and `sharegpt`: lists of turns.

A turn is {role, content}, as for OpenAI and most chat templates, or {from, value}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct, field

from packcorpus.tasks.conversations.answers import OPTIONS, TOOL_KEYS, tools_of
from packcorpus.tasks.conversations.chat import messages_of, objects_in_messages, with_system
from packcorpus.tasks.conversations.model import Conversation, Format, Nothing, PlainRecord, Record, role_named
from packcorpus.tasks.conversations.names import ROLE_NAMES, TURN_NAMES
from packcorpus.tasks.conversations.values import found_list, required

_BESIDE = ("system", *TOOL_KEYS, OPTIONS)


class PlainMessages(PlainRecord, gc=False, kw_only=True):
    """The keys beside the turns, without a meaning that turns lack."""

    system: Nothing = None
    tools: Nothing = None
    tool_defs: Nothing = None
    functions: Nothing = None
    chat_template_kwargs: Nothing = None


class PlainTurn(Protocol):
    """A turn of a plain record."""

    role: str
    content: str


def _names_and_contents(turns: Iterable[PlainTurn]) -> tuple[tuple[str, ...], list[str]]:
    names, contents = [], []
    for turn in turns:  # faster than two comprehensions
        names.append(turn.role)
        contents.append(turn.content)
    return tuple(names), contents


class Turn(Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str


class Messages(PlainMessages, gc=False, kw_only=True):
    messages: list[Turn]

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return _names_and_contents(self.messages)


def read_messages(record: Record) -> Conversation:
    messages = messages_of(required(record, "messages"), "messages")
    return Conversation(with_system(record, messages), tools_of(record))


def _is_prompt(record: Mapping[str, object]) -> bool:
    """Return whether the messages of a record end before its `completions`."""
    turns = found_list(record["messages"]) if "completions" in record else None
    last = turns[-1] if turns else None
    return isinstance(last, dict) and role_named(last.get("role"), TURN_NAMES) in ("user", "tool")


MESSAGES = Format(
    name="messages",
    keys=("messages", *_BESIDE),
    matches=lambda record: "messages" in record and not _is_prompt(record),
    read=read_messages,
    summary="`messages`, a list of turns with `role` and `content`; optionally `system`, `tools` (or "
    "`tool_defs`, `functions`), `chat_template_kwargs`",
    example='{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}',
    plain=Messages,
    objects=lambda record, columns: objects_in_messages(
        record.get("messages"), f"{columns.get('messages', 'messages')}[]", columns
    ),
    roles=ROLE_NAMES,
)


class ShareGptTurn(Struct, gc=False, forbid_unknown_fields=True):
    role: str = field(name="from")
    content: str = field(name="value")


class ShareGpt(PlainMessages, gc=False, kw_only=True):
    conversations: list[ShareGptTurn]

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return _names_and_contents(self.conversations)


def read_sharegpt(record: Record) -> Conversation:
    key = _turns_key(record)
    messages = messages_of(required(record, key), key, sharegpt=True)
    return Conversation(with_system(record, messages), tools_of(record))


def _turns_key(record: Record) -> str:
    return "conversation" if record.get("conversations") is None and "conversation" in record else "conversations"


SHAREGPT = Format(
    name="sharegpt",
    keys=("conversations", "conversation", *_BESIDE),
    matches=lambda record: "conversations" in record or "conversation" in record,
    read=read_sharegpt,
    summary="`conversations` (or `conversation`), a list of turns with `from`, `value`; optionally `system`, "
    "`tools` (or `tool_defs`, `functions`), `chat_template_kwargs`",
    example='{"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}',
    plain=ShareGpt,
    used=lambda record: (_turns_key(record), *_BESIDE),
    objects=lambda record, columns: objects_in_messages(
        record.get(key := _turns_key(record)), f"{columns.get(key, key)}[]", columns, sharegpt=True
    ),
    roles=ROLE_NAMES,
)
