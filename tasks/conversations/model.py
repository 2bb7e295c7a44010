"""Define conversations, their form for OpenAI, and the formats of records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import orjson
from msgspec import Struct
from xxhash import xxh3_64_intdigest


@dataclass(slots=True)
class ToolCall:
    """One call of a tool by the assistant.

    `arguments` is JSON text, normally of an object.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class Message:
    """One message of a conversation.

    `role` is one of `ROLES`. `reasoning` is the assistant's reasoning before its answer, if the record separates it
    from the content. `context` is called input in Alpaca and context in Dolly: it belongs to `content`, but a template
    may render it separately. `train` is None unless the data decides whether the message is trained on (see
    `trained_turns`). `loss_weight` is the value in the record until it is read, and a float afterwards
    (turn_weights.py). `parts` has the texts of a content that is a list of several parts, for templates that read
    lists; `content` is then these texts, joined with line breaks. `developer` is true for a system message that the
    data calls DEVELOPER; only templates that know this role see the difference.

    The class is not frozen, although nothing changes a message, because creating a frozen message takes five times as
    long.
    """

    role: str
    content: str
    context: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    train: bool | None = None
    reasoning: str = ""
    loss_weight: object = None
    parts: tuple[str, ...] = ()
    developer: bool = False

    @property
    def given_role(self) -> str:
        """Return the role that the data gives: DEVELOPER, or one of `ROLES`."""
        return DEVELOPER if self.developer else self.role


class RecordedTokens(NamedTuple):
    """The token ids of a record that has no messages.

    `trained` has a flag for each id that is trained on. `tokenizer` is the SHA-256 of the tokenizer that the
    record names, or "".
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    tokenizer: str = ""


class Answer(NamedTuple):
    """The place of an answer in its record, and the index of its first message."""

    place: str
    first: int


@dataclass(slots=True)
class Conversation:
    """A list of messages, and the tools that are available in it.

    `tools` holds the schema of each tool as JSON text. `loss_weight` is the value in the record. A conversation with
    `recorded` ids has one empty message of plain text, and no tokenizer or template is used for it. `template_options`
    are variables that the record sets for its template, over those of the config. A record that lists answers has the
    messages of its prompt, then those of all `answers` in their order.
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    loss_weight: object = None
    recorded: RecordedTokens | None = None
    template_options: Mapping[str, Any] | None = None
    answers: tuple[Answer, ...] = ()

    @property
    def has_several_answers(self) -> bool:
        """Return whether several answers follow the same prompt."""
        return len(self.answers) > 1


ROLES = ("system", "user", "assistant", "tool", "text")

# A name of the system role in OpenAI's form, which some templates know as a role of its own.
DEVELOPER = "developer"

RECORDED = "\x12"  # the layout of recorded ids
NEXT_ANSWER = "\x14"  # in a layout, before each answer of several


def role_named(name: object, roles: Mapping[str, str]) -> str | None:
    """Return the role that a name in the data stands for, or None.

    `roles` maps names in lower case to roles. The case of `name` is ignored.
    """
    return (roles.get(name) or roles.get(name.lower())) if isinstance(name, str) else None


def message_of(given_role: str, content: str) -> Message:
    """Return a message with a role that the data gives."""
    return Message("system", content, developer=True) if given_role == DEVELOPER else Message(given_role, content)


def turns_of(roles: Sequence[str]) -> int:
    """Count the messages that are not system messages."""
    return sum(role != "system" for role in roles)


def usual_order(roles: Sequence[str]) -> bool:
    """Return whether the roles are in the usual order.

    A system message is optional and comes first. Then user and assistant alternate, and tools reply to the assistant.
    """
    turns = [role for role in roles if role != "text"]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return turns[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(turns))


def is_blank(message: Message) -> bool:
    """Return whether a message has neither text nor tool calls.

    Reasoning does not count.
    """
    return not (message.tool_calls or message.content.strip() or message.context.strip())


def full_text(message: Message) -> str:
    """Join content and context, for templates that do not separate them."""
    return "\n\n".join(filter(None, (message.content, message.context)))


# -- one text for the whole conversation, and its hash ----------------------------------------------------------------


def whole_text(conversation: Conversation) -> str:
    """Return the layout of a conversation and all its strings, joined with NUL.

    No string contains NUL, so different conversations have different results. The layout consists of control
    characters, so it never looks like a control string of a tokenizer.
    """
    if conversation.recorded:
        return f"{RECORDED}\0{' '.join(map(str, conversation.recorded.ids))}"
    strings = [layout_of(conversation)]
    for message in conversation.messages:
        of_calls = [text for call in message.tool_calls for text in (call.name, call.arguments, call.id)]
        strings += [text for text in (message.content, *_optional(message), *of_calls) if text is not None]
    return "\0".join((*strings, *conversation.tools, *filter(None, [options_json(conversation)])))


def _optional(message: Message) -> tuple[str | None, ...]:
    # in the order of their marks in the layout
    return message.context or None, message.name, message.tool_call_id, message.reasoning or None


def options_json(conversation: Conversation) -> str:
    """Return the template options of a conversation as JSON, or "".

    The options are sorted, but not the objects in them, because a template may write these.
    """
    options = conversation.template_options
    return orjson.dumps(dict(sorted(options.items()))).decode() if options else ""


def layout_of(conversation: Conversation) -> str:
    """Return the layout, which shows the strings that follow in `whole_text`.

    It has one character for each message, for each optional string and tool call of a message, for each tool, and for
    template options. Each of several answers begins with NEXT_ANSWER, which shows no string.
    """
    marks = []
    firsts = {answer.first for answer in conversation.answers} if conversation.has_several_answers else ()
    for k, message in enumerate(conversation.messages):
        if k in firsts:
            marks.append(NEXT_ANSWER)
        marks += [chr(1 + ROLES.index(message.role))]
        marks += [mark for mark, text in zip("\x06\x07\x08\x11", _optional(message), strict=True) if text is not None]
        marks += ["\x0e" if call.id is None else "\x0f" for call in message.tool_calls]
    return "".join(marks) + "\x10" * len(conversation.tools) + "\x13" * bool(conversation.template_options)


def prompt_text(conversation: Conversation, trained: Sequence[bool]) -> str:
    """Return the prompt of a conversation as one text, or "" if it has none.

    It is everything before the first answer that is trained on: messages with their roles, texts, and calls, and the
    tools. White space at the ends of a text, IDs of calls, and reasoning are not part of it, and neither is the format
    of the record. No part of several answers belongs to it. `trained` has a flag for each message. Without a message of
    the user there is no prompt.
    """
    if recorded := conversation.recorded:
        first = recorded.trained.index(True)
        return f"{RECORDED}\0{' '.join(map(str, recorded.ids[:first]))}" if first else ""
    stop = first_answer([message.role for message in conversation.messages], trained)
    if conversation.has_several_answers:
        stop = min(stop, conversation.answers[0].first)
    messages = conversation.messages[:stop]
    if not any(message.role == "user" and not is_blank(message) for message in messages):
        return ""
    marks, strings = [], list[str]()
    for message in messages:
        marks.append(chr(1 + ROLES.index(message.role)))
        strings.append(full_text(message).strip())
        for call in message.tool_calls:
            marks.append("\x0e")
            strings += [call.name, call.arguments]
    marks.append("\x10" * len(conversation.tools))
    return "\0".join(["".join(marks), *strings, *conversation.tools])


def first_answer(roles: Sequence[str], trained: Sequence[bool]) -> int:
    """Return the index of the first answer that is trained on, or else of a message."""
    answers = [k for k, (role, flag) in enumerate(zip(roles, trained, strict=True)) if flag and role == "assistant"]
    return answers[0] if answers else [*trained].index(True)


def content_digest(text: bytes) -> int:
    """Return the 64-bit hash of a conversation, unsigned.

    `text` is `whole_text` as UTF-8, and the hash is its XXH3 hash (Collet, 2019). Neither the format of the record nor
    the weights are part of it, so a conversation is in the same split however it is stored and trained. The hash
    function never changes (a golden test checks this). It is not cryptographic: collisions can be constructed.
    """
    return int(xxh3_64_intdigest(text))


# -- OpenAI's form -----------------------------------------------------------------------------------------------------

# The roles of messages in this form.
OPENAI_ROLES = ("system", DEVELOPER, "user", "assistant", "tool")


def turns_json(conversation: Conversation) -> str:
    """Return the messages as JSON for format 2.0.

    The result is null for the format `text`, which has no turns.
    """
    plain = conversation.messages[0].role == "text"
    return orjson.dumps(None if plain else [as_row(message) for message in conversation.messages]).decode()


def tools_json(conversation: Conversation) -> str | None:
    return f"[{','.join(conversation.tools)}]" if conversation.tools else None


def as_row(message: Any) -> dict[str, Any]:
    """Return a message in OpenAI's form for format 2.0.

    Arguments of tool calls are JSON text.
    """
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": message.given_role,
        "content": full_text(message),
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "weight": 0 if message.train is False else 1,
        "reasoning_content": message.reasoning or None,
        "train": message.train,
    }


def as_openai(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, which chat templates expect."""
    calls = []
    for call in message.tool_calls:
        try:
            arguments = orjson.loads(call.arguments)
        except orjson.JSONDecodeError:
            arguments = call.arguments
        function = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        calls.append(function | ({"id": call.id} if call.id else {}))
    found: dict[str, Any] = {"name": message.name, "tool_call_id": message.tool_call_id}
    found |= {"reasoning_content": message.reasoning or None, "tool_calls": calls or None}
    said = {"role": message.role, "content": full_text(message)}
    return said | {key: value for key, value in found.items() if value is not None}


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form with its content as a list of one part.

    Some templates read only this form. If the content is a list of texts, each of them is a part.
    """
    content = [message["content"]] if isinstance(message["content"], str) else message["content"]
    return {**message, "content": [{"type": "text", "text": text} for text in content]} if content else message


# -- formats ----------------------------------------------------------------------------------------------------------

Record = dict[str, object]

# The type of a key that is absent, null, or an empty string in plain records.
Nothing = Literal[""] | None


class PlainRecord(Struct, gc=False, omit_defaults=True):
    """A record that holds only turns.

    Subclasses declare its keys and their types; see `Format.plain`.
    """

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        """Return the names of the roles in the record, and the contents."""
        raise NotImplementedError


@dataclass(frozen=True)
class Format:
    """A format of records.

    `keys` are all the keys that `read` uses. `matches` decides by these keys whether a record is of this format; null
    values are removed before. `read` converts a record to a conversation, and so defines the meaning of a record; it
    raises Reject. `summary` and `example` are for the documentation.

    Most records hold only turns. They are read ten times as fast if `plain` declares them. The meaning of a record that
    fits this type must be exactly its `turns()`, whatever other keys it has. So every key that has a meaning is
    declared, as `Nothing` if it is not a turn, and a record that lacks a turn does not fit. `roles` maps the names of
    roles in `turns()`, in lower case, to roles; it is None if `turns()` returns roles.

    Unused keys are counted. `used` returns the keys that `read` uses of a record; without `used`, they are `keys`.
    `objects` yields the path, the content, and the used keys of each object within a record, given the `columns` of the
    config, also for a record that `read` rejects; without `objects`, objects are used as a whole. `left_out` counts
    further things of a record that `read` leaves out, by path.
    """

    name: str
    keys: tuple[str, ...]
    matches: Callable[[Mapping[str, object]], bool]
    read: Callable[[Record], Conversation]
    summary: str
    example: str
    plain: type[PlainRecord] | None = None
    used: Callable[[Record], Collection[str]] | None = None
    objects: Callable[[Record, Mapping[str, str]], Iterator[tuple[str, Record, Collection[str]]]] | None = None
    roles: Mapping[str, str] | None = None
    left_out: Callable[[Record], Mapping[str, int]] | None = None
