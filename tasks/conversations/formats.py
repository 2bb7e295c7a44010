"""List the formats of records, find the format of a record, and read it.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}    one record
    {"instruction": "2+2?", "output": "4"}                                                        another record
        → Conversation((Message("user", "2+2?"), Message("assistant", "4")))                      the same conversation

A record is a JSON object or a row of a table. A key whose value is null counts as absent, because a table has every
column in every row. Keys that a format does not use are counted (unused_keys.py). A record that does not fit its
format raises `Reject` with one of these codes: not_an_object, missing_key, bad_type, bad_role, bad_content, bad_weight,
bad_tool_call, bad_tools, big_integer, empty, no_common_prompt, nul, lone_surrogate, too_many_turns. The message names
the place within the record, the value, and the fix if there is one.

Reading takes 1 µs per message. A new format is one file in this folder and one line in `FORMATS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packcorpus.tasks.conversations.answers import OPTIONS, options_of
from packcorpus.tasks.conversations.messages import MESSAGES, SHAREGPT
from packcorpus.tasks.conversations.model import ROLES, Conversation, Format
from packcorpus.tasks.conversations.names import ROLE_NAMES, in_own_names, rename, rename_messages
from packcorpus.tasks.conversations.oasst import OASST
from packcorpus.tasks.conversations.other_data import OTHER_KEYS
from packcorpus.tasks.conversations.pairs import ALPACA, DOLLY, PROMPT_COMPLETION, TEXT
from packcorpus.tasks.conversations.session import SESSION
from packcorpus.tasks.conversations.several_answers import COMPLETIONS, PREFERENCE
from packcorpus.tasks.conversations.tokens import TOKENS
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown, suggest

# The first format that matches a record is the format of the record.
FORMATS: tuple[Format, ...] = (
    MESSAGES,
    SHAREGPT,
    ALPACA,
    DOLLY,
    OASST,
    PROMPT_COMPLETION,
    TEXT,
    SESSION,
    TOKENS,
    COMPLETIONS,
    PREFERENCE,
)

FORMAT_NAMES: tuple[str, ...] = tuple(format.name for format in FORMATS)
FORMAT_OF: dict[str, Format] = {format.name: format for format in FORMATS}

# Formats with keys of their own, which the records of another format may have with another meaning.
OWN_KEYS = (SESSION, TOKENS, COMPLETIONS, PREFERENCE)

# The names that a `columns` mapping may give to keys of a record, and those of records with messages or text.
COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(key for format in FORMATS for key in format.keys))
USUAL_COLUMNS = tuple(dict.fromkeys(key for format in FORMATS if format not in OWN_KEYS for key in format.keys))

# Limit for one conversation. Tokenizing a message takes 30 µs and 3.5 KB, so this many take 3 s and 350 MB.
MOST_MESSAGES = 100_000


def check_format(name: str) -> str:
    """Return the name of a format, or raise ValueError with the closest known name."""
    if name not in FORMAT_OF:
        known = suggest(name, FORMAT_NAMES) or f"; known are {', '.join(FORMAT_NAMES)}"
        raise ValueError(f"format {shown(name)} is not known{known}")
    return name


def detect(record: object, columns: Mapping[str, str] = {}, only: str = "") -> str | None:
    """Return the name of the first format that matches a record, or None.

    `columns` maps packcorpus names of keys to the names in the record, such as {"instruction": "frage"}. If `only`
    names a format, no other format is tried.
    """
    if not isinstance(record, dict):
        return None
    if columns:
        record = rename(record, columns)
    present = {key: value for key, value in record.items() if value is not None}
    formats = [FORMAT_OF[only]] if only else FORMATS
    return next((format.name for format in formats if format.matches(present)), None)


def role_names(format: str, roles: Mapping[str, str] = {}) -> Mapping[str, str]:
    """Return the role of each name that roles have in plain records of a format.

    `roles` is as in `read_record`.
    """
    known = FORMAT_OF[format].roles
    return {role: role for role in ROLES} if known is None else {**known, **roles}


def read_record(
    record: object, format: str, columns: Mapping[str, str] = {}, roles: Mapping[str, str] = {}
) -> Conversation:
    """Return the conversation in a record of the given format, one of `FORMAT_NAMES`.

    `columns` maps packcorpus names of keys to the names in the record. `roles` maps further names of roles, in lower
    case, to roles. Raises Reject if the record is not of this format, and KeyError for an unknown format.
    """
    read = FORMAT_OF[format].read
    if not isinstance(record, dict):
        raise Reject("not_an_object", f"the record is {kind(record)}; expected an object with keys")
    if columns or roles:
        record = rename_messages(rename(record, columns), format, columns, roles)
    try:
        conversation = read(record)
    except Reject as reject:
        if not columns:
            raise
        raise Reject(reject.reason, in_own_names(reject.message, columns)) from None
    if columns:
        conversation.answers = tuple(a._replace(place=in_own_names(a.place, columns)) for a in conversation.answers)
    conversation.loss_weight = record.get("loss_weight")
    if OPTIONS in record and OPTIONS in FORMAT_OF[format].keys:
        conversation.template_options = options_of(record)
    if not conversation.messages:
        raise Reject("empty", "the record holds no messages")
    count = len(conversation.messages)
    if conversation.has_several_answers:  # each of them is rendered after the prompt
        count += (len(conversation.answers) - 1) * conversation.answers[0].first
    if count > MOST_MESSAGES:
        found = f"the record holds {count:,} messages"
        raise Reject("too_many_turns", f"{found}, more than {MOST_MESSAGES:,}; split it")
    return conversation


# -- guesses ----------------------------------------------------------------------------------------------------------

# Common names for the two sides of a record, beyond the keys of the formats.
_ASKED = (
    "prompt", "instruction", "question", "query", "input", "user", "human", "customer", "source", "frage",
    "anfrage", "eingabe", "pregunta", "domanda", "pergunta",
)  # fmt: skip
_ANSWERED = (
    "completion", "response", "output", "answer", "assistant", "gpt", "agent", "reply", "target", "antwort",
    "ausgabe", "réponse", "reponse", "respuesta", "risposta", "resposta",
)  # fmt: skip

# Common names of the keys of a message, the most likely first.
_SPEAKERS = ("role", "from", "speaker", "author", "sender", "who", "name", "type", "user")
_CONTENTS = ("content", "value", "text", "message", "utterance", "body", "says", "msg")

# Words in the names of people who ask and who answer.
_WORDS = {
    **dict.fromkeys(
        (
            "asker", "buyer", "caller", "client", "customer", "guest", "member", "patient", "seeker", "student", "user",
            "visitor",
        ),
        "user",
    ),
    **dict.fromkeys(
        (
            "advisor", "adviser", "agent", "answerer", "assistant", "bot", "clerk", "consultant", "doctor", "expert",
            "helper", "operator", "representative", "support", "teacher", "therapist", "tutor",
        ),
        "assistant",
    ),
}  # fmt: skip

MOST_NAMES = 8  # maximum for one role; if there are more, they are names of people


def guess_columns(record: Mapping[str, object]) -> dict[str, str]:
    """Guess a `columns` mapping from the names of a record's keys.

    The keys are packcorpus names in another case, a common pair of names, or a list of messages. Returns {} if no
    mapping fits. For example, {"Frage": …, "Antwort": …} gives {prompt: Frage, completion: Antwort},
    {"dialog": [{"speaker": "Agent", "text": "Hi"}]} gives {messages: dialog, role: speaker, content: text}, but
    {"a": …, "b": …} gives {}.
    """
    keys = {key.lower().strip().replace(" ", "_"): key for key in record if isinstance(key, str)}
    columns = {name: keys[name] for name in USUAL_COLUMNS if name in keys}
    if detect(record, columns):
        return columns
    asked = next((keys[name] for name in _ASKED if name in keys), None)
    answered = next((keys[name] for name in _ANSWERED if name in keys and keys[name] != asked), None)
    columns = {"prompt": asked, "completion": answered} if asked and answered else _guess_messages(record)
    return columns if detect(record, columns) else {}


def _guess_messages(record: Mapping[str, object]) -> dict[str, str]:
    for key, value in record.items():
        first = value[0] if isinstance(value, list) and value else None
        if key in OTHER_KEYS or not isinstance(first, dict):
            continue
        texts = {name.lower(): name for name, text in first.items() if isinstance(name, str) and isinstance(text, str)}
        role, content = (next((texts[n] for n in names if n in texts), "") for names in (_SPEAKERS, _CONTENTS))
        if role and content:
            mapping = {"messages": key, "role": role, "content": content}
            return {ours: theirs for ours, theirs in mapping.items() if ours != theirs}
    return {}


def guess_roles(records: Iterable[object], columns: Mapping[str, str]) -> dict[str, list[str]]:
    """Guess a `roles` mapping for the unknown names in lists of messages.

    A name with words for both roles, or for neither, is left out; case is ignored. Returns {} if no name can be
    guessed. For example, messages of Customer and of Support Agent give {user: [Customer], assistant: [Support Agent]}.
    """
    keys = [columns["role"]] if "role" in columns else ["role", "from"]
    known, guessed = set(ROLE_NAMES), dict[str, list[str]]()
    lists = (value for record in records if isinstance(record, dict) for value in record.values())
    messages = (message for value in lists if isinstance(value, list) for message in value)
    for name in (message.get(key) for message in messages if isinstance(message, dict) for key in keys):
        if isinstance(name, str) and name.lower() not in known:
            known.add(name.lower())
            meant = {_WORDS[word] for word in re.findall(r"[a-z]+", name.lower()) if word in _WORDS}
            if len(meant) == 1:
                guessed.setdefault(meant.pop(), []).append(name)
    return {} if any(len(names) > MOST_NAMES for names in guessed.values()) else guessed
