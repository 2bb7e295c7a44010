"""Record formats → `Conversation`. (record: one JSON object or table row)

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}    one record
    {"instruction": "2+2?", "output": "4"}                                                        another record
        → Conversation((Message("user", "2+2?"), Message("assistant", "4")))                      the same conversation

`detect` tells the format from a record's keys; the first line of this table that fits wins. A key whose value is
null counts as absent, because a table has every column in every row.

| told by the keys                              | format            | read as well, where present            |
|-----------------------------------------------|-------------------|----------------------------------------|
| messages                                      | messages          | tools                                  |
| conversations, or conversation                | sharegpt          | system, tools                          |
| prompt that is an object                      | oasst             |                                        |
| instruction and output                        | alpaca            | input (else context), system, history  |
| instruction and response and context          | dolly             | system                                 |
| instruction and response                      | alpaca            | input, system, history                 |
| prompt and completion, or prompt and response | prompt_completion | system, tools                          |
| question and answer, or question and response | prompt_completion | system, tools                          |
| text                                          | text              |                                        |

Other keys are ignored. A record that does not fit its format raises `Reject` with one of these codes:
not_an_object, missing_key, bad_type, bad_role, bad_content, bad_weight, bad_tool_call, bad_tools, big_integer, empty,
nul, lone_surrogate, too_many_turns. The message names the place within the record, the value and, where there is one,
the fix.

Cost: 1 µs a message. It runs for every one of millions of records, hence plain code and no schema library, and hence
values that are not frozen, though nobody changes one: frozen, a message takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.conversations.chat import read_messages, read_sharegpt
from tasks.conversations.instruction import read_alpaca, read_dolly, read_prompt_completion, read_text
from tasks.conversations.model import Conversation
from tasks.conversations.oasst import read_oasst
from tasks.core.errors import Reject
from tasks.core.printable import kind

# Of one conversation. A message takes 30 µs and 3.5 KB until it is tokens, so these take 3 s and 350 MB.
MOST_MESSAGES = 100_000


FORMATS: tuple[str, ...] = ("messages", "sharegpt", "alpaca", "dolly", "oasst", "prompt_completion", "text")


COLUMNS: tuple[str, ...] = (
    *("messages", "conversations", "conversation", "tools", "system", "instruction", "input", "context", "output"),
    *("response", "history", "prompt", "completion", "question", "answer", "text"),
)
"""The names that a `columns` mapping may give to a record's keys."""


def detect(record: object, columns: Mapping[str, str] = {}) -> str | None:
    """The format of `record` by its keys (the table above), or None if it cannot be told.

    `columns` maps our column names to the record's, such as {"instruction": "frage"}.
    """
    if not isinstance(record, dict):
        return None
    if columns:
        record = _rename(record, columns)
    keys = {key for key, value in record.items() if value is not None}
    if "messages" in keys:
        return "messages"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "prompt" in keys and isinstance(record["prompt"], dict):
        return "oasst"
    if "instruction" in keys:
        if "output" in keys:
            return "alpaca"
        if "response" in keys:
            return "dolly" if "context" in keys else "alpaca"
    if ("prompt" in keys and not keys.isdisjoint(("completion", "response"))) or (
        "question" in keys and not keys.isdisjoint(("answer", "response"))
    ):
        return "prompt_completion"
    return "text" if "text" in keys else None


def read_record(record: object, format: str, columns: Mapping[str, str] = {}) -> Conversation:
    """The conversation in `record`, which is of the given format, one of `FORMATS`.

    `columns` maps our column names to the record's. Raises Reject if the record is not of this format, and KeyError
    for an unknown format.
    """
    reader = _READERS[format]
    if not isinstance(record, dict):
        raise Reject("not_an_object", f"the record is {kind(record)}; expected an object with keys")
    if columns:
        record = _rename(record, columns)
    conversation = reader(record)
    if not conversation.messages:
        raise Reject("empty", "the record holds no messages")
    if len(conversation.messages) > MOST_MESSAGES:
        found = f"the record holds {len(conversation.messages):,} messages"
        raise Reject("too_many_turns", f"{found}, more than {MOST_MESSAGES:,}; split it")
    return conversation


_READERS = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "dolly": read_dolly,
    "oasst": read_oasst,
    "prompt_completion": read_prompt_completion,
    "text": read_text,
}


def _rename(record: dict[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    """The record under our names. A name that is mapped means the mapped key and no other."""
    taken = {*columns, *columns.values()}
    renamed = {key: value for key, value in record.items() if key not in taken}
    for ours, theirs in columns.items():
        if theirs in record:
            renamed[ours] = record[theirs]
    return renamed
