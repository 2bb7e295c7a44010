"""Exactly the strings that need a change are found in the JSON of a conversation."""

from __future__ import annotations

import re
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from packcorpus.tasks.templates.jinja.control_strings import Unchanged

KEYS, ROLES = ("role", "content"), ("user", "tool")

# Characters that JSON escapes, and text that surrounds strings in JSON.
text = st.lists(
    st.sampled_from(
        ['"', "\\", "\\u0041", "\n", "\x00", "é", "\ud7ff", "!", "a", "role", "user", '":"', "{}", ",", ":"]
    )
).map("".join)
values = st.recursive(
    st.none() | st.integers(0, 9) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


def strings_of(value: Any) -> list[str]:
    """Return all strings and unknown keys, except known roles."""
    if isinstance(value, list):
        return [string for item in value for string in strings_of(item)]
    if not isinstance(value, dict):
        return [value] if isinstance(value, str) else []
    found = [key for key in value if key not in KEYS]
    return found + [
        string
        for key, item in value.items()
        if (key, item) not in [("role", role) for role in ROLES]
        for string in strings_of(item)
    ]


@given(st.lists(values, min_size=1, max_size=4))
@example([['"role":"user"!'], {"role": "user"}])
@example([{"a": "\\"}, {"a": '\\"!'}])
@example([{"role": "user!"}, {"role": ["user", "!"]}])
def test_all_strings_are_looked_at(found: list[Any]) -> None:
    unchanged = Unchanged(lambda string: re.sub("[!\n]", "", string), KEYS, ROLES)
    for value in found * 2:  # results for one value are reused for the next
        expected = not any(re.search("[!\n]", string) for string in strings_of(value))
        assert unchanged.has_all(orjson.dumps(value).decode()) is expected, value


def without_marks(value: Any) -> Any:
    """Remove `!` from all strings and unknown keys, except known roles."""
    if isinstance(value, list):
        return [without_marks(item) for item in value]
    if not isinstance(value, dict):
        return value.replace("!", "") if isinstance(value, str) else value
    return {
        key if key in KEYS else key.replace("!", ""): item
        if (key, item) in [("role", role) for role in ROLES]
        else without_marks(item)
        for key, item in value.items()
    }


@given(st.lists(values, min_size=1, max_size=4))
@example([{"a!": '!"', "role": "user"}])
@example(["a!", "b", "a!"])
def test_strings_are_changed_where_they_are(found: list[Any]) -> None:
    unchanged = Unchanged(lambda string: string.replace("!", ""), KEYS, ROLES)
    for value in found * 2:
        changed = unchanged.changed(orjson.dumps(value).decode(), lambda string: string.replace("!", ""))
        if len(set(strings_of(without_marks(value)))) == len(set(strings_of(value))):  # no two keys became equal
            assert orjson.loads(changed) == without_marks(value)
