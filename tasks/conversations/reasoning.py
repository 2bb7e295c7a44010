"""Read the reasoning of an answer.

It is in a key next to the content, or at the front of the text.

{"content": "4", "thinking": "Two and two."}       → "Two and two."
"<think>\\nTwo and two.\\n</think>\\n{\\"name\\": …}"   → "Two and two.", '{"name": …}'
"""

from __future__ import annotations

from tasks.conversations.fields import text_of
from tasks.conversations.model import Record
from tasks.core.errors import Reject

# Names of the reasoning of an answer in published data.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


_NAMES = frozenset(REASONING_KEYS)


def reasoning_in(item: dict[str, object], where: str = "") -> str:
    """Return the reasoning in an object.

    Any of REASONING_KEYS may hold it. It is "" if there is none. `where` is the place of the keys.
    """
    if _NAMES.isdisjoint(item):
        return ""
    found = {key: item[key] for key in REASONING_KEYS if item.get(key) not in (None, "")}
    texts = {text_of(value, where + key) for key, value in found.items()}
    if len(texts) > 1:
        raise Reject("bad_content", f"{where.rstrip('.') or 'the record'}: {' and '.join(found)} differ; keep one")
    return texts.pop() if texts else ""


def reasoning_keys(record: Record) -> list[str]:
    """Return the keys of a record with one answer that hold its reasoning.

    A flag, a number, or a list under one of these names is a remark.
    """
    return [key for key in REASONING_KEYS if isinstance(record.get(key), str)]


def reasoning_of_record(record: Record) -> str:
    """Return the reasoning of a record with one answer, or ""."""
    return reasoning_in({key: record[key] for key in reasoning_keys(record)})


def without_front(text: str) -> tuple[str, str]:
    """Return the reasoning at the front of a text, and the text after it.

    Some data lacks the first marker, because the prompt of the model ends with it.
    """
    reasoning, marker, rest = text.partition("</think>")
    reasoning = reasoning.strip().removeprefix("<think>")
    return (reasoning.strip(), rest.lstrip()) if marker and "<think>" not in reasoning else ("", text)
