"""Plain records are prepared like records that are read with care.

This is true for every format, template, and tokenizer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import BUILT, CHATML_JINJA, open_kind, read_rows

from packcorpus.tasks.config import Config
from packcorpus.tasks.conversations.answers import Unpaired
from packcorpus.tasks.conversations.formats import FORMATS
from packcorpus.tasks.conversations.model import Conversation, Format, PlainRecord, ToolCall
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.templates.built_in import BUILT_IN, BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import TrainOn
from packcorpus.tasks.tokenization.prepare import PlainRecords, Preparer, comparable
from packcorpus.tasks.tokenization.samples import Prepared
from packcorpus.tasks.tokenization.skeletons import Skeleton, Skeletons
from packcorpus.tasks.tokenization.tokenize_part import tokenize_part

FEW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PLAIN = [format for format in FORMATS if format.plain]
TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "all", "last", "rounds")
ROLES = ("system", "user", "assistant", "tool", "human", "gpt", "function_call", "tool_call", "prompter", "assistent")
MORE_KEYS = ("weight", "name", "tool_calls", "id", "category", "extra")


# -- records like the example of a format -----------------------------------------------------------------------------
# Values are chosen by a Random, because strategies favor simple values and these tests need rare combinations.

CONTENTS = ("a", "a", "a\0b", "100 %s", " b\n", "é", "Ä" * 99, '"role":', "\\", "▁", "\v", "\x1c", "[INST]", "</s>",
    '[{"role": "user", "content": "a"}]', ' [{"role": "user", "content": "a"}]', '{"name": "f"}')  # fmt: skip
ODD = (None, True, 7, 10**20, [], {}, "", " ", "a\0b", "x", "x", ["a"], {"a": {"b": "c"}})
MORE_KEYS = ("weight", "name", "tool_calls", "id", "category", "extra")


def like(random: Random, value: Any, odds: float, more: tuple[str, ...], key: str = "") -> Any:
    """Return a value like this one, with other strings and more or fewer items.

    With a probability of `odds`, parts of the value have another type, are missing, or are added.
    """
    if random.random() < odds / 2:
        return random.choice((*ODD, *CONTENTS))
    if key in ("role", "from"):
        return random.choice(ROLES) if random.random() < max(odds, 0.1) else value
    if key == "type":
        return value
    if isinstance(value, str):
        return random.choice(CONTENTS)
    if isinstance(value, int):
        return value
    if isinstance(value, list):
        return [like(random, item, odds, more) for item in value * random.choice((1, 1, 2))]
    found = {name: like(random, item, odds, more, name) for name, item in value.items() if random.random() >= odds}
    if random.random() < 2 * odds:
        found[random.choice(more)] = random.choice((*ODD, *CONTENTS))
    return found


def records(random: Random, format: Format) -> list[Any]:
    example = json.loads(format.example)
    if random.random() < 0.5:
        example = {key: value for key, value in example.items() if key not in ("input", "context")}
    odds = random.choice((0, 0.05, 0.2))
    return [like(random, example, odds, (*format.keys, *MORE_KEYS)) for _ in range(random.randint(1, 5))]


def lines(random: Random, format: Format) -> list[bytes]:
    """Return records as JSON Lines.

    In half of the cases, one line is changed so that a decoder may misread it.
    """
    ascii, separators = random.random() < 0.5, random.choice(((", ", ": "), (",", ":"), (" , ", " : ")))
    found = [json.dumps(record, ensure_ascii=ascii, separators=separators) for record in records(random, format)]
    first, *others = map(str.encode, found)
    if random.random() < 0.5:
        first = changed(random, first, (*format.keys, *MORE_KEYS))
    return [*others[:1], first, *others[1:]]


def changed(random: Random, line: bytes, more: tuple[str, ...]) -> bytes:
    known = [found.decode() for found in re.findall(rb'"(\w+)"', line)]
    key = random.choice((*known, *more))
    key = random.choice((key, key, f"\\u{ord(key[0]):04x}{key[1:]}"))
    value = random.choice(('"x"', '"x"', "null", '""', "0", "7", "NaN", "1e999", str(10**25), "[]", '{"b":1,"b":2}'))
    at = random.choice([at for at, byte in enumerate(line) if byte in b"{}"] or [0])
    pair = f'"{key}": {value}'.encode()
    longer = (
        line[:at] + b"," + pair + line[at:]
        if line[at : at + 1] == b"}"
        else line[: at + 1] + pair + b"," + line[at + 1 :]
    )
    behind = random.choice([at + 1 for at, byte in enumerate(line) if byte in b'"'] or [0])
    inside = random.choice((rb"\u0000", rb"\ud800", b"\xff", rb"\u0022", b"\t"))
    end = random.choice((b"\r", b" ", b"}", b"{}", b"\0", b"\x0b"))
    ways = (
        longer,
        longer,
        longer,
        longer.replace(b'"a"', rb'"\u0022\u0022\u0022\u0022"'),
        line.replace(b"e", rb"\u0065"),
    )
    ways += (line[:behind] + inside + line[behind:], line[:behind], b"\xef\xbb\xbf" + line, line + end)
    return random.choice(ways)


# -- plain reading and reading with care ------------------------------------------------------------------------------


def with_care(patch: pytest.MonkeyPatch) -> None:
    """Read every record separately and with care, and fill nothing in."""
    patch.setattr(PlainRecords, "decode", lambda *_: None)
    patch.setattr(PlainRecords, "of", lambda *_: None)
    patch.setattr(Skeleton, "fill", lambda *_: None)
    patch.setattr(Skeleton, "fill_values", lambda *_: None)


def part_of(place: Path, content: list[bytes], format: Format) -> Part:
    path = place / "part.jsonl"
    path.write_bytes(b"\n".join(content) + b"\n")
    stat = path.stat()
    file = SourceFile(path, path.name, "jsonl", "", format.name, (), stat.st_size, "", stat.st_mtime_ns)
    return Part(file, 0, stat.st_size, "")


@pytest.mark.slow  # slow, because the examples must include every template
@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_both_ways_write_the_same_token_file(format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    seen = Counter[str]()

    @settings(FEW, max_examples=150)
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        content = lines(random, format)
        template, train_on, kind = random.choice(list(BUILT_IN)), random.choice(TRAIN_ON), random.choice(BUILT)
        part, encoder = part_of(tmp_path, content, format), open_kind(kind)
        config = Config(sources=[Source(path="part.jsonl")], train_on=train_on)
        found = []
        for careful in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if careful:
                    with_care(patch)
                written = BuiltIn(template, encoder, train_on)
                receipt = tokenize_part(part, encoder, written, config, tmp_path / "tokens", tmp_path / "receipt")
                found.append((receipt, (tmp_path / "tokens").read_bytes()))
        assert found[0] == found[1]
        seen[template] += receipt["accepted"]
        seen["rejected"] += len(receipt["rejects"])

    check()
    assert all(seen[name] for name in (*BUILT_IN, "rejected")), seen


def file_of(format: Format, columns: tuple[tuple[str, str], ...] = ()) -> SourceFile:
    return SourceFile(Path("a.parquet"), "a.parquet", "parquet", "", format.name, columns, 0, "", 0)


def outcome(preparer: Preparer, record: object) -> Any:
    try:
        samples = preparer.prepare(record)
    except Reject as error:
        return error.reason, str(error)
    return [(*comparable(sample), sample.layout.usual, sample.layout.turns) for sample in samples]


@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_both_ways_prepare_the_rows_of_a_table_alike(format: Format) -> None:
    ways = Counter[bool]()

    @settings(FEW, max_examples=examples(300))
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        rows = records(random, format)
        template, train_on, kind = random.choice(list(BUILT_IN)), random.choice(TRAIN_ON), random.choice(BUILT)
        encoder = open_kind(kind)
        preparer = Preparer(file_of(format), BuiltIn(template, encoder, train_on), encoder, train_on)
        for row in [*rows, 7, {"text": "\udc00"}, Reject("bad_value", "a row")]:
            plain = outcome(preparer, row)
            with pytest.MonkeyPatch.context() as patch:
                with_care(patch)
                assert plain == outcome(preparer, row)
            ways[preparer._plain.of(row) is not None] += 1

    check()
    assert ways[False], ways
    assert bool(ways[True]) == (format.plain is not None), ways


# -- records that are filled in ---------------------------------------------------------------------------------------


def preparer_of(format: Format, kind: str = "sp_bpe_chatml", **settings: Any) -> Preparer:
    encoder = open_kind(kind)
    return Preparer(file_of(format, **settings), BuiltIn("chatml", encoder, "all"), encoder, "all")


def is_filled(preparer: Preparer, record: object) -> bool:
    """Return whether a record is filled in without being read with care."""

    def fail(*_: object) -> list[Prepared]:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preparer, "_fill_with_care", fail)
        try:
            [prepared] = preparer.prepare(record)
            return prepared.layout.conversation != ""
        except AssertionError:
            return False


@pytest.mark.parametrize("format", PLAIN, ids=[format.name for format in PLAIN])
def test_the_example_of_a_format_is_plain_as_a_line_and_as_a_row(format: Format) -> None:
    preparer = preparer_of(format)
    row = json.loads(format.example)
    row = {key: value for key, value in row.items() if key not in ("input", "context")}
    assert format.matches(row) or format.name == "dolly"
    further = {"id": "7", "category": "x"}
    for ascii in (False, True):
        found = preparer.decode([json.dumps(record, ensure_ascii=ascii).encode() for record in (row, row | further)])
        assert found is not None
        assert all(isinstance(record, PlainRecord) for record in found)
        assert all(is_filled(preparer, record) for record in found)
    assert is_filled(preparer, row | further | {"extra": 7, "system": None, "tools": ""})
    assert not is_filled(preparer_of(format, columns=(("text", "x"),)), row)


def turns(*contents: object, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)], **more}


@pytest.mark.parametrize(
    "record",
    [
        turns("a\0", "b"),
        turns("\udc00", "b"),
        turns(5, "b"),
        turns("a", " "),
        turns(),
        turns("a", "b", tools=[]),
        {"messages": [{"role": "assistent", "content": "a"}]},
        {"messages": [{"role": ["user"], "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": "user"},
        Reject("bad_json", ""),
    ],
)
def test_a_record_that_is_unusual_is_read_with_care(record: object) -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    assert is_filled(preparer_of(messages), turns("a", "b"))
    assert not is_filled(preparer_of(messages), record)


@pytest.mark.parametrize("kind", BUILT)
def test_an_encoder_that_adds_spaces_needs_the_contents(kind: str) -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    assert is_filled(preparer_of(messages, kind), turns("a", "b")) != open_kind(kind).has_space


def test_a_frame_is_rendered_once_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.tokenization.skeletons.MOST_SHAPES", 2)
    [messages] = [format for format in FORMATS if format.name == "messages"]
    preparer = preparer_of(messages)
    [first] = preparer.prepare(turns("a", "b"))
    assert is_filled(preparer, turns("a"))
    assert not is_filled(preparer, turns("a", "b", "c"))
    monkeypatch.setattr(BuiltIn, "spans", None)
    [other] = preparer.prepare(turns("2+2?", "4"))
    assert other.layout is first.layout


def test_calls_of_a_role_that_says_call_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    preparer, tried = preparer_of(messages), []

    def filled(skeletons: Skeletons, conversation: Conversation, trained: object) -> tuple[None, None]:
        tried.append(conversation.messages[-1].tool_calls)
        return None, None

    monkeypatch.setattr(Skeletons, "filled", filled)
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "tool_call", "content": '{"name": "f"}'}]}
    preparer.prepare(record)
    assert tried == [(ToolCall("f", "{}"),)]


def test_results_without_a_call_are_noticed_when_they_are_filled_in() -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    encoder = open_kind("sp_bpe_chatml")
    template = JinjaTemplate("t.jinja", CHATML_JINJA, encoder, "assistant", "2026-01-01")
    preparer = Preparer(file_of(messages), template, encoder, "assistant")
    result = {"messages": [{"role": role, "content": "a"} for role in ("user", "tool", "assistant")]}
    as_text = {"messages": [{"role": "assistant", "content": "<tool_call>"}, *result["messages"]]}
    preparer.prepare_all([result, as_text])
    assert is_filled(preparer, result)
    [[first], [second]] = preparer.prepare_all([result, as_text])
    assert (first.unpaired, second.unpaired) == (Unpaired(results_without_call=1), None)


def test_parts_share_what_was_rendered_of_their_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts share the rendered shapes of their template.

    Each part has its own Preparer, but a process renders each shape of a template only once.
    """
    [messages] = [format for format in FORMATS if format.name == "messages"]
    template = BuiltIn("chatml", open_kind("sp_bpe_chatml"), "all")
    preparers = [Preparer(file_of(messages), template, template.encoder, "all") for _ in range(2)]
    [first] = preparers[0].prepare(turns("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(BuiltIn, "spans", None)
        [other] = preparers[1].prepare(turns("2+2?", "4"))
        assert other.layout is first.layout
    # If a part has no space for another shape, it starts again without the known shapes.
    monkeypatch.setattr("packcorpus.tasks.tokenization.skeletons.MOST_SHAPES", 1)
    preparer = Preparer(file_of(messages), template, template.encoder, "all")
    assert is_filled(preparer, turns("a"))
    assert not is_filled(preparer, turns("a", "b"))


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_many_records_are_prepared_as_each_by_itself(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records are prepared as if each was prepared separately.

    There are plain, unusual, invalid, and refused records. The template must render all of them.
    """
    monkeypatch.setattr("packcorpus.tasks.templates.jinja.template.AT_ONCE", at_once)
    [messages] = [format for format in FORMATS if format.name == "messages"]
    encoder = open_kind("hf_byte_level")
    refuses = "{{ raise_exception('no') if 'no' in messages[0].content }}" + CHATML_JINJA.replace(
        ".content", ".content[:9]"
    )
    template = JinjaTemplate("t.jinja", refuses, encoder, "assistant", "2026-01-01")
    preparers = [Preparer(file_of(messages), template, encoder, "assistant") for _ in range(2)]
    records = [
        turns("a", "b"),
        7,
        turns("no", "b"),
        turns("a"),
        turns("a", "b", "c", "d"),
        turns("é" * 20, "b"),
        turns("no", "d"),
    ] * 5
    found = preparers[0].prepare_all(records)
    for record, many in zip(records, found, strict=True):
        if isinstance(many, list):
            assert list(map(comparable, many)) == list(map(comparable, preparers[1].prepare(record)))
        else:
            with pytest.raises(type(many), match=re.escape(str(many))):
                preparers[1].prepare(record)


def test_a_reject_takes_the_place_of_its_record() -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    preparer = preparer_of(messages)
    thinks = turns("a", "b")
    thinks["messages"][1]["reasoning"] = "t"
    first, second, third = preparer.prepare_all([turns("a", "b"), thinks, turns("c", "d")])
    assert isinstance(first, list)
    assert isinstance(second, Reject)
    assert isinstance(third, list)
    with pytest.raises(Reject, match="has reasoning, but the built-in template"):
        preparer.prepare(thinks)


def test_rows_of_a_token_file_are_in_the_order_of_the_records(tmp_path: Path) -> None:
    [messages] = [format for format in FORMATS if format.name == "messages"]
    content = [json.dumps(turns("a", "b" * n, **({"extra": n} if n % 3 else {}))).encode() for n in range(1, 9)]
    part, encoder = part_of(tmp_path, content, messages), open_kind("sp_bpe_chatml")
    config = Config(sources=[Source(path="part.jsonl")])
    template = BuiltIn("chatml", encoder, "assistant")
    tokenize_part(part, encoder, template, config, tmp_path / "tokens.arrow", tmp_path / "receipt.json")
    assert [row.record for row in read_rows(tmp_path / "tokens.arrow")] == list(range(8))


@pytest.mark.parametrize(
    ("train_on", "messages", "why"),
    [
        ("assistant", [("user", "a", 1)], "it has no assistant message"),
        ("assistant", [("user", "a", 1), ("assistant", " ", 1)], "its answers are empty"),
        ("last", [("assistant", "a", 1), ("user", "a", 1), ("assistant", "", 1)], "its last answer is empty"),
        ("assistant", [("user", "a", 1), ("assistant", "a", 0)], "weight, train, or training leaves answers out"),
    ],
)
def test_the_reason_why_nothing_is_trained_on(train_on: TrainOn, messages: list[tuple[Any, ...]], why: str) -> None:
    file = SourceFile(Path("a"), "a", "jsonl", "", "messages", (), 0, "", 0)
    encoder = open_kind("sp_bpe_chatml")
    preparer = Preparer(file, BuiltIn("chatml", encoder, train_on), encoder, train_on)
    turns = [dict(zip(("role", "content", "weight"), message, strict=True)) for message in messages]
    with pytest.raises(Reject, match=rf"^none of its turns is trained on \(train_on: {train_on}\): {why}$"):
        preparer.prepare({"messages": turns})
