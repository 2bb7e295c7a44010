"""Show each token of a tree its path: masks of rows that store shared tokens once.

    batch ─use_trees(model)─▶ `end` is taken out, so that no decoder receives it
    decoder ─transformers─▶ the masks of its kinds of layers: causal, of a window, of chunks
            ─registered by backend─▶ the same masks over positions, and only where k <= q < end[k]

transformers builds the masks of nearly all decoders in functions that are registered by backend: a tensor [B, 1, L, L]
for sdpa and eager, a BlockMask for flex. Those functions are extended here, so a window is counted in positions of the
path and every kind of layer gets its own mask. Without `end` in a batch, they do what they did. varlen has no mask, and
its Collator replaces `end` by places of keys.

    rows ─replacements─▶ what to replace for the proof of train.model.isolation, and what may move, and what must
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from packcorpus.tasks.storage.schemas import END
from packcorpus.train.model.attention import BACKENDS, BY_SEGMENTS, decoder_of, without_adapter

# Backends whose kernels read a mask.
WITH_MASK = tuple(name for name in BACKENDS if name not in BY_SEGMENTS)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the masks of a batch follow from, int[B, L] each."""

    end: torch.Tensor
    positions: torch.Tensor


# The batch that a decoder computes, by the identity of its config. It is kept until the next batch, because activation
# checkpointing may build masks again in the backward pass.
_batches: dict[int, Batch] = {}


def has_trees(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether rows store shared tokens once."""
    return END in rows[0]


def use_trees(model: Any) -> None:
    """Make a model, with or without an adapter, follow `end` in its batches."""
    causal = without_adapter(model)
    if not getattr(causal, "follows_end", False):
        causal.follows_end = True
        config = decoder_of(causal).config
        weakref.finalize(config, _batches.pop, id(config), None)
        causal.register_forward_pre_hook(_take_end, with_kwargs=True)


def _take_end(causal: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Note the trees of a batch before the model runs."""
    end, config = named.pop(END, None), id(decoder_of(causal).config)
    if end is None:
        _batches.pop(config, None)
        return args, named
    if named.get("attention_mask") is not None or named.get("position_ids") is None:
        raise ValueError("rows with `end` need their position_ids, and no attention_mask")
    _batches[config] = Batch(end, named["position_ids"])
    # With a mask, transformers does not look for conversations in the positions, which do not restart at a branch.
    return args, named | {"attention_mask": torch.ones_like(end)}


def _along_paths(build: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a function that builds the masks of a backend."""

    def build_along_paths(*args: Any, **named: Any) -> Any:
        batch = _batches.get(id(named.get("config")))
        if batch is None:
            return build(*args, **named)
        end, positions, plain = batch.end, batch.positions, named.get("mask_function", causal_mask_function)

        def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
            on_path = (key <= query) & (query < end[row, key])
            return on_path & plain(row, head, positions[row, query], positions[row, key])

        # All places count, and padding sees itself.
        return build(*args, **named | {"mask_function": sees, "attention_mask": None, "allow_is_causal_skip": False})

    return build_along_paths


for _backend in WITH_MASK:
    _name = BACKENDS[_backend]
    AttentionMaskInterface.register(_name, _along_paths(AttentionMaskInterface._global_mapping[_name]))


# -- the proof ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replacement:
    """Tokens of a batch to replace, bool[B, L], and where logits may and must move."""

    replaced: torch.Tensor
    reached: torch.Tensor  # the replaced tokens, and those that see them
    units: list[torch.Tensor]  # in each, logits must move


class TreesOfRows:
    """Structure of rows of equal lengths, read from their columns, not from a batch."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        end, positions, labels = (
            torch.stack([torch.as_tensor(row[name]) for row in rows]).long() for name in (END, "position_ids", "labels")
        )
        self._shape = rows_, length = end.shape
        continues = torch.zeros_like(end, dtype=torch.bool)
        continues[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
        # From here on, the rows are one sequence.
        self._positions, self._end = positions.flatten(), (end + length * torch.arange(rows_)[:, None]).flatten()
        starts = (~continues).flatten().nonzero().flatten()
        stops = torch.cat([starts[1:], torch.tensor([end.numel()])])
        piece = (~continues).flatten().cumsum(0) - 1
        trained = torch.bincount(piece[labels.flatten() >= 0], minlength=len(starts)) > 0
        self._is_tail = (self._end == stops[piece]) & trained[piece]
        self._is_stem = (self._end != stops[piece]) & trained[piece]
        self.starts, self._stops = starts[trained], stops[trained]  # of the samples, without padding
        self._depths = self._cover(self.starts)[self.starts] - 1

    @property
    def samples(self) -> int:
        return len(self.starts)

    def _cover(self, places: torch.Tensor) -> torch.Tensor:
        """Return by how many of `places` each place is seen, int64[B · L]."""
        edges = torch.zeros(len(self._end) + 1, dtype=torch.long)
        edges.index_add_(0, places, torch.ones_like(places))
        edges.index_add_(0, self._end[places], -torch.ones_like(places))
        return edges[:-1].cumsum(0)

    def _replacement(self, replaced: torch.Tensor, units: Sequence[torch.Tensor]) -> Replacement:
        reached = self._cover(replaced.nonzero().flatten()) > 0
        parts = [unit.view(self._shape) for unit in units]
        return Replacement(replaced.view(self._shape), reached.view(self._shape), parts)

    def _places(self, *spans: tuple[int, int]) -> torch.Tensor:
        chosen = torch.zeros(len(self._end), dtype=torch.bool)
        for start, stop in spans:
            chosen[start:stop] = True
        return chosen

    def replacements(self) -> list[Replacement]:
        """Return what to replace: every second tree, branch, and tail, and all stems.

        A tail is the part of a sample that no other sample sees. The rest of it is a stem, whose tokens the samples
        that branch off it must see. A branch is a sample and all that branch off it, here at the depth that has most.
        """
        branching = self._depths[self._depths > 0]
        kinds = [self._spans(self._depths == 0)]
        if len(branching):
            kinds += [self._spans(self._depths == branching.mode().values.item()), self._tails()]
        found = []
        for spans in kinds:
            for chosen in filter(None, (spans[::2], spans[1::2])):
                found.append(self._replacement(self._places(*chosen), [self._places(span) for span in chosen]))
        if len(branching):
            later = self.starts[self._depths > 0]
            stems = self._is_stem.clone()
            stems[later] = False  # copies
            found.append(self._replacement(stems, [self._places((at, at + 1)) for at in later.tolist()]))
        return found

    def _spans(self, chosen: torch.Tensor) -> list[tuple[int, int]]:
        starts = self.starts[chosen]
        return [*zip(starts.tolist(), self._end[starts].tolist(), strict=True)]

    def _tails(self) -> list[tuple[int, int]]:
        pairs = zip(self.starts.tolist(), self._stops.tolist(), strict=True)
        return [(stop - int(self._is_tail[start:stop].sum()), stop) for start, stop in pairs]

    def path(self) -> torch.Tensor | None:
        """Return the path of the sample that is furthest from the places of its positions.

        A path is the places of a sample's tokens in the rows as one sequence, int64[tokens]. Returns None if no sample
        branches off another.
        """
        if not (self._depths > 0).any():
            return None
        away = self.starts % self._shape[1] - self._positions[self.starts]
        number = int(away.masked_fill(self._depths == 0, -1).argmax())
        stop = int(self._stops[number])
        first = int(self.starts[number]) // self._shape[1] * self._shape[1]
        return (self._end[first:stop] >= stop).nonzero().flatten() + first
