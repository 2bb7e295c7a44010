"""Configs whose corpora must not change: what same_bytes.py packs.

sample, ../shared/corpora, generated conversations ─pinned─▶ {name: Pinned(config, template, what is done with it)}

Together, they have every record format, overlong policy, weighting, and setting of rows, and Jinja templates in the
styles of published ones: one strips reasoning from the history, one reads arguments key by key, one has marks, and one
reads contents as parts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from support.commands import ROOT, SHARED
from support.tokenizer_kinds import MISTRAL, kind_path

SAMPLE = ROOT / "data" / "sample"
Record = dict[str, Any]

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Like Qwen3: reasoning before the last question is left out, results are part of a user turn.
STRIPPED = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\\n' if content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- endif %}{% endfor %}" + PROMPT
).replace("{%- ", "{% ")
# Like Qwen3-Coder and GLM: definitions and arguments are read key by key.
KEY_BY_KEY = (
    "{% macro value(v) %}{{ v if v is string else v | tojson }}{% endmacro %}"
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{% set f = tool.function or tool %}\n<function>"
    "<name>{{ f.name }}</name><description>{{ (f.description or '') | trim }}</description>"
    "{% for name, about in (f.parameters.properties or {}) | items %}\n<parameter><name>{{ name }}</name>"
    "{% if about.type is defined %}<type>{{ about.type }}</type>{% endif %}"
    "{% if about.enum is defined %}{{ about.enum | tojson }}{% endif %}</parameter>{% endfor %}</function>"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n{% endif %}"
    "{% if m.content is string %}{{ m.content | trim }}{% endif %}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, given in call.function.arguments | items %}<parameter={{ name }}>\n{{ value(given) }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ (m.content or '') + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
)
# Contents are lists of parts, and the reasoning is before the calls.
PARTS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "({% for k, v in call.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}"
    "{% endfor %})"
    "</tool_call>{% endfor %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class Pinned:
    """A config, the text of its Jinja template, and what is done with its corpus."""

    config: Record
    template: str = ""
    removed: tuple[str, ...] = ()  # settings that a newer checkout may refuse
    trains: bool = True
    exported: str = "trl"  # format
    quick: bool = False


def pinned(folder: Path) -> dict[str, Pinned]:
    """Return the configs by name, with absolute paths.

    `folder` gets the generated sources.
    """
    found = _of_sample() | _of_generated(folder) | (_of_corpora() if (SHARED / "corpora").is_dir() else {})
    # The default of overlong was truncate in earlier versions.
    return {name: replace(case, config={"overlong": "truncate"} | case.config) for name, case in found.items()}


def _of_sample() -> dict[str, Pinned]:
    """Return configs of the sample.

    It has every record format, and its tokenizer is trained.
    """
    own = yaml.safe_load((SAMPLE / "corpus.yaml").read_text())
    own |= own.pop("advanced", {}) | {"overlong": "truncate"}  # earlier versions have one level
    base = own | {"sources": [entry | {"path": str(SAMPLE / entry["path"])} for entry in own["sources"]]}
    weights = [0.5, 1, 0.25, 1, 0.75, 1, 1, 1, 0.1, 1]
    weighted = [entry | {"weight": weight} for entry, weight in zip(base["sources"], weights, strict=True)]
    return {
        "sample-1024": Pinned(base, quick=True),
        # At 128, many conversations have no trained token left.
        "sample-128": Pinned(base | {"sequence_length": 128, "max_rejects": 0.5}),
        "sample-llama3-error": Pinned(base | {"template": "llama3", "sequence_length": 2048, "overlong": "error"}),
        "sample-too-long": Pinned(base | {"sequence_length": 64, "overlong": "error", "max_rejects": 1.0}),
        "sample-split-epochs": Pinned(
            base | {"epochs": 3, "validation": 0.1, "sequence_length": 256, "overlong": "split", "max_rejects": 0.5}
        ),
        "sample-lengths": Pinned(base | {"sequence_length": [128, 256, 1024], "overlong": "drop", "max_rejects": 0.5}),
        "sample-lengths-blocks": Pinned(
            base | {"sequence_length": [256, 512], "mix": "blocks", "epochs": 2, "max_rejects": 0.5}
        ),
        "sample-padding-none": Pinned(base | {"padding": "none"}, exported="megatron"),
        "sample-align": Pinned(base | {"align": 64, "sequence_length": 512, "max_rejects": 0.5}),
        "sample-balance": Pinned(
            base | {"balance": {"ranks": 4, "rows_per_rank": 2}, "sequence_length": 512, "max_rejects": 0.5}
        ),
        "sample-similar": Pinned(base | {"company": "similar", "sequence_length": 512, "max_rejects": 0.5}),
        "sample-apart": Pinned(base | {"company": "apart", "epochs": 2, "sequence_length": 512, "max_rejects": 0.5}),
        "sample-subsample": Pinned(
            base | {"sources": weighted, "weighting": "subsample", "duplicates": "drop", "train_on": "last"}
        ),
        "sample-2.0": Pinned(base | {"packing": False}, trains=False, exported="", quick=True),
        "sample-groups": Pinned(base | {"plan_group": 100, "plan_chunk": 10}, removed=("plan_group", "plan_chunk")),
    }


def _of_generated(folder: Path) -> dict[str, Pinned]:
    """Return configs of generated conversations.

    They have tools, reasoning, weights, and unusual texts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "tools": _write(folder / "tools.jsonl", [_with_tools(random.Random(f"tools {n}")) for n in range(240)]),
        "reasoned": _write(folder / "reasoned.jsonl", [_reasoned(random.Random(f"reasoned {n}")) for n in range(160)]),
        "weighted": _write(folder / "weighted.jsonl", [_weighted(random.Random(f"weighted {n}")) for n in range(200)]),
    }
    base: Record = {
        "name": "generated",
        "tokenizer": str(kind_path("hf_byte_level")),
        "sources": [{"path": path} for name, path in paths.items() if name != "weighted"],
        "sequence_length": 2048,
        "max_rejects": 0.9,
        "validation": 0.05,
        "eos_token": "<|im_end|>",
    }
    jinja = base | {"template": "template.jinja", "overlong": "split"}
    weighted = base | {"sources": [{"path": paths["weighted"]}], "sequence_length": 1024}
    vectors = weighted | {"company": "similar", "company_by": "embedding"}
    return {
        "hermes": Pinned(base | {"reasoning": "drop"}, quick=True),
        "jinja-stripped": Pinned(jinja, STRIPPED, quick=True),
        "jinja-stripped-apart": Pinned(jinja | {"turns": "apart", "train_on": "last"}, STRIPPED),
        "jinja-key-by-key": Pinned(jinja, KEY_BY_KEY, quick=True),
        "jinja-marked": Pinned(jinja, MARKED, quick=True),
        "jinja-parts": Pinned(jinja, PARTS, quick=True),
        "jinja-own": Pinned(base | {"template": "tokenizer", "reasoning": "drop"}),
        "loss-weight": Pinned(weighted | {"loss_weight": "both"}, exported="mds"),
        "embeddings": Pinned(vectors, removed=("company_by",)),
    }


def _of_corpora() -> dict[str, Pinned]:
    """Return configs of real data."""
    paths = sorted(str(path) for path in (SHARED / "corpora").iterdir() if ".json" in path.name)
    base: Record = {
        "name": "shared",
        "tokenizer": str(MISTRAL),
        "sources": [{"path": path} for path in paths],
        "sequence_length": 2048,
        "max_rejects": 0.05,
    }
    tools = [{"path": path} for path in paths if "glaive" in path]
    weights = [0.5, 2.5, 1, 1.25, 3, 0.25]
    mixtures = {}
    for weighting in ("repeat", "token_share"):
        sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
        sources[0]["limit"] = 300
        mixtures[f"corpora-{weighting}"] = Pinned(
            base
            | {"sources": sources, "weighting": weighting, "duplicates": "drop", "epochs": 2, "validation": 0.02}
            | {"min_tokens": 8, "min_turns": 2, "template": "mistral"}
        )
    glaive = base | {"sources": tools, "tokenizer": str(kind_path("hf_byte_level")), "max_rejects": 0.9}
    return mixtures | {
        "corpora-drop": Pinned(base | {"overlong": "drop", "sequence_length": 512, "max_rejects": 0.5}, quick=True),
        "corpora-split-all": Pinned(base | {"overlong": "split", "train_on": "all"}, exported="axolotl"),
        "corpora-llama2-last": Pinned(
            base | {"overlong": "truncate", "train_on": "last", "validation": 0.03, "template": "llama2"}
        ),
        "corpora-trained": Pinned(
            {key: value for key, value in base.items() if key != "tokenizer"} | {"vocab_size": 2048, "epochs": 2}
        ),
        "corpora-tools": Pinned(
            glaive | {"template": "template.jinja", "sequence_length": 2048, "eos_token": "<|im_end|>"}, STRIPPED
        ),
    }


# -- generated sources ------------------------------------------------------------------------------------------------

SENTENCE = "the a weather price of to flight Oslo Köln 東京 rate total please show next week number first cold naïve"
WORDS = SENTENCE.split()
# What templates and control tokens could confuse.
UNUSUAL = (
    "<|im_end|>", "</think>", "<think>\nhm\n</think>\n\n", "<|endoftext|>", "{{ x }}", "\x1c", "\u2028", " ", "\n\n",
    "<tool_call>", "🙂", "<|im_", "\t",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    1, -7, 2.5, 1e-7, 1e21, 100.0, True, False, None, "x", "two words", "", [1, 2], ["a", None],
    {"k": "v", "n": {"m": 1}}, "<|im_end|>", 'quoted "text"', "line\nbreak", 12345678901234567890,
)  # fmt: skip


def _words(rng: random.Random, least: int, most: int) -> str:
    text = " ".join(rng.choices(WORDS, k=rng.randint(least, most)))
    if rng.random() < 0.15:
        at = rng.choice((0, len(text) // 2, len(text)))
        text = text[:at] + rng.choice(UNUSUAL) + text[at:]
    return text


def _with_tools(rng: random.Random) -> Record:
    """Return a conversation with calls and results.

    Some have their own tools, and some turns have several calls.
    """
    number = rng.choice((0, 0, 0, rng.randrange(1000)))
    names = rng.sample(("city", "unit", "count", "when", "filter"), rng.randint(1, 4)) if number else ["city", "count"]
    properties = {name: {"type": rng.choice(("string", "integer", "object"))} for name in names} if number else {
        "city": {"type": "string", "description": "A city.", "enum": ["Oslo", "Köln"]}, "count": {"type": "integer"},
    }  # fmt: skip
    function = {"name": f"find_{number}", "description": " Finds things.\n"}
    function["parameters"] = {"type": "object", "properties": properties, "required": names[:1]}  # type: ignore[assignment]
    messages: list[Record] = [{"role": "system", "content": _words(rng, 3, 9)}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _words(rng, 3, 20)})
        calls = []
        for index in range(rng.choice((1, 1, 2))):
            given: Any = {name: rng.choice(VALUES) for name in names if rng.random() < 0.8}
            if rng.random() < 0.3:
                given = json.dumps(given, ensure_ascii=False)
            call = {"name": f"find_{number}", "arguments": given}
            calls.append({"id": f"call{turn:03d}{index:02d}", "type": "function", "function": call})
        said = {"content": rng.choice((None, "", _words(rng, 2, 6)))}
        reasoning = {"reasoning_content": _words(rng, 3, 12)} if rng.random() < 0.4 else {}
        messages.append({"role": "assistant"} | said | reasoning | {"tool_calls": calls})
        for made in calls:
            result = json.dumps({name: rng.choice(VALUES) for name in names})
            messages.append({"role": "tool", "name": f"find_{number}", "tool_call_id": made["id"], "content": result})
        messages.append({"role": "assistant", "content": _words(rng, 4, 30)})
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


def _reasoned(rng: random.Random) -> Record:
    """Return a conversation with reasoning in a field, in the content, or nowhere."""
    messages: list[Record] = []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _words(rng, 2, 15)})
        answer: Record = {"role": "assistant", "content": _words(rng, 2, 25)}
        kind = rng.randrange(4)
        if kind == 0:
            answer["reasoning_content"] = _words(rng, 3, 40)
        elif kind == 1:
            answer["content"] = f"<think>\n{_words(rng, 3, 20)}\n</think>\n\n{answer['content']}"
        elif kind == 2 and rng.random() < 0.3:
            answer["train"] = False
        messages.append(answer)
    return {"messages": messages}


def _weighted(rng: random.Random) -> Record:
    """Return a conversation with weights for the loss and an embedding."""
    messages: list[Record] = [{"role": "user", "content": _words(rng, 2, 30)}]
    messages.append({"role": "assistant", "content": _words(rng, 2, 40)})
    if rng.random() < 0.4:
        messages[-1]["loss_weight"] = rng.choice((0.25, 2))
    vector = [round(rng.uniform(-1, 1), 3) for _ in range(8)]
    return {"messages": messages, "loss_weight": rng.choice((0.5, 1, 1.5)), "embedding": vector}


def _write(path: Path, records: list[Record]) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)
