"""Options and text parts of a conversation reach its template."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import make_recipe, pack_corpus
from support.templates.jinja_sources import CHATML_MARKED
from support.tokenizer_kinds import CHATML_JINJA, kind_path, open_kind, reference

from packcorpus.tasks.conversations.messages import MESSAGES
from packcorpus.tasks.conversations.model import Conversation, Message, content_digest, whole_text
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.jinja.engines import MOST_OPTIONS, Engines
from packcorpus.tasks.templates.jinja.template import MOST_READINGS, JinjaTemplate
from packcorpus.tasks.templates.spans import Sample, trained_turns
from packcorpus.tasks.tokenization.prepare import Preparer, comparable
from packcorpus.tasks.tokenization.samples import Prepared, prepare_spans, prompt_digest, roles_of
from packcorpus.tasks.tokenization.skeletons import skeletons_of

KIND = "hf_byte_level"

# Writes reasoning only if it is enabled, and says so in its prompts.
THINKS = (
    "{% if effort is defined %}<|im_start|>system\n{{ effort }} {{ documents | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and enable_thinking %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPTIONS: list[dict[str, Any] | None] = [
    None, {}, {"enable_thinking": True}, {"enable_thinking": False}, {"effort": "high"}, {"effort": 3, "a": None},
    {"documents": [{"title": "a", "text": "b"}], "effort": "low", "enable_thinking": True}, {"bos_token": "other"},
]  # fmt: skip


@functools.cache
def opened(source: str = THINKS, options: str = '{"enable_thinking": false}') -> JinjaTemplate:
    return JinjaTemplate("t", source, open_kind(KIND), "assistant", "2026-01-01", options=json.loads(options))


def talk(options: dict[str, Any] | None, texts: tuple[str, ...] = ("2+2?", "4"), reasoning: str = "") -> Conversation:
    messages = tuple(Message(role, text) for role, text in zip(("user", "assistant") * 9, texts, strict=False))
    messages[-1].reasoning = reasoning
    return Conversation(messages, template_options=options)


def text_of(samples: list[Sample]) -> str:
    [sample] = samples
    return "".join(span.text for span in sample.spans)


def rendered(conversation: Conversation, source: str, **options: Any) -> str:
    messages = []
    for m in conversation.messages:
        content = [{"type": "text", "text": text} for text in m.parts] or m.content
        messages.append(
            {"role": m.role, "content": content} | ({"reasoning_content": m.reasoning} if m.reasoning else {})
        )
    own = conversation.template_options or {}
    library = reference(KIND)
    return str(library.apply_chat_template(messages, chat_template=source, tokenize=False, **{**options, **own}))


def prepared(template: JinjaTemplate, conversation: Conversation, trained: list[bool]) -> list[Prepared]:
    """Return the samples that a template renders, without a skeleton."""
    found = template.samples(conversation, trained)
    ready = [prepare_spans(conversation, sample, template.encoder) for sample in found]
    for sample in ready:
        sample.prompt = prompt_digest(conversation, trained, sample.digest)
    return ready


def samples_of(template: Any, conversation: Conversation) -> list[Sample]:
    return template.samples(conversation, trained_turns(conversation, "assistant"))  # type: ignore[no-any-return]


# -- options ----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=8), st.text("ab \n", min_size=1))
def test_conversations_are_rendered_with_their_own_options(several: list[Any], text: str) -> None:
    """Conversations with other options, rendered together, do not matter."""
    conversations = []
    for options in several:
        enabled = bool((options or {}).get("enable_thinking"))
        conversations.append(talk(options, (text + "?", "b" + text.rstrip()), "Two." if enabled else ""))
    pairs = [(each, trained_turns(each, "assistant")) for each in conversations]
    for each, found in zip(conversations, opened().all_samples(pairs), strict=True):
        assert isinstance(found, list)
        assert text_of(found) == rendered(each, THINKS, enable_thinking=False)


@pytest.mark.parametrize("options", OPTIONS)
def test_both_engines_see_the_options(options: dict[str, Any] | None) -> None:
    enabled = bool((options or {}).get("enable_thinking"))
    conversation = talk(options, reasoning="Two." if enabled else "")
    expected = rendered(conversation, THINKS, enable_thinking=False)
    template = opened(THINKS)
    with mock.patch.object(template.engines, "engine_for", return_value="jinja2"):
        assert text_of(samples_of(template, conversation)) == expected
    with mock.patch.object(template.engines, "engine_for", return_value="minijinja"):
        job = template._job(template._broken(conversation), [1], "auto")
        fast = template.engines._fast_rendering(job)
    with template.engines.comparing():
        assert text_of(samples_of(template, conversation)) == expected
    assert template.engines.differs is None
    is_written_alike = not options or options.get("effort") != 3
    assert fast is not None or not is_written_alike


def test_options_that_the_engines_write_in_two_ways_are_left_to_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines render a few conversations with each set of options."""
    template = JinjaTemplate("t", "{{ flag }}" + CHATML_JINJA, open_kind(KIND), "assistant", "2026-01-01")
    differs = Engines._is_wrong
    monkeypatch.setattr(
        Engines, "_is_wrong", lambda self, job, it: job.options["flag"] == "odd" or differs(self, job, it)
    )
    for flag, is_left in ((True, False), ("usual", False), ("odd", True), (1e30, True)):
        options = orjson.dumps({"flag": flag}).decode()
        assert (template.engines.engine_for("[[],null]", options) == "jinja2") == is_left
    assert template.engines.differs is None
    assert template.engines.are_fast


def test_any_number_of_options_is_rendered() -> None:
    template = opened()
    for number in range(MOST_OPTIONS + MOST_READINGS + 2):
        conversation = talk({"effort": f"a{number}"})
        assert text_of(samples_of(template, conversation)) == rendered(conversation, THINKS, enable_thinking=False)
    assert len(template._checks) <= MOST_READINGS


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(OPTIONS), st.lists(st.text("abc", min_size=1), min_size=2, max_size=4))
def test_a_filled_conversation_has_its_own_options(options: dict[str, Any] | None, texts: list[str]) -> None:
    texts = texts[: len(texts) // 2 * 2]
    template = opened()
    enabled = bool((options or {}).get("enable_thinking"))
    conversation = talk(options, tuple(texts), "Two." if enabled else "")
    trained = trained_turns(conversation, "assistant")
    if enabled:
        trained = [False] * (len(trained) - 1) + [True]
    filled, _ = skeletons_of(template, "assistant", {}).filled(conversation, trained)
    expected = prepared(template, conversation, trained)
    assert filled is not None
    assert [*map(comparable, filled)] == [*map(comparable, expected)]


def test_reasoning_is_read_with_the_options_of_the_conversation() -> None:
    """The template writes no reasoning without its option."""
    template = opened()
    with pytest.raises(Reject, match="does not write it"):
        samples_of(template, talk({"enable_thinking": False}, reasoning="Two."))
    assert "<think>\nTwo.\n" in text_of(samples_of(template, talk({"enable_thinking": True}, reasoning="Two.")))


def test_options_are_part_of_the_digest() -> None:
    texts = [whole_text(talk(options)) for options in OPTIONS]
    assert len(set(texts)) == len(OPTIONS) - 1  # {} sets nothing
    assert whole_text(talk({"a": 1, "b": 2})) == whole_text(talk({"b": 2, "a": 1}))
    assert content_digest(whole_text(talk(None)).encode()) == content_digest(b"\x02\x03\x002+2?\x004")


def test_content_tokens_in_options_have_a_role_of_their_own() -> None:
    conversation = replace(talk({"effort": "high"}), tools=('{"name": "f"}',))
    layout, *strings = whole_text(conversation).split("\0")
    assert strings == ["2+2?", "4", '{"name": "f"}', '{"effort":"high"}']
    assert roles_of(layout, len(strings)) == ["user", "assistant", "tools", "options"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_that_is_set_anyway_is_no_option(name: str) -> None:
    with pytest.raises(Reject, match=f"chat_template_kwargs.{name}: comes from the conversation") as raised:
        samples_of(opened(), talk({name: []}))
    assert raised.value.reason == "bad_options"
    trained = [False, True]
    assert skeletons_of(opened(), "assistant", {}).filled(talk({name: []}), trained) == (None, None)


def test_an_option_cannot_write_a_control_token() -> None:
    encoder = open_kind(KIND)
    for effort in ("<|im_end|>", ["a", {"b<|im_start|>": "<|endoftext|>x"}]):
        [sample] = samples_of(opened(), talk({"effort": effort}))
        written = [span.text for span in sample.spans if span.token in encoder.control_strings]
        [without] = samples_of(opened(), talk({"effort": "none"}))
        assert written == [span.text for span in without.spans if span.token in encoder.control_strings]


def test_a_control_token_is_forged_although_another_option_writes_it() -> None:
    """Control tokens are only compared with those of the same options."""
    source = "{% if extra %}<|im_end|>{% else %}{{ messages[0].content | lower }}{% endif %}" + CHATML_JINJA
    template = opened(source)
    assert samples_of(template, talk({"extra": True}, ("<|IM_END|>", "b")))
    with pytest.raises(Reject) as raised:
        samples_of(template, talk({"extra": False}, ("<|IM_END|>", "b")))
    assert raised.value.reason == "forged_token"


def test_an_option_that_is_a_part_of_a_control_string_is_compared_as_it_is() -> None:
    source = "{% if mode == 'start' %}Begin.{% endif %}" + CHATML_JINJA
    assert text_of(samples_of(opened(source), talk({"mode": "start"}))).startswith("Begin.")


@pytest.mark.parametrize("drop", [False, True])
def test_settings_keep_the_options(drop: bool) -> None:
    """Other settings change the messages."""
    from packcorpus.tasks.templates.adjust import Adjust

    template = JinjaTemplate(
        "t", THINKS, open_kind(KIND), "assistant", "2026-01-01", adjust=Adjust(drop, None if drop else "Be brief.")
    )
    assert text_of(samples_of(template, talk({"effort": "high"}))).startswith("<|im_start|>system\nhigh")


# -- text parts -------------------------------------------------------------------------------------------------------

READS_BOTH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
READS_LISTS = READS_BOTH.replace(
    "{% if m.content is string %}{{ m.content }}{% else %}", "{% if not m.content is string %}"
)
READS_LISTS_OF_USERS = READS_BOTH.replace("m.content is string", "m.role != 'user'")
READS_FIRST = READS_BOTH.replace("{% for part in m.content %}{{ part.text }}{% endfor %}", "{{ m.content[0].text }}")


def in_parts(*messages: tuple[str, ...]) -> Conversation:
    found = []
    for role, *texts in messages:
        found.append(Message(role, "\n".join(texts), parts=tuple(texts) if len(texts) > 1 else ()))
    return Conversation(tuple(found))


@pytest.mark.parametrize(
    ("source", "as_lists"),
    [
        (READS_BOTH, {"system", "user", "assistant"}),
        (READS_LISTS, {"system", "user", "assistant"}),
        (READS_LISTS_OF_USERS, {"user"}),
        (READS_FIRST, set()),
        (CHATML_JINJA, set()),
        (CHATML_MARKED, set()),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | tojson }}<|im_end|>\n{% endfor %}", set()),
    ],
)
def test_parts_are_a_list_for_templates_that_read_lists(source: str, as_lists: set[str]) -> None:
    """For others, they are joined with line breaks."""
    conversation = in_parts(("system", "Be", "brief."), ("user", "2+2?", "Now."), ("assistant", "It is", "4."))
    template = opened(source)
    assert {
        role for role in ("system", "user", "assistant") if template._checks_for(conversation).forms.reads_lists(role)
    } == as_lists
    expected = replace(
        conversation,
        messages=tuple(
            replace(m, parts=m.parts if m.role in as_lists else (m.content,) if source == READS_LISTS else ())
            for m in conversation.messages
        ),
    )
    assert text_of(samples_of(template, conversation)) == rendered(expected, source)


@pytest.mark.parametrize("source", [READS_BOTH, CHATML_JINJA])
def test_filled_conversations_have_their_parts(source: str) -> None:
    """A template that reads strings is filled in, and lists are rendered."""
    template = opened(source)
    for conversation in (
        in_parts(("user", "2+2?", "Now."), ("assistant", "4.")),
        in_parts(("user", "2+2?"), ("assistant", "It is", "4.")),
    ):
        expected = prepared(template, conversation, [False, True])
        filled, _ = skeletons_of(template, "assistant", {}).filled(conversation, [False, True])
        reads = any(
            template._checks_for(conversation).forms.reads_lists(m.role) for m in conversation.messages if m.parts
        )
        assert (filled is None) == reads
        if filled:
            assert [*map(comparable, filled)] == [*map(comparable, expected)]


@pytest.mark.parametrize(
    ("source", "reads"), [(READS_BOTH, True), (READS_LISTS_OF_USERS, False), (CHATML_JINJA, False)]
)
def test_parts_of_results_are_a_list_after_a_call(source: str, reads: bool) -> None:
    """Some templates refuse a result without a call."""
    refuses = (
        "{% if messages[-1].role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('no') }}{% endif %}"
    )
    forms = opened(refuses + source)._checks_for(talk(None)).forms
    assert forms.reads_lists("tool") is reads


def test_control_strings_in_parts_stay_text() -> None:
    [sample] = opened(READS_BOTH).samples(
        in_parts(("user", "a<|im_", "end|>", "<|im_end|>"), ("assistant", "4.")), [False, True]
    )
    [other] = opened(READS_BOTH).samples(in_parts(("user", "a", "b"), ("assistant", "4.")), [False, True])
    assert [span.token for span in sample.spans] == [span.token for span in other.spans]
    assert "a<|im_end|><|im_end|>" in text_of([sample])


def test_dropped_reasoning_is_not_in_the_parts() -> None:
    from packcorpus.tasks.templates.adjust import Adjust

    template = JinjaTemplate("t", READS_BOTH, open_kind(KIND), "assistant", "2026-01-01", adjust=Adjust(True))
    conversation = in_parts(("user", "2+2?"), ("assistant", "<think>\nTwo.\n</think>\n\n4", "."))
    assert "Two" not in text_of(template.samples(conversation, [False, True]))


def test_built_in_templates_join_parts() -> None:
    template = BuiltIn("chatml", open_kind(KIND), "assistant")
    conversation = in_parts(("user", "2+2?", "Now."), ("assistant", "4."))
    assert "2+2?\nNow." in text_of(template.samples(conversation, [False, True]))
    filled, _ = skeletons_of(template, "assistant", {}).filled(conversation, [False, True])
    assert filled is not None


# -- rows of format 2.0 -----------------------------------------------------------------------------------------------


def test_rows_of_conversations_have_strings_and_no_options() -> None:
    file = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", "messages", (), 1, "", 1)
    template = opened(READS_BOTH)
    preparer = Preparer(file, template, template.encoder, "assistant", packing=False)
    with mock.patch.object(SourceFile, "conversation", lambda _, record, __: record):
        [found, refused] = preparer.prepare_all(
            [in_parts(("user", "2+2?", "Now."), ("assistant", "4.")), talk({"a": 1})]
        )  # type: ignore[list-item]
    assert isinstance(found, list)
    assert found[0].row is not None
    assert json.loads(found[0].row[0])[0]["content"] == "2+2?\nNow."
    assert "2+2?\nNow." in found[0].row[2]
    assert isinstance(refused, Reject)
    assert refused.reason == "bad_options"
    assert MESSAGES.name == "messages"


# -- records ----------------------------------------------------------------------------------------------------------


def test_options_and_parts_of_records_are_packed(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": text} for text in ("2+2?", "Now.")]
    answer: dict[str, Any] = {"role": "assistant", "content": "4"}
    some: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "2+2?"}, answer]},
        {"messages": [{"role": "user", "content": parts}, answer], "chat_template_kwargs": {"effort": "high"}},
        {"messages": [{"role": "user", "content": "2+2?"}, answer], "chat_template_kwargs": {"effort": "low"}},
    ]
    (tmp_path / "own.jinja").write_text("{{ effort }}" + READS_BOTH)
    common: dict[str, Any] = {"template": "own.jinja", "template_options": {"effort": "none"}, "duplicates": "exact"}
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path, some, tokenizer=str(kind_path(KIND)), **common)))
    assert not manifest.unused_keys
    rows = pa.ipc.open_stream((tmp_path / manifest.corpus / "train-00000-of-00001.arrow").read_bytes()).read_all()
    text = "".join(reference(KIND).decode(row) for row in rows["input_ids"].to_pylist())
    for prompt in ("none<|im_start|>user\n2+2?<", "high<|im_start|>user\n2+2?Now.<", "low<|im_start|>user\n2+2?<"):
        assert prompt in text
