"""Read whether a message is trained on, and the weights of messages in the loss.

{"role": "assistant", "content": "4", "train": false} → False
{"messages": [{…}, {"role": "assistant", "content": "4", "loss_weight": 0.5}], "loss_weight": 2} → a weight of 1.0

The flag is `train` or `training` (axolotl), `weight` (OpenAI), or `loss` (ms-swift). `weight: 1` is the default of
OpenAI's format and decides nothing. A `loss` that is a number is a remark.

The weight of a turn is multiplied by the weight of its record. A missing weight is 1. A turn of weight 0 is not trained
on, as if it had `weight: 0`, so every token that is trained on has a weight above 0. Other weights are read only with
`loss_weight: data` or `both` in the config. In a message, ms-swift's `loss_scale` is the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.conversations.values import found_list
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import counted, kind, shown

# The keys of training flags, each with the values that it may have.
TRAINING_FLAGS = {"weight": "0 or 1", "train": "true or false", "training": "true or false"}
LOSS = "loss"  # a flag only if it is true or false
_FLAGS = frozenset((LOSS, *TRAINING_FLAGS))

# The names of the weight of a message; only the first is also one of a record.
OF_MESSAGES = (LOSS_WEIGHT, LOSS_SCALE) = ("loss_weight", "loss_scale")

# Limits of weights, chosen so that float32 can hold their product with all factors of a conversation.
LEAST, MOST = 1e-6, 1e6

# Names of keys that may mean that a message is not trained on.
_SUSPECTS = re.compile(r"(?:^|[._])(?:train|training|trainable|loss|mask|masked|weight|weights)(?:$|_)", re.IGNORECASE)


def training_flag(message: Mapping[str, object], where: str) -> bool | None:
    """Return whether a message is trained on, or None if `train_on` decides.

    Raises Reject for any other value, and if two keys have different values.
    """
    if _FLAGS.isdisjoint(message):
        return None
    found: dict[str, bool] = {}
    if isinstance(message.get(LOSS), bool):
        found[LOSS] = message[LOSS] is True
    for key, expected in TRAINING_FLAGS.items():
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            what = repr(value)[:40] if type(value) in (int, float) else kind(value)
            raise Reject("bad_weight", f"{where}.{key} is {what}; expected {expected}")
        if key != "weight" or not value:
            found[key] = bool(value)
    if len(set(found.values())) > 1:
        flags = " and ".join(f"{key} is {message[key]!r}".lower() for key in found)
        raise Reject("bad_weight", f"{where}: {flags}; keep one of them")
    return next(iter(found.values()), None)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def weight_of(message: Mapping[str, object], where: str) -> object:
    """Return the weight of a message as its keys have it.

    Raises Reject if both have numbers that differ.
    """
    value, scale = message.get(LOSS_WEIGHT), message.get(LOSS_SCALE)
    if scale is None or not is_number(scale):
        return value
    if value not in (None, scale):
        raise Reject("bad_weight", f"{where}: {' and '.join(OF_MESSAGES)} differ; keep one of them")
    return scale


def with_loss_weights(conversation: Conversation, is_text: bool, name: str = LOSS_WEIGHT) -> Conversation:
    """Return a conversation whose messages have their weights as floats.

    The weight of a record that lists answers may be a list with one for each. `is_text` means that numbers are written
    as text, as in CSV. `name` is the key in the data. Raises Reject for an invalid weight.
    """
    of_messages = _weights_of_messages(conversation, is_text, name)
    messages = []
    for index, message in enumerate(conversation.messages):
        found = of_messages[index]
        if message.loss_weight is not None:
            found *= _weight(message.loss_weight, f"messages[{index}].{name}", is_text)
        messages.append(replace(message, loss_weight=found, train=message.train if found else False))
    return replace(conversation, messages=tuple(messages))


def _weights_of_messages(conversation: Conversation, is_text: bool, name: str) -> list[float]:
    """Return the weight that the record gives to each message, perhaps by its answer."""
    value, count = conversation.loss_weight, len(conversation.messages)
    weights = found_list(value) if conversation.answers else None
    if weights is None:
        return [_weight(value, name, is_text)] * count
    if len(weights) != len(conversation.answers):
        counts = f"{counted(len(weights), 'weight')} for {counted(len(conversation.answers), 'answer')}"
        raise Reject("bad_weight", f"{name} has {counts}; expected one for each")
    firsts = [*(answer.first for answer in conversation.answers), count]
    found = [1.0] * firsts[0]
    for index, (weight, (first, last)) in enumerate(zip(weights, pairwise(firsts), strict=True)):
        found += [_weight(weight, f"{name}[{index}]", is_text)] * (last - first)
    return found


def _weight(value: object, where: str, is_text: bool) -> float:
    if value is None or (is_text and value == ""):
        return 1.0
    number = value
    if is_text and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise Reject("bad_weight", f"{where} is {shown(value)}; expected a number") from None
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise Reject("bad_weight", f"{where} is {kind(value)}; expected a number")
    if number != 0 and not (math.isfinite(number) and LEAST <= number <= MOST):
        expected = f"0, or a number from {LEAST:g} to {MOST:,.0f}"
        raise Reject("bad_weight", f"{where} is {repr(number)[:40]}; expected {expected}")
    return float(number)


def flag_hints(unused: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each unused key of messages that may be a training flag.

    `unused` has counts by source.

        {"a.jsonl": {"messages[].should_train": 200}} → a.jsonl: messages[].should_train is not used, but may be …
    """
    return [
        f"{source}: {path} is not used, but may be a training flag; if so, set  columns: {{train: "
        f"{path.rpartition('.')[2]}}}"
        for source, counts in unused.items()
        for path in counts
        if path.count("[].") == 1 and path.count(".") == 1 and _SUSPECTS.search(path.rpartition(".")[2])
        if not path.endswith(".loss_weight")
    ]


def loss_weight_hints(unused: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each source with weights that are not used.

    `unused` has counts by source.
    """
    return [
        f"{source}: {path} is not used; to weigh the loss by it, set  advanced: {{loss_weight: data}}"
        for source, counts in unused.items()
        for path in counts
        if path.rpartition(".")[2] == LOSS_WEIGHT
    ]
