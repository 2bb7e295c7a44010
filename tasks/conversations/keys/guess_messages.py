"""Guess the key of a record's messages, and the keys of their role and content.

{"dialog": [{"speaker": "Agent", "text": "Hi"}]} → {messages: dialog, role: speaker, content: text}
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.conversations.keys.other_data import OTHER_KEYS

# Common names, the most likely first.
_ROLES = ("role", "from", "speaker", "author", "sender", "who", "name", "type", "user")
_CONTENTS = ("content", "value", "text", "message", "utterance", "body", "says", "msg")


def guess_messages(record: Mapping[str, object]) -> dict[str, str]:
    """Guess a `columns` mapping from the first list of objects with both keys.

    Returns {} if there is no such list.
    """
    for key, value in record.items():
        first = value[0] if isinstance(value, list) and value else None
        if key in OTHER_KEYS or not isinstance(first, dict):
            continue
        role, content = _named(first, _ROLES), _named(first, _CONTENTS)
        if role and content:
            mapping = {"messages": key, "role": role, "content": content}
            return {ours: theirs for ours, theirs in mapping.items() if ours != theirs}
    return {}


def _named(message: Mapping[str, object], names: tuple[str, ...]) -> str:
    """Return the key of a string with one of these names, or "".

    The case of the key is ignored.
    """
    keys = {key.lower(): key for key, value in message.items() if isinstance(key, str) and isinstance(value, str)}
    return next((keys[name] for name in names if name in keys), "")
