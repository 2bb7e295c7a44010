"""List the formats of records, find the format of a record, and read it.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}    one record
    {"instruction": "2+2?", "output": "4"}                                                        another record
        → Conversation((Message("user", "2+2?"), Message("assistant", "4")))                      the same conversation

A record is a JSON object or a row of a table. A key whose value is null counts as absent, because a table has every
column in every row. Keys that a format does not use are counted (keys/unused.py). A record that does not fit its
format raises `Reject` with one of these codes: not_an_object, missing_key, bad_type, bad_role, bad_content, bad_weight,
bad_tool_call, bad_tools, big_integer, empty, nul, lone_surrogate, too_many_turns. The message names the place within
the record, the value, and the fix if there is one.

Cost: 1 µs a message. A new format is one file in this folder and one line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.conversations.instruction import ALPACA, DOLLY
from tasks.conversations.messages import MESSAGES
from tasks.conversations.model import ROLES, Conversation, Format, role_named
from tasks.conversations.oasst import OASST
from tasks.conversations.prompt_completion import PROMPT_COMPLETION
from tasks.conversations.sharegpt import SHAREGPT
from tasks.conversations.text import TEXT
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown
from tasks.core.suggest import suggest

# The first one that matches a record is its format.
FORMATS: tuple[Format, ...] = (MESSAGES, SHAREGPT, ALPACA, DOLLY, OASST, PROMPT_COMPLETION, TEXT)

FORMAT_NAMES: tuple[str, ...] = tuple(format.name for format in FORMATS)
FORMAT_OF: dict[str, Format] = {format.name: format for format in FORMATS}

# The names that a `columns` mapping may give to keys of a record.
COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(key for format in FORMATS for key in format.keys))

# The names that it may give to keys of a message.
MESSAGE_KEYS: tuple[str, ...] = ("role", "content")

# Keys of a record that hold a list of messages in some format.
_MESSAGE_LISTS = (
    "messages", "conversations", "conversation", "prompt", "question", "completion", "answer", "response"
)  # fmt: skip

# Of one conversation. A message takes 30 µs and 3.5 KB until it is tokens, so these take 3 s and 350 MB.
MOST_MESSAGES = 100_000


def check_format(name: str) -> str:
    """Return the name of a format, or raise ValueError with the closest known name."""
    if name not in FORMAT_OF:
        known = suggest(name, FORMAT_NAMES) or f"; known are {', '.join(FORMAT_NAMES)}"
        raise ValueError(f"format {shown(name)} is not known{known}")
    return name


def detect(record: object, columns: Mapping[str, str] = {}, only: str = "") -> str | None:
    """Return the name of the first format that matches a record, or None; only one format is tried if it is named.

    `columns` maps our column names to the record's, such as {"instruction": "frage"}.
    """
    if not isinstance(record, dict):
        return None
    if columns:
        record = rename(record, columns)
    present = {key: value for key, value in record.items() if value is not None}
    formats = [FORMAT_OF[only]] if only else FORMATS
    return next((format.name for format in formats if format.matches(present)), None)


def role_names(format: str, roles: Mapping[str, str] = {}) -> Mapping[str, str]:
    """Return our names of the roles in plain records of a format; `roles` as in `read_record`."""
    known = FORMAT_OF[format].roles
    return {role: role for role in ROLES} if known is None else {**known, **roles}


def read_record(
    record: object, format: str, columns: Mapping[str, str] = {}, roles: Mapping[str, str] = {}
) -> Conversation:
    """Return the conversation in a record of the given format, one of `FORMAT_NAMES`.

    `columns` maps our names of keys to the record's, `roles` further names of roles, in lower case, to ours. Raises
    Reject if the record is not of this format, and KeyError for an unknown format.
    """
    read = FORMAT_OF[format].read
    if not isinstance(record, dict):
        raise Reject("not_an_object", f"the record is {kind(record)}; expected an object with keys")
    if columns or roles:
        record = _rename_messages(rename(record, columns), format, columns, roles)
    conversation = read(record)
    if not conversation.messages:
        raise Reject("empty", "the record holds no messages")
    if len(conversation.messages) > MOST_MESSAGES:
        found = f"the record holds {len(conversation.messages):,} messages"
        raise Reject("too_many_turns", f"{found}, more than {MOST_MESSAGES:,}; split it")
    return conversation


def rename(record: dict[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    """Return the record under our names of its keys; its messages keep theirs."""
    return _renamed(record, {ours: theirs for ours, theirs in columns.items() if ours not in MESSAGE_KEYS})


def _rename_messages(
    record: dict[str, object], format: str, columns: Mapping[str, str], roles: Mapping[str, str]
) -> dict[str, object]:
    """Return the record with its lists of messages under our names of keys and roles."""
    keys = {ours: theirs for ours, theirs in columns.items() if ours in MESSAGE_KEYS}
    if not keys and not roles:
        return record
    return {
        key: [_rename_message(item, format, keys, roles) if type(item) is dict else item for item in value]
        if key in _MESSAGE_LISTS and isinstance(value, list)
        else value
        for key, value in record.items()
    }


def _rename_message(
    item: dict[str, object], format: str, keys: Mapping[str, str], roles: Mapping[str, str]
) -> dict[str, object]:
    by_from = format == "sharegpt" and item.get("from") is not None
    if keys:
        # Of the two keys of ShareGPT, one may be mapped and the other keep its name.
        others = {"role": "from", "content": "value"} if by_from else {}
        if format == "sharegpt" and "content" not in item:
            others["content"] = "value"
        item = _renamed(item, {**others, **keys})
        if by_from:
            item.pop("from", None)
    key = "from" if by_from and not keys else "role"
    if roles and (role := role_named(item.get(key), roles)):
        item = {**item, key: role}
    return item


def _renamed(values: dict[str, object], keys: Mapping[str, str]) -> dict[str, object]:
    """Return an object under our names. A name that is mapped means the mapped key and no other."""
    taken = {*keys, *keys.values()}
    renamed = {key: value for key, value in values.items() if key not in taken}
    for ours, theirs in keys.items():
        if theirs in values:
            renamed[ours] = values[theirs]
    return renamed


# -- keys that no format has ------------------------------------------------------------------------------------------

# Common names for the two sides of a record that are not ours.
_ASKED = ("prompt", "instruction", "question", "query", "input", "user", "human", "source")
_ANSWERED = ("completion", "response", "output", "answer", "assistant", "gpt", "reply", "target")


def guess_columns(record: Mapping[str, object]) -> dict[str, str]:
    """Guess a `columns` mapping by the names of a record's keys; return {} if none fits.

    Keys are ours in another case, or a common pair of names: {"Question": …, "Answer": …} → {question: Question,
    answer: Answer}, but {"frage": …, "antwort": …} → {}.
    """
    keys = {key.lower().strip().replace(" ", "_"): key for key in record if isinstance(key, str)}
    columns = {name: keys[name] for name in COLUMNS if name in keys}
    if detect(record, columns):
        return columns
    asked = next((keys[name] for name in _ASKED if name in keys), None)
    answered = next((keys[name] for name in _ANSWERED if name in keys and keys[name] != asked), None)
    columns = {"prompt": asked, "completion": answered} if asked and answered else {}
    return columns if detect(record, columns) else {}
