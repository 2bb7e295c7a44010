"""A token file accounts for every record and every token of its part.

The receipt is written last.
"""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import (
    BUILT,
    CHATML_JINJA,
    check_row,
    hostile,
    open_kind,
    ordinary,
    read_rows,
    records,
    tokenize,
)

import packcorpus.tasks.tokenization.tokenize_part
from packcorpus.tasks.config import Config
from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation, Message, content_digest, whole_text
from packcorpus.tasks.core.errors import DataError, Reject, StorageError
from packcorpus.tasks.encoders.encoder import Encoded, Encoder, Unencodable
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.sources.model import Part, Source
from packcorpus.tasks.sources.parts import find_parts
from packcorpus.tasks.storage.files import read_receipt
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA, tokens_schema
from packcorpus.tasks.storage.token_files import TokenFiles
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import TEXT, Sample, Span, Template, TrainOn, Turns, trained_turns
from packcorpus.tasks.tokenization.samples import prepare_spans
from packcorpus.tasks.tokenization.tokenize_part import COUNTS, tokenize_part

FEW = settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])

GOOD = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def part_of(place: Path, lines: list[bytes]) -> Part:
    (place / "part.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    [(_, [part])] = find_parts([Source(path="part.jsonl", format="messages")], place, 1 << 30)
    return part


def line_of(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def run(place: Path, part: Part, template: Template | None = None, **settings: Any) -> dict[str, Any]:
    encoder = open_kind("sp_bpe_chatml")
    config = Config(sources=[Source(path="part.jsonl")], **settings)
    template = template or BuiltIn("chatml", encoder, config.train_on)
    return tokenize_part(part, encoder, template, config, place / "tokens.arrow", place / "receipt.json")


# -- every conversation, every token ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILT)
def test_every_record_and_every_token_is_accounted_for(kind: str) -> None:
    encoder = open_kind(kind)
    bad = st.sampled_from([7, {"messages": 1}, {"messages": [{"role": "assistent", "content": ""}]}, {"messages": []}])

    @FEW
    @given(
        st.lists(records(hostile(kind)) | bad, min_size=1, max_size=6),
        st.sampled_from(["assistant", "last", "rounds", "all"]),
        st.sampled_from(["chatml", "llama2", "alpaca", "plain"]),
    )
    def check(given_records: list[Any], train_on: TrainOn, name: str) -> None:
        rows, receipt = tokenize(given_records, encoder, name, train_on)
        template = BuiltIn(name, encoder, train_on)
        kept: dict[int, list[Span]] = {}
        rejected: dict[int, str] = {}
        control_text = unusual = odd_space = empty_prompts = 0
        for number, record in enumerate(given_records):
            try:
                conversation = read_record(record, "messages")
            except Reject as reject:
                rejected[number] = reject.reason
                continue
            trained = trained_turns(conversation, train_on)
            if not any(trained):
                rejected[number] = "no_trained_tokens"
                continue
            try:
                kept[number] = template.spans(conversation, trained)
            except Reject as reject:
                rejected[number] = reject.reason
                continue
            roles = "".join(message.role[0] for message in conversation.messages).removeprefix("s")
            unusual += not _in_order(roles)
            empty_prompts += any(_is_prompt_empty(conversation, k) for k, flag in enumerate(trained) if flag)
            # JSON escapes no character of a control string, so the JSON of a record contains those in its fields.
            said = json.dumps(record, ensure_ascii=False)
            control_text += any(string in said for string in encoder.controls)
            odd_space += encoder.underline_is_space and "▁" in "".join(span.text for span in kept[number])

        assert [row.record for row in rows] == list(kept)
        assert {index: code for index, code, _ in receipt["rejects"]} == rejected
        for row in rows:
            check_row(row, kept[row.record], encoder)
            assert not row.trained[0]
        counts = {name: receipt[name] for name in ("conversations", *COUNTS) if name != "control_text_seen"}
        assert counts == {
            "conversations": len(given_records),
            "accepted": len(rows),
            "tokens": sum(len(row.ids) - row.separator for row in rows),
            "not_round_trip": odd_space,
            "unknown_tokens": sum(int((row.ids == encoder.unk_id).sum()) for row in rows),
            "unusual_order": unusual,
            "empty_prompts": empty_prompts,
        }
        assert receipt["control_text_seen"] == control_text
        assert receipt["records"] == len(given_records)

    check()


def _is_prompt_empty(conversation: Conversation, k: int) -> bool:
    """Return whether an answer follows only blank user messages."""
    asked = list(takewhile(lambda message: message.role == "user", reversed(conversation.messages[:k])))
    is_blank = not any(message.content.strip() or message.context.strip() for message in asked)
    return conversation.messages[k].role == "assistant" and bool(asked) and is_blank


def _in_order(roles: str) -> bool:
    """Return whether turns are in the usual order.

    `roles` are the first letters of the roles without `system`. User and assistant must alternate, and results of tools
    must follow an answer.
    """
    import re

    return re.fullmatch(r"(ua(t+a)*)*(u|ua(t+a)*t+)?", roles) is not None


@pytest.mark.parametrize(
    ("roles", "unusual"),
    [
        (["user", "assistant"], 0),
        (["system", "user", "assistant", "tool", "tool", "assistant", "user"], 0),
        (["user", "user", "assistant"], 1),
        (["assistant"], 1),
        (["system", "assistant"], 1),
        (["user", "assistant", "assistant"], 1),
        (["user", "system", "assistant"], 1),
        (["user", "tool", "assistant"], 1),
    ],
)
def test_an_unusual_order_of_turns_is_kept_and_counted(roles: list[str], unusual: int) -> None:
    record = {"messages": [{"role": role, "content": "x"} for role in roles]}
    rows, receipt = tokenize([record], open_kind("sp_bpe_chatml"), "chatml")
    assert len(rows) == 1
    assert receipt["unusual_order"] == unusual


def test_control_text_anywhere_is_counted_once_per_conversation() -> None:
    encoder = open_kind("sp_bpe_user_defined")
    messages = GOOD["messages"]
    with_control_text = [
        {"messages": [messages[0] | {"content": "a</s>b<sep>"}, messages[1]]},
        {"messages": [messages[0], messages[1] | {"content": "</s>"}]},
        {"messages": [messages[0], messages[1] | {"tool_calls": [{"function": {"name": "</s>", "arguments": "{}"}}]}]},
        {"messages": [messages[0], messages[1]], "tools": [{"name": "<s>"}]},
    ]
    _, receipt = tokenize([*with_control_text, GOOD, GOOD], encoder, "llama2")
    # llama2 writes [INST], which this tokenizer has as a token, as text. This is not an injection attempt.
    assert receipt["control_text_seen"] == len(with_control_text)


def test_text_that_does_not_round_trip_is_counted() -> None:
    record = {"messages": [{"role": "user", "content": "a▁b"}, {"role": "assistant", "content": "c"}]}
    for kind, expected in (("sp_bpe_chatml", 1), ("hf_byte_level", 0), ("hf_metaspace", 1), ("hf_legacy", 1)):
        _, receipt = tokenize([record, GOOD], open_kind(kind), "chatml")
        assert receipt["not_round_trip"] == expected


# -- the separator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "template", "train_on", "separator", "trained"),
    [
        ("sp_bpe_chatml", "chatml", "assistant", True, True),
        ("hf_byte_level", "chatml", "assistant", False, True),
        ("sp_bpe_chatml", "llama2", "assistant", False, True),
        ("sp_bpe_chatml", "zephyr", "assistant", False, True),
        ("hf_byte_level", "llama3", "assistant", True, True),
        ("hf_byte_level", CHATML_JINJA, "assistant", False, False),
        ("hf_metaspace", CHATML_JINJA, "assistant", True, True),
    ],
)
def test_an_eos_is_appended_unless_the_template_ended_with_one(
    kind: str, template: str, train_on: TrainOn, separator: bool, trained: bool
) -> None:
    encoder = open_kind(kind)
    written: Template = (
        JinjaTemplate("jinja", template, encoder, train_on, "2026-01-01")
        if "{" in template
        else BuiltIn(template, encoder, train_on)
    )
    [row], receipt = tokenize([GOOD], encoder, written, train_on)
    assert row.separator == separator
    assert row.trained[-1] == trained
    if separator:
        assert row.ids[-1] == encoder.eos_id
    assert encoder.decode(row.ids).rstrip().endswith(encoder.control_strings[encoder.eos_id])
    assert receipt["tokens"] == len(row.ids) - separator


def test_the_separator_after_an_untrained_turn_is_not_trained() -> None:
    record = {"messages": [*GOOD["messages"], {"role": "user", "content": "thanks"}]}
    for kind in BUILT:
        for template in ("chatml", "llama2", "alpaca", "plain"):
            [row], _ = tokenize([record], open_kind(kind), template)
            assert row.ids[-1] == open_kind(kind).eos_id
            assert not row.trained[-1]


@pytest.mark.parametrize("trained", [True, False])
def test_white_space_after_the_eos_does_not_hide_it(trained: bool) -> None:
    encoder = open_kind("sp_bpe_chatml")

    class Ends(Template):
        name, markers_as_text, adjust = "ends", (), Adjust()

        def __init__(self) -> None:
            self.encoder = encoder

        def spans(self, *_: Any) -> list[Span]:
            eos = Span("</s>", encoder.eos_id, trained, "assistant")
            return [Span("a", TEXT, True, "user"), eos, Span(" \n", TEXT, False, "")]

        def samples(self, *_: Any) -> list[Sample]:
            return [Sample(self.spans())]

        def separate(self, conversation: Conversation) -> Conversation:
            return conversation

        def outline(self, *_: Any) -> None:
            return None

    [row], _ = tokenize([GOOD], encoder, Ends())
    assert not row.separator
    assert int((row.ids == encoder.eos_id).sum()) == 1


# -- the token file ---------------------------------------------------------------------------------------------------


def test_many_batches_give_the_same_rows_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = part_of(tmp_path, [line_of(GOOD), b"[", line_of({"messages": [GOOD["messages"][0]]}), line_of(GOOD)] * 5)
    one = run(tmp_path, part)
    rows = read_rows(tmp_path / "tokens.arrow")
    monkeypatch.setattr(packcorpus.tasks.tokenization.tokenize_part, "BATCH_BYTES", 1)
    encoder, config = open_kind("sp_bpe_chatml"), Config(sources=[Source(path="part.jsonl")])
    template = BuiltIn("chatml", encoder, "assistant")
    many = tokenize_part(part, encoder, template, config, tmp_path / "t", tmp_path / "r")
    with pa.ipc.open_file(pa.memory_map(str(tmp_path / "t"))) as file:
        assert file.num_record_batches == 10
    again = read_rows(tmp_path / "t")
    assert [(r.record, r.ids.tolist(), r.trained.tolist()) for r in rows] == [
        (r.record, r.ids.tolist(), r.trained.tolist()) for r in again
    ]
    assert {name: one[name] for name in (*COUNTS, "rejects")} == {name: many[name] for name in (*COUNTS, "rejects")}


def test_a_token_and_its_label_are_one_number(tmp_path: Path) -> None:
    run(tmp_path, part_of(tmp_path, [line_of(GOOD)]))
    files = TokenFiles([tmp_path / "tokens.arrow", None])
    values = files.tokens(0, 0)
    encoder = open_kind("sp_bpe_chatml")
    ids = (values ^ (values >> 31)).tolist()
    assert encoder.decode(ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|></s>"
    assert encoder.decode(values[values >= 0].tolist()) == "4<|im_end|></s>"
    assert files.table(0).schema == TOKENS_SCHEMA
    conversation = read_record(GOOD, "messages")
    assert files.table(0).column("digest").to_pylist() == [content_digest(whole_text(conversation).encode())]
    assert len(files.table(1)) == 0


def test_without_packing_the_messages_and_the_text_are_kept(tmp_path: Path) -> None:
    record = {
        "messages": [
            {"role": "user", "content": "a</s>", "name": "Ada", "train": True},
            {
                "role": "assistant",
                "weight": 0,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ],
        "tools": [{"name": "f"}],
    }
    run(tmp_path, part_of(tmp_path, [line_of(record), line_of(GOOD)]), packing=False)
    table = TokenFiles([tmp_path / "tokens.arrow"]).table(0)
    assert table.schema == tokens_schema(packing=False, weighted=False)
    messages, tools, text = (table.column(name).to_pylist() for name in ("messages", "tools", "text"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    usual = {"name": None, "tool_calls": None, "tool_call_id": None, "weight": 1, "reasoning_content": None}
    assert json.loads(messages[0]) == [
        usual | {"role": "user", "content": "a</s>", "name": "Ada", "train": True},
        usual | {"role": "assistant", "content": "", "tool_calls": [call], "weight": 0, "train": False},
    ]
    assert tools == ['[{"type":"function","function":{"name":"f"}}]', None]
    assert text[1] == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"


def test_equal_parts_give_equal_bytes(tmp_path: Path) -> None:
    digests = []
    for folder in ("a", "b"):
        place = tmp_path / folder / "tokens"  # the receipt is sealed with the name of its folder
        place.mkdir(parents=True)
        receipt = run(place, part_of(place, [line_of(GOOD)] * 3))
        digests.append(
            [xxhash.xxh3_128_hexdigest((place / name).read_bytes()) for name in ("tokens.arrow", "receipt.json")]
        )
        assert receipt["xxh3"] == digests[-1][0]
        assert receipt["bytes"] == (place / "tokens.arrow").stat().st_size
    assert digests[0] == digests[1]


# -- the receipt ------------------------------------------------------------------------------------------------------


def test_rejects_have_their_record_and_reason(tmp_path: Path) -> None:
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    lines = [
        line_of(GOOD),
        b'{"messages": [',
        line_of({"messages": [{"role": "assistent", "content": "a"}]}),
        line_of(GOOD),
        line_of({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}),
        line_of({"messages": [{"role": "assistant", "content": None}]}),
        surrogate,
    ]
    receipt = run(tmp_path, part_of(tmp_path, lines))
    assert [(index, code) for index, code, _ in receipt["rejects"]] == [
        (1, "bad_json"),
        (2, "bad_role"),
        (4, "no_trained_tokens"),
        (5, "bad_content"),
        (6, "lone_surrogate"),
    ]
    assert "did you mean assistant?" in receipt["rejects"][1][2]
    assert (receipt["conversations"], receipt["accepted"]) == (7, 2)
    assert read_receipt(tmp_path / "receipt.json") == receipt


class Fails(Template):
    """This template raises the given error at the second conversation."""

    name, markers_as_text, adjust = "fails", (), Adjust()

    def __init__(self, error: Exception):
        self.error, self.calls, self.encoder = error, 0, open_kind("sp_bpe_chatml")

    def spans(self, *_: Any) -> list[Span]:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return [Span("a", TEXT, True, "user"), Span("b", TEXT, True, "user")]

    def samples(self, *_: Any) -> list[Sample]:
        return [Sample(self.spans())]

    def separate(self, conversation: Conversation) -> Conversation:
        return conversation

    def outline(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize(
    "error", [DataError("turn_not_located", "messages[1] cannot be located"), KeyboardInterrupt(), MemoryError()]
)
def test_a_run_that_stops_leaves_neither_token_file_nor_receipt(tmp_path: Path, error: Exception) -> None:
    part = part_of(tmp_path, [line_of(GOOD)] * 3)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(type(error)) as raised:
        run(tmp_path, part, Fails(error))
    assert sorted(tmp_path.iterdir()) == before
    if isinstance(error, DataError):
        assert str(raised.value) == "part.jsonl:2: messages[1] cannot be located"


def test_the_receipt_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(tmp_path, [line_of(GOOD)])

    def refuse(path: Path, _: object) -> None:
        assert path.name == "receipt.json"
        assert (tmp_path / "tokens.arrow").is_file()
        raise StorageError("cannot_write", f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(packcorpus.tasks.tokenization.tokenize_part, "write_receipt", refuse)
    with pytest.raises(StorageError, match="No space left"):
        run(tmp_path, part)
    assert not (tmp_path / "receipt.json").exists()


def test_a_source_that_changed_since_it_was_hashed_stops_the_run(tmp_path: Path) -> None:
    part = part_of(tmp_path, [line_of(GOOD)] * 3)
    (tmp_path / "part.jsonl").write_bytes(line_of(GOOD) + b"\n")
    with pytest.raises(DataError, match=r"part\.jsonl"):
        run(tmp_path, part)
    assert not (tmp_path / "receipt.json").exists()


def test_a_conversation_that_cannot_be_encoded_is_rejected_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only conversations that cannot be encoded are rejected.

    They may be the first, some, or all conversations of a batch. With `apart`, all samples of such a conversation
    are rejected.
    """
    encoder = open_kind("sp_bpe_chatml")
    encode = type(encoder)._encode

    def failing(self: Encoder, texts: Texts) -> Encoded:
        if problems := {text: f"no encoding of {text}" for text in texts.strings if "§" in text}:
            raise Unencodable(problems)
        return encode(self, texts)

    def said(text: str, odd: bool) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": text}]
        last = [{"role": "user", "content": "§" * odd + text}, {"role": "assistant", "content": f"{text}."}]
        return {"messages": [*turns, *last]}

    @settings(max_examples=examples(40), deadline=None)
    @given(
        st.lists(st.booleans(), min_size=1, max_size=12),
        st.sampled_from([1, 30, 1 << 20]),
        st.sampled_from(["together", "apart"]),
    )
    def check(odd: list[bool], batch: int, turns: Turns) -> None:
        given_records = [said(f"a{number}", flag) for number, flag in enumerate(odd)]
        bad = [number for number, flag in enumerate(odd) if flag] + [len(odd)]
        given_records.append({"messages": 3})  # rejected before encoding
        with monkeypatch.context() as patch:
            patch.setattr(packcorpus.tasks.tokenization.tokenize_part, "BATCH_BYTES", batch)
            good = [record for number, record in enumerate(given_records) if number not in bad]
            template = BuiltIn("chatml", encoder, "assistant", turns)
            expected, counted = tokenize(good, encoder, template) if good else ([], dict.fromkeys(COUNTS, 0))
            patch.setattr(type(encoder), "_encode", failing)
            rows, receipt = tokenize(given_records, encoder, template)
        assert [(row.ids.tolist(), row.trained.tolist()) for row in rows] == [
            (row.ids.tolist(), row.trained.tolist()) for row in expected
        ]
        assert [number for number, *_ in receipt["rejects"]] == bad
        assert {reason for _, reason, _ in receipt["rejects"][:-1]} <= {"unwritable_text"}
        assert receipt["conversations"] == len(given_records)
        assert {name: receipt[name] for name in COUNTS} == {name: counted[name] for name in COUNTS}

    check()


@pytest.mark.slow
@pytest.mark.parametrize("content", [" " * 1_000_000, "a" * 1_000_000, "</s>" * 100_000])
@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "hf_byte_level", "hf_unigram"])
def test_a_megabyte_of_one_character_is_tokenized(kind: str, content: str) -> None:
    encoder = open_kind(kind)
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "4"}]}
    [row], _ = tokenize(
        [
            record,
        ],
        encoder,
        "alpaca",
    )
    assert content in encoder.decode(row.ids)


def test_ordinary_conversations_are_all_accepted() -> None:
    @FEW
    @given(st.lists(records(ordinary("hf_byte_level"), usual=True), min_size=1, max_size=5))
    def check(given_records: list[dict[str, Any]]) -> None:
        rows, receipt = tokenize(given_records, open_kind("hf_byte_level"), "llama3")
        assert len(rows) == receipt["accepted"] == len(given_records)
        assert receipt["rejects"] == []

    check()


@given(
    st.lists(st.lists(st.sampled_from(["Hi", "a\0b", "\0", "▁é", "<|im_start|>"]), max_size=3), min_size=1, max_size=5)
)
def test_texts_may_contain_the_separator_of_texts_and_samples_may_have_no_text(samples: list[list[str]]) -> None:
    """No content contains NUL, but a template may write it."""
    encoder = open_kind("sp_bpe_chatml")
    end = Span("<|im_end|>", encoder.controls["<|im_end|>"], True, "assistant")
    conversation = Conversation((Message("user", "2+2?"), Message("assistant", "4")))
    batch = packcorpus.tasks.tokenization.tokenize_part.Batch(encoder, dict.fromkeys(COUNTS, 0), str)
    for number, texts in enumerate(samples):
        spans = [end, *(span for text in texts for span in (Span(text, TEXT, True, "assistant"), end))]
        prepared = prepare_spans(conversation, Sample(spans), encoder)
        assert prepared.texts == texts
        batch.add(number, [prepared])
    found = batch.encode(TOKENS_SCHEMA)
    assert found
    rows = [[max(i, ~i) for i in row] for row in found.column("tokens").to_pylist()]
    assert rows == [
        [end.token, *(i for text in texts for i in (*encoder.encode([text]).ids.tolist(), end.token)), encoder.eos_id]
        for texts in samples
    ]


def test_texts_are_rejected_in_two_stages() -> None:
    """The reference encodes texts with NUL first, then texts with control tokens."""
    reference = open_kind("sp_bpe_chatml")
    encoder = GigatokenEncoder(reference)
    conversation = Conversation((Message("user", "2+2?"), Message("assistant", "4")))
    batch = packcorpus.tasks.tokenization.tokenize_part.Batch(encoder, dict.fromkeys(COUNTS, 0), str)
    texts = ["a\0§", "§<|im_end|>", "ok", "§\0"]
    for number, text in enumerate(texts):
        batch.add(number, [prepare_spans(conversation, Sample([Span(text, TEXT, True, "assistant")]), encoder)])

    def encode(some: list[str]) -> Encoded:
        if problems := {text: f"no encoding of {text!r}" for text in some if "§" in text}:
            raise Unencodable(problems)
        return reference.encode(some)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_encode_as_text", encode)
        found = batch.encode(TOKENS_SCHEMA)
    assert found
    assert found.column("record").to_pylist() == [2]
    assert sorted(number for number, _ in batch.rejects) == [0, 1, 3]


# -- samples of a conversation ---------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["", "Hi", "a b", "<|im_start|>", "x <|im_end|>", "an apple"]), min_size=1, max_size=12)
)
def test_repeated_texts_are_encoded_once_and_as_if_each_were(texts: list[str]) -> None:
    encoder = open_kind("sp_bpe_chatml")
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        encode = encoder.encode
        patch.setattr(encoder, "encode", lambda distinct: asked.extend(distinct) or encode(distinct))
        encoded = encoder.encode_repeated(texts)
    assert sorted(asked) == sorted({*texts})
    expected = encoder.encode(texts)
    assert encoded.ids.tolist() == expected.ids.tolist()
    assert encoded.offsets.tolist() == expected.offsets.tolist()
