"""Group the tokens of a row into runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.encoders.encoder import Encoder
from tasks.storage.schemas import IGNORED


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one kind: text, or control tokens, that are trained on or not."""

    ids: list[int]
    trained: bool
    control: bool


def runs_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray) -> list[Run]:
    """Tokens of one conversation, cut where training begins or ends and around every control token."""
    found: list[Run] = []
    marks = encoder.control_strings
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        trained = label != IGNORED
        control = token in marks or token == encoder.unk_id
        last = found[-1] if found else None
        if last is None or control or (last.trained, last.control) != (trained, control):
            found.append(Run([token], trained, control))
        else:
            last.ids.append(token)
    return found
