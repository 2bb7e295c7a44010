"""What is read from each dialect is what a template writes into a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.storage.manifest import Manifest, load_manifest

TEMPLATE = """{%- for t in tools or [] %}({{ t.function.name }}: {{ t.function.parameters | tojson }}){% endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
USER, ANSWER = {"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "3 degrees"}
SCHEMA = {"name": "weather", "parameters": {"type": "object"}}
DEFINED = '(weather: {"type": "object"})'
ASKED = "<|im_start|>user\nOslo?<|im_end|>\n"
CALLED = '[weather {"city": "Oslo"}]<|im_end|>\n'
RESULT = "<|im_start|>tool\n3<|im_end|>\n"
SAID = "<|im_start|>assistant\n3 degrees<|im_end|>\n"
AS_ASSISTANT = "<|im_start|>assistant\n"


def packed(folder: Path, name: str) -> tuple[Manifest, str]:
    """Return the manifest of a source with one conversation, and the text of its row."""
    (folder / "t.jinja").write_text(TEMPLATE)
    recipe = make_recipe(
        folder, [], sources=[{"path": name}], template="t.jinja", packing=False, eos_token="<|im_end|>"
    )
    path = pack_corpus(recipe)
    manifest = load_manifest(path)
    [shard] = manifest.splits["train"].shards
    with pa.ipc.open_stream(path.parents[1] / manifest.corpus / shard.path) as rows:
        [row] = rows.read_all().to_pylist()
    return manifest, row["text"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {
                "conversations": [
                    {"from": "human", "value": "Oslo?"},
                    {"from": "function_call", "value": f"<think>\nLook.\n</think>\n{CALL}"},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "3 degrees"},
                ]
            },
            f"{ASKED}{AS_ASSISTANT}<think>Look.</think>{CALLED}{RESULT}{SAID}",
        ),
        (
            {
                "tools": json.dumps([SCHEMA]),
                "messages": [
                    USER,
                    {"role": "tool_call", "content": CALL},
                    {"role": "tool_call", "content": CALL},
                    {"role": "tool_response", "content": "3"},
                    {"role": "tool_response", "content": "3"},
                    ANSWER,
                ],
            },
            f"{DEFINED}{ASKED}{AS_ASSISTANT}{CALLED.partition('<')[0]}{CALLED}{RESULT}{RESULT}{SAID}",
        ),
        ({"messages": [USER, ANSWER], "tools": None, "tool_defs": [SCHEMA]}, f"{DEFINED}{ASKED}{SAID}"),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Look."},
                            {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
                        ],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}]},
                    ANSWER,
                ]
            },
            f"{ASKED}{AS_ASSISTANT}<think>Look.</think>{CALLED}{RESULT}{SAID}",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "In"}, {"type": "text", "text": "Oslo?"}]},
                    ANSWER,
                ]
            },
            f"<|im_start|>user\nIn\nOslo?<|im_end|>\n{SAID}",
        ),
        ({"messages": {"role": ["user", "assistant"], "content": ["Oslo?", "3 degrees"]}}, f"{ASKED}{SAID}"),
        ({"messages": json.dumps([USER, ANSWER])}, f"{ASKED}{SAID}"),
    ],
)
def test_the_text_of_a_dialect(record: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(record) + b"\n")
    manifest, found = packed(tmp_path, "a.jsonl")
    assert found.removesuffix("\n") == text.removesuffix("\n")
    assert not manifest.unused_keys


@pytest.mark.parametrize(
    ("kind", "given", "null_fields"),
    [
        (pa.struct([("city", pa.string()), ("a", pa.int64()), ("b", pa.int64())]), {"city": "Oslo"}, 3),
        (pa.map_(pa.string(), pa.string()), [("city", "Oslo")], 1),
        (pa.string(), '{"city": "Oslo"}', 1),
    ],
)
def test_arguments_of_a_table(kind: pa.DataType, given: Any, null_fields: int, tmp_path: Path) -> None:
    call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", kind)]))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    called = [{"function": {"name": "weather", "arguments": given}}]
    turns = [USER | {"tool_calls": None}, {"role": "assistant", "content": "", "tool_calls": called}]
    pq.write_table(pa.table({"messages": pa.array([turns], pa.list_(message))}), tmp_path / "a.parquet")
    manifest, found = packed(tmp_path, "a.parquet")
    assert found.removesuffix("\n") == f"{ASKED}{AS_ASSISTANT}{CALLED}".removesuffix("\n")
    assert manifest.noticed["null_fields"] == null_fields
    assert manifest.noticed["undefined_tools"] == 1
