"""Guess the keys of a record's messages, and the roles of unknown names.

{"dialog": [{"speaker": "Agent", "text": "Hi"}]} → {messages: dialog, role: speaker, content: text}
[{"speaker": "Customer", …}, {"speaker": "Support Agent", …}] → {user: [Customer], assistant: [Support Agent]}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tasks.conversations.chat import ROLE_NAMES
from tasks.conversations.other_data import OTHER_KEYS

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


# Words of names, in lower case.
_ASKS = (
    "asker", "buyer", "caller", "client", "customer", "guest", "member", "patient", "seeker", "student", "user",
    "visitor",
)  # fmt: skip
_ANSWERS = (
    "advisor", "adviser", "agent", "answerer", "assistant", "bot", "clerk", "consultant", "doctor", "expert", "helper",
    "operator", "representative", "support", "teacher", "therapist", "tutor",
)  # fmt: skip
_WORDS = {**dict.fromkeys(_ASKS, "user"), **dict.fromkeys(_ANSWERS, "assistant")}

MOST_NAMES = 8  # maximum for one role; if there are more, they are names of people


def guess_roles(records: Iterable[object], columns: Mapping[str, str]) -> dict[str, list[str]]:
    """Guess a `roles` mapping for the unknown names in lists of messages.

    A name with words for both roles, or for neither, is left out. Returns {} if no name can be guessed.
    """
    found: dict[str, list[str]] = {}
    for name in _names(records, [columns["role"]] if "role" in columns else ["role", "from"]):
        meant = {_WORDS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in _WORDS}
        if len(meant) == 1:
            found.setdefault(meant.pop(), []).append(name)
    return {} if any(len(names) > MOST_NAMES for names in found.values()) else found


def _names(records: Iterable[object], keys: Sequence[str]) -> Iterator[str]:
    """Yield each unknown name once, ignoring case."""
    seen = set(ROLE_NAMES)
    for record in records:
        for messages in record.values() if isinstance(record, dict) else ():
            for message in messages if isinstance(messages, list) else ():
                for name in map(message.get, keys) if isinstance(message, dict) else ():
                    if isinstance(name, str) and name.lower() not in seen:
                        seen.add(name.lower())
                        yield name
