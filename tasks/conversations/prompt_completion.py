"""The format `prompt_completion`: two strings, or two lists of messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from tasks.conversations.chat import TURN_NAMES, messages_of
from tasks.conversations.fields import required, system_of, text_of
from tasks.conversations.lists import MAY_OPEN, messages_in
from tasks.conversations.model import Conversation, Format, Message, Nothing, PlainRecord, Record
from tasks.conversations.objects import Object, objects_in_messages
from tasks.conversations.reasoning import REASONING_KEYS, reasoning_keys, reasoning_of_record
from tasks.conversations.tools import OPTIONS, TOOL_KEYS, tools_of
from tasks.core.errors import Reject
from tasks.core.printable import kind


def read(record: Record) -> Conversation:
    ask, answer = _sides(record)
    prompt, completion = required(record, ask), required(record, answer)
    messages = system_of(record)
    # As text, a prompt may be a list of messages. Then its completion may be one, too.
    prompt = messages_in(prompt, TURN_NAMES) or prompt
    if not isinstance(prompt, str):
        completion = messages_in(completion, TURN_NAMES) or completion
    if isinstance(prompt, str) and isinstance(completion, str):
        said = Message("assistant", text_of(completion, answer), reasoning=reasoning_of_record(record))
        messages += (Message("user", text_of(prompt, ask)), said)
    elif isinstance(prompt, list) and isinstance(completion, str):
        messages += messages_of(prompt, ask)
        said = Message("assistant", text_of(completion, answer), reasoning=reasoning_of_record(record))
        messages.append(said)
    elif _is_list(prompt) and _is_list(completion):
        if reasoning_of_record(record):
            raise Reject("bad_content", f"the record has reasoning next to lists of messages; move it into {answer}")
        messages += messages_of(prompt, ask)
        messages += messages_of(completion, answer)
    else:
        found = f"found {kind(prompt)} and {kind(completion)}"
        raise Reject("bad_type", f"{ask} and {answer}: expected two strings or two lists of messages, {found}")
    return Conversation(tuple(messages), tools_of(record))


def _sides(record: Record) -> tuple[str, str]:
    """Return the key of the prompt and the key of the completion."""
    ask = "question" if record.get("prompt") is None and record.get("question") is not None else "prompt"
    answers = ("completion", "response") if ask == "prompt" else ("answer", "response")
    return ask, next((key for key in answers if record.get(key) is not None), answers[0])


def _is_list(value: object) -> bool:
    """Return whether a side is a list of messages, or a struct of lists."""
    return isinstance(value, (list, dict))


def _used(record: Record) -> Collection[str]:
    return *_sides(record), "system", *TOOL_KEYS, OPTIONS, *reasoning_keys(record)


def _objects(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    return chain.from_iterable(objects_in_messages(record, side, columns) for side in _sides(record))


class Plain(PlainRecord, gc=False):
    prompt: str | None = None
    question: str | None = None
    completion: str | None = None
    answer: str | None = None
    response: str | None = None
    system: Nothing = None
    tools: Nothing = None
    tool_defs: Nothing = None
    functions: Nothing = None
    chat_template_kwargs: Nothing = None
    reasoning_content: Nothing = None
    reasoning: Nothing = None
    thinking: Nothing = None

    def __post_init__(self) -> None:
        sides = (self.prompt, self.question, self.completion, self.answer, self.response)
        ask, answer = self.pair()
        if ask is not None and ask[:1] in MAY_OPEN and ask.lstrip()[:1] == "[":
            raise ValueError("the prompt may be a list of messages")
        if ask is None or answer is None or sides.count(None) != 3:
            raise ValueError("a side is missing, or not used")

    def pair(self) -> tuple[str | None, str | None]:
        ask, answer = (self.question, self.answer) if self.prompt is None else (self.prompt, self.completion)
        return ask, self.response if answer is None else answer

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return ("user", "assistant"), [text or "" for text in self.pair()]


def matches(record: Mapping[str, object]) -> bool:
    return ("prompt" in record and ("completion" in record or "response" in record)) or (
        "question" in record and ("answer" in record or "response" in record)
    )


PROMPT_COMPLETION = Format(
    name="prompt_completion",
    keys=("prompt", "completion", "question", "answer", "response", "system", *TOOL_KEYS, *REASONING_KEYS, OPTIONS),
    matches=matches,
    read=read,
    summary="`prompt` and `completion` (or `response`), or `question` and `answer` (or `response`); "
    "optionally `system`, `tools` (or `tool_defs`, `functions`), `reasoning_content` (or `reasoning`, `thinking`), "
    "`chat_template_kwargs`",
    example='{"prompt": "2+2?", "completion": "4"}',
    plain=Plain,
    used=_used,
    objects=_objects,
)
