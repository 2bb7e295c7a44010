"""Divide steps among the ranks, and feed the Trainer.

    format 3.0   packed rows, in random order ─shuffled_steps─▶ ┐
                 or whole groups of `balance` ─balanced_steps─▶ ├ the steps of an epoch ─StepRows─▶ Trainer
    format 3.1   steps of one length each ─────mixed_steps────▶ ┘
    format 2.0   conversations, tokenized with the template ─shuffled_steps─▶ StepRows ─TRL's collator─▶ SFTTrainer

Step k has the same rows on any number of ranks and with any micro-batch, so a run may continue on another number of
ranks. The last step of an epoch has the remaining rows. A rank without rows receives a *filler*, a row without a
trained token, so that all ranks run the same number of passes. All feeds have the same interface, so a run does not
depend on the format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.schemas import END, LOSS_WEIGHT
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.data.steps import Order, balance_of, is_in_order, order_of, packings_of, shuffled_steps
from packcorpus.train.loop.run_folder import WITHOUT_VALIDATION
from packcorpus.train.loop.trainer import conversation_trainer, packed_trainer
from packcorpus.train.model.attention import Collator

# -- ranks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a step: each rank runs `passes` passes of `micro_batch` rows."""

    ranks: int
    micro_batch: int
    passes: int
    rows_per_step: int

    @classmethod
    def of(cls, given: dict[str, Any], rows_per_step: int | None = None) -> Shares:
        """Return the shares; without `rows_per_step`, all passes are full."""
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size, passes = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
        return cls(ranks, size, passes, rows_per_step or ranks * size * passes)


class StepRows(torch.utils.data.Dataset):
    """Rows of steps for a DataLoader that asks for numbers in sequence.

    The DataLoader of the Trainer deals batches of `micro_batch` numbers to the ranks in turn. Batch b belongs to rank
    b % ranks, and is its pass b // ranks. If `spread` is set, every step has all passes, and a step with fewer rows
    spreads them over its passes. Otherwise, only the last step of an epoch has fewer rows, and it has fewer passes.
    `filler` makes a row for a rank without rows.
    """

    def __init__(self, order: Order, shares: Shares, filler: Callable[[Any], Any], *, spread: bool = False):
        self._order, self._shares, self.filler, self._spread = order, shares, filler, spread
        self.set_epoch(0)

    def set_epoch(self, number: int) -> None:
        """Switch to the order of an epoch, counted from 0; accelerate calls this."""
        self._steps = self._order(number)

    def __len__(self) -> int:
        shares = self._shares
        last = math.ceil(math.ceil(len(self._steps[-1].numbers) / shares.ranks) / shares.micro_batch)
        passes = (len(self._steps) - 1) * shares.passes + (shares.passes if self._spread else last)
        return passes * shares.ranks * shares.micro_batch

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return the rows of the batch that begins with the first of `numbers`."""
        size, passes = self._shares.micro_batch, self._shares.passes
        turn, rank = divmod(numbers[0] // size, self._shares.ranks)
        step, number = divmod(turn, passes)
        rows, of_step = self._steps[step]
        mine = of_step[rank :: self._shares.ranks]
        first, last = number * size, (number + 1) * size
        if self._spread:
            first, last = len(mine) * number // passes, len(mine) * (number + 1) // passes
        taken = mine[first:last].tolist()
        return list(rows.__getitems__(taken)) if taken else [self.filler(rows)]


def empty_row(rows: PackedDataset) -> dict[str, torch.Tensor]:
    """Return a row of a split's length without a trained token."""
    corpus, length = rows.corpus, rows.length
    ids, labels = torch.zeros(length, dtype=torch.int32), torch.full((length,), -100, dtype=torch.int64)
    positions = {"position_ids": torch.arange(length, dtype=torch.int32)} if corpus.isolated else {}
    ends = {END: torch.full((length,), length, dtype=torch.int32)} if corpus.layout.is_shared else {}
    weights = {LOSS_WEIGHT: torch.zeros(length)} if corpus.weighted else {}
    return {"input_ids": ids, "labels": labels, **positions, **ends, **weights}


def empty_conversation(_: Any) -> dict[str, list[int]]:
    """Return a conversation of format 2.0 without a trained token."""
    return {"input_ids": [0, 0], "labels": [-100, -100]}


# -- feeds -------------------------------------------------------------------------------------------------------------


class PackedFeed:
    """Packed rows of format 3.0, or of several lengths (format 3.1).

    `tokens` and `trained` count the tokens of one epoch without padding, and `padded_tokens` with padding. The
    `packings` of the training split are used in turn, one in each epoch. If rows have several lengths, `rows` is the
    number of rows of the longest length that have as many tokens. Measurements before the first step use the longest
    rows, because passes of shorter rows have the same number of tokens.
    """

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        several = len(corpus.lengths) > 1
        packings = packings_of({split: corpus.rows(split) for split in corpus.splits}, corpus.lengths)
        # All packings are opened here, so that their digests are checked before the first step, not hours later.
        self._packings = [
            {length: PackedDataset(corpus, name, config.load) for length, name in names.items()} for names in packings
        ]
        names = [f"validation-{length}" if several else "validation" for length in corpus.lengths]
        held_out = [PackedDataset(corpus, name, config.load) for name in names if corpus.rows(name)]
        self.validation: Any = ConcatDataset(held_out) if held_out else None
        opened = [*self._packings[0].values()]
        self.isolated, self._seed = corpus.isolated, config.seed
        self.train = opened[-1]
        self.equal = corpus.layout.padding == "row"
        self.longest: Any = self.train
        if not self.equal:  # time and memory that are measured on the first rows are an upper bound for all rows
            self.longest = Subset(self.train, np.argsort(-self.train.lengths, kind="stable").tolist())
        self.spread = several  # a step with fewer rows has as many passes as the others
        self._mix = corpus.layout.mix
        everything = [rows for packing in self._packings for rows in (*packing.values(), *held_out)]
        self.max_id = max(rows.max_id for rows in everything)
        # Kernels compute in blocks of up to 128 tokens.
        self._longest_segment = -(-max(rows.longest_segment for rows in everything) // 128) * 128
        self.tokens = sum(rows.tokens for rows in opened)
        self.trained = sum(rows.trained_tokens for rows in opened)
        self.padded_tokens = sum(int(rows.lengths.sum()) for rows in opened)
        self.rows = math.ceil(self.padded_tokens / self.train.length) if several else len(self.train)
        self.notes = list(dict.fromkeys(note for rows in opened for note in rows.notes))
        self.in_memory = all(rows.load == "memory" for rows in opened)
        up_to = "up to " * (not self.equal)
        of_lengths = ", ".join(f"{counted(len(rows), 'row')} of {up_to}{rows.length:,}" for rows in opened)
        self.described = (
            f"{of_lengths}, {100 * self.tokens / self.padded_tokens:.2f} % full, "
            f"{sum(rows.nbytes for rows in opened) / 1e6:,.1f} MB {'in memory' if self.in_memory else 'mapped'}"
        )
        if several:
            self.described += f"; steps of one length each, mix: {self._mix}"
        self.packings = len(packings)
        if self.packings > 1:
            self.described += f"; {self.packings} packings, one for each epoch in turn"
        self.balance = balance_of(corpus.manifest)  # the steps that rows are ordered for
        self._groups: list[list[int]] = []
        if self.balance:
            assert corpus.manifest is not None
            of_packings = [corpus.manifest.splits[name] for names in packings for name in names.values()]
            self._groups = [split.groups or [split.rows] for split in of_packings]
            self.described += f"; balanced for {self.balance.ranks} ranks"
        self._in_order = is_in_order(corpus.manifest)
        if self._in_order:
            self.described += "; in the order of the data"

    def collator(self, attention: str) -> Any:
        return Collator(attention, self._longest_segment)

    def order(self, rows_per_step: int) -> Order:
        """Return the order of rows for steps of a size."""
        settings = (self.balance, self._groups, rows_per_step, self._seed, self._in_order)
        return order_of(self._packings, self._mix, *settings)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any, rows_per_step: int | None = None) -> Any:
        """Build the Trainer; without `rows_per_step`, all passes of a step are full."""
        shares = Shares.of(given, rows_per_step)
        rows = StepRows(self.order(shares.rows_per_step), shares, empty_row, spread=self.spread)
        return packed_trainer(model, given, collator, rows, self.validation)

    def positions(self) -> torch.Tensor:
        """Return the position_ids of typical rows, one after another, int[1, tokens]."""
        rows = [self.train[row] for row in range(min(64, len(self.train)))]
        return torch.cat([row.get("position_ids", torch.arange(len(row["input_ids"]))) for row in rows])[None]


class ConversationFeed:
    """Conversations of format 2.0, one per row, padded to the longest of a batch."""

    equal = True  # padded by the collator
    balance = None
    isolated = False  # nothing to isolate: a row is one conversation
    packings = 1
    in_memory = True

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        from packcorpus.train.data.conversations import padding_tokenizer, sft_dataset

        self.train, counts = sft_dataset(corpus, "train")
        self.validation = sft_dataset(corpus, "validation")[0] if corpus.rows("validation") else None
        self._padding, self._seed = padding_tokenizer(corpus), config.seed
        self.tokens, self.trained, self.padded_tokens = counts.tokens, counts.trained, counts.tokens
        lengths = [len(row) for row in self.train["input_ids"]]
        self.rows = len(lengths)
        self.longest = self.train.select(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))
        splits = [split for split in (self.train, self.validation) if split is not None]
        self.max_id = max(max(row) for split in splits for row in split["input_ids"])
        self._mean = max(1, round(counts.tokens / len(lengths)))
        self.notes = []
        if counts.dropped or counts.truncated:
            self.notes.append(
                f"of {counts.read:,} conversations {counts.truncated:,} were truncated to {corpus.sequence_length:,} "
                f"tokens and {counts.dropped:,} dropped, because no token within that length is trained on"
            )
        self.described = f"{counted(len(lengths), 'conversation')}, one per row, {self._mean:,} tokens on average"

    def collator(self, attention: str) -> Any:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(pad_token_id=self._padding.pad_token_id)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any, rows_per_step: int | None = None) -> Any:
        trainer = conversation_trainer(model, given, collator, self.train, self.validation, self._padding)
        shares = Shares.of(given, rows_per_step)
        order = partial(shuffled_steps, [self.train], shares.rows_per_step, self._seed)
        trainer.train_dataset = StepRows(order, shares, empty_conversation)
        return trainer

    def positions(self) -> torch.Tensor:
        return torch.arange(self._mean)[None]


Feed = PackedFeed | ConversationFeed


def open_feed(corpus: Corpus, config: TrainingConfig) -> Feed:
    """Open the rows and check the digests of shards."""
    feed: Feed = PackedFeed(corpus, config) if corpus.packed else ConversationFeed(corpus, config)
    if os.environ.get(WITHOUT_VALIDATION):
        feed.validation = None
    return feed
