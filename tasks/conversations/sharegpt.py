"""The format `sharegpt`: a list of {from, value}."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct, field

from tasks.conversations.chat import ROLE_NAMES, messages_of, names_and_contents, with_system
from tasks.conversations.fields import required
from tasks.conversations.model import Conversation, Format, Nothing, PlainRecord, Record
from tasks.conversations.objects import Object, objects_in_messages
from tasks.conversations.tools import OPTIONS, TOOL_KEYS, tools_of


def read(record: Record) -> Conversation:
    key = _turns_key(record)
    messages = messages_of(required(record, key), key, sharegpt=True)
    return Conversation(with_system(record, messages), tools_of(record))


def _turns_key(record: Record) -> str:
    return "conversation" if record.get("conversations") is None and "conversation" in record else "conversations"


def _used(record: Record) -> Collection[str]:
    return _turns_key(record), "system", *TOOL_KEYS, OPTIONS


def _objects(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    return objects_in_messages(record, _turns_key(record), columns, sharegpt=True)


class Turn(Struct, gc=False, forbid_unknown_fields=True):
    role: str = field(name="from")
    content: str = field(name="value")


class Plain(PlainRecord, gc=False):
    conversations: list[Turn]
    system: Nothing = None
    tools: Nothing = None
    tool_defs: Nothing = None
    functions: Nothing = None
    chat_template_kwargs: Nothing = None

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return names_and_contents(self.conversations)


SHAREGPT = Format(
    name="sharegpt",
    keys=("conversations", "conversation", "system", *TOOL_KEYS, OPTIONS),
    matches=lambda record: "conversations" in record or "conversation" in record,
    read=read,
    summary="`conversations` (or `conversation`), a list of turns with `from`, `value`; optionally `system`, "
    "`tools` (or `tool_defs`, `functions`), `chat_template_kwargs`",
    example='{"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}',
    plain=Plain,
    used=_used,
    objects=_objects,
    roles=ROLE_NAMES,
)
