"""Files next to the weights: tokenizer, chat template, stop tokens, and card.

The chat template is one that the model was trained on, or there is none.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import yaml
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import kind_path
from support.training.finished_runs import finished_run, merged
from transformers import AutoTokenizer, GenerationConfig

from packcorpus.tasks.encoders.auto_tokenizer import Comparison
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer
from packcorpus.train.merge.other_files import find_facts
from packcorpus.train.model import base_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER = CHATML.replace("<|im_start|>", "### ")


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Projects with one corpus each, by name.

    The corpora have a built-in template, a Jinja template, and format 2.0.
    """
    home = tmp_path_factory.mktemp("projects")
    for name, settings in {
        "built-in": {"license": ["cc-by-4.0"]},
        "jinja": {"template": "mine.jinja", "template_options": {"shout": True}},
        "whole": {"packing": False},
        "named": {"template": "tokenizer"},
    }.items():
        (home / name).mkdir()
        (home / name / "mine.jinja").write_text(CHATML)
        shutil.copytree(kind_path("hf_byte_level"), home / name / "tokenizer")
        if name == "named":
            both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{# tools #}" + CHATML}]
            update(home / name / "tokenizer" / "tokenizer_config.json", chat_template=both)
        given = {"name": name, "tokenizer": "tokenizer", "validation": 0.1} | settings
        pack_corpus(make_recipe(home / name, conversations(60), **given))
    return home


def manifest_of(project: Path) -> dict[str, Any]:
    [path] = (project / "manifests").glob("*.json")
    return dict(orjson.loads(path.read_bytes()))


def run_of(project: Path, folder: Path, template: str | None = None, **how: Any) -> Path:
    """Write a run on the project's corpus.

    Its base model has the corpus's tokenizer with this chat template.
    """
    manifest = manifest_of(project)
    corpus = {"name": manifest["name"], "key": manifest["key"], "sequence_length": manifest["sequence_length"]}
    run = finished_run(folder, corpus=corpus, vocab_size=manifest["tokenizer"]["vocab_size"], **how)
    for file in (project / "tokenizer").iterdir():
        shutil.copy(file, folder / "base")
    (folder / "base" / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "base" / "tokenizer_config.json"
    values = orjson.loads(config.read_bytes())
    values.pop("chat_template", None)
    config.write_bytes(orjson.dumps(values | ({"chat_template": template} if template else {})))
    update(run / "training.json", base_digest=None)
    return run


def update(path: Path, **values: Any) -> None:
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | values))


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    _, header, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), body


def template_of(folder: Path) -> str | None:
    return find_tokenizer(folder).chat_template()


# -- chat template -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("project", "own", "kept", "said"),
    [
        (
            "built-in",
            CHATML,
            CHATML,
            "the template of the tokenizer; the corpus was written by the built-in template chatml",
        ),
        (
            "built-in",
            OTHER,
            None,
            "none: .*chatml.*; the template of the tokenizer renders differently and was left out",
        ),
        ("built-in", "{{ raise_exception('no') }}", None, "none: .*chatml.*differently and was left out"),
        ("built-in", None, None, "none: .*chatml.*, and the tokenizer has none"),
        ("jinja", OTHER, CHATML, r"the Jinja template of the corpus \(mine.jinja\), rendered with {'shout': True}"),
        ("jinja", None, CHATML, "the Jinja template of the corpus"),
        ("whole", CHATML, CHATML, "the template of the tokenizer; the corpus was written by"),
    ],
)
def test_the_chat_template_is_what_the_model_was_trained_on_or_none(
    projects: Path, tmp_path: Path, project: str, own: str | None, kept: str | None, said: str
) -> None:
    folder = merged(run_of(projects / project, tmp_path, own), tmp_path / "out", root=projects / project)
    assert template_of(folder) == kept
    assert re.search(f"chat template \\| {said}", (folder / "README.md").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kept:
        messages = [{"role": "user", "content": "Hi"}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("difference", ["", '"x" becomes "y" here'])
def test_the_merged_tokenizer_is_compared_with_that_of_the_corpus(
    difference: str,
    projects: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if difference:
        monkeypatch.setattr(base_model, "compare", lambda encoder, folder, texts: Comparison(3, difference))
    merged(run_of(projects / "built-in", tmp_path, CHATML), tmp_path / "out", root=projects / "built-in")
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenizer: ")]
    assert re.fullmatch(re.escape(difference) or r"\d\d+ texts have the tokens of AutoTokenizer", line[11:])


def test_both_templates_of_the_corpus_are_written(projects: Path, tmp_path: Path) -> None:
    run = run_of(projects / "named", tmp_path, OTHER)
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    (tmp_path / "base" / "additional_chat_templates" / "rag.jinja").write_text(OTHER)
    folder = merged(run, tmp_path / "out", root=projects / "named")
    assert AutoTokenizer.from_pretrained(folder).chat_template == {
        "default": CHATML,
        "tool_use": "{# tools #}" + CHATML,
    }


def test_without_the_corpus_further_templates_stay_with_the_tokenizer(projects: Path, tmp_path: Path) -> None:
    run = run_of(projects / "built-in", tmp_path, OTHER)
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    (tmp_path / "base" / "additional_chat_templates" / "rag.jinja").write_text(CHATML)
    folder = merged(run, tmp_path / "out")
    assert (folder / "additional_chat_templates" / "rag.jinja").read_text() == CHATML


def test_without_the_corpus_the_template_is_that_of_the_tokenizer_unchecked(projects: Path, tmp_path: Path) -> None:
    run = run_of(projects / "built-in", tmp_path, OTHER)
    folder = merged(run, tmp_path / "out")
    assert template_of(folder) == OTHER
    card = (folder / "README.md").read_text()
    assert "the template of the tokenizer, unchecked because the corpus is missing" in card
    assert "the corpus was not available when this was merged" in card
    assert (folder / "tokenizer_config.json").read_bytes() == (tmp_path / "base" / "tokenizer_config.json").read_bytes()


def test_a_jinja_template_that_is_gone_is_not_replaced_by_another(projects: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(projects / "jinja", project)
    shutil.rmtree(project / "data" / "corpora")
    folder = merged(run_of(project, tmp_path, OTHER), tmp_path / "out", root=project)
    assert template_of(folder) is None
    assert "none: the corpus was written by a Jinja template (mine.jinja), which is missing" in card_of(folder)[1]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        manifest_of(project)["tokenizer"]["eos_token_id"],
        2,
    ]


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def test_a_base_without_tokenizer_gets_that_of_the_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    shutil.copy(kind_path("sp_bpe_chatml"), run / "tiny.model")
    folder = merged(run, tmp_path / "out")
    assert (folder / "tokenizer.model").read_bytes() == (run / "tiny.model").read_bytes()
    assert "| tokenizer | the copy in the corpus |" in (folder / "README.md").read_text()
    bare = merged(finished_run(tmp_path / "bare"), tmp_path / "bare-out")
    assert "| tokenizer | none: neither the base model nor the run has one |" in (bare / "README.md").read_text()


def test_the_tokenizer_that_the_run_names_comes_before_that_of_the_base(tmp_path: Path) -> None:
    """The run's tokenizer has the new tokens, for which the base only has room."""
    run = finished_run(tmp_path, tokenizer=str(tmp_path / "extended.json"))
    (tmp_path / "base" / "tokenizer.json").write_text("old")
    (tmp_path / "base" / "LICENSE").write_text("mine")
    update(run / "training.json", base_digest=None)
    assert (merged(run, tmp_path / "bare") / "tokenizer.json").read_text() == "old", "the run has none"
    (run / "tokenizer.json").write_text('{"new": 1}')
    folder = merged(run, tmp_path / "out")
    assert (folder / "tokenizer.json").read_text() == '{"new": 1}'
    assert (folder / "LICENSE").read_text() == "mine"
    assert "| tokenizer | the copy in the corpus |" in (folder / "README.md").read_text()


def test_files_of_a_processor_and_the_license_are_copied(projects: Path, tmp_path: Path) -> None:
    run = run_of(projects / "built-in", tmp_path)
    for name in ("LICENSE", "preprocessor_config.json", "notes.txt", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text("{}")
    names = {path.name for path in merged(run, tmp_path / "out").iterdir()}
    assert {"LICENSE", "preprocessor_config.json", "tokenizer.json"} <= names
    assert not {"notes.txt", "pytorch_model.bin", "adapter_config.json", "training.json"} & names


# -- where to stop -----------------------------------------------------------------------------------------------------


def test_generation_stops_where_the_corpus_ends_a_turn(projects: Path, tmp_path: Path) -> None:
    """The token that ends turns in the rows comes before the base's stop tokens."""
    project = projects / "built-in"
    facts, note = find_facts({"corpus": manifest_of(project)}, project)
    assert facts is not None
    assert note == ""
    tokenizer = AutoTokenizer.from_pretrained(project / "tokenizer")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = facts.rows(10, 10_000)
    assert sum(row.count(end) for row in rows) > 20, "the rows hold turns that end like this"
    eos = manifest_of(project)["tokenizer"]["eos_token_id"]
    run = run_of(project, tmp_path)
    base = {"eos_token_id": [eos, 77], "pad_token_id": 99, "temperature": 0.5, "do_sample": True}
    (tmp_path / "base" / "generation_config.json").write_bytes(orjson.dumps(base))
    folder = merged(run, tmp_path / "out", root=project)
    found = GenerationConfig.from_pretrained(folder)
    assert found.eos_token_id == list(dict.fromkeys([end, eos, 77]))
    assert (found.pad_token_id, found.temperature) == (99, 0.5)
    assert f"| generation ends at | `{end}`, " in (folder / "README.md").read_text()


def test_the_stop_token_of_the_template_comes_before_eos(tmp_path: Path) -> None:
    """Generation stops at the end of a turn first, then at EOS.

    In this tokenizer they are two tokens. The rows hold both, and each ends trained text.
    """
    manifest = orjson.loads(pack_corpus(make_recipe(tmp_path, conversations(20))).read_bytes())
    facts, _ = find_facts({"corpus": manifest}, tmp_path)
    assert facts is not None
    assert facts.encoder is not None
    end, eos = facts.encoder.controls["<|im_end|>"], manifest["tokenizer"]["eos_token_id"]
    assert end != eos
    assert facts.stop_tokens() == [end, eos]


@pytest.mark.parametrize("ends", [5, [5, 6], None])
def test_without_the_corpus_generation_stops_where_the_base_does(tmp_path: Path, ends: Any) -> None:
    run = finished_run(tmp_path, eos_token_id=ends)
    folder = merged(run, tmp_path / "out")
    file = folder / "generation_config.json"
    assert json.loads(file.read_text()).get("eos_token_id") == ends
    assert ("not known" in (folder / "README.md").read_text()) == (ends is None)


# -- card --------------------------------------------------------------------------------------------------------------


def test_the_card_names_corpus_base_settings_and_loss(projects: Path, tmp_path: Path) -> None:
    project, manifest = projects / "built-in", manifest_of(projects / "built-in")
    run = run_of(project, tmp_path, lora_variant="rslora", dtype=torch.bfloat16)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    header, body = card_of(merged(run, tmp_path / "out", root=project))
    assert header["license"] == "apache-2.0"
    assert (header["library_name"], header["base_model"]) == ("transformers", "base")
    assert {"packcorpus", "merged"} <= set(header["tags"])
    tokens = manifest["ledger"]["tokens"]
    rows = manifest["splits"]["train"]["rows"]
    for text in (
        f"key `{manifest['key']}`",
        f"| rows | {rows} of 128 tokens; the corpus has {tokens['packed']:,} tokens, {tokens['trained']:,} of them",
        "| trained on | 24 rows in 4 optimizer steps",
        "3.5000 at the start, 1.2500 at the end",
        "rsLoRA of rank 4, scaled by 16, on 14 weights",
        "| precision | bf16;",
        "| `lora_variant` | `rslora` |",
        "| license of the corpus | `cc-by-4.0` |",
        "Trained with packcorpus 0.1.0",
    ):
        assert text in body
    assert str(tmp_path) not in body + str(header), "paths of this machine are not published"


@pytest.mark.parametrize("card", ["# No header", "---\nlicense: [\n---\n", "---\n- a\n---\n", "---\nlicense: 7\n---\n"])
def test_without_a_known_license_the_card_has_none(tmp_path: Path, card: str) -> None:
    run = finished_run(tmp_path)
    (tmp_path / "base" / "README.md").write_text(card)
    update(run / "training.json", base_digest=None)
    assert "license" not in card_of(merged(run, tmp_path / "out"))[0]


def test_names_in_the_card_are_escaped(tmp_path: Path) -> None:
    corpus = {"name": "a|b`c\n# d\x1b[31m", "key": "c" * 64, "sequence_length": 64}
    header, body = card_of(merged(finished_run(tmp_path, corpus=corpus), tmp_path / "out"))
    assert header["base_model"] == "base"
    assert "\x1b" not in body
    assert "| corpus | `a\\|b'c\\n# d" in body
