"""The format `messages`: a list of {role, content}.

OpenAI and most chat templates use this form.
"""

from __future__ import annotations

from msgspec import Struct

from tasks.conversations.chat import ROLE_NAMES, messages_of, names_and_contents, with_system
from tasks.conversations.fields import required
from tasks.conversations.model import Conversation, Format, Nothing, PlainRecord, Record
from tasks.conversations.objects import objects_in_messages
from tasks.conversations.tools import OPTIONS, TOOL_KEYS, tools_of


def read(record: Record) -> Conversation:
    messages = messages_of(required(record, "messages"), "messages")
    return Conversation(with_system(record, messages), tools_of(record))


class Turn(Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str


class Plain(PlainRecord, gc=False):
    messages: list[Turn]
    system: Nothing = None
    tools: Nothing = None
    tool_defs: Nothing = None
    functions: Nothing = None
    chat_template_kwargs: Nothing = None

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return names_and_contents(self.messages)


MESSAGES = Format(
    name="messages",
    keys=("messages", "system", *TOOL_KEYS, OPTIONS),
    matches=lambda record: "messages" in record,
    read=read,
    summary="`messages`, a list of turns with `role` and `content`; optionally `system`, `tools` (or "
    "`tool_defs`, `functions`), `chat_template_kwargs`",
    example='{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}',
    plain=Plain,
    objects=lambda record, columns: objects_in_messages(record, "messages", columns),
    roles=ROLE_NAMES,
)
