"""Build the model card, the README.md of a merged model.

    run, base, corpus, how it was merged ─model_card─▶ YAML header for the Hub, Markdown for people

The card contains no time and no path, so equal merges have equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.core.printable import counted, printable
from tasks.storage.layout import kind_of
from train.merge.companions import Companions
from train.merge.corpus_facts import Facts
from train.merge.find_run import Base, Run

CARD = "README.md"

SETTINGS = (
    "quantization", "lora_variant", "lora_r", "lora_alpha", "lora_dropout", "lora_targets", "optimizer",
    "learning_rate", "schedule", "warmup", "weight_decay", "max_grad_norm", "epochs", "max_steps", "tokens_per_step",
    "seed",
)  # fmt: skip


def model_card(
    run: Run, base: Base, facts: Facts | None, companions: Companions, dtype: str, adapter: str, whole: bool, zero: bool
) -> bytes:
    """Return the README.md of a merged model.

    Names that come from files are escaped.
    """
    record = run.record
    corpus, config, result, choices = (record[name] for name in ("corpus", "config", "result", "choices"))
    rows = choices["micro_batch"] * choices["accumulation"] * choices["ranks"] * result["steps"]
    licenses = facts.manifest.config.get("license") if facts else None
    lines = {
        "corpus": f"{_code(corpus['name'])}, key `{corpus['key']}`",
        "rows": _rows(facts, corpus["sequence_length"]),
        "trained on": f"{rows:,} rows in {counted(result['steps'], 'optimizer step')}, counted as often as they were "
        f"seen; run `{run.key}`",
        "loss": _loss(result),
        "base model": _code(base.name) + (f" at commit `{base.commit}`" if base.commit else ""),
        "adapter": adapter + (" (all zero)" if zero else ""),
        "precision": f"{dtype}; base plus adapter computed in fp32, rounded once",
        "tokenizer": companions.tokenizer,
        "chat template": companions.template,
        "generation ends at": ", ".join(f"`{token}`" for token in companions.stops) or "not known",
        "license of the corpus": ", ".join(map(_code, licenses or ())) or "not specified",
    }
    cells = {name: printable(text).replace("|", "\\|") for name, text in lines.items()}
    table = "".join(f"| {name} | {text} |\n" for name, text in cells.items())
    settings = "".join(
        f"| `{name}` | {_code(str(config[name]))} |\n" for name in SETTINGS if config.get(name) is not None
    )
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    beside = "the base model"
    if config.get("quantization") == "nf4":
        beside = "a copy of the base model in NF4 (4 bits), which this model differs from by the error of NF4"
    streamed = "loaded as a whole and saved by transformers" if whole else "written one layer at a time"
    license_ = license_of(base.folder)
    facts_of_hub = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base.name,
        "base_model_relation": "finetune",
        **({"license": license_} if license_ else {}),
        "tags": ["packcorpus", "merged", "lora", "sft", "conversational"],
    }
    header = yaml.safe_dump(facts_of_hub, sort_keys=False, allow_unicode=True, width=1000)
    return f"""\
---
{header}---

# {printable(corpus["name"])}

{_code(base.name)} fine-tuned with packcorpus, with the adapter merged into its weights. Transformers loads it without
PEFT:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

| | |
|---|---|
{table}
The adapter was trained on top of {beside}. Here, it is merged into the base model's own weights in
full precision. The weights were {streamed}. Before it was published, this folder was compared with base plus adapter,
both in full precision: every adapted layer, and the logits if they fit into memory.

## Settings of the training

| setting | value |
|---|---|
{settings}
Trained with {versions}.
""".encode()


def license_of(folder: Path) -> Any:
    """Return the license that the card of the base model names, or None."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if not text.startswith("---\n") or (end := text.find("\n---", 4)) < 0:
        return None
    try:
        values = yaml.safe_load(text[4:end])
    except yaml.YAMLError:
        return None
    found = values.get("license") if isinstance(values, dict) else None
    return found if isinstance(found, str | list) else None


def _rows(facts: Facts | None, length: int) -> str:
    if facts is None:
        return f"of {length:,} tokens; the corpus was not available when this was merged"
    manifest = facts.manifest
    tokens = manifest.ledger.tokens
    rows = " and ".join(
        f"{split.rows:,} of {manifest.length_of_split(name):,}"
        for name, split in manifest.splits.items()
        if kind_of(name) == "train"
    )
    return f"{rows} tokens; the corpus has {tokens.packed:,} tokens, {tokens.trained:,} of them trained on"


def _loss(result: dict[str, Any]) -> str:
    means = f"means of {counted(result['loss_steps'], 'step')}"
    text = f"{result['first_loss']:.4f} at the start, {result['last_loss']:.4f} at the end ({means})"
    return text + (f"; validation {result['validation_loss']:.4f}" if result["validation_loss"] is not None else "")


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
