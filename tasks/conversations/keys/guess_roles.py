"""Guess the role that an unknown name in the data stands for, by its words.

[{"speaker": "Customer", …}, {"speaker": "Support Agent", …}] → {user: [Customer], assistant: [Support Agent]}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tasks.conversations.chat import ROLE_NAMES

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
