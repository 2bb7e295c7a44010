"""Records with several answers are read as their prompt, then all answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from packcorpus.tasks.conversations.formats import MOST_MESSAGES, detect, read_record
from packcorpus.tasks.conversations.model import Answer, Conversation, Message, content_digest, prompt_text, whole_text
from packcorpus.tasks.conversations.several_answers import each_answer
from packcorpus.tasks.conversations.turn_weights import with_loss_weights
from packcorpus.tasks.conversations.unused_keys import UnusedKeys
from packcorpus.tasks.core.errors import DataError, Reject

SYSTEM, ASKED = Message("system", "Be brief."), Message("user", "2+2?")
FOUR, WORD, FIVE = (Message("assistant", text) for text in ("4", "Four.", "5"))


def turn(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


USER, SAID, WORDS, WRONG = map(turn, (ASKED, FOUR, WORD, FIVE))
HISTORY = [turn(SYSTEM), turn(Message("user", "1+1?")), turn(Message("assistant", "2")), USER]


def said(*messages: Message, answers: dict[str, int]) -> Conversation:
    return Conversation(messages, answers=tuple(Answer(*answer) for answer in answers.items()))


BOTH = {"completions[0]": 1, "completions[1]": 2}
PAIR = {"chosen": 1, "rejected": 2}


@pytest.mark.parametrize(
    ("format", "record", "expected"),
    [
        ("completions", {"prompt": "2+2?", "completions": ["4", "Four."]}, said(ASKED, FOUR, WORD, answers=BOTH)),
        ("completions", {"question": "2+2?", "completions": '["4", "Four."]'}, said(ASKED, FOUR, WORD, answers=BOTH)),
        ("completions", {"prompt": [USER], "completions": [[SAID], "Four."]}, said(ASKED, FOUR, WORD, answers=BOTH)),
        (
            "completions",  # a table may write lists of messages as text, or as a struct of lists
            {
                "prompt": orjson.dumps([USER]).decode(),
                "completions": [orjson.dumps([SAID]).decode(), {"role": ["assistant"], "content": ["Four."]}],
            },
            said(ASKED, FOUR, WORD, answers=BOTH),
        ),
        (
            "completions",
            {"messages": [USER], "completions": ["4", [WORDS]], "system": "Be brief."},
            said(SYSTEM, ASKED, FOUR, WORD, answers={"completions[0]": 2, "completions[1]": 3}),
        ),
        (
            "completions",
            {"prompt": [USER], "completions": [[SAID, USER, SAID], [WORDS]]},
            said(ASKED, FOUR, ASKED, FOUR, WORD, answers={"completions[0]": 1, "completions[1]": 4}),
        ),
        ("completions", {"prompt": "2+2?", "completions": ["4"]}, said(ASKED, FOUR, answers={"completions[0]": 1})),
        ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, said(ASKED, FOUR, FIVE, answers=PAIR)),
        (
            "preference",
            {"prompt": [USER], "chosen": [SAID], "rejected": [WRONG]},
            said(ASKED, FOUR, FIVE, answers=PAIR),
        ),
        (
            "preference",  # the prompt is what both have in common
            {"chosen": [*HISTORY, SAID], "rejected": [*HISTORY, WRONG]},
            said(
                SYSTEM,
                Message("user", "1+1?"),
                Message("assistant", "2"),
                ASKED,
                FOUR,
                FIVE,
                answers={"chosen": 4, "rejected": 5},
            ),
        ),
        (
            "preference",  # a text beside whole conversations is not needed
            {"prompt": "2+2?", "chosen": [USER, SAID], "rejected": [USER, WRONG]},
            said(ASKED, FOUR, FIVE, answers=PAIR),
        ),
        (
            "preference",  # equal answers are two answers
            {"chosen": [USER, SAID], "rejected": [USER, SAID]},
            said(ASKED, FOUR, FOUR, answers=PAIR),
        ),
        (
            "preference",
            {"chosen": [USER, SAID], "rejected": [USER, SAID, USER, WRONG], "system": "Be brief."},
            said(SYSTEM, ASKED, FOUR, FOUR, ASKED, FIVE, answers={"chosen": 2, "rejected": 3}),
        ),
    ],
)
def test_records_are_read(format: str, record: dict[str, Any], expected: Conversation) -> None:
    assert detect(record) == format
    assert read_record(record, format) == expected


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": [USER, SAID], "completions": ["4"]}, "messages"),
        ({"messages": [USER], "completions": ["4"]}, "completions"),
        ({"prompt": "2+2?", "completion": "4", "completions": ["4"]}, "prompt_completion"),
        ({"prompt": "2+2?", "completions": ["4"], "text": "2+2? 4"}, "text"),
        ({"prompt": "2+2?", "completion": "4", "chosen": "4", "rejected": "5"}, "prompt_completion"),
        ({"messages": [USER, SAID], "chosen": [SAID], "rejected": [WRONG]}, "messages"),
        ({"chosen": "Human: 2+2? Assistant: 4", "rejected": "Human: 2+2? Assistant: 5"}, None),
        ({"completions": ["4"]}, None),
        ({"prompt": "2+2?", "chosen": "4"}, None),
    ],
)
def test_records_that_another_format_reads_keep_it(record: dict[str, Any], format: str | None) -> None:
    assert detect(record) == format


@pytest.mark.parametrize(
    ("format", "record", "code", "message"),
    [
        ("completions", {"prompt": "2+2?", "completions": []}, "empty", "completions is an empty list"),
        ("completions", {"prompt": "2+2?"}, "missing_key", "completions is missing"),
        ("completions", {"prompt": "2+2?", "completions": None}, "missing_key", "completions is null"),
        ("completions", {"completions": ["4"]}, "missing_key", "prompt is missing"),
        ("completions", {"prompt": "2+2?", "completions": "4"}, "bad_type", "completions: expected a list, found"),
        ("completions", {"prompt": "2+2?", "completions": ["4", 4]}, "bad_type", r"completions\[1\]: expected two"),
        (
            "completions",
            {"prompt": [USER], "completions": [SAID]},
            "bad_type",
            r"completions\[0\]: expected a string or a list of messages, found an object",
        ),
        ("completions", {"prompt": [USER], "completions": ["4", []]}, "empty", r"completions\[1\] holds no messages"),
        ("completions", {"prompt": "2+2?", "completions": [[SAID]]}, "bad_type", "two strings or two lists"),
        (
            "completions",
            {"prompt": [USER], "completions": ["4", [{"role": "assistant", "content": 4}]]},
            "bad_content",
            r"completions\[1\]\[0\].content: expected a string, found a number",
        ),
        (
            "completions",
            {"prompt": "2+2?", "completions": ["4", "Four."], "reasoning": "Two and two."},
            "bad_content",
            "one reasoning for 2 answers",
        ),
        (
            "completions",
            {"prompt": [USER] * 1000, "completions": ["4"] * 100},
            "too_many_turns",
            f"holds 100,100 messages, more than {MOST_MESSAGES:,}",
        ),
        ("preference", {"prompt": "2+2?", "rejected": "5"}, "missing_key", "chosen is missing"),
        ("preference", {"chosen": "4", "rejected": "5"}, "missing_key", "prompt is missing"),
        ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": [WRONG]}, "bad_type", "prompt and rejected"),
        (
            "preference",
            {"chosen": [USER, SAID], "rejected": [turn(SYSTEM), USER, WRONG]},
            "no_common_prompt",
            "chosen and rejected begin with different messages",
        ),
        ("preference", {"chosen": [USER, SAID], "rejected": [WRONG]}, "no_common_prompt", "begin with different"),
    ],
)
def test_rejects(format: str, record: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(Reject, match=message) as caught:
        read_record(record, format)
    assert caught.value.reason == code


def test_names_of_keys_and_roles_are_mapped_in_answers() -> None:
    """The key and the roles of messages have other names in the data."""
    turns = [{"speaker": "kunde", "says": "2+2?"}]
    answers = [[{"speaker": "bot", "says": "4"}], [{"speaker": "bot", "says": 4}]]
    columns = {"prompt": "frage", "completions": "antworten", "role": "speaker", "content": "says"}
    roles = {"kunde": "user"}
    record: dict[str, Any] = {"frage": turns, "antworten": answers[:1]}
    read = read_record(record, "completions", columns, roles)
    assert read == said(ASKED, FOUR, answers={"antworten[0]": 1})
    with pytest.raises(Reject, match=r"^antworten\[1\]\[0\].says: expected a string"):
        read_record(record | {"antworten": answers}, "completions", columns, roles)
    pair = {"gut": [*turns, *answers[0]], "schlecht": [*turns, {"speaker": "bot", "says": "5"}]}
    names = {"chosen": "gut", "rejected": "schlecht", "role": "speaker", "content": "says"}
    assert read_record(pair, "preference", names, roles).messages == (ASKED, FOUR, FIVE)


def test_each_answer_follows_the_prompt_and_answers_of_the_prompt_are_trained_on_once() -> None:
    read = read_record({"prompt": HISTORY, "completions": [[SAID, USER, WORDS], "5"]}, "completions")
    prompt = [Message("user", "1+1?"), Message("assistant", "2"), ASKED]
    places, branches = zip(*each_answer(read), strict=True)
    assert places == ("completions[0]", "completions[1]")
    assert branches[0].messages == (SYSTEM, *prompt, FOUR, ASKED, WORD)
    assert [message.content for message in branches[1].messages] == ["Be brief.", "1+1?", "2", "2+2?", "5"]
    assert [message.train for message in branches[1].messages] == [False] * 4 + [None]
    assert not any(branch.answers for branch in branches)
    alone = read_record({"prompt": "2+2?", "completions": ["4"]}, "completions")
    assert list(each_answer(alone)) == [("", alone)]


def digest_of(record: dict[str, Any], format: str) -> int:
    return content_digest(whole_text(read_record(record, format)).encode())


def test_the_digest_is_of_the_prompt_and_of_all_answers() -> None:
    one = digest_of({"prompt": "2+2?", "completions": ["4"]}, "completions")
    assert one == digest_of({"prompt": "2+2?", "completion": "4"}, "prompt_completion")
    two = [["4", "Four."], ["Four.", "4"], ["4", "4"], ["4", "Four.", "5"]]
    digests = [digest_of({"prompt": "2+2?", "completions": answers}, "completions") for answers in two]
    linear = digest_of({"messages": [USER, SAID, WORDS]}, "messages")
    assert len({one, linear, *digests}) == 6
    assert digest_of({"prompt": [USER], "chosen": [SAID], "rejected": [WORDS]}, "preference") == digests[0]


@pytest.mark.parametrize("answers", [["4", "Four."], ["Four.", "5"], [[SAID, USER, WORDS], "5"]])
@pytest.mark.parametrize("first_trained", [1, 3])
def test_the_prompt_is_what_the_answers_have_in_common(answers: list[Any], first_trained: int) -> None:
    read = read_record({"prompt": [USER], "completions": answers}, "completions")
    trained = [k >= first_trained for k in range(len(read.messages))] if len(read.messages) > 3 else [False, True, True]
    alone = read_record({"prompt": "2+2?", "completion": "4"}, "prompt_completion")
    assert prompt_text(read, trained) == prompt_text(alone, [False, True])


@pytest.mark.parametrize(
    ("weight", "expected"),
    [([0.5, 0], [1.0, 0.5, 0.0]), ("[0.5, 0]", [1.0, 0.5, 0.0]), (2, [2.0, 2.0, 2.0]), (None, [1.0, 1.0, 1.0])],
)
def test_a_weight_is_of_the_record_or_of_each_answer(weight: object, expected: list[float]) -> None:
    record = {"prompt": "2+2?", "completions": ["4", "5"], "loss_weight": weight}
    weighted = with_loss_weights(read_record(record, "completions"), is_text=False)
    assert [message.loss_weight for message in weighted.messages] == expected
    assert [message.train for message in weighted.messages] == [None if weight else False for weight in expected]
    single = read_record({"prompt": "2+2?", "completions": ["4"], "loss_weight": [0.5]}, "completions")
    assert [message.loss_weight for message in with_loss_weights(single, False).messages] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1], "loss_weight has 1 weight for 2 answers; expected one for each"),
        ([1, "x"], r"loss_weight\[1\] is a string; expected a number"),
        ([1, -1], r"loss_weight\[1\] is -1; expected 0, or a number from"),
    ],
)
def test_weights_that_do_not_fit_the_answers(weight: object, message: str) -> None:
    record = {"prompt": "2+2?", "completions": ["4", "5"], "loss_weight": weight}
    with pytest.raises(Reject, match=message) as caught:
        with_loss_weights(read_record(record, "completions"), is_text=False)
    assert caught.value.reason == "bad_weight"


def test_unused_keys_are_those_that_no_answer_needs() -> None:
    def counts(format: str, record: dict[str, Any], unread: Sequence[str] = (), **further: Any) -> dict[str, int]:
        unused = UnusedKeys(format, {}, (), unread=unread, **further)
        unused.add([0, 1], [record, record], str)
        return unused.found()

    turns = [SAID | {"id": 1}]
    listed = {"prompt": [USER | {"id": 1}], "completions": [turns, turns, "4"], "scores": [1, 2, 3], "messages": [USER]}
    assert counts("completions", listed) == {"completions[][].id": 4, "prompt[].id": 2, "scores": 2, "messages": 2}
    weighted = {"prompt": "2+2?", "completions": [[SAID | {"loss_weight": 0.5, "images": []}], "4"]}
    assert counts("completions", weighted) == {"completions[][].loss_weight": 2}
    assert counts("completions", weighted, further=("loss_weight",)) == {}
    with pytest.raises(DataError, match="the record has images"):
        counts("completions", {"prompt": [USER], "completions": [[SAID | {"images": ["x"]}]]})
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    assert counts("preference", pair) == {}
    assert counts("preference", pair, ("rejected",)) == {"rejected": 2}
    whole = {"prompt": "2+2?", "chosen": [USER, SAID], "rejected": [USER, WRONG], "score_chosen": 1.0}
    assert counts("preference", whole) == {"prompt": 2, "score_chosen": 2}
    assert counts("preference", whole, ("rejected",)) == {"prompt": 2, "score_chosen": 2, "rejected": 2}
