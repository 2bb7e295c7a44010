"""One conversation of a corpus, as it is trained on.

FILE:LINE, or a number ─index.arrow─▶ places in the rows ─Sample(s)─▶ tokens, labels, weights
                                   └▶ the record in its source ─────▶ messages
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.failures import explained
from packcorpus.rows import Rows
from packcorpus.tasks.cli.row_view import show_conversation
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.inspection import rows as inspection
from packcorpus.tasks.inspection.lookup import pieces_of_number, places_at
from packcorpus.tasks.inspection.sources import messages_of_record
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import LOSS_WEIGHT
from packcorpus.tasks.storage.shards import sample_of_piece
from packcorpus.views import as_html, as_text


@dataclass(frozen=True, eq=False)
class Sample:
    """The tokens of a conversation, or of one of its turns, as they are in the rows.

    turn     the message that is trained on, from 0; None if the sample is the whole conversation
    tokens   int32[n]
    labels   int32[n], -100 where a token is not trained on
    weights  float32[n], or None if the corpus has no weights
    rows     (split, row) of each piece and of each copy
    dropped  why the sample is in no row, or ""

        for sample in packcorpus.open("mine").conversation("chats.jsonl:3").samples:
            print(sample.turn, len(sample.tokens), sample.rows)
    """

    turn: int | None
    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None
    rows: list[tuple[str, int]]
    dropped: str


class Conversation:
    """One conversation of a corpus, as it is trained on.

    In a terminal, it is shown in color, and in a notebook as HTML: what is ⟦trained on⟧, what is not, and every
    ▐control token▌. Characters that a terminal or a browser would obey are escaped.

    place     str: FILE:LINE in its source
    number    int: its number in the index
    samples   list of Sample: a conversation has several if its turns have different prompts
    tokens    int32[n]: those of all samples, one after another; empty if the conversation was dropped, or in a corpus
              with `packing: false`
    labels    int32[n], -100 where a token is not trained on
    weights   float32[n], or None if the corpus has no weights
    messages  list of {"role": str, "content": str, …}, read from the source at first use. Raises InputMissing if the
              source is gone, and DataError if the conversation in it has changed
    text      str: the tokens as text

        conversation = packcorpus.open("mine").conversation("chats.jsonl:3")
        trained = conversation.tokens[conversation.labels != -100]
    """

    def __init__(self, manifest: Manifest, folder: Path, view: inspection.Conversation):
        self._manifest, self._folder, self._view = manifest, folder, view
        self.number: int = view.conversation
        self.place: str = view.pieces[0]["origin"]

    def __repr__(self) -> str:
        return as_text(show_conversation, self._view)

    def _repr_html_(self) -> str:
        return as_html(show_conversation, self._view)

    @cached_property
    def samples(self) -> list[Sample]:
        by_turn: dict[int, list[inspection.Piece]] = {}
        for piece in self._view.pieces:
            by_turn.setdefault(piece.get("turn", -1), []).append(piece)
        return [self._sample(turn, pieces) for turn, pieces in sorted(by_turn.items())]

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([sample.tokens for sample in self.samples])

    @property
    def labels(self) -> np.ndarray:
        return np.concatenate([sample.labels for sample in self.samples])

    @property
    def weights(self) -> np.ndarray | None:
        weights = [sample.weights for sample in self.samples if sample.weights is not None]
        return np.concatenate(weights) if weights else None

    @property
    def text(self) -> str:
        return "".join(span.text for piece in self._view.pieces for span in piece.get("spans", ()))

    @cached_property
    @explained
    def messages(self) -> list[dict[str, Any]]:
        return messages_of_record(self._manifest, self._folder, self._view.pieces[0])

    def _sample(self, turn: int, pieces: list[inspection.Piece]) -> Sample:
        placed = [piece for piece in pieces if piece["row"] is not None]
        parts = {piece["first"]: piece for piece in reversed(placed)}  # the first copy of each piece
        found: dict[str, list[np.ndarray]] = {}
        for _, piece in sorted(parts.items()):
            row = Rows(self._manifest, self._folder, piece["split"])[piece["row_of_split"]]
            for name, values in sample_of_piece(row, piece["start"], piece["length"]).items():
                found.setdefault(name, []).append(values)
        tokens, labels = (np.concatenate(found.get(name, [np.zeros(0, np.int32)])) for name in ("input_ids", "labels"))
        weights = np.concatenate(found[LOSS_WEIGHT]) if LOSS_WEIGHT in found else None
        rows = [(piece["split"], piece["row_of_split"]) for piece in placed]
        dropped = next((piece["why"] for piece in pieces if piece["row"] is None), "")
        return Sample(None if turn < 0 else turn, tokens, labels, weights, rows, dropped)


def find_conversation(path: Path, manifest: Manifest, folder: Path, place: str | int) -> Conversation:
    """Read the conversation at FILE:LINE, or with a number. Raises UsageError."""
    try:
        if isinstance(place, str):
            places = places_at(manifest, folder, place)
        else:
            places = pieces_of_number(manifest, folder, place)
    except UsageError as error:
        # It names the options of the command line.
        error.message = error.message.removeprefix("--at ").replace("--conversation", "conversation")
        raise
    return Conversation(manifest, folder, inspection.conversation(path, places))
