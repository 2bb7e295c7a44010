"""Special tokens by name, and named templates of a tokenizer, as in transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, kind_path
from transformers import AutoTokenizer

from packcorpus.tasks.conversations.messages import MESSAGES
from packcorpus.tasks.core.errors import DataError, Reject, UsageError
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.jinja.engines import BothEngines
from packcorpus.tasks.templates.jinja.template import ByTools, JinjaTemplate
from packcorpus.tasks.templates.spans import Span, Template
from packcorpus.tasks.verification.verify import verify

TALK: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3 degrees"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(folder: Path, config: dict[str, Any], files: dict[str, str] | None = None) -> Path:
    """Write a tokenizer with these settings, and with further files."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kind_path("hf_byte_level"), folder)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def text_of(spans: list[Span]) -> str:
    return "".join(span.text for span in spans)


# -- special tokens ---------------------------------------------------------------------------------------------------

USUAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHERS = ("image_token", "boi_token", "soi", "think_start")
WRITES_NAMES = "".join(f"[{name}={{{{ {name} }}}}]" for name in (*USUAL, *OTHERS)) + CHATML_JINJA

TOKENS = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<seen>", "no token"])
FORMS = st.one_of(TOKENS, TOKENS.map(lambda token: {"__type": "AddedToken", "content": token, "special": True}))
UNUSUAL = ("unk_token", "sep_token", "cls_token", "mask_token")
NAMED = st.fixed_dictionaries({}, optional=dict.fromkeys((*UNUSUAL, "image_token", "boi_token"), FORMS))
EXTRA = st.one_of(
    st.none(),
    st.just({"extra_special_tokens": ["<seen>"]}),
    st.just({"additional_special_tokens": ["<seen>"]}),
    st.dictionaries(st.sampled_from(OTHERS), TOKENS, max_size=3).map(lambda named: {"extra_special_tokens": named}),
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMED, EXTRA, st.dictionaries(st.sampled_from(UNUSUAL), TOKENS, max_size=2), st.booleans())
@example({}, {"extra_special_tokens": {"image_token": "<|im_start|>", "soi": "<seen>"}}, {}, False)
@example({"sep_token": "<|im_start|>", "image_token": "<seen>"}, None, {"sep_token": "<|im_end|>"}, False)
@example({"sep_token": "<|im_start|>"}, None, {"sep_token": "<|im_end|>"}, True)
def test_every_special_token_has_its_name_as_in_transformers(
    tmp_path: Path, named: dict[str, Any], extra: dict[str, Any] | None, of_map: dict[str, str], lists_added: bool
) -> None:
    """special_tokens_map.json counts unless the settings list the added tokens."""
    config = {**named, **(extra or {}), "unk_token": named.get("unk_token", "<|endoftext|>")}
    if lists_added:
        config["added_tokens_decoder"] = {}
    files = {"special_tokens_map.json": json.dumps(of_map)} if of_map else {}
    folder = tokenizer_with(tmp_path / "tok", config, files)
    template = JinjaTemplate("t", WRITES_NAMES, open_encoder(find_tokenizer(folder)), "assistant", "2026-01-01")
    conversation = MESSAGES.read({"messages": TALK})
    found = text_of(template.spans(conversation, [False, True]))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, chat_template=WRITES_NAMES, tokenize=False
    )
    assert found == expected


def test_a_named_token_is_a_control_token(tmp_path: Path) -> None:
    folder = tokenizer_with(tmp_path, {"sep_token": "<|endoftext|>"})
    encoder = open_encoder(find_tokenizer(folder))
    template = JinjaTemplate("t", "{{ sep_token }}" + CHATML_JINJA, encoder, "assistant", "2026-01-01")
    spans = template.spans(MESSAGES.read({"messages": TALK}), [False, True])
    assert spans[0].token == encoder.controls["<|endoftext|>"]


# -- named templates --------------------------------------------------------------------------------------------------

LISTED = [{"name": "default", "template": CHATML_JINJA}, {"name": "tool_use", "template": WITH_TOOLS}]
RAG = {"name": "rag", "template": "rag:" + CHATML_JINJA}
FILES = {"chat_template.jinja": CHATML_JINJA, "additional_chat_templates/tool_use.jinja": WITH_TOOLS}
FORMS_OF_TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "listed": ({"chat_template": [*LISTED, RAG]}, {}),
    "files": ({}, {**FILES, "additional_chat_templates/rag.jinja": "rag:" + CHATML_JINJA}),
    "files replace the list": ({"chat_template": [RAG, *LISTED[::-1]]}, FILES),
    "one file replaces the list": ({"chat_template": LISTED}, {"chat_template.jinja": "one:" + CHATML_JINJA}),
    "only default is listed": ({"chat_template": LISTED[:1]}, {}),
    "one": ({"chat_template": WITH_TOOLS}, {}),
}
KINDS = [{"messages": TALK}, {"messages": TALK, "tools": [TOOL]}, {"messages": CALLED, "tools": [TOOL]}]


def opened(folder: Path, config: dict[str, Any], files: dict[str, str], template: str = "tokenizer") -> Template:
    tokenizer_with(folder / "tok", config, files)
    return make_recipe(folder, KINDS, tokenizer="tok", template=template).template


@pytest.mark.parametrize("form", FORMS_OF_TEMPLATES)
def test_the_template_is_chosen_as_in_transformers(tmp_path: Path, form: str) -> None:
    template = opened(tmp_path, *FORMS_OF_TEMPLATES[form])
    library = AutoTokenizer.from_pretrained(tmp_path / "tok")
    pairs = []
    for record in [*KINDS, *KINDS]:
        if not record.get("tools") and form == "one":
            continue
        messages: Any = record["messages"]
        conversation = MESSAGES.read({**record})
        pairs.append((conversation, [message["role"] == "assistant" for message in messages]))
    found = list(template.all_samples(pairs))
    for (conversation, trained), samples in zip(pairs, found, strict=True):
        tools = [json.loads(tool) for tool in conversation.tools] or None
        messages = CALLED if len(conversation.messages) == 4 else TALK
        if messages is CALLED and "tool_calls" not in str(library.get_chat_template(tools=tools)):
            assert not isinstance(samples, list), "calls that a template does not write are rejected"
            continue
        if tools and "tools" not in str(library.get_chat_template(tools=tools)):
            assert "tools[0]" in str(samples), "tools that a template does not write are rejected"
            continue
        expected = library.apply_chat_template(messages, tools=tools, tokenize=False)
        assert isinstance(samples, list)
        assert [text_of(sample.spans) for sample in samples] == [expected]
        assert text_of(template.spans(conversation, trained)) == expected


@pytest.mark.parametrize("form", ["listed", "files"])
def test_a_name_chooses_a_template_for_all_conversations(tmp_path: Path, form: str) -> None:
    template = opened(tmp_path, *FORMS_OF_TEMPLATES[form], template="tokenizer:rag")
    library = AutoTokenizer.from_pretrained(tmp_path / "tok")
    expected = library.apply_chat_template(TALK, chat_template="rag", tokenize=False)
    assert text_of(template.spans(MESSAGES.read({**KINDS[0]}), [False, True])) == expected
    with pytest.raises(Reject, match="tokenizer:rag does not write it"):
        template.spans(MESSAGES.read({**KINDS[1]}), [False, True])


@pytest.mark.parametrize(
    ("config", "template", "problem"),
    [
        ({"chat_template": LISTED}, "tokenizer:tooluse", "no chat template 'tooluse', only default, tool_use; did you"),
        ({"chat_template": LISTED}, "tokenizer:rag", "no chat template 'rag', only default, tool_use"),
        ({"chat_template": CHATML_JINJA}, "tokenizer:rag", "no chat template 'rag', only default"),
        ({"chat_template": [RAG, LISTED[1]]}, "tokenizer", "no chat template `default`; .*one of rag, tool_use"),
        ({"chat_template": [{"name": 3}, 4]}, "tokenizer", "has no chat template; use one of"),
        ({"chat_template": None}, "tokenizer:rag", "has no chat template; use one of"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_names(
    tmp_path: Path, config: dict[str, Any], template: str, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem) as raised:
        opened(tmp_path, config, {}, template)
    assert raised.value.reason == "no_chat_template"


# -- provenance -------------------------------------------------------------------------------------------------------


def recipe_with(folder: Path, default: str, tool_use: str) -> Recipe:
    files = {"chat_template.jinja": default, "additional_chat_templates/tool_use.jinja": tool_use}
    tokenizer_with(folder / "tok", {}, files)
    return make_recipe(folder, KINDS, tokenizer="tok", template="tokenizer")


def test_both_templates_are_part_of_the_keys(tmp_path: Path) -> None:
    keys = set()
    for tool_use in (WITH_TOOLS, WITH_TOOLS + "{# changed #}", CHATML_JINJA):
        recipe = recipe_with(tmp_path, CHATML_JINJA, tool_use)
        keys |= {recipe.corpus_key, *recipe.token_keys}
    assert len(keys) == 6


def test_a_corpus_contains_both_templates(tmp_path: Path) -> None:
    path = pack_corpus(recipe_with(tmp_path, CHATML_JINJA, WITH_TOOLS))
    manifest = load_manifest(path)
    folder = tmp_path / manifest.corpus
    assert [file.path for file in manifest.template_files] == ["template.jinja", "tool_use.jinja"]
    assert (folder / "template.jinja").read_text() == CHATML_JINJA
    assert (folder / "tool_use.jinja").read_text() == WITH_TOOLS
    verify(path)
    (folder / "tool_use.jinja").write_text(WITH_TOOLS.replace("assistant", "a_model__"))
    with pytest.raises(DataError, match=re.escape("tool_use.jinja")):
        verify(path)


def test_a_corpus_of_one_template_contains_only_that_one(tmp_path: Path) -> None:
    tokenizer_with(tmp_path / "tok", *FORMS_OF_TEMPLATES["listed"])
    path = pack_corpus(make_recipe(tmp_path, KINDS, tokenizer="tok", template="tokenizer:tool_use"))
    manifest = load_manifest(path)
    assert manifest.template.name == "tokenizer:tool_use"
    assert [file.path for file in manifest.template_files] == ["template.jinja"]


# -- engines ----------------------------------------------------------------------------------------------------------


def test_the_engines_of_both_templates_are_one(tmp_path: Path) -> None:
    template = opened(tmp_path, *FORMS_OF_TEMPLATES["files"])
    assert isinstance(template, ByTools)
    both = [template._default.engines, template._tool_use.engines]
    assert isinstance(template.engines, BothEngines)
    assert template.engines.are_fast
    with template.engines.comparing():
        assert [engines._compares_all for engines in both] == [True, True]
    assert [engines._compares_all for engines in both] == [False, False]
    both[1].differs = "here"
    assert template.engines.differs == "here"
    assert not template.engines.are_fast
    template.engines.use_jinja2()
    assert [engines.are_fast for engines in both] == [False, False]
