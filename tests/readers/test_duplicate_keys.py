"""Exactly the records with equal keys in one object are rejected.

records whose keys are equal, or not ─write─▶ lines or an array ─parts─▶ readers ─▶ values and Rejects
                                            └─json.loads, object by object──────▶ the same values, or equal keys

Neither the spelling nor the place of the keys matters.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.json_texts import STYLES, Pairs, Raw, objects, written
from support.profiles import examples

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation, PlainRecord
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.readers.strict_json import decode_block
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import PartReader, find_parts
from packcorpus.tasks.tokenization.prepare import PlainRecords, as_dict

PART_SIZES = (1, 100, 1 << 20)
NAMES = ("a.jsonl", "a.json", "a.jsonl.gz")


class Case(NamedTuple):
    """A case is a source file: its name, the format of its records, and the records.

    The records are JSON texts.
    """

    name: str
    format: str
    records: tuple[str, ...]
    lines: str  # between two records


# -- generated records ------------------------------------------------------------------------------------------------

PIECES = (
    "a", '"', "\\", ":", '": ', '",', "{", "}", "[", "]", ",", " ", "u0022", "\\u0022", '\\"', "role", '"role"', '"a":',
    "content", "é", "\u2028", "\x7f", "\t", "\n", "/", "🙂", "messages", '"messages" :',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
KEYS = st.sampled_from(["a", "b", "role", "content", "text", "messages", "id", "", '"', "é", "\\", '"a":']) | TEXTS
NUMBERS = st.sampled_from(["0", "-1", "7", "1.5", "-0.0", "2E+3", "1e-7", "true", "false", "null", "9007199254740993"])
LEAVES = TEXTS | NUMBERS.map(Raw)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(KEYS, inner), max_size=3, unique_by=lambda pair: pair[0]).map(Pairs),
    ),
    max_leaves=5,
)
# Records that neither reader can decode, although their keys differ. Records near them are read one by one.
ODD = ('{"text": NaN}', '{"text": "\\ud800"}', f'{{"text": {"9" * 30}}}', '"text"', "[1]", "null")


def _turns(role: str, content: str) -> st.SearchStrategy[list[Pairs]]:
    turn = st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS)
    return st.lists(turn.map(lambda pair: Pairs([(role, pair[0]), (content, pair[1])])), max_size=3)


@st.composite
def _calls(draw: st.DrawFn) -> list[Pairs]:
    """Draw turns, with JSON in a string as the arguments of the last turn."""
    arguments = _with_equal_keys(draw, Pairs([("a", draw(VALUES)), ("b", draw(TEXTS))]))
    text = written(arguments, draw(st.sampled_from(STYLES)), random.Random(draw(st.integers(0, 99))))
    function = Pairs([("name", "f"), ("arguments", text)])
    call = Pairs([("role", "assistant"), ("content", "x"), ("tool_calls", [Pairs([("function", function)])])])
    return [*draw(_turns("role", "content")), call]


def _pairs(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[Pairs]:
    return st.fixed_dictionaries(values).map(lambda found: Pairs(found.items()))


FORMATS: dict[str, st.SearchStrategy[Pairs]] = {
    "messages": _pairs(messages=_turns("role", "content") | _calls()),
    "sharegpt": _pairs(conversations=_turns("from", "value")),
    "alpaca": _pairs(instruction=TEXTS, output=TEXTS),
    "prompt_completion": _pairs(prompt=TEXTS, completion=TEXTS),
    "text": _pairs(text=TEXTS),
}


def _with_equal_keys(draw: st.DrawFn, node: Pairs) -> Pairs:
    """Repeat up to two keys of objects within a value."""
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        filled = [found for found in objects(node) if found]
        found = filled[draw(st.integers(0, len(filled) - 1))]
        key, value = found[draw(st.integers(0, len(found) - 1))]
        again = draw(st.one_of(st.just(value), VALUES, TEXTS))
        found.insert(draw(st.integers(0, len(found))), (key, again))
    return node


@st.composite
def _records(draw: st.DrawFn, format: str, style: str) -> str:
    kind = draw(st.integers(0, 12))
    if kind == 12:
        return draw(st.sampled_from(ODD))
    node = draw(FORMATS[format])
    if kind < 6:
        for key, value in draw(st.lists(st.tuples(KEYS, VALUES), max_size=2, unique_by=lambda pair: pair[0])):
            if key not in dict(node):
                node.insert(draw(st.integers(0, len(node))), (key, value))
    if kind == 1:
        nested = functools.reduce(lambda inner, _: [inner], range(300), draw(VALUES))
        node.append((f"deep{len(node)}", nested))
    node = _with_equal_keys(draw, node)
    style = draw(st.sampled_from(STYLES)) if draw(st.booleans()) else style
    return written(node, style, random.Random(draw(st.integers(0, 99))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name, format = draw(st.sampled_from(NAMES)), draw(st.sampled_from([*FORMATS, "messages"]))
    style = draw(st.sampled_from(STYLES))
    records = tuple(draw(st.lists(_records(format, style), min_size=1, max_size=6)))
    between = [", ", ",", ",\n ", "\n,\r\n"] if name == "a.json" else ["\n", "\r\n", "\n\n \n"]
    return Case(name, format, records, draw(st.sampled_from(between)))


# -- the check --------------------------------------------------------------------------------------------------------


class _EqualKeysError(Exception):
    pass


def _strictly(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise _EqualKeysError
    return dict(pairs)


def expected(text: str) -> Any:
    """Return the value of a JSON text, or _EqualKeysError.

    The class is returned if an object in the text has equal keys.
    """
    try:
        return json.loads(text, object_pairs_hook=_strictly)
    except _EqualKeysError:
        return _EqualKeysError


def inner_texts(record: Any) -> list[str]:
    """Return the strings of a record that contain JSON.

    The record has the format `messages`.
    """
    return [call["function"]["arguments"] for turn in record["messages"] for call in turn.get("tool_calls", ())]


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_duplicate_keys_"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def check(case: Case) -> str:
    """Check that exactly the records with equal keys are rejected.

    All other records are read as they are. Returns whether the case has records with equal keys.
    """
    whole = case.lines.join(case.records)
    data = (f"[{whole}]" if case.name == "a.json" else whole + case.lines).encode()
    (_place() / case.name).write_bytes(gzip.compress(data, 1) if case.name.endswith(".gz") else data)
    for part_size in PART_SIZES:
        [(_, parts)] = find_parts([Source(path=case.name, format=case.format)], _place(), part_size)
        for decode in (decode_block, PlainRecords(case.format).decode):
            found = [record for part in parts for _, record in PartReader(part, decode=decode)]
            assert len(found) == len(case.records), part_size
            for text, record in zip(case.records, found, strict=True):
                _check_record(case.format, text, record)
    return "with equal keys" if _EqualKeysError in map(expected, case.records) else "without equal keys"


def _check_record(format: str, text: str, record: object) -> None:
    reason = record.reason if isinstance(record, Reject) else ""
    if text in ODD[:3]:
        assert reason not in ("", "duplicate_key"), (text, record)
        return
    value = expected(text)
    if value is _EqualKeysError:
        assert reason == "duplicate_key", (text, record)
        return
    assert not reason, (text, str(record))
    if not isinstance(record, PlainRecord):
        assert json.dumps(record) == json.dumps(value), (text, record)
    ours, theirs = _conversation(as_dict(record), format), _conversation(value, format)
    assert ours == theirs, text
    if format == "messages" and isinstance(value, dict):
        inner = [expected(found) for found in inner_texts(value)]
        if _EqualKeysError in inner:
            assert isinstance(ours, str), text
        else:
            assert ours != "duplicate_key", text


def _conversation(record: object, format: str) -> Conversation | str:
    try:
        return read_record(record, format)
    except Reject as reject:
        return reject.reason


SPLIT = (
    '{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"assistant","content":"b"}]}',
    '{"messages" :[{"role":"assistant","content":"c"}]}',
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@example(Case("a.jsonl", "messages", ('{"messages":[{"role":"user","role":"user"},{"role" :"assistant"}]}',), "\n"))
@example(Case("a.jsonl", "messages", (r'{"messages":[{"content":"LOST","content":"kept \u0022: x"}]}',), "\n"))
@example(Case("a.jsonl", "messages", SPLIT, "\n"))
@given(cases())
def test_equal_keys_are_rejected_and_all_else_is_read_as_it_is(case: Case) -> None:
    check(case)
