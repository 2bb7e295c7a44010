"""The formats `completions` and `preference`: several answers to one prompt.

    {"prompt": "2+2?", "completions": ["4", "Four."]}     ─┐
    {"prompt": "2+2?", "chosen": "4", "rejected": "Four."} ─┴─read─▶ Conversation: the prompt, then both answers
                                                             ─each_answer─▶ 2+2? 4        2+2? Four.

Each answer follows the prompt, not the answer before it. A prompt or an answer may be a list of messages. `chosen` and
`rejected` may also be two whole conversations, whose prompt is what they have in common. `rejected` is read only with
`pairs: both`; see `SourceFile.unread`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from packcorpus.tasks.conversations.answers import (
    OPTIONS,
    REASONING_KEYS,
    TOOL_KEYS,
    reasoning_keys,
    reasoning_of_record,
    tools_of,
)
from packcorpus.tasks.conversations.chat import Object, messages_of, objects_in_messages, with_system
from packcorpus.tasks.conversations.model import (
    DEVELOPER,
    Answer,
    Conversation,
    Format,
    Message,
    Record,
    role_named,
)
from packcorpus.tasks.conversations.names import TURN_NAMES
from packcorpus.tasks.conversations.pairs import lists_in, read_sides
from packcorpus.tasks.conversations.values import found_list, list_of, required, system_of
from packcorpus.tasks.core.errors import Reject

_MESSAGES = "messages"
_PROMPTS = ("prompt", "question")  # the keys of a prompt, and those that completions may follow
_BEFORE_COMPLETIONS = (*_PROMPTS, _MESSAGES)
_BESIDE = ("system", *TOOL_KEYS, OPTIONS)
_OPTIONAL = (
    "optionally `system`, `tools` (or `tool_defs`, `functions`), `reasoning_content` (or `reasoning`, `thinking`) of a "
    "single answer, `chat_template_kwargs`"
)

COMPLETIONS_KEY = "completions"
CHOSEN, REJECTED = "chosen", "rejected"


def each_answer(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """Yield the place of each answer, and the conversation that it ends.

    Only the first of them trains on answers within the prompt. A conversation without several answers is yielded as it
    is, with the place "".
    """
    if not conversation.has_several_answers:
        yield "", conversation
        return
    messages, answers = conversation.messages, conversation.answers
    prompt = messages[: answers[0].first]
    bounds = pairwise([*(answer.first for answer in answers), len(messages)])
    for answer, (first, last) in zip(answers, bounds, strict=True):
        yield answer.place, replace(conversation, messages=(*prompt, *messages[first:last]), answers=())
        if answer is answers[0]:
            prompt = tuple(replace(message, train=False) for message in prompt)


def _joined(record: Record, prompt: Sequence[Message], said: Mapping[str, Sequence[Message]]) -> Conversation:
    """Return the conversation of a prompt and its answers, which are given by place."""
    messages, answers = [*prompt], []
    for place, of_answer in said.items():
        if not of_answer:
            raise Reject("empty", f"{place} holds no messages")
        answers.append(Answer(place, len(messages)))
        messages += of_answer
    return Conversation(tuple(messages), tools_of(record), answers=tuple(answers))


def _check_reasoning(record: Record, count: int) -> None:
    """Raise Reject if a record has one reasoning for several answers."""
    if count > 1 and reasoning_of_record(record):
        raise Reject("bad_content", f"the record has one reasoning for {count} answers; move it into each of them")


# -- completions ------------------------------------------------------------------------------------------------------


def read_completions(record: Record) -> Conversation:
    ask = _prompt_key(record, _BEFORE_COMPLETIONS)
    given, answers = required(record, ask), list_of(required(record, COMPLETIONS_KEY), COMPLETIONS_KEY)
    if not answers:
        raise Reject("empty", f"{COMPLETIONS_KEY} is an empty list")
    _check_reasoning(record, len(answers))
    prompt = list_of(given, ask) if ask == _MESSAGES else lists_in(given, None)[0]
    system = [] if ask == _MESSAGES else system_of(record)
    before: list[Message] = []
    said: dict[str, list[Message]] = {}
    for index, answer in enumerate(answers):
        place = f"{COMPLETIONS_KEY}[{index}]"
        if isinstance(answer, dict) and isinstance(lists_in([], answer)[1], dict):
            raise Reject("bad_type", f"{place}: expected a string or a list of messages, found an object")
        turns, said[place] = read_sides(record, prompt, answer, ask, place)
        if not index:
            before, prompt = turns, "" if isinstance(prompt, str) else []  # read once
    if ask == _MESSAGES:
        before = [*with_system(record, before)]
    return _joined(record, [*system, *before], said)


def _prompt_key(record: Record, keys: Sequence[str] = _PROMPTS) -> str:
    return next((key for key in keys if record.get(key) is not None), keys[0])


def _objects_of_completions(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    ask = _prompt_key(record, _BEFORE_COMPLETIONS)
    prompt, _ = lists_in(record.get(ask), None)
    if type(prompt) is list:
        yield from objects_in_messages(prompt, f"{columns.get(ask, ask)}[]", columns)
    for answer in found_list(record.get(COMPLETIONS_KEY)) or ():
        _, turns = lists_in(prompt, answer)
        if type(turns) is list:
            yield from objects_in_messages(turns, f"{columns.get(COMPLETIONS_KEY, COMPLETIONS_KEY)}[][]", columns)


COMPLETIONS = Format(
    name="completions",
    keys=(*_BEFORE_COMPLETIONS, COMPLETIONS_KEY, *_BESIDE, *REASONING_KEYS),
    matches=lambda record: COMPLETIONS_KEY in record and any(key in record for key in _BEFORE_COMPLETIONS),
    read=read_completions,
    summary="`prompt` (or `question`, or `messages` that end before the answer) and `completions`, a list of answers, "
    f"each a text or a list of messages; {_OPTIONAL}",
    example='{"prompt": "2+2?", "completions": ["4", "Four."]}',
    used=lambda record: (
        _prompt_key(record, _BEFORE_COMPLETIONS),
        COMPLETIONS_KEY,
        *_BESIDE,
        *reasoning_keys(record),
    ),
    objects=_objects_of_completions,
)


# -- preference -------------------------------------------------------------------------------------------------------


def read_preference(record: Record) -> Conversation:
    required(record, CHOSEN)
    names = [name for name in (CHOSEN, REJECTED) if record.get(name) is not None]
    if _holds_prompt(record):
        return _divided(record, names)
    ask = _prompt_key(record)
    prompt = required(record, ask)
    _check_reasoning(record, len(names))
    system = system_of(record)
    sides = {name: read_sides(record, prompt, record[name], ask, name) for name in names}
    before, _ = sides[CHOSEN]
    return _joined(record, [*system, *before], {name: said for name, (_, said) in sides.items()})


def _divided(record: Record, names: Sequence[str]) -> Conversation:
    """Return what whole conversations have in common, then the rest of each."""
    whole = {name: messages_of(lists_in([], record[name])[1], name) for name in names}
    if reasoning_of_record(record):
        raise Reject("bad_content", f"the record has reasoning next to lists of messages; move it into {CHOSEN}")
    shared, most = 0, min(map(len, whole.values())) - 1  # an answer has a message
    while shared < most and all(turns[shared] == whole[CHOSEN][shared] for turns in whole.values()):
        shared += 1
    if len(names) > 1 and not shared:
        raise Reject("no_common_prompt", f"{' and '.join(names)} begin with different messages")
    prompt = with_system(record, whole[CHOSEN][:shared])
    return _joined(record, prompt, {name: turns[shared:] for name, turns in whole.items()})


def _holds_prompt(record: Record) -> bool:
    """Return whether `chosen` is a whole conversation, which begins with its prompt."""
    _, turns = lists_in([], record.get(CHOSEN))
    first = turns[0] if isinstance(turns, list) and turns else None
    role = role_named(first.get("role"), TURN_NAMES) if isinstance(first, dict) else None
    return role in ("system", DEVELOPER, "user")


def _used_of_preference(record: Record) -> Collection[str]:
    prompt = () if _holds_prompt(record) else (_prompt_key(record),)
    return *prompt, CHOSEN, REJECTED, *_BESIDE, *reasoning_keys(record)


def _objects_of_preference(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    ask = _prompt_key(record)
    if _holds_prompt(record):
        prompt: object = []
        yield "", {}, ()  # whether the prompt is used depends on more than the keys
    else:
        prompt, _ = lists_in(record.get(ask), None)
    if type(prompt) is list:
        yield from objects_in_messages(prompt, f"{columns.get(ask, ask)}[]", columns)
    for name in (CHOSEN, REJECTED):
        _, turns = lists_in(prompt, record.get(name))
        if type(turns) is list:
            yield from objects_in_messages(turns, f"{columns.get(name, name)}[]", columns)


PREFERENCE = Format(
    name="preference",
    keys=(*_PROMPTS, CHOSEN, REJECTED, *_BESIDE, *REASONING_KEYS),
    matches=lambda record: (
        CHOSEN in record
        and REJECTED in record
        and (any(key in record for key in _PROMPTS) or bool(found_list(record[CHOSEN])))
    ),
    read=read_preference,
    summary="`prompt` (or `question`), `chosen`, and `rejected`, each a text or a list of messages, or `chosen` and "
    f"`rejected` as whole conversations; `rejected` is read only with `pairs: both`; {_OPTIONAL}",
    example='{"prompt": "2+2?", "chosen": "4", "rejected": "5"}',
    used=_used_of_preference,
    objects=_objects_of_preference,
)
