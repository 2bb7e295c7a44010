"""Read `loss_weight`, the weight of a conversation or a turn in the loss.

{"messages": [{…}, {"role": "assistant", "content": "4", "loss_weight": 0.5}], "loss_weight": 2} → a weight of 1.0

The weight of a turn is multiplied by the weight of its record. A missing weight is 1. A turn of weight 0 is not trained
on, as if it had `weight: 0`, so every token that is trained on has a weight above 0. Other weights are read only with
`loss_weight: data` or `both` in the config. In a message, ms-swift's `loss_scale` is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tasks.conversations.model import Conversation
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown

LOSS_WEIGHT = "loss_weight"

# The names of the weight of a message.
LOSS_SCALE = "loss_scale"
OF_MESSAGES = (LOSS_WEIGHT, LOSS_SCALE)

# Limits of weights, chosen so that float32 can hold their product with all factors of a conversation.
LEAST, MOST = 1e-6, 1e6


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_zero(value: object) -> bool:
    return is_number(value) and value == 0


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

    `is_text` means that numbers are written as text, as in CSV. `name` is the key in the data. Raises Reject for an
    invalid weight.
    """
    of_record = _weight(conversation.loss_weight, name, is_text)
    messages = []
    for index, message in enumerate(conversation.messages):
        found = of_record
        if message.loss_weight is not None:
            found *= _weight(message.loss_weight, f"messages[{index}].{name}", is_text)
        messages.append(replace(message, loss_weight=found, train=message.train if found else False))
    return replace(conversation, messages=tuple(messages))


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


def loss_weight_hints(unused: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each source with weights that are not used.

    `unused` has counts by source.
    """
    return [
        f"{source}: {path} is not used; to weigh the loss by it, set  loss_weight: data"
        for source, counts in unused.items()
        for path in counts
        if path.rpartition(".")[2] == LOSS_WEIGHT
    ]
