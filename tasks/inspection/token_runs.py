"""Group the tokens of a conversation by kind and decode them.

ids, labels ─runs_of─▶ Runs of ids ─spans_of─▶ Spans of text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.encoders.encoder import Encoder
from tasks.storage.schemas import IGNORED


@dataclass(frozen=True, slots=True)
class Run:
    """Neighboring tokens of one kind: text or a control token, trained or not."""

    ids: list[int]
    trained: bool
    control: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A run with its text.

    `tokens` holds the text of each token, if it was requested.
    """

    text: str
    trained: bool
    control: bool
    ids: list[int]
    tokens: list[str] | None = None


def runs_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray) -> list[Run]:
    """Split the tokens of one conversation into runs.

    A run ends where training starts or ends. Every control token is its own run.
    """
    runs: list[Run] = []
    marks = encoder.control_strings
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        trained = label != IGNORED
        control = token in marks or token == encoder.unk_id
        last = runs[-1] if runs else None
        if last is None or control or (last.trained, last.control) != (trained, control):
            runs.append(Run([token], trained, control))
        else:
            last.ids.append(token)
    return runs


def spans_of(encoder: Encoder, ids: np.ndarray, labels: np.ndarray, tokens: bool = False) -> list[Span]:
    """Decode the runs of one conversation.

    With `tokens`, each token is also decoded separately.
    """
    return [
        Span(
            encoder.decode(run.ids),
            run.trained,
            run.control,
            run.ids,
            list(_texts_of_tokens(encoder, run.ids)) if tokens else None,
        )
        for run in runs_of(encoder, ids, labels)
    ]


def _texts_of_tokens(encoder: Encoder, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token.

    Tokens that together form one character are one text.
    """
    held = b""
    for token in ids:
        held += encoder.token_bytes(token)
        try:
            text = held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                continue
            text = held.decode("utf-8", "replace")
        yield text
        held = b""
    if held:
        yield held.decode("utf-8", "replace")
