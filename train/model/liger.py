"""Use Liger's kernels for norms, rotations of positions, and activations.

model ─transformers' own switch─▶ the same model with Liger's RMSNorm, RoPE, and SwiGLU ─undo─▶ as before

Only the installed package is used; nothing is downloaded. The loss stays ours. train.model.options proves that a step
is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from packcorpus.train.model.attention import without_adapter

WITHOUT_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def missing_reason() -> str:
    """Return why Liger cannot be used; "" if it can."""
    return "" if is_liger_kernel_available() else "it may be faster; run: pip install liger-kernel"


def use_liger(model: Any) -> Callable[[], None]:
    """Replace parts of a model by Liger's, and return how to undo it.

    Raises ValueError if Liger has nothing for the model, and any error of Liger, which leaves the model as it was.
    """
    causal = without_adapter(model)
    # Liger replaces methods of the parts, and functions and classes of the files with their code.
    names = {type(part).__module__ for part in causal.modules()}
    places = [*causal.modules(), *(sys.modules[name] for name in names if name.startswith("transformers."))]
    before = [_state(place) for place in places]

    def undo() -> None:
        for place, values in zip(places, before, strict=True):
            for name in vars(place).keys() - values.keys():
                del vars(place)[name]
            vars(place).update(values)

    try:
        apply_liger_kernel(model, WITHOUT_LOSS)
        if all(_same(vars(place), values) for place, values in zip(places, before, strict=True)):
            raise ValueError(f"it has none for {causal.config.model_type} models")
    except BaseException:
        undo()
        raise
    return undo


def _state(place: Any) -> dict[str, Any]:
    """Copy the attributes of a part or a file, and the table of inner parts."""
    values = dict(vars(place))
    return values | {"_modules": dict(values["_modules"])} if "_modules" in values else values


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name] is other[name] or (name == "_modules" and one[name] == other[name]) for name in one
    )
