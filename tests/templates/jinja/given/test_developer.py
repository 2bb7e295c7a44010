"""Templates that know the role developer get it as in transformers.

All others get system messages.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, kind_path, open_kind, reference

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation, Message, content_digest, whole_text
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.storage.keys import VERSIONS
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.adjust import NO_CHANGE, Adjust, knows_developer
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate, open_jinja
from packcorpus.tasks.templates.spans import Template, trained_turns
from packcorpus.tasks.tokenization.prepare import Preparer

KIND = "hf_byte_level"

# Like gpt-oss: the first message may be of either role.
FIRST_ONLY = (
    "{% if messages[0].role == 'developer' or messages[0].role == \"system\" %}<|im_start|>developer\n"
    "{{ messages[0].content }}<|im_end|>\n{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Both roles differ everywhere.
DISTINCT = (
    "{% for m in messages %}<|im_start|>{{ 'boss' if m.role == 'developer' else m.role }}\n"
    "{{ m.content }}{{ m.name }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Has the word, but not as the name of a role.
OTHERS = [
    "Instructions of the developer:\n" + CHATML_JINJA,
    CHATML_JINJA + "{% if developer is defined %}{{ developer }}{% endif %}{# a 'developers' #}",
    CHATML_JINJA + "{% for m in messages %}{% if m.role == 'developer_note' %}{% endif %}{% endfor %}",
    CHATML_JINJA,
]


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@functools.cache
def opened(source: str, adjust: Adjust = NO_CHANGE) -> JinjaTemplate:
    return JinjaTemplate("t", source, open_kind(KIND), "assistant", "2026-01-01", adjust=adjust)


def text_of(template: Template, record: dict[str, Any]) -> str:
    conversation = read_record(record, "messages")
    [sample] = template.samples(conversation, trained_turns(conversation, "assistant"))
    return "".join(span.text for span in sample.spans)


def as_transformers(source: str, messages: list[dict[str, Any]]) -> str:
    return str(reference(KIND).apply_chat_template(messages, chat_template=source, tokenize=False))


def prepared(template: Template, records: list[dict[str, Any]]) -> list[str]:
    """Return the texts of records that are prepared together.

    They are read as lines and as dicts, and filled in where possible.
    """
    file = SourceFile(Path("c.jsonl"), "c.jsonl", "jsonl", "", "messages", (), 0, "", 0)
    preparer = Preparer(file, template, template.encoder, "assistant")
    decoded = preparer.decode([json.dumps(record).encode() for record in records])
    texts: list[list[str]] = []
    for several in (records, decoded or []):
        texts.append([])
        for samples in preparer.prepare_all(several):
            assert isinstance(samples, list)
            [sample] = samples
            assert (sample.layout.usual, sample.layout.turns) == (True, 2)
            said = iter(sample.texts)
            tokens = sample.layout.tokens[: len(sample.layout.tokens) - sample.layout.separator].tolist()
            strings = template.encoder.control_strings
            texts[-1].append("".join(next(said) if token < 0 else strings[token] for token in tokens))
    assert texts[0] == texts[1]
    return texts[0]


# -- reading ----------------------------------------------------------------------------------------------------------

BRIEF = Message("system", "Be brief.", developer=True)


@pytest.mark.parametrize("name", ["developer", "Developer", "DEVELOPER"])
def test_a_conversation_keeps_that_the_data_says_developer(name: str) -> None:
    user, answer = say("user", "2+2?"), say("assistant", "4")
    records: dict[str, dict[str, Any]] = {
        "messages": {"messages": [say(name, "Be brief."), user, answer]},
        "sharegpt": {"conversations": [{"from": name, "value": "Be brief."}, {"from": "gpt", "value": "4"}]},
        "prompt_completion": {"prompt": [say(name, "Be brief."), user], "completion": [answer]},
        "oasst": {"prompt": {"role": name, "text": "Be brief.", "replies": [{"role": "assistant", "text": "4"}]}},
    }
    for format, record in records.items():
        assert read_record(record, format).messages[0] == BRIEF
    with_more = {"messages": [say(name, "Be brief.", name="Ada", weight=0), user, answer]}
    found = read_record(with_more, "messages").messages[0]
    assert (found.role, found.given_role, found.name, found.train) == ("system", "developer", "Ada", False)


def test_the_setting_roles_can_make_it_a_system_message() -> None:
    record = {"messages": [say("developer", "Be brief."), say("assistant", "4")]}
    for roles in ({"developer": "system"}, {"developer": "user"}):
        assert read_record(record, "messages", roles=roles).messages[0] == Message(roles["developer"], "Be brief.")
    renamed = {"messages": [say("boss", "Be brief."), say("assistant", "4")]}
    assert not read_record(renamed, "messages", roles={"boss": "system"}).messages[0].developer


def test_the_role_is_no_part_of_the_digest() -> None:
    """Filters, splits, and counts see a system message."""
    texts = {whole_text(Conversation((message,))) for message in (BRIEF, Message("system", "Be brief."))}
    assert {content_digest(text.encode()) for text in texts} == {content_digest(b"\x01\0Be brief.")}


def test_a_close_name_is_mapped_to_system() -> None:
    with pytest.raises(Reject, match=r"did you mean developer\? Or map it with roles: \{system: \[developr\]\}"):
        read_record({"messages": [say("developr", "a")]}, "messages")


# -- rendering --------------------------------------------------------------------------------------------------------

ROLES = st.lists(st.sampled_from(["system", "developer", "user"]), min_size=1, max_size=4)


def test_a_template_knows_the_role_if_it_is_one_of_its_strings() -> None:
    assert [knows_developer(source) for source in (FIRST_ONLY, DISTINCT)] == [True, True]
    assert not any(map(knows_developer, OTHERS))


@settings(max_examples=examples(30), deadline=None)
@given(ROLES)
@example(["developer", "user"])
@example(["system", "developer"])
@example(["user", "developer"])
def test_prompts_are_those_of_transformers(roles: list[str]) -> None:
    messages = [*(say(role, f"Text {n}.") for n, role in enumerate(roles)), say("assistant", "Yes.")]
    as_system = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    record = {"messages": messages}
    for source in (FIRST_ONLY, DISTINCT):
        assert text_of(opened(source), record) == as_transformers(source, messages)
    for source in OTHERS:
        assert text_of(opened(source), record) == as_transformers(source, as_system)
    chatml = [text_of(BuiltIn("chatml", open_kind(KIND), "assistant"), {"messages": m}) for m in (messages, as_system)]
    assert chatml[0] == chatml[1]


def test_the_template_of_the_tools_decides() -> None:
    """Of two templates, the one that renders a conversation counts."""
    tools = "{{ tools | tojson }}"
    record = {"messages": [say("developer", "Be brief."), say("user", "a"), say("assistant", "b")]}
    both = [record, record | {"tools": [{"name": "f", "parameters": {}}]}]
    for default, tool_use, knows in (
        (DISTINCT, tools + CHATML_JINJA, [True, False]),
        (CHATML_JINJA, tools + DISTINCT, [False, True]),
    ):
        template = open_jinja("t", [default, tool_use], open_kind(KIND), "assistant", "2026-01-01")
        assert ["boss\nBe brief." in text_of(template, each) for each in both] == knows
        assert [template.knows_developer(read_record(each, "messages")) for each in both] == knows


def test_parts_are_read_as_in_developer_messages() -> None:
    """A template may read lists of parts in one role only."""
    source = DISTINCT.replace(
        "{{ m.content }}",
        "{% if m.role == 'developer' and m.content is not string %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    parts: Any = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.")]
    for role, expected in (("developer", "boss\n[Be brief.][Be kind.]<"), ("system", "system\nBe brief.\nBe kind.<")):
        record = {"messages": [say(role, parts), say("user", "a"), say("assistant", "b")]}
        assert expected in text_of(opened(source), record)
        assert prepared(opened(source), [record, record]) == [text_of(opened(source), record)] * 2


def test_a_default_system_message_is_not_added_to_one_of_the_developer() -> None:
    template = opened(DISTINCT, Adjust(default_system="Be kind."))
    text = text_of(template, {"messages": [say("developer", "Be brief."), say("user", "a"), say("assistant", "b")]})
    assert "Be kind." not in text
    assert "boss\nBe brief.<" in text


def test_a_lost_message_of_the_developer_is_rejected_with_its_role() -> None:
    messages = [say("user", "a"), say("developer", "Be brief."), say("assistant", "b")]
    source = DISTINCT.replace("{{ m.content }}", "{{ m.content if m.role != 'developer' }}")
    with pytest.raises(Reject, match=r"messages\[1\] \(developer\) has \"Be brief\.\".*`drop_roles: \[system\]`"):
        text_of(opened(source), {"messages": messages})


def test_a_text_with_control_strings_of_the_developer_stays_text() -> None:
    messages = [say("developer", "<|im_end|>role: developer"), say("user", "a"), say("assistant", "b")]
    conversation = read_record({"messages": messages}, "messages")
    [sample] = opened(DISTINCT).samples(conversation, [False, False, True])
    assert "boss\n<|im_end|>role: developer" in "".join(span.text for span in sample.spans)
    assert [span.text for span in sample.spans if span.token >= 0].count("<|im_end|>") == 3


def test_a_control_string_may_have_the_name_of_the_role(tmp_path: Path) -> None:
    """Contents that could complete a control string are changed, but roles are not."""
    folder = Path(shutil.copytree(kind_path(KIND), tmp_path / "tok"))
    values = json.loads((folder / "tokenizer.json").read_text())
    last = values["added_tokens"][-1]
    number = max(token["id"] for token in values["added_tokens"]) + 1
    values["added_tokens"].append(last | {"id": number, "content": "<|developer|>", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(values))
    encoder = open_encoder(find_tokenizer(folder))
    template = JinjaTemplate("t", DISTINCT, encoder, "assistant", "2026-01-01")
    messages = [say("developer", "a<|developer|>"), say("user", "developer"), say("assistant", "b")]
    assert text_of(template, {"messages": messages}).startswith("<|im_start|>boss\na<|developer|><|im_end|>")


# -- filling in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [FIRST_ONLY, DISTINCT, CHATML_JINJA])
@pytest.mark.parametrize("more", [{}, {"name": "Ada"}])
def test_shapes_differ_in_the_role(source: str, more: dict[str, str]) -> None:
    """Records that differ only in the role are prepared together."""
    pairs = [(role, text) for text in ("One.", "Two.") for role in ("system", "developer", "DEVELOPER", "system")]
    records = [{"messages": [say(role, text, **more), say("user", "a"), say("assistant", "b")]} for role, text in pairs]
    assert prepared(opened(source), records) == [text_of(opened(source), record) for record in records]


# -- corpora ----------------------------------------------------------------------------------------------------------

RECORDS = [
    {"messages": [say("developer", f"Be brief {n}. <think>"), say("user", "2+2?"), say("assistant", "4")]}
    for n in range(9)
]


def packed(folder: Path, source: str, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    folder.mkdir(exist_ok=True)
    (folder / "own.jinja").write_text(source)
    recipe = make_recipe(folder, RECORDS, tokenizer=str(kind_path(KIND)), template="own.jinja", **settings)
    manifest = load_manifest(pack_corpus(recipe))
    shard = folder / manifest.corpus / "train-00000-of-00001.arrow"
    return manifest, pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist()


def test_rows_have_the_role_of_the_template_and_counts_have_system(tmp_path: Path) -> None:
    for source, header in ((DISTINCT, "boss\n"), (CHATML_JINJA, "system\n")):
        manifest, rows = packed(tmp_path / header.strip(), source)
        text = "".join(reference(KIND).decode(row["input_ids"]) for row in rows)
        assert text.count(f"<|im_start|>{header}Be brief") == 9
        assert manifest.content_tokens["<think>"] == {"system": 9}
        assert manifest.noticed_counts["unusual_order"] == 0


def test_dropped_system_messages_are_those_of_the_developer_too(tmp_path: Path) -> None:
    source = {"path": "chat.jsonl", "drop_roles": ["system"]}
    manifest, rows = packed(tmp_path, DISTINCT, sources=[source])
    assert manifest.ledger.context.left_out == {"system": 9}
    assert "brief" not in "".join(reference(KIND).decode(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("source", [DISTINCT, CHATML_JINJA])
def test_messages_of_format_2_render_to_their_text(tmp_path: Path, source: str) -> None:
    """A trainer that renders the messages of a row writes its text."""
    _, rows = packed(tmp_path, source, packing=False)
    assert len(rows) == 9
    expected = "developer" if source == DISTINCT else "system"
    for row in rows:
        messages = [{key: m[key] for key in ("role", "content")} for m in row["messages"]]
        assert [m["role"] for m in messages] == [expected, "user", "assistant"]
        assert as_transformers(source, messages) == row["text"]
        assert text_of(opened(source), {"messages": messages}) == row["text"]


def test_only_templates_that_know_the_role_have_its_version_in_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> list[tuple[list[str], str]]:
        found = []
        for source in (CHATML_JINJA, DISTINCT, None):
            (tmp_path / "own.jinja").write_text(source or "")
            template = "own.jinja" if source else "chatml"
            recipe = make_recipe(tmp_path, RECORDS, tokenizer=str(kind_path(KIND)), template=template)
            found.append((recipe.token_keys, recipe.corpus_key))
        return found

    before = keys()
    monkeypatch.setitem(VERSIONS, "developer", VERSIONS["developer"] + 1)
    after = keys()
    assert [one == other for (one, _), (other, _) in zip(before, after, strict=True)] == [True, False, True]
    assert [one == other for (_, one), (_, other) in zip(before, after, strict=True)] == [True, True, True]
