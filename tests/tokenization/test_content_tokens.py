"""Rows have content tokens where the model has them at inference.

They are counted by role, regardless of how the work is divided.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, pack_corpus, write_project
from support.templates.modern_templates import STRIPPED
from support.tokenizer_kinds import CHATML_JINJA, everywhere, kind_path, open_kind, ordinary, reference, tokenize
from typer.testing import CliRunner

from packcorpus.tasks.cli.app import app
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.tokenization.checks import hard_tokens
from packcorpus.tasks.tokenization.samples import merged

FEW = settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
HF = ("hf_byte_level", "hf_metaspace", "hf_legacy")

# Content tokens in the frame, next to contents, and at the edges of trained text.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

# Like REASONING, but with calls. Neither template writes names or tools.
CALLING = REASONING.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")


def with_tokens(kind: str) -> st.SearchStrategy[str]:
    """Draw ordinary text with whole and cut content tokens."""
    tokens = [token for token in open_kind(kind).content_tokens if token.strip()]
    pieces = st.one_of(st.sampled_from([*tokens, *(token[:-1] for token in tokens)]), ordinary(kind))
    return st.lists(pieces, max_size=6).map("".join)


@pytest.mark.parametrize("source", [CHATML_JINJA, REASONING])
@pytest.mark.parametrize("kind", HF)
def test_tokens_are_those_of_transformers(kind: str, source: str) -> None:
    pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")
    library, encoder = reference(kind), open_kind(kind)
    template = JinjaTemplate("test.jinja", source, encoder, "assistant", "2026-01-01")

    @FEW
    @given(st.lists(with_tokens(kind), min_size=2, max_size=4))
    def check(contents: list[str]) -> None:
        contents = contents[: len(contents) // 2 * 2]
        # Leading white space of an answer is encoded with the answer. transformers encodes it with the line before.
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": f"Zz{content}"}
            for number, content in enumerate(contents)
        ]
        [row], _ = tokenize([{"messages": messages}], encoder, template)
        expected = library.apply_chat_template(messages, chat_template=source, tokenize=True, return_dict=False)
        assert row.ids.tolist()[: len(row.ids) - row.separator] == expected

    check()


def test_what_a_built_in_template_writes_is_the_token_that_content_writes() -> None:
    encoder = open_kind("hf_byte_level")
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    user = {"role": "user", "content": "u"}
    rows, receipt = tokenize(
        [
            {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [call]}]},
            {"messages": [user, {"role": "assistant", "content": said}]},
        ],
        encoder,
        "chatml",
    )
    assert rows[0].ids.tolist() == rows[1].ids.tolist()
    assert {encoder.content_tokens["<tool_call>"], encoder.content_tokens["</tool_call>"]} < set(rows[0].ids.tolist())
    assert receipt["content_tokens"] == {"</tool_call>": {"assistant": 1}, "<tool_call>": {"assistant": 1}}


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["chatml", "tokenizer"])
def test_every_field_is_counted_by_its_role(template: str) -> None:
    """Content tokens in every field are counted by the role of the message.

    Special tokens, cut tokens, and content tokens of the template are not counted.
    """
    encoder = open_kind("hf_byte_level")
    bound: Any = template
    if template == "tokenizer":
        pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")
        bound = JinjaTemplate("test.jinja", CALLING, encoder, "assistant", "2026-01-01")
    records = [everywhere("<think><|im_end|><think"), {"messages": [{"role": "user", "content": "a"}, ANSWER]}]
    if template == "tokenizer":  # this template writes no tools
        del records[0]["tools"]
    _, receipt = tokenize(records, encoder, bound)
    # content and name; two calls with an id, a name, and four strings each
    expected = {"system": 2, "user": 2, "assistant": 2 + 2 * 6 + 1, "tool": 3, "tools": 4}
    if template == "tokenizer":
        expected.pop("tools")
    assert receipt["content_tokens"] == {"<think>": dict(sorted(expected.items()))}
    _, receipt = tokenize([{"messages": [{"role": "user", "content": "a"}, ANSWER]}], encoder, bound)
    assert "content_tokens" not in receipt


@pytest.mark.parametrize("template", ["chatml", "tokenizer"])
def test_a_context_is_counted_by_its_role(template: str) -> None:
    """The content tokens of a context are counted by the role of its message.

    A context is filled in with the content of its message. The frame is the same with and without a context.
    """
    encoder = open_kind("hf_byte_level")
    bound: Any = template
    if template == "tokenizer":
        bound = JinjaTemplate("test.jinja", CHATML_JINJA, encoder, "assistant", "2026-01-01")
    record = {"instruction": "<think> or", "input": "</think>?", "output": "Neither <think>."}
    for records in ([record], [{**record, "input": ""}, record]):
        _, receipt = tokenize(records, encoder, bound, format="alpaca")
        assert receipt["content_tokens"] == {
            "</think>": {"user": 1},
            "<think>": {"assistant": len(records), "user": len(records)},
        }


@pytest.mark.parametrize(("train_on", "count"), [("assistant", 2), ("last", 1)])
def test_what_a_template_leaves_out_is_not_counted(train_on: Any, count: int) -> None:
    """Text that a template does not write is not counted.

    The reasoning of the first answer is written only in the sample of that answer.
    """
    encoder = open_kind("hf_byte_level")
    template = JinjaTemplate("test.jinja", STRIPPED, encoder, train_on, "2026-01-01")
    for thoughts in (
        ("<think>\nTwo.\n</think>\n\n", "<think>Six by seven.</think>"),
        ("<think>\nTwo.\n</think>\n\n",) * 2,
    ):
        turns = ["2+2?", f"{thoughts[0]}4", "What is <think>?", f"{thoughts[1]}A token."]
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
        messages[0]["name"] = "The <think> fan"  # no template here writes names
        _, receipt = tokenize([{"messages": messages}], encoder, template, train_on)
        assert receipt["content_tokens"] == {
            "</think>": {"assistant": count},
            "<think>": {"assistant": count, "user": 1},
        }


def test_a_token_next_to_a_control_token_that_the_template_writes_is_counted() -> None:
    """`<think>` is taken from the content tokens, and the template writes it itself."""
    path = find_tokenizer(kind_path("hf_byte_level"))
    encoder = open_encoder(path, content_tokens=["-<think>"])
    template = JinjaTemplate("test.jinja", STRIPPED, encoder, "assistant", "2026-01-01")
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nx\n</think>\n\na <tool_call> b"}
    ]  # fmt: skip
    _, receipt = tokenize([{"messages": messages}], encoder, template)
    assert receipt["content_tokens"] == {"</think>": {"assistant": 1}, "<tool_call>": {"assistant": 1}}


ANSWER = {"role": "assistant", "content": "b <think"}


def project(place: Path, **settings: Any) -> Path:
    """Write conversations, every third with reasoning.

    In every third of these, the question also contains reasoning.
    """
    records = conversations(90)
    for number, record in enumerate(records):
        for message in record["messages"] if number % 3 == 0 else ():
            if message["role"] == "assistant" or number % 9 == 0:
                message["content"] = f"<think>\n{message['content']}\n</think>\n\nSo."
    place.mkdir(exist_ok=True)
    shutil.copytree(kind_path("hf_byte_level"), place / "hf", dirs_exist_ok=True)
    return write_project(place, records, **({"tokenizer": "hf"} | settings))


def counted(place: Path, **settings: Any) -> Any:
    return load_manifest(pack_corpus(resolve(project(place, **settings), place))).noticed.get("content_tokens")


def test_the_counts_depend_on_the_data_alone(tmp_path: Path) -> None:
    usual = counted(tmp_path / "a")
    said = [m for line in (tmp_path / "a" / "chat.jsonl").open() for m in json.loads(line)["messages"]]
    roles = {role: sum(m["role"] == role and "<think>" in m["content"] for m in said) for role in ("assistant", "user")}
    assert usual == {"</think>": roles, "<think>": roles}
    assert counted(tmp_path / "b", part_size=1024) == usual
    assert counted(tmp_path / "c", engine="reference") == usual
    assert counted(tmp_path / "d", template="tokenizer", packing=False) == usual
    assert counted(tmp_path / "e", content_tokens=["-<think>"]) == {"</think>": roles}
    assert counted(tmp_path / "f", content_tokens=["-*"]) is None


def test_sums_do_not_depend_on_the_order_of_parts() -> None:
    parts = [{"b": {"user": 1}, "a": {"user": 2}}, {"a": {"user": 3, "assistant": 4}}, {}]
    sums = merged(parts)
    assert json.dumps(sums) == json.dumps(merged(parts[::-1])) == json.dumps(merged([sums]))
    assert sums == {"a": {"assistant": 4, "user": 5}, "b": {"user": 1}}


def test_they_are_shown(tmp_path: Path) -> None:
    config = project(tmp_path / "a")
    line = r"tokens written by content: </think> (\d+) \(assistant \d+, user \d+\), <think> \1 \(assistant"
    found = CliRunner().invoke(app, ["check", str(config)]).output
    assert re.search(line, " ".join(found.split()))
    path = pack_corpus(resolve(config, tmp_path / "a"))
    found = CliRunner().invoke(app, ["inspect", str(path)]).output
    assert re.search(line, " ".join(found.split()))
    assert CliRunner().invoke(app, ["report", str(path), "--output", str(tmp_path / "r.html")]).exit_code == 0
    other = pack_corpus(resolve(project(tmp_path / "b", content_tokens=["-<think>"]), tmp_path / "b"))
    found = CliRunner().invoke(app, ["diff", str(path), str(other)]).output
    assert re.search(r"written by content: <think> user +\d+ +0", found)
    assert re.search(line, html.unescape((tmp_path / "r.html").read_text()))


def test_the_engine_check_has_texts_with_content_tokens_and_control_strings() -> None:
    texts = hard_tokens(open_kind("hf_byte_level"))
    assert {"<think>", "a<think>b", "<think", "<think><think>\n\n", "<|im_end|>", "a<|im_end|>b"} <= set(texts)
    assert "<|im_end|>" in hard_tokens(open_kind("sp_bpe_chatml"))
