"""Write what a conversation says as one text, and hash it."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from tasks.conversations.model import ROLES, Conversation


def said(conversation: Conversation) -> str:
    """All that the conversation says: first which strings there are, then the strings, with NUL between them, which
    none holds. No two conversations say the same.

    What comes first is made of control characters, so that it is none of a tokenizer's control strings.
    """
    strings = []
    for message in conversation.messages:
        known = (message.content, message.context or None, message.name, message.tool_call_id)
        strings += [text for text in known if text is not None]
        strings += [text for c in message.tool_calls for text in (c.name, c.arguments, c.id) if text is not None]
    return "\0".join((said_of(conversation), *strings, *conversation.tools))


def said_of(conversation: Conversation) -> str:
    """Which strings `said` goes on with: a character for each message, and one for each thing that it may have."""
    marks = []
    for message in conversation.messages:
        known = (message.context or None, message.name, message.tool_call_id)
        marks += [chr(1 + ROLES.index(message.role))]
        marks += [mark for mark, text in zip("\x06\x07\x08", known, strict=True) if text is not None]
        marks += ["\x0e" if call.id is None else "\x0f" for call in message.tool_calls]
    return "".join(marks) + "\x10" * len(conversation.tools)


def content_digest(said: bytes) -> int:
    """64 bits, unsigned, of what a conversation says (`said` as UTF-8): XXH3 (Collet, 2019).

    Neither the format that it was read from nor the weights count, so that the same conversation falls on the same
    side of a split however it is stored and trained. The same for ever: a golden test holds it. No secret is in it:
    who wants two conversations with one digest can find them.
    """
    return int(xxh3_64_intdigest(said))
