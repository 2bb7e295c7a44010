"""List the formats of records, find the format of a record, and read it.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}    one record
    {"instruction": "2+2?", "output": "4"}                                                        another record
        → Conversation((Message("user", "2+2?"), Message("assistant", "4")))                      the same conversation

A record is a JSON object or a row of a table. A key whose value is null counts as absent, because a table has every
column in every row. Keys that a format does not use are counted (unused_keys.py). A record that does not fit its
format raises `Reject` with one of these codes: not_an_object, missing_key, bad_type, bad_role, bad_content, bad_weight,
bad_tool_call, bad_tools, big_integer, empty, nul, lone_surrogate, too_many_turns. The message names the place within
the record, the value, and the fix if there is one.

Reading takes 1 µs per message. A new format is one file in this folder and one line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.conversations.chat import TURN_NAMES
from tasks.conversations.guess import guess_messages
from tasks.conversations.instruction import ALPACA, DOLLY
from tasks.conversations.lists import MESSAGE_LISTS, with_lists
from tasks.conversations.messages import MESSAGES
from tasks.conversations.model import ROLES, Conversation, Format
from tasks.conversations.names import in_own_names, rename, rename_messages
from tasks.conversations.oasst import OASST
from tasks.conversations.prompt_completion import PROMPT_COMPLETION
from tasks.conversations.sharegpt import SHAREGPT
from tasks.conversations.text import TEXT
from tasks.conversations.tools import OPTIONS, options_of
from tasks.conversations.traces.session import SESSION
from tasks.conversations.traces.tokens import TOKENS
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown, suggest

# The first format that matches a record is the format of the record.
FORMATS: tuple[Format, ...] = (MESSAGES, SHAREGPT, ALPACA, DOLLY, OASST, PROMPT_COMPLETION, TEXT, SESSION, TOKENS)

FORMAT_NAMES: tuple[str, ...] = tuple(format.name for format in FORMATS)
FORMAT_OF: dict[str, Format] = {format.name: format for format in FORMATS}

# The names that a `columns` mapping may give to keys of a record.
COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(key for format in FORMATS for key in format.keys))

# Those of records with messages or text.
_USUAL = [format for format in FORMATS if format not in (SESSION, TOKENS)]
USUAL_COLUMNS = tuple(dict.fromkeys(key for format in _USUAL for key in format.keys))

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
        record = with_lists(rename(record, columns), MESSAGE_LISTS, {**TURN_NAMES, **roles})
        record = rename_messages(record, format, columns, roles)
    try:
        conversation = read(record)
    except Reject as reject:
        if not columns:
            raise
        raise Reject(reject.reason, in_own_names(reject.message, columns)) from None
    conversation.loss_weight = record.get("loss_weight")
    if OPTIONS in record and OPTIONS in FORMAT_OF[format].keys:
        conversation.template_options = options_of(record)
    if not conversation.messages:
        raise Reject("empty", "the record holds no messages")
    if len(conversation.messages) > MOST_MESSAGES:
        found = f"the record holds {len(conversation.messages):,} messages"
        raise Reject("too_many_turns", f"{found}, more than {MOST_MESSAGES:,}; split it")
    return conversation


# -- keys that no format has ------------------------------------------------------------------------------------------

# Common names for the two sides of a record, beyond the keys of the formats.
_ASKED = ("prompt", "instruction", "question", "query", "input", "user", "human", "customer", "source")
_ANSWERED = ("completion", "response", "output", "answer", "assistant", "gpt", "agent", "reply", "target")


def guess_columns(record: Mapping[str, object]) -> dict[str, str]:
    """Guess a `columns` mapping from the names of a record's keys.

    The keys are packcorpus names in another case, a common pair of names, or a list of messages. Returns {} if no
    mapping fits. For example, {"Question": …, "Answer": …} gives {question: Question, answer: Answer}, but {"frage": …,
    "antwort": …} gives {}.
    """
    keys = {key.lower().strip().replace(" ", "_"): key for key in record if isinstance(key, str)}
    columns = {name: keys[name] for name in USUAL_COLUMNS if name in keys}
    if detect(record, columns):
        return columns
    asked = next((keys[name] for name in _ASKED if name in keys), None)
    answered = next((keys[name] for name in _ANSWERED if name in keys and keys[name] != asked), None)
    columns = {"prompt": asked, "completion": answered} if asked and answered else guess_messages(record)
    return columns if detect(record, columns) else {}
