"""Read whether a message is trained on.

{"role": "assistant", "content": "4", "train": false} → False

The key is `train` or `training` (axolotl), `weight` (OpenAI), or `loss` (ms-swift). `weight: 1` is the default of
OpenAI's format and decides nothing. A `loss` that is a number is a remark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasks.core.errors import Reject
from tasks.core.printable import kind

# The keys of training flags, each with the values that it may have.
TRAINING_FLAGS = {"weight": "0 or 1", "train": "true or false", "training": "true or false"}


LOSS = "loss"  # a flag only if it is true or false

_NAMES = frozenset((LOSS, *TRAINING_FLAGS))

# Names of keys that may mean that a message is not trained on.
_SUSPECTS = re.compile(r"(?:^|[._])(?:train|training|trainable|loss|mask|masked|weight|weights)(?:$|_)", re.IGNORECASE)


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


def training_flag(message: Mapping[str, object], where: str) -> bool | None:
    """Return whether a message is trained on, or None if `train_on` decides.

    Raises Reject for any other value, and if two keys have different values.
    """
    if _NAMES.isdisjoint(message):
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
