"""Define conversations and the formats that they are read from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from msgspec import Struct
from xxhash import xxh3_64_intdigest


@dataclass(slots=True)
class ToolCall:
    """One call of a tool by the assistant. `arguments` is JSON text (normally an object)."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class Message:
    """One turn. `role` is one of `ROLES`.

    `reasoning` is what the assistant thinks before it answers, if the record has it apart from the content. `context`
    is what Alpaca calls input and Dolly context: it belongs to `content`, but a template may render it
    separately. A turn of `weight` 0 is never trained on. `loss_weight` is what the record has, and a float once it was
    read (keys/loss_weights.py).

    Not frozen, although nothing changes a message: frozen, it would take five times as long to create.
    """

    role: str
    content: str
    context: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    weight: int = 1
    reasoning: str = ""
    loss_weight: object = None


@dataclass(slots=True)
class Conversation:
    """A list of messages. `tools` holds the schemas of the available tools, each as JSON text.

    `loss_weight` and `embedding` are what the record has; the latter is a Sketch once it was read (keys/embeddings.py).
    """

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()
    loss_weight: object = None
    embedding: object = None


ROLES = ("system", "user", "assistant", "tool", "text")


def role_named(name: object, roles: Mapping[str, str]) -> str | None:
    """Return our name of a role, or None; `roles` has the names in lower case, and case is ignored."""
    return (roles.get(name) or roles.get(name.lower())) if isinstance(name, str) else None


def turns_of(roles: Sequence[str]) -> int:
    """Count the messages that are not system messages."""
    return sum(role != "system" for role in roles)


def usual_order(roles: Sequence[str]) -> bool:
    """Check the order: an optional system message, then user and assistant in turn; tools reply to the assistant."""
    turns = [role for role in roles if role != "text"]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return turns[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(turns))


def is_blank(message: Message) -> bool:
    """Return whether a message says nothing; its reasoning does not count."""
    return not (message.tool_calls or message.content.strip() or message.context.strip())


def full_text(message: Message) -> str:
    """Join content and context, for templates that do not separate them."""
    return "\n\n".join(filter(None, (message.content, message.context)))


# -- one text for the whole conversation, and its hash ----------------------------------------------------------------


def whole_text(conversation: Conversation) -> str:
    """Return the layout of a conversation and all its strings, joined with NUL. Different conversations differ here.

    No string contains NUL. The layout consists of control characters, so it never looks like a control string of a
    tokenizer.
    """
    strings = []
    for message in conversation.messages:
        known = (
            message.content,
            message.context or None,
            message.name,
            message.tool_call_id,
            message.reasoning or None,
        )
        strings += [text for text in known if text is not None]
        strings += [text for c in message.tool_calls for text in (c.name, c.arguments, c.id) if text is not None]
    return "\0".join((layout_of(conversation), *strings, *conversation.tools))


def layout_of(conversation: Conversation) -> str:
    """Return which strings follow in `whole_text`: a character per message and per optional string of it."""
    marks = []
    for message in conversation.messages:
        known = (message.context or None, message.name, message.tool_call_id, message.reasoning or None)
        marks += [chr(1 + ROLES.index(message.role))]
        marks += [mark for mark, text in zip("\x06\x07\x08\x11", known, strict=True) if text is not None]
        marks += ["\x0e" if call.id is None else "\x0f" for call in message.tool_calls]
    return "".join(marks) + "\x10" * len(conversation.tools)


def content_digest(text: bytes) -> int:
    """Return the XXH3 hash (Collet, 2019) of `whole_text` as UTF-8: 64 bits, unsigned.

    Neither the format of the record nor the weights are part of it, so the same conversation is in the same split
    however it is stored and trained. It never changes (a golden test checks this), and it is not cryptographic:
    collisions can be constructed.
    """
    return int(xxh3_64_intdigest(text))


# -- formats ----------------------------------------------------------------------------------------------------------

Record = dict[str, object]

# A key that does not make a record unusual: absent, null, or an empty string.
Nothing = Literal[""] | None


class PlainRecord(Struct, gc=False, omit_defaults=True):
    """A record that holds turns and nothing else; subclasses declare its keys and their types (see `Format.plain`)."""

    def turns(self) -> tuple[tuple[str, ...], list[str]]:
        """Return the roles, as the record names them, and the contents."""
        raise NotImplementedError


@dataclass(frozen=True)
class Format:
    """A format of records.

    `keys` are all the keys that `read` uses, and `matches` decides by them whether a record, without its null values,
    is of this format. `read` defines what a record means; it raises Reject. `summary` and `example` are for the
    documentation.

    Most records are turns and nothing else, and those are read ten times as fast if `plain` declares them: a record
    that fits this type must mean exactly its `turns()`, whatever other keys it has. So every key that means something
    is declared, as `Nothing` if it is not a turn, and a record that lacks a turn does not fit. `roles` are our names of
    the roles in `turns()`, by their names in lower case; None if `turns()` has ours.

    What is not used is counted. `used` returns those of `keys` that `read` uses of this record, if not always all of
    them. `objects` yields the path, the keys, and the used keys of objects within the record, given the `columns` of
    the config; without it, objects are used as a whole.
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
