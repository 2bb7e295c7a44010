"""The formats `alpaca` and `dolly`: an instruction and a response.

The instruction may have a context.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tasks.conversations.fields import optional_text, required_text, system_of, text_of
from tasks.conversations.lists import list_of
from tasks.conversations.model import Conversation, Format, Message, Nothing, PlainRecord, Record
from tasks.conversations.reasoning import REASONING_KEYS, reasoning_keys, reasoning_of_record
from tasks.conversations.tools import OPTIONS
from tasks.core.errors import Reject

USER_ASSISTANT = ("user", "assistant")


def read_alpaca(record: Record) -> Conversation:
    messages = system_of(record)
    history = record.get("history")
    if history is not None and history != "":
        for index, pair in enumerate(list_of(history, "history")):
            where = f"history[{index}]"
            turns = list_of(pair, where)
            if len(turns) != 2:
                raise Reject("bad_type", f"{where}: expected [user, assistant], found a list of {len(turns)}")
            messages.append(Message("user", text_of(turns[0], f"{where}[0]")))
            messages.append(Message("assistant", text_of(turns[1], f"{where}[1]")))
    context = optional_text(record, "input") or optional_text(record, "context")
    messages.append(Message("user", required_text(record, "instruction"), context))
    messages.append(
        Message("assistant", required_text(record, _answer_key(record)), reasoning=reasoning_of_record(record))
    )
    return Conversation(tuple(messages))


def _answer_key(record: Record) -> str:
    return "response" if record.get("output") is None and record.get("response") is not None else "output"


def _used_of_alpaca(record: Record) -> Collection[str]:
    context = "context" if record.get("input") in (None, "") else "input"
    return "system", "history", "instruction", context, _answer_key(record), OPTIONS, *reasoning_keys(record)


def _used_of_dolly(record: Record) -> Collection[str]:
    return "system", "instruction", "context", "response", OPTIONS, *reasoning_keys(record)


def read_dolly(record: Record) -> Conversation:
    messages = system_of(record)
    instruction = required_text(record, "instruction")
    messages.append(Message("user", instruction, optional_text(record, "context")))
    messages.append(Message("assistant", required_text(record, "response"), reasoning=reasoning_of_record(record)))
    return Conversation(tuple(messages))


class PlainAlpaca(PlainRecord, gc=False):
    instruction: str
    output: str | None = None
    response: str | None = None
    input: Nothing = None
    context: Nothing = None
    system: Nothing = None
    history: Nothing = None
    reasoning_content: Nothing = None
    reasoning: Nothing = None
    thinking: Nothing = None
    chat_template_kwargs: Nothing = None

    @property
    def answer(self) -> str | None:
        return self.response if self.output is None else self.output

    def __post_init__(self) -> None:
        if (self.output is None) == (self.response is None):
            raise ValueError("expected either output or response")

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return USER_ASSISTANT, [self.instruction, self.answer or ""]


class PlainDolly(PlainRecord, gc=False):
    instruction: str
    response: str
    context: Nothing = None
    system: Nothing = None
    reasoning_content: Nothing = None
    reasoning: Nothing = None
    thinking: Nothing = None
    chat_template_kwargs: Nothing = None

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return USER_ASSISTANT, [self.instruction, self.response]


def _has_instruction(record: Mapping[str, object]) -> bool:
    return "instruction" in record and not isinstance(record.get("prompt"), dict)  # a tree of messages is oasst


def _is_dolly(record: Mapping[str, object]) -> bool:
    return _has_instruction(record) and "response" in record and "context" in record and "output" not in record


ALPACA = Format(
    name="alpaca",
    keys=("instruction", "input", "context", "output", "response", "system", "history", *REASONING_KEYS, OPTIONS),
    matches=lambda record: (
        _has_instruction(record) and ("output" in record or "response" in record) and not _is_dolly(record)
    ),
    read=read_alpaca,
    summary="`instruction` and `output` (or `response`); optionally `input` (or `context`), `system`, "
    "`history`, `reasoning_content` (or `reasoning`, `thinking`), `chat_template_kwargs`",
    example='{"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}',
    plain=PlainAlpaca,
    used=_used_of_alpaca,
)

DOLLY = Format(
    name="dolly",
    keys=("instruction", "context", "response", "system", *REASONING_KEYS, OPTIONS),
    matches=_is_dolly,
    read=read_dolly,
    summary="`instruction`, `context`, and `response`; optionally `system`, `reasoning_content` (or `reasoning`, "
    "`thinking`), `chat_template_kwargs`",
    example='{"instruction": "Who wrote it?", "context": "Faust is a play by Goethe.", "response": "Goethe."}',
    plain=PlainDolly,
    used=_used_of_dolly,
)
