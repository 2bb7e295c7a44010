"""The format `text`: plain text, all of which is trained on."""

from __future__ import annotations

from tasks.conversations.fields import required_text
from tasks.conversations.model import Conversation, Format, Message, PlainRecord, Record


def read(record: Record) -> Conversation:
    text = required_text(record, "text")
    return Conversation((Message("text", text),) if text else ())


class Plain(PlainRecord, gc=False):
    text: str

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return ("text",), [self.text]


TEXT = Format(
    name="text",
    keys=("text",),
    matches=lambda record: "text" in record,
    read=read,
    summary="`text`: no turns, no template",
    example='{"text": "Two and two are four."}',
    plain=Plain,
)
