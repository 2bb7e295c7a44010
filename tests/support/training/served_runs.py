"""Runs with their corpus, their base model, and their merged model, for `certify`.

(tokenizer, template), architecture ─make─▶ Served: a sound run, merged by the real code
Served.faults(check) ─▶ the faults of one check, as text
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import kind_path
from support.training.finished_runs import finished_run, merged

from packcorpus.train.certify.finding import Finding, Subject
from packcorpus.train.merge.find_run import base_of, find_run
from packcorpus.train.merge.other_files import find_facts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With BOS, tools, calls, reasoning, and options, as in templates of published models.
WITH_TOOLS = (
    "{{- bos_token }}{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{%- endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# (kind of the tokenizer, template): a Jinja source, "tokenizer", or the name of a built-in template
CORPORA = (
    ("hf_byte_level", CHATML),
    ("hf_byte_level", WITH_TOOLS),
    ("hf_byte_level", "chatml"),
    ("hf_metaspace", "tokenizer"),
    ("hf_legacy", "tokenizer"),
    ("hf_unigram", CHATML),
)
# Architectures of all kinds: tied, biased, renamed, stacked, hybrid, with experts. Transformers loads the tokenizer of
# each qwen2 as Qwen2Tokenizer, which splits digits otherwise, so it is not sound with the tokenizers here.
SOUND = (
    "llama", "mistral", "arcee", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "granite", "cohere",
    "cohere2", "starcoder2", "smollm3", "gpt2", "gpt_neox", "stablelm", "nemotron", "falcon", "mixtral", "qwen2_moe",
    "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "gpt_oss", "glm4_moe", "jetmoe", "lfm2", "qwen3_next", "bamba",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Files of a run that a test may change; `root` is the project of its corpus."""

    root: Path
    run: Path
    merged: Path

    @property
    def base(self) -> Path:
        return self.run.parent / "base"

    def subject(self, is_merged: bool = True) -> Subject:
        run = find_run(str(self.run), self.root)
        folder = self.merged if is_merged else None
        return Subject(run, base_of(run), folder, find_facts(run.record, self.root)[0], self.root)

    def faults(self, check: Callable[[Subject], Iterator[Finding]], is_merged: bool = True) -> str:
        found = [each for each in check(self.subject(is_merged)) if each.result == "FAULT"]
        return "\n".join(f"{each.of}: {each.text}" for each in found)


def update(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; None removes a key."""
    found = json.loads(path.read_bytes()) if path.is_file() else {}
    path.write_text(json.dumps({name: value for name, value in (found | values).items() if value is not None}))


def records() -> list[dict[str, Any]]:
    """Return conversations; some have a system message, a call, or reasoning."""
    found = conversations(60)
    for number, record in enumerate(found[:20]):
        if number % 2:
            record["messages"].insert(0, {"role": "system", "content": "Be brief."})
        else:
            function = {"name": "ride", "arguments": json.dumps({"from": "Ulm", "hours": 2.5, "at": number})}
            call = {"id": f"call0000{number % 10}", "type": "function", "function": function}
            record["tools"] = [{"type": "function", "function": {"name": "ride", "parameters": {"type": "object"}}}]
            record["messages"][1:1] = [
                {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "a ride"},
                {"role": "tool", "name": "ride", "tool_call_id": call["id"], "content": "85 minutes"},
            ]
    return found


def make_corpus(home: Path, kind: str = "hf_byte_level", template: str = CHATML, **how: Any) -> dict[str, Any]:
    """Pack a corpus in `home`, and return its manifest; `how` are settings of it."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.copytree(kind_path(kind), home / "tokenizer")
    if template != "tokenizer":
        update(home / "tokenizer" / "tokenizer_config.json", chat_template=None)
    is_source = "{" in template
    (home / "mine.jinja").write_text(template)
    has_tools = template == WITH_TOOLS
    rows = records() if has_tools else conversations(60)
    name = "mine.jinja" if is_source else template
    settings = {"tokenizer": "tokenizer", "template": name, "sequence_length": 256 if has_tools else 128}
    return dict(json.loads(pack_corpus(make_recipe(home, rows, **settings | how)).read_bytes()))


def make_run(home: Path, folder: Path, manifest: dict[str, Any], architecture: str, **how: Any) -> Served:
    """Write a run on a corpus whose base has its tokenizer, and merge it."""
    corpus = {name: manifest[name] for name in ("name", "key", "sequence_length")}
    tokenizer = manifest["tokenizer"]
    run = finished_run(folder, architecture, corpus=corpus, vocab_size=tokenizer["vocab_size"], **how)
    for file in (home / "tokenizer").iterdir():
        shutil.copy(file, folder / "base")
    config = json.loads((folder / "base" / "tokenizer_config.json").read_bytes())
    if "chat_template" not in config:
        source = (home / "mine.jinja").read_text()
        (folder / "base" / "chat_template.jinja").write_text(source if "{" in source else CHATML)
    stops = [token["id"] for token in _added(folder / "base") if token["content"] == "<|im_end|>"]
    update(folder / "base" / "generation_config.json", eos_token_id=[*stops, tokenizer["eos_token_id"]])
    update(run / "training.json", base_digest=None)
    return Served(home, run, merged(run, folder / "out", root=home))


def _added(folder: Path) -> Sequence[dict[str, Any]]:
    return list(json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"])
