"""Jinja2 renders the whole corpus if minijinja renders a part of it differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.storage.files import digest_of
from packcorpus.tasks.templates.jinja import engines
from packcorpus.tasks.templates.jinja.engines import FastTemplate
from packcorpus.tasks.tokenization import checks

# The cut cannot be traced, so all conversations are rendered.
SOURCE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:1000] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [f"{'odd ' if number % 40 == 7 else ''}{number}" for number in range(200)]
RECORDS = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in TEXTS]


def packed(folder: Path) -> tuple[list[str], checks.EngineChoice]:
    """Pack a corpus; return the digests of its shards, and which engines made it."""
    folder.mkdir()
    (folder / "own.jinja").write_text(SOURCE)
    recipe_module._jinja_once.cache_clear()
    recipe = make_recipe(folder, RECORDS, template="own.jinja", part_size=4000)
    pack_corpus(recipe)
    recipe_module._jinja_once.cache_clear()  # other tests must not use this template
    shards = [digest_of(recipe.corpus_folder / name, "sha256") for name in recipe.shard_names]
    return shards, checks.choose_engines(recipe)


@pytest.mark.parametrize("where", ["before the run", "in the run"])
def test_if_minijinja_differs_jinja2_renders_the_whole_corpus(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, choice = packed(tmp_path / "right")
    assert choice.uses_minijinja
    render = FastTemplate._rendered

    def wrong(self: FastTemplate, *given: Any) -> tuple[str, list[Any]]:
        text, marks = render(self, *given)
        return text.replace("odd ", ""), marks

    monkeypatch.setattr(FastTemplate, "_rendered", wrong)
    monkeypatch.setattr(engines, "COMPARED", 2 if where == "in the run" else 1 << 40)
    if where == "in the run":  # nothing is compared before
        monkeypatch.setattr(checks, "sample", lambda recipe: [])
    made, choice = packed(tmp_path / "wrong")
    assert (made, choice.uses_minijinja) == (right, False)
    assert choice.rendering_differs
    assert "odd" in choice.rendering_differs
