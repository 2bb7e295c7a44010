"""Roles and keys of messages may have the names that the data uses.

Every way to read a record maps them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.profiles import examples
from support.tokenizer_kinds import open_kind

from packcorpus.tasks.conversations.formats import detect, read_record, role_names
from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.conversations.names import ROLE_NAMES, in_own_names
from packcorpus.tasks.conversations.unused_keys import UnusedKeys
from packcorpus.tasks.core.errors import Reject, UsageError
from packcorpus.tasks.sources.model import Source, SourceFile
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.tokenization.prepare import Preparer

CHAT = Conversation((Message("user", "2+2?"), Message("assistant", "4")))
OWN = {"user": ["Kunde", "customer", "Bot"], "assistant": ["AGENT", "bot 7", "human"], "system": ["note"]}

names = st.sampled_from([*ROLE_NAMES, "kunde", "customer", "agent", "bot 7", "note"])
any_case = names.flatmap(lambda name: st.sampled_from([name, name.upper(), name.title(), name.swapcase()]))


def messages(*roles: str, role: str = "role", content: str = "content") -> list[dict[str, object]]:
    return [{role: name, content: text} for name, text in zip(roles, ("2+2?", "4", "Why?", "So."), strict=False)]


def file_of(format: str = "messages", container: str = "jsonl", **source: Any) -> SourceFile:
    made = Source(path="a", **source)
    columns, roles = tuple(made.columns.items()), tuple(made.role_names.items())
    return SourceFile(Path("a"), "a", container, "", format, columns, 0, "", 0, roles=roles)


def preparer_of(file: SourceFile) -> Preparer:
    encoder = open_kind("sp_bpe_chatml")
    return Preparer(file, BuiltIn("chatml", encoder, "all"), encoder, "all")


def outcome(preparer: Preparer, record: object) -> Any:
    try:
        [prepared] = preparer.prepare(record)
    except Reject as reject:
        return reject.reason
    return prepared.texts, prepared.digest, prepared.layout.tokens.tolist()


# -- roles ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(any_case, min_size=1, max_size=4), st.sampled_from([{}, OWN]), st.sampled_from(["messages", "sharegpt"])
)
def test_lines_rows_and_records_read_with_care_have_the_same_roles(
    roles: list[str], own: dict[str, list[str]], format: str
) -> None:
    keys = {"role": "from", "content": "value"} if format == "sharegpt" else {}
    record = {{"sharegpt": "conversations"}.get(format, format): messages(*roles, **keys)}
    file = file_of(format, roles=own)
    fast, careful = preparer_of(file), preparer_of(file)
    [line] = fast.decode([json.dumps(record).encode()]) or [None]
    found = outcome(fast, line)
    careful._plain = type(careful._plain)("")
    if (
        line
        and found != "bad_role"
        and "tool" not in [role_names(format, dict(file.roles)).get(name.lower()) for name in roles]
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(Preparer, "_fill_with_care")
            assert outcome(fast, line) == found
    assert found == outcome(fast, record) == outcome(careful, record)
    if found != "bad_role":
        known = ROLE_NAMES | dict(file.roles)
        expected = [known[name.lower()] for name in roles]
        assert [message.given_role for message in file.conversation(record).messages] == expected
    else:
        assert not own


@pytest.mark.parametrize(
    ("role", "ours"),
    [
        ("User", "user"), ("HUMAN", "user"), ("prompter", "user"), ("Developer", "system"), ("gpt", "assistant"),
        ("ChatGPT", "assistant"), ("model", "assistant"), ("Bot", "assistant"), ("AI", "assistant"),
        ("observation", "tool"), ("Function", "tool"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["messages", "sharegpt", "prompt_completion"])
def test_common_names_are_known_in_any_case(role: str, ours: str, format: str) -> None:
    turns: Any = messages(role, "assistant")
    record = {
        "messages": {"messages": turns},
        "sharegpt": {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in turns]},
        "prompt_completion": {"prompt": turns[:1], "completion": turns[1:]},
    }[format]
    assert [message.role for message in read_record(record, format).messages] == [ours, "assistant"]


def test_named_roles_come_before_the_usual_ones() -> None:
    file = file_of(roles={"user": ["Bot", "assistant"], "assistant": ["user"]})
    found = [file.conversation({"messages": messages("bot", "USER", "Assistant")}).messages[n].role for n in range(3)]
    assert found == ["user", "assistant", "user"]
    strings = file_of("prompt_completion", roles={"user": ["assistant"], "assistant": ["user"]})
    pair = {"prompt": "2+2?", "completion": "4"}
    assert strings.conversation(pair) == CHAT, "these roles have no names in the data"
    assert preparer_of(strings).prepare(pair)[0].layout.conversation == "\2\3"


def test_a_call_in_sharegpt_stays_one_unless_its_name_is_mapped() -> None:
    calls = {"conversations": [{"from": "FUNCTION_CALL", "value": '{"name": "f"}'}]}
    assert read_record(calls, "sharegpt").messages[0].tool_calls[0].name == "f"
    [message] = file_of("sharegpt", roles={"assistant": ["function_call"]}).conversation(calls).messages
    assert (message.role, message.content) == ("assistant", '{"name": "f"}')


def test_an_unknown_role_is_rejected_and_names_the_setting() -> None:
    for role, advice in (
        ("kunde", "; map it to system, user, assistant, or tool, such as roles: {user: [kunde]}"),
        ("Bot 1", '; did you mean bot? Or map it with roles: {assistant: ["Bot 1"]}'),
    ):
        with pytest.raises(Reject) as reject:
            file_of(roles={"user": ["customer"]}).conversation({"messages": messages("customer", role)})
        assert reject.value.message == (f'messages[1].role "{role}" is not a role{advice}')


def test_a_name_belongs_to_one_role() -> None:
    with pytest.raises(
        ValidationError, match=r'"agent" is not a role; roles go on the left, .*: roles: \{user: \[agent\]\}'
    ):
        Source(path="a", roles={"agent": "user"})
    assert Source(path="a", roles={"user": "kunde"}) == Source(path="a", roles={"user": ["kunde"]})
    with pytest.raises(ValidationError, match='"BOT" is a name of user and of assistant; case is ignored'):
        Source(path="a", roles={"user": ["bot"], "assistant": ["BOT"]})
    for wrong in ({"usr": ["a"]}, {"user": [""]}, {"user": [1]}, {"text": ["a"]}):
        with pytest.raises(ValidationError):
            Source(path="a", roles=wrong)
    assert Source(path="a", roles=OWN).role_names["bot 7"] == "assistant"


# -- keys of a message ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "record", "columns"),
    [
        (
            "messages",
            {"dialog": messages("user", "gpt", role="speaker", content="utterance"), "content": 7},
            {"messages": "dialog", "role": "speaker", "content": "utterance"},
        ),
        ("messages", {"messages": messages("user", "gpt", content="text")}, {"content": "text"}),
        ("messages", {"messages": messages("user", "gpt", role="name")}, {"role": "name"}),
        ("sharegpt", {"conversations": messages("human", "gpt", role="from", content="text")}, {"content": "text"}),
        ("sharegpt", {"conversations": messages("human", "gpt", role="who", content="value")}, {"role": "who"}),
        (
            "sharegpt",
            {"conversations": [turn | {"from": "x"} for turn in messages("a", "gpt", role="role2", content="value")]},
            {"role": "role2"},
        ),
        (
            "prompt_completion",
            {"prompt": messages("user", content="text"), "completion": [{"role": "bot", "text": "4"}]},
            {"content": "text"},
        ),
    ],
)
def test_keys_of_a_message_are_mapped(format: str, record: dict[str, object], columns: dict[str, str]) -> None:
    assert detect(record, columns) == format
    file = file_of(format, columns=columns, roles={"user": ["a"]})
    assert file.conversation(record) == CHAT
    assert outcome(preparer_of(file), record) == outcome(preparer_of(file_of()), {"messages": messages("user", "bot")})
    assert not {"speaker", "utterance", "text"} & (file.wanted_columns - file_of().wanted_columns)


def test_a_mapped_key_means_that_key_and_no_other() -> None:
    file = file_of(columns={"content": "text"})
    advice = r"if one of them is the content, map it with columns: \{content: …\}"
    with pytest.raises(Reject, match=rf"messages\[0\]\.text is missing; the keys found are: role; {advice}$"):
        file.conversation({"messages": messages("user")})
    assert file.conversation({"messages": [{"role": "user", "text": "a", "content": "b", "weight": 0}]}) == (
        Conversation((Message("user", "a", train=False),))
    )
    assert file_of("text", columns={"content": "text"}).conversation({"text": "a"}).messages[0].content == "a"


TREE = {
    "prompt": {
        "who": "Kunde",
        "says": "2+2?",
        "replies": [{"who": "assistant", "says": "5", "rank": 1}, {"who": "Bot", "says": "4", "rank": 0}],
    }
}


def test_trees_have_named_roles_and_keys() -> None:
    file = file_of("oasst", columns={"role": "who", "content": "says"}, roles={"user": "kunde"})
    assert file.conversation(TREE) == CHAT
    assert TREE["prompt"]["who"] == "Kunde", "the record is not changed"
    unused = UnusedKeys("oasst", dict(file.columns), ())
    unused.add([1], [TREE], lambda number: "a:1")
    assert not unused.found()
    with pytest.raises(Reject, match=r'^prompt\.who "Kunde" is not a role'):
        file_of("oasst", columns={"role": "who", "content": "says"}).conversation(TREE)
    deep: dict[str, object] = {"role": "assistant", "text": "a"}
    for _ in range(5000):
        deep = {"role": "prompter", "text": "b", "replies": [deep]}
    assert len(file_of("oasst", roles={"user": "kunde"}).conversation({"prompt": deep}).messages) == 5001


@pytest.mark.parametrize("format", ["messages", "sharegpt"])
def test_flags_and_reasoning_have_other_names(format: str) -> None:
    keys = {"role": "from", "content": "value"} if format == "sharegpt" else {}
    record = {{"sharegpt": "conversations"}.get(format, format): messages("user", "bot", **keys)}
    [turns] = record.values()
    turns[1] |= {"should_train": False, "thought": "Two and two.", "train": True}
    file = file_of(format, columns={"train": "should_train", "reasoning": "thought"})
    expected = (Message("user", "2+2?"), Message("assistant", "4", train=False, reasoning="Two and two."))
    assert file.conversation(record).messages == expected
    unused = UnusedKeys(format, dict(file.columns), ())
    unused.add([1], [record], lambda number: "a:1")
    assert list(unused.found()) == [f"{next(iter(record))}[].train"]
    turns[1]["should_train"] = 0.5
    with pytest.raises(Reject, match=r"\[1\]\.should_train is 0\.5; expected true or false$"):
        file.conversation(record)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("messages[3].role is null", "dialog[3].who is null"),
        ("messages[3].content[0].text: expected a string", "dialog[3].says[0].text: expected a string"),
        ("messages is missing; the keys found are: id, tools", "dialog is missing; the keys found are: id, extra"),
        (
            "messages[0].role is missing; the keys found are: content; if one of them is the role, map it",
            "dialog[0].who is missing; the keys found are: says; if one of them is the role, map it",
        ),
        ("messages[0].tool_calls[0]: role", "dialog[0].tool_calls[0]: role"),
        ("none of its turns is trained on", "none of its turns is trained on"),
        ("", ""),
    ],
)
def test_messages_have_the_names_of_the_file(message: str, expected: str) -> None:
    columns = {"messages": "dialog", "tools": "extra", "role": "who", "content": "says"}
    assert in_own_names(message, columns) == expected
    assert in_own_names(message, {}) == message


def test_names_of_columns_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages("user", "bot")}))
    for columns, advice in (
        ({"content_": "x"}, "; did you mean content?"),
        ({"speaker": "role"}, "; packcorpus names go on the left: columns: {role: speaker}"),
    ):
        with pytest.raises(UsageError) as error:
            find_files([Source(path="a.jsonl", columns=columns)], tmp_path)
        assert str(error.value).endswith(f"is not a column of packcorpus{advice}")
