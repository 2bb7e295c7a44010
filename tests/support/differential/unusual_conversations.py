"""Unusual conversations from a seed.

    unusual(kind, seed, count) ─▶ [(format, record), …], most of the format `messages`

Real data rarely has their features, and templates and tokenizers may get them wrong: any order of roles, empty
contents, white space at ends, control strings of the tokenizer (whole, cut, and split over neighboring fields), rare
characters, tools, calls, and results, weights, several system messages, names, and records that do not fit their
format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from support.tokenizer_kinds import control_strings

WORDS = ("The", "train", " ride", "area", "85", "1000", ", ", ".", "?", "Wie lange?", "0.9 > 0.11", "def f(x):\n    ")
SPACE = ("", "", "", "", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u2028", "\r\n", " \n ")
RARE = (
    "🙂",
    "👩‍👩‍👧",
    "漢字",
    "Привет",
    "مرحبا",
    "\u200d",
    "e\u0301",
    "ﬁ",
    "①",
    "▁",
    "▁▁ ",
    "\ufeff",
    "\x07",
    "\ue000",
    "\U0001f1e9",
    "ẞ",
)
JSON = ('{"t": [1,2.50]}', "18", " [1 , 2]\n", "null", '{"a": 1, "a": 2}', "NaN", '"ü"', "{a}", "1e999", "-0.0")
ORDERS = ("user", "user", "assistant", "assistant", "call", "tool", "system")


def unusual(kind: str, seed: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return records with their formats, the same for the same arguments."""
    random_ = random.Random(seed)
    texts = _texts(random_, control_strings(kind)[:40])
    found = []
    for _ in range(count):
        format = random_.choice(tuple(OTHERS)) if random_.random() < 0.3 else "messages"
        record = OTHERS.get(format, _messages)(random_, texts)
        if random_.random() < 0.05:
            key = random_.choice(list(record))
            record[key] = random_.choice((None, 5, [], {}, "", [None], ["a"], [{}]))
        found.append((format, record))
    return found


def _messages(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    usual = random_.random() < 0.3
    messages: list[dict[str, Any]] = []
    if random_.random() < 0.4:
        messages += [_message("system", texts, random_)] * random_.choice((1, 1, 1, 2))
    for _ in range(random_.choice((1, 1, 2, 3))):
        roles = ["user", "assistant"] if usual else random_.choices(ORDERS, k=random_.randint(1, 4))
        messages += [_message(role, texts, random_) for role in roles]
    if random_.random() < 0.7:
        messages.append(_message("assistant", texts, random_))
    record: dict[str, Any] = {"messages": messages}
    if random_.random() < 0.3:
        tool = {"name": next(texts) or "f", "description": next(texts), "parameters": _value(random_, texts)}
        framed: list[Any] = [{"type": "function", "function": tool}, tool]
        record["tools"] = random_.choices(framed, k=random_.randint(0, 2))
    return record


def _message(role: str, texts: Iterator[str], random_: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant" if role == "call" else role, "content": next(texts)}
    if role == "call":
        message["tool_calls"] = []
        for _ in range(random_.choice((1, 1, 2))):
            arguments = {next(texts): _value(random_, texts), "größe": random_.choice((1, 0.5, -1e22, None, True))}
            call = {"type": "function", "function": {"name": next(texts) or "f", "arguments": arguments}}
            message["tool_calls"].append({"id": next(texts), **call} if random_.random() < 0.8 else call)
        if random_.random() < 0.3:
            message["content"] = None
    if role == "tool":
        message["content"] = random_.choice(JSON) if random_.random() < 0.4 else message["content"]
        message |= {"tool_call_id": next(texts), "name": next(texts)} if random_.random() < 0.8 else {}
    if random_.random() < 0.1:
        message["name"] = next(texts)
    if random_.random() < 0.1:
        message |= random_.choice(({"weight": 0}, {"weight": 1}, {"train": False}, {"training": True}, {"weight": 2}))
    if random_.random() < 0.05 and message["content"] is not None:
        text = message["content"]
        message["content"] = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
    return message


def _sharegpt(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    turns = []
    for _ in range(random_.randint(1, 6)):
        name = random_.choice(("human", "gpt", "GPT", "user", "system", "observation", "function_call", "bard"))
        value = next(texts)
        if name == "function_call" and random_.random() < 0.7:
            call = {"name": next(texts), "arguments": random_.choice(({next(texts): 1}, '{"a": 1}', "", None))}
            value = json.dumps(random_.choice((call, [call, call])), ensure_ascii=False)
        turns.append(random_.choice(({"from": name, "value": value}, {"role": name, "content": value})))
    record: dict[str, Any] = {"conversations": turns}
    if random_.random() < 0.3:
        record["system"] = random_.choice(("", next(texts), str(turns[0].get("value", ""))))
    if random_.random() < 0.3:
        record["tools"] = random_.choice(("", "[]", "null", "{", json.dumps([{"name": next(texts) or "f"}])))
    return record


def _alpaca(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"instruction": next(texts), random_.choice(("output", "response")): next(texts)}
    more = {
        "input": next(texts),
        "context": next(texts),
        "system": next(texts),
        "history": [[next(texts), next(texts)]],
    }
    return record | {key: value for key, value in more.items() if random_.random() < 0.4}


def _dolly(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    record = {"instruction": next(texts), "context": next(texts), "response": next(texts), "category": "qa"}
    return record | ({"system": next(texts)} if random_.random() < 0.3 else {})


def _prompt_completion(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    keys = random_.choice((("prompt", "completion"), ("prompt", "response"), ("question", "answer")))
    if random_.random() < 0.3:
        asked, answer = ([_message(role, texts, random_)] for role in ("user", "assistant"))
        return dict(zip(keys, (asked, answer), strict=True))
    record = dict(zip(keys, (next(texts), next(texts)), strict=True))
    return record | ({"system": next(texts)} if random_.random() < 0.3 else {})


def _oasst(random_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    def node(depth: int) -> dict[str, Any]:
        replies = [node(depth + 1) for _ in range(random_.randint(0, 3 - depth))]
        reply = {"role": ("prompter", "assistant")[depth % 2], "text": next(texts), "replies": replies}
        rank = random_.choice(({}, {"rank": None}, {"rank": 0}, {"rank": 1}, {"rank": 1.5}))
        return reply | rank | ({"deleted": True} if random_.random() < 0.1 else {})

    return {"prompt": node(0)}


def _text(_: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    return {"text": next(texts)}


OTHERS: dict[str, Callable[[random.Random, Iterator[str]], dict[str, Any]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "dolly": _dolly,
    "prompt_completion": _prompt_completion,
    "oasst": _oasst,
    "text": _text,
}


def _value(random_: random.Random, texts: Iterator[str]) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: next(texts),
        lambda: [next(texts), 7],
        lambda: {next(texts): next(texts)},
        lambda: None,
    )
    return random_.choice(makers)()


def _texts(random_: random.Random, controls: tuple[str, ...]) -> Iterator[str]:
    """Yield texts; a control string that is cut continues in the next text."""
    rest = ""
    while True:
        text = rest + random_.choice(SPACE)
        rest = ""
        for _ in range(random_.choice((0, 0, 1, 1, 2, 3, 6))):
            draw = random_.random()
            if draw < 0.5:
                text += random_.choice(WORDS)
            elif draw < 0.65:
                text += random_.choice(RARE)
            elif draw < 0.8:
                text += random_.choice(SPACE)
            elif draw < 0.95:
                text += random_.choice(controls)
            else:
                string = random_.choice(controls)
                cut = random_.randint(1, len(string))
                text, rest = text + string[:cut], string[cut:]
                break
        yield text + random_.choice(SPACE) * (not rest)
