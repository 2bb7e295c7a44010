"""Names that a template reads and nothing defines are named.

Options of a template are not.
"""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.commands import packcorpus
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path, open_kind, reference

from packcorpus.tasks.config import load_config
from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.adjust import explain_undefined
from packcorpus.tasks.templates.jinja.environment import chat_environment, names_read
from packcorpus.tasks.templates.jinja.template import JinjaTemplate

KIND = "hf_byte_level"
ENVIRONMENT = chat_environment(datetime(2026, 1, 1))
PERSONA = "{{ persona }}{{ persona }}{% set who = author %}{{ who }}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a }}{{ a.b }}{{ f(b) }}{% for x in c %}{{ x }}{% endfor %}", {"a": 2, "b": 1, "c": 1, "f": 1}),
        ("{% set x = a %}{% set ns.y = b %}{{ x }}{{ c ~ d[e] }}", dict.fromkeys("abcde", 1)),
        ("{{ '' or a }}{{ b | trim }}{{ c | replace(d, 'x') }}", dict.fromkeys("abcd", 1)),
        ("{% generation %}{{ a }}{% endgeneration %}{% filter upper %}{{ b }}{% endfilter %}", {"a": 1, "b": 1}),
        ("{{ messages }}", {"messages": 1}),
        # Options of a template.
        ("{% if a is defined %}{{ a }}{% endif %}{{ b is undefined }}{{ c is string }}", {}),
        ("{{ a | default('x') }}{{ b | d }}{{ c or 'x' }}{{ 'x' if d }}{{ not e }}{{ f and 'x' }}", {}),
        ("{% if a %}{% elif b == 'x' %}{{ b }}{% endif %}{% for x in [1] if c[d] %}{% endfor %}", {}),
        ("{% set x = x if x is defined else 'y' %}{{ x }}", {}),
        # Names that the template or Jinja defines.
        ("{% if true %}{% set x = 1 %}{% endif %}{{ x }}{% for y in [x] %}{{ loop.index }}{{ y }}{% endfor %}", {}),
        ("{% macro m(x, y=1) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}{{ m(1) }}", {}),
        ("{% call(x) range(1) %}{{ x }}{% endcall %}{% set b %}{{ b }}{% endset %}{% with z = 1 %}{{ z }}", {}),
        ("{{ namespace(a=1) }}{{ dict(a=1) }}{{ range(3) }}{{ raise_exception('') }}{{ strftime_now('') }}", {}),
        ("{{ cycler }}{{ joiner }}{{ lipsum }}{{ true }}{{ none }}{{ False }}", {}),
    ],
)
def test_names_that_are_read_and_not_defined(source: str, expected: dict[str, int]) -> None:
    source += "{% endwith %}" * source.count("{% with")
    found = names_read(ENVIRONMENT, ENVIRONMENT.parse(source))
    assert found == expected
    assert list(found) == sorted(found)


def undefined(source: str, **options: Any) -> dict[str, int]:
    template = JinjaTemplate("t", source, open_kind(KIND), "assistant", "2026-01-01", options=options)
    [found] = template.undefined
    return dict(found)


def test_what_a_template_is_given_is_defined() -> None:
    given = "{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}"
    special = "".join(f"{{{{ {name}_token }}}}" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
    assert undefined(given + special + CHATML_JINJA) == {}
    assert undefined(PERSONA + CHATML_JINJA) == {"author": 1, "persona": 2}
    assert undefined(PERSONA + CHATML_JINJA, persona="x") == {"author": 1}
    assert undefined("{{ image_token }}" + CHATML_JINJA) == {"image_token": 1}


def test_an_undefined_name_is_empty_as_in_transformers() -> None:
    record = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    template = JinjaTemplate("t", PERSONA + CHATML_JINJA, open_kind(KIND), "assistant", "2026-01-01")
    [sample] = template.samples(read_record(record, "messages"), [False, True])
    expected = reference(KIND).apply_chat_template(
        record["messages"], chat_template=PERSONA + CHATML_JINJA, tokenize=False
    )
    assert "".join(span.text for span in sample.spans) == expected


END = "which neither Transformers nor template_options defines: "
IT = "it is empty unless a record has it in chat_template_kwargs"
THEY = "they are empty unless a record has them in chat_template_kwargs"


def test_names_are_listed_by_template() -> None:
    assert explain_undefined({}) == []
    assert explain_undefined({"template.jinja": {"a": 1}, "tool_use.jinja": {"b": 1, "c": 9}}) == [
        f"the template reads a, {END}{IT}",
        f"the template tool_use.jinja reads b and c, {END}{THEY}",
    ]
    [many] = explain_undefined({"template.jinja": {**{f"n{k}": 1 for k in range(10)}, "\u202e" + "x" * 99: 1}})
    assert many == f"the template reads n0, n1, n2, n3, n4, n5, n6, n7 and 3 more names, {END}{THEY}"
    assert explain_undefined({"template.jinja": {"\u202e" + "x" * 99: 1}}) == [
        f"the template reads \\u202e{'x' * 59}, {END}{IT}"
    ]


def test_check_and_the_manifest_name_them(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PERSONA + CHATML_JINJA)
    settings: dict[str, Any] = {"template": "own.jinja", "tokenizer": str(kind_path(KIND))}
    names = {"author": 1, "persona": 2}
    for options in ({}, {"persona": "x"}, {"author": 1}):
        recipe = make_recipe(tmp_path, conversations(9), template_options=options, **settings)
        manifest = load_manifest(pack_corpus(recipe))
        expected = {"template.jinja": {name: count for name, count in names.items() if name not in options}}
        assert manifest.undefined_names == expected == manifest.noticed["undefined_names"]
        lines = explain_undefined(manifest.undefined_names)
        assert [line for line in predict(recipe.config, tmp_path, tmp_path).warnings if "reads" in line] == lines
    recipe = make_recipe(tmp_path, conversations(9), template_options={"author": 1, "persona": ""}, **settings)
    assert "undefined_names" not in load_manifest(pack_corpus(recipe)).noticed


def test_a_trained_tokenizer_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ persona }}" + CHATML_JINJA)
    config = load_config(write_project(tmp_path, conversations(20), template="own.jinja"))
    assert f"the template reads persona, {END}{IT}" in predict(config, tmp_path, tmp_path).warnings


def test_each_template_of_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kind_path(KIND), tmp_path / "tok"))
    (folder / "chat_template.jinja").write_text(CHATML_JINJA)
    (folder / "additional_chat_templates").mkdir()
    tool_use = "{{ tools | tojson }}{{ style }}" + CHATML_JINJA
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    recipe = make_recipe(tmp_path, conversations(9), template="tokenizer", tokenizer="tok")
    assert recipe.undefined == {"tool_use.jinja": {"style": 1}}
    assert make_recipe(tmp_path, conversations(9)).undefined == {}


def test_commands_show_them_once(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ persona }}" + CHATML_JINJA)
    config = write_project(tmp_path, conversations(40), template="own.jinja", tokenizer=str(kind_path(KIND)))
    line = f"the template reads persona, {END}{IT}"
    packed = packcorpus(tmp_path, "pack", config, "--root", ".", "--on", "here")
    assert packed.returncode == 0, packed.stderr
    assert packed.stderr.count(f"note: {line}") == 1
    manifest = packed.stdout.split()[-1]
    for words in (("check", config, "--root", "."), ("inspect", manifest)):
        shown = packcorpus(tmp_path, *words)
        assert " ".join(shown.stdout.split()).count(line) == 1
    packcorpus(tmp_path, "report", manifest, "--output", "page.html")
    assert (tmp_path / "page.html").read_text().count(line) == 1
