"""Read the formats with one key per turn: alpaca, dolly, prompt_completion, text."""

from __future__ import annotations

from tasks.conversations.chat import ROLE_NAMES, messages_of, tools_of
from tasks.conversations.fields import list_of, optional_text, required, required_text, text_of
from tasks.conversations.model import Conversation, Message
from tasks.core.errors import Reject
from tasks.core.printable import kind


def read_alpaca(record: dict[str, object]) -> Conversation:
    messages = system_of(record)
    history = record.get("history")
    if history is not None and history != "":
        for index, pair in enumerate(list_of(history, "history")):
            where = f"history[{index}]"
            turns = list_of(pair, where)
            if len(turns) != 2:
                raise Reject("bad_type", f"{where}: expected [user, assistant], found a list of {len(turns)}")
            messages.append(Message("user", text_of(turns[0], f"{where}[0]")))
            messages.append(Message("assistant", text_of(turns[1], f"{where}[1]")))
    context = optional_text(record, "input") or optional_text(record, "context")
    messages.append(Message("user", required_text(record, "instruction"), context))
    answer = "response" if record.get("output") is None and record.get("response") is not None else "output"
    messages.append(Message("assistant", required_text(record, answer)))
    return Conversation(tuple(messages))


def read_dolly(record: dict[str, object]) -> Conversation:
    messages = system_of(record)
    instruction = required_text(record, "instruction")
    messages.append(Message("user", instruction, optional_text(record, "context")))
    messages.append(Message("assistant", required_text(record, "response")))
    return Conversation(tuple(messages))


def read_prompt_completion(record: dict[str, object]) -> Conversation:
    ask = "question" if record.get("prompt") is None and record.get("question") is not None else "prompt"
    answers = ("completion", "response") if ask == "prompt" else ("answer", "response")
    answer = next((key for key in answers if record.get(key) is not None), answers[0])
    prompt, completion = required(record, ask), required(record, answer)
    messages = system_of(record)
    if isinstance(prompt, str) and isinstance(completion, str):
        messages += (Message("user", text_of(prompt, ask)), Message("assistant", text_of(completion, answer)))
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages += messages_of(prompt, ask, ROLE_NAMES)
        messages += messages_of(completion, answer, ROLE_NAMES)
    else:
        found = f"found {kind(prompt)} and {kind(completion)}"
        raise Reject("bad_type", f"{ask} and {answer}: expected two strings or two lists of messages, {found}")
    return Conversation(tuple(messages), tools_of(record))


def read_text(record: dict[str, object]) -> Conversation:
    text = required_text(record, "text")
    return Conversation((Message("text", text),) if text else ())


def system_of(record: dict[str, object]) -> list[Message]:
    system = optional_text(record, "system")
    return [Message("system", system)] if system else []
