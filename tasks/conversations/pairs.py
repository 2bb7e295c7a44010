"""The formats `alpaca`, `dolly`, `prompt_completion`, and `text`.

A record is a question and an answer, or plain text. A question may have a context, and turns before it. Both sides of
`prompt_completion` may be lists of messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from packcorpus.tasks.conversations.answers import (
    OPTIONS,
    REASONING_KEYS,
    TOOL_KEYS,
    reasoning_keys,
    reasoning_of_record,
    tools_of,
)
from packcorpus.tasks.conversations.chat import Object, messages_of, objects_in_messages
from packcorpus.tasks.conversations.model import Conversation, Format, Message, Nothing, PlainRecord, Record
from packcorpus.tasks.conversations.names import TURN_NAMES
from packcorpus.tasks.conversations.values import (
    list_of,
    messages_in,
    optional_text,
    required,
    required_text,
    system_of,
    text_of,
)
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind

_ROLES = ("user", "assistant")
_BESIDE = ("system", *REASONING_KEYS, OPTIONS)


class PlainPair(PlainRecord, gc=False, kw_only=True):
    """The keys beside a question and an answer."""

    system: Nothing = None
    reasoning_content: Nothing = None
    reasoning: Nothing = None
    thinking: Nothing = None
    chat_template_kwargs: Nothing = None


# -- alpaca and dolly -------------------------------------------------------------------------------------------------


def read_alpaca(record: Record) -> Conversation:
    messages = system_of(record)
    history = record.get("history")
    if history is not None and history != "":
        for index, pair in enumerate(list_of(history, "history")):
            where = f"history[{index}]"
            turns = list_of(pair, where)
            if len(turns) != 2:
                raise Reject("bad_type", f"{where}: expected [user, assistant], found a list of {len(turns)}")
            messages += [Message(role, text_of(turns[n], f"{where}[{n}]")) for n, role in enumerate(_ROLES)]
    context = optional_text(record, "input") or optional_text(record, "context")
    messages.append(Message("user", required_text(record, "instruction"), context))
    answer = required_text(record, _answer_key(record))
    return Conversation((*messages, Message("assistant", answer, reasoning=reasoning_of_record(record))))


def read_dolly(record: Record) -> Conversation:
    messages = system_of(record)
    instruction = required_text(record, "instruction")
    messages.append(Message("user", instruction, optional_text(record, "context")))
    answer = required_text(record, "response")
    return Conversation((*messages, Message("assistant", answer, reasoning=reasoning_of_record(record))))


def _answer_key(record: Record) -> str:
    return "response" if record.get("output") is None and record.get("response") is not None else "output"


def _used_of_alpaca(record: Record) -> Collection[str]:
    context = "context" if record.get("input") in (None, "") else "input"
    return "system", "history", "instruction", context, _answer_key(record), OPTIONS, *reasoning_keys(record)


class PlainAlpaca(PlainPair, gc=False, kw_only=True):
    instruction: str
    output: str | None = None
    response: str | None = None
    input: Nothing = None
    context: Nothing = None
    history: Nothing = None

    def __post_init__(self) -> None:
        if (self.output is None) == (self.response is None):
            raise ValueError("expected either output or response")

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return _ROLES, [self.instruction, self.output or self.response or ""]


class PlainDolly(PlainPair, gc=False, kw_only=True):
    instruction: str
    response: str
    context: Nothing = None

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return _ROLES, [self.instruction, self.response]


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
    keys=("instruction", "context", "response", *_BESIDE),
    matches=_is_dolly,
    read=read_dolly,
    summary="`instruction`, `context`, and `response`; optionally `system`, `reasoning_content` (or `reasoning`, "
    "`thinking`), `chat_template_kwargs`",
    example='{"instruction": "Who wrote it?", "context": "Faust is a play by Goethe.", "response": "Goethe."}',
    plain=PlainDolly,
    used=lambda record: ("system", "instruction", "context", "response", OPTIONS, *reasoning_keys(record)),
)


# -- prompt_completion ------------------------------------------------------------------------------------------------


def read_prompt_completion(record: Record) -> Conversation:
    ask, answer = _sides(record)
    required(record, ask), required(record, answer)
    system = system_of(record)
    before, said = read_sides(record, record[ask], record[answer], ask, answer)
    return Conversation((*system, *before, *said), tools_of(record))


def read_sides(
    record: Record, prompt: object, completion: object, ask: str, answer: str
) -> tuple[list[Message], list[Message]]:
    """Return the messages of a prompt and of its completion.

    `ask` and `answer` are their places in the record. The record may also have the reasoning of a completion that is a
    string.
    """
    prompt, completion = lists_in(prompt, completion)
    if isinstance(completion, str) and isinstance(prompt, (str, list)):
        before = messages_of(prompt, ask) if isinstance(prompt, list) else []
        said = Message("assistant", text_of(completion, answer), reasoning=reasoning_of_record(record))
        before += [Message("user", text_of(prompt, ask))] if isinstance(prompt, str) else []
        return before, [said]
    if isinstance(prompt, (list, dict)) and isinstance(completion, (list, dict)):
        if reasoning_of_record(record):
            raise Reject("bad_content", f"the record has reasoning next to lists of messages; move it into {answer}")
        return messages_of(prompt, ask), messages_of(completion, answer)
    found = f"found {kind(prompt)} and {kind(completion)}"
    raise Reject("bad_type", f"{ask} and {answer}: expected two strings or two lists of messages, {found}")


def _sides(record: Record) -> tuple[str, str]:
    """Return the key of the prompt and the key of the completion."""
    ask = "question" if record.get("prompt") is None and record.get("question") is not None else "prompt"
    answers = ("completion", "response") if ask == "prompt" else ("answer", "response")
    return ask, next((key for key in answers if record.get(key) is not None), answers[0])


def lists_in(prompt: object, completion: object) -> tuple[object, object]:
    """Return both sides, each as a list if it is the text of one.

    The completion may be a list only if the prompt is one.
    """
    prompt = messages_in(prompt, TURN_NAMES) or prompt
    if prompt is None or isinstance(prompt, str):
        return prompt, completion
    return prompt, messages_in(completion, TURN_NAMES) or completion


def _objects(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    sides = _sides(record)
    for side, value in zip(sides, lists_in(*map(record.get, sides)), strict=True):
        if type(value) is list:
            yield from objects_in_messages(value, f"{columns.get(side, side)}[]", columns)


class PlainPromptCompletion(PlainPair, gc=False, kw_only=True):
    prompt: str | None = None
    question: str | None = None
    completion: str | None = None
    answer: str | None = None
    response: str | None = None
    tools: Nothing = None
    tool_defs: Nothing = None
    functions: Nothing = None

    def __post_init__(self) -> None:
        sides = (self.prompt, self.question, self.completion, self.answer, self.response)
        ask, answer = self.pair()
        if ask is not None and ask[:1] in "[ \t\r\n" and ask.lstrip()[:1] == "[":
            raise ValueError("the prompt may be a list of messages")
        if ask is None or answer is None or sides.count(None) != 3:
            raise ValueError("a side is missing, or not used")

    def pair(self) -> tuple[str | None, str | None]:
        ask, answer = (self.question, self.answer) if self.prompt is None else (self.prompt, self.completion)
        return ask, self.response if answer is None else answer

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return _ROLES, [text or "" for text in self.pair()]


PROMPT_COMPLETION = Format(
    name="prompt_completion",
    keys=("prompt", "completion", "question", "answer", "response", "system", *TOOL_KEYS, *REASONING_KEYS, OPTIONS),
    matches=lambda record: (
        ("prompt" in record and ("completion" in record or "response" in record))
        or ("question" in record and ("answer" in record or "response" in record))
    ),
    read=read_prompt_completion,
    summary="`prompt` and `completion` (or `response`), or `question` and `answer` (or `response`); "
    "optionally `system`, `tools` (or `tool_defs`, `functions`), `reasoning_content` (or `reasoning`, `thinking`), "
    "`chat_template_kwargs`",
    example='{"prompt": "2+2?", "completion": "4"}',
    plain=PlainPromptCompletion,
    used=lambda record: (*_sides(record), "system", *TOOL_KEYS, OPTIONS, *reasoning_keys(record)),
    objects=_objects,
)


# -- text -------------------------------------------------------------------------------------------------------------


def read_text(record: Record) -> Conversation:
    text = required_text(record, "text")
    return Conversation((Message("text", text),) if text else ())


class PlainText(PlainRecord, gc=False):
    text: str

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        return ("text",), [self.text]


TEXT = Format(
    name="text",
    keys=("text",),
    matches=lambda record: "text" in record,
    read=read_text,
    summary="`text`: no turns, no template",
    example='{"text": "Two and two are four."}',
    plain=PlainText,
)
