"""Reasoning in no row is counted: dropped by a setting or by the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.inspected import page_of, shown
from support.small_corpus import make_recipe, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks.config import load_config
from packcorpus.tasks.corpus.summary import notes
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild

# Like Qwen3, it writes reasoning after the last question only.
LATE = """{% set last = namespace(i=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.i = loop.index0 %}
{%- endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > last.i %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"late": LATE, "all": LATE.replace(" and loop.index0 > last.i", ""), "none": CHATML_JINJA}
REASONS = ["Add two and two.", "ok", "Two more."]


def chat(number: int, inline: bool = False) -> dict[str, Any]:
    """Return a conversation; all contents have the reasoning of the second answer."""
    messages = []
    for turn, reason in enumerate(REASONS):
        messages.append({"role": "user", "content": f"Question {number} {turn}?"})
        answer = {"role": "assistant", "content": f"It is {turn}, ok."}
        if inline:
            answer["content"] = f"<think>\n{reason}\n</think>\n\n{answer['content']}"
        else:
            answer["reasoning_content"] = f" {reason}\n"
        messages.append(answer)
    return {"messages": messages}


RECORDS = [chat(number, inline=number % 3 == 0) for number in range(30)]


def settings_of(folder: Path, template: str, **settings: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    if template in TEMPLATES:
        (folder / "own.jinja").write_text(TEMPLATES[template], encoding="utf-8")
        template = "own.jinja"
    return {"template": template, "tokenizer": str(kind_path("hf_byte_level")), "sequence_length": 512} | settings


def tokens_of(folder: Path, reasons: list[str], **settings: Any) -> int:
    encoder = make_recipe(folder, RECORDS, **settings).encoder
    return int(encoder.encode(reasons).offsets[-1])


@pytest.mark.parametrize(
    ("template", "settings", "kind", "reasons"),
    [
        ("late", {"reasoning": "drop"}, "dropped", REASONS),
        ("all", {"reasoning": "drop"}, "dropped", REASONS),
        ("none", {"reasoning": "drop"}, "dropped", REASONS),
        ("chatml", {"reasoning": "drop"}, "dropped", REASONS),
        ("late", {"reasoning": "drop", "default_system": "Be brief."}, "dropped", REASONS),
        # Each turn is trained on with its reasoning, in a sample of its own.
        ("late", {}, None, []),
        ("late", {"train_on": "last"}, "unwritten", REASONS[:2]),
        ("late", {"train_on": "last", "default_system": "Be brief."}, "unwritten", REASONS[:2]),
        ("all", {"train_on": "last"}, None, []),
        ("all", {"train_on": "all"}, None, []),
    ],
)
def test_reasoning_in_no_row_is_counted(
    template: str, settings: dict[str, Any], kind: str | None, reasons: list[str], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, template, **settings)
    published = pack_corpus(make_recipe(tmp_path, RECORDS, **settings))
    manifest = load_manifest(published)
    run = predict(load_config(tmp_path / "corpus.yaml"), tmp_path, tmp_path)
    assert run.ledger == manifest.ledger
    reasoning = manifest.ledger.reasoning
    lines = [line for line in notes(manifest) if "reasoning" in line]
    if kind is None:
        assert (reasoning, lines) == (None, [])
        return
    assert reasoning is not None
    tokens = tokens_of(tmp_path, reasons * len(RECORDS), **settings)
    found = getattr(reasoning, kind)
    assert (found.answers, found.tokens) == (len(reasons) * len(RECORDS), tokens)
    assert {name for name in ("dropped", "unwritten") if getattr(reasoning, name)} == {kind}
    assert reasoning.template_writes == (kind == "dropped" and template in ("late", "all"))
    said = (
        f"{len(reasons) * len(RECORDS)} earlier answers ({tokens:,} tokens), as at inference; they are not trained on"
    )
    if kind == "dropped":
        said = f"reasoning: drop leaves out the reasoning of 90 answers ({tokens:,} tokens)"
        said += ", although the template can write it; to train on it, set  reasoning: keep" * reasoning.template_writes
    said = " ".join(said.split())
    for view in (*lines[:1], shown(published), page_of(published, tmp_path / "report.html")):
        assert said in " ".join(view.split())
    assert any(said in " ".join(warning.split()) for warning in run.warnings)
    assert "identical" in rebuild(published, tmp_path / "corpus.yaml")


def test_counts_do_not_depend_on_parts(tmp_path: Path) -> None:
    found = []
    for number, size in enumerate((1 << 10, 1 << 20)):
        folder = tmp_path / str(number)
        settings = settings_of(folder, "late", train_on="last", part_size=size)
        manifest = load_manifest(pack_corpus(make_recipe(folder, RECORDS, **settings)))
        found.append(manifest.model_dump(exclude={"config"}))
    assert found[0]["ledger"]["reasoning"] is not None
    assert found[0] == found[1]


def test_the_difference_of_two_corpora_names_dropped_reasoning(tmp_path: Path) -> None:
    paths = []
    for reasoning in ("keep", "drop"):
        settings = settings_of(tmp_path, "all", reasoning=reasoning)
        paths.append(pack_corpus(make_recipe(tmp_path, RECORDS, **settings)))
    figures = {change.name: (change.before, change.after) for change in compare(*paths).figures}
    assert figures["ledger.reasoning.dropped.answers"] == (None, 90)


def test_blank_reasoning_is_not_counted(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "<think>\n\n</think>\n\nYes.", "reasoning_content": "  "}
    records = [{"messages": [{"role": "user", "content": f"{n}?"}, answer]} for n in range(9)]
    settings = settings_of(tmp_path, "all", reasoning="drop")
    assert load_manifest(pack_corpus(make_recipe(tmp_path, records, **settings))).ledger.reasoning is None


def test_an_estimate_says_so(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "all", reasoning="drop")
    records = [chat(number) for number in range(3000)]
    config = write_project(tmp_path, records, **settings)
    run = predict(load_config(config), tmp_path, tmp_path, budget=1 << 15)
    assert not run.whole
    assert any("leaves out the reasoning of about 9,0" in line for line in run.warnings)
    manifest = load_manifest(pack_corpus(resolve(config, tmp_path)))
    assert manifest.ledger.reasoning is not None
    assert manifest.ledger.reasoning.dropped is not None
    assert manifest.ledger.reasoning.dropped.answers == 9000
