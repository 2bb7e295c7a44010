"""Arguments of calls reach a template as in transformers.

They are objects, or texts if the template reads texts.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import orjson
import pytest
from support.tokenizer_kinds import open_kind, reference

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import trained_turns

KIND = "hf_byte_level"
ARGUMENTS: dict[str, Any] = {"city": "Köln", "days": 3, "at": [1.5, None, True], "more": {"b": 1, "a": "<x>"}}
TEXTS = (json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1), orjson.dumps(ARGUMENTS).decode())
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = CALLS.replace("CALL", "{{ c.function | tojson }}")
AS_ITEMS = CALLS.replace(
    "CALL", "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
)
AS_TEXT = CALLS.replace("CALL", "{{ c.function.name + ' ' + c.function.arguments }}")


@functools.cache
def opened(source: str) -> JinjaTemplate:
    return JinjaTemplate("t", source, open_kind(KIND), "assistant", "2026-01-01")


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3 °C"},
    ]


def written(source: str, arguments: Any) -> str:
    conversation = read_record({"messages": calling(arguments)}, "messages")
    [sample] = opened(source).samples(conversation, trained_turns(conversation, "assistant"))
    return "".join(span.text for span in sample.spans)


def as_transformers(source: str, arguments: Any) -> str:
    return str(reference(KIND).apply_chat_template(calling(arguments), chat_template=source, tokenize=False))


@pytest.mark.parametrize("source", [AS_JSON, AS_ITEMS])
@pytest.mark.parametrize("given", [ARGUMENTS, *TEXTS])
def test_a_template_that_reads_objects_gets_the_object(source: str, given: Any) -> None:
    """Arguments may be text, as in OpenAI's API, and inference servers parse it."""
    assert written(source, given) == as_transformers(source, ARGUMENTS)


@pytest.mark.parametrize("given", [*TEXTS, "{}"])
def test_a_template_that_reads_texts_gets_the_text_of_the_data(given: str) -> None:
    assert written(AS_TEXT, given) == as_transformers(AS_TEXT, given)
