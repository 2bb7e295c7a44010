"""Keys of a record that are none of ours → `columns` that say which is which, as a guess by their names.

{"Question": …, "Answer": …} ─▶ {question: Question, answer: Answer}       {"frage": …, "antwort": …} ─▶ {}
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.conversations.formats import COLUMNS, detect

# Names that people give to the two sides of a record, where they are none of ours.
ASKED = ("prompt", "instruction", "question", "query", "input", "user", "human", "source")
ANSWERED = ("completion", "response", "output", "answer", "assistant", "gpt", "reply", "target")


def guess_columns(record: Mapping[str, object]) -> dict[str, str]:
    """Our names → the record's, where these are ours in other letters, or a usual pair of names; {} where none is."""
    keys = {key.lower().strip().replace(" ", "_"): key for key in record if isinstance(key, str)}
    columns = {name: keys[name] for name in COLUMNS if name in keys}
    if detect(record, columns):
        return columns
    asked = next((keys[name] for name in ASKED if name in keys), None)
    answered = next((keys[name] for name in ANSWERED if name in keys and keys[name] != asked), None)
    columns = {"prompt": asked, "completion": answered} if asked and answered else {}
    return columns if detect(record, columns) else {}
