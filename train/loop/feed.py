"""Feed rows to the Trainer, depending on the format of the corpus.

    format 3.0   packed rows, shuffled, or in the order of `balance` ─default collator─▶ Trainer
    format 3.1   packed rows of several lengths, steps of one length each ─▶ Trainer
    format 2.0   one conversation per row, tokenized with the manifest's template ─TRL's collator─▶ SFTTrainer

All feeds have the same interface, so a run does not depend on the format. All order their rows in steps, which StepRows
divides among the ranks.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from tasks.core.printable import counted
from tasks.storage.layout import TRAIN_EPOCH_PREFIX, kind_of
from train.config import TrainingConfig
from train.data.corpus import Corpus
from train.data.dataset import PackedDataset
from train.data.steps import (
    Mix,
    Order,
    Shares,
    StepRows,
    balance_of,
    balanced_steps,
    empty_conversation,
    empty_row,
    first_row,
    mixed_steps,
    shuffled_steps,
)
from train.loop.run_folder import WITHOUT_VALIDATION
from train.loop.trainer import packed_trainer
from train.model.attention import Collator


class PackedFeed:
    """Packed rows of format 3.0, or of several lengths (format 3.1).

    `tokens` and `trained` count the tokens of one epoch without padding, and `padded_tokens` with padding. The
    `packings` of the training split are used in turn, one in each epoch. If rows have several lengths, `rows` is the
    number of rows of the longest length that have as many tokens. Measurements before the first step use the longest
    rows, because passes of shorter rows have the same number of tokens.
    """

    own_loss = True  # the model computes the loss, not the trainer

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        several = len(corpus.lengths) > 1

        def name_of(kind: str, length: int) -> str:
            return f"{kind}-{length}" if several else kind

        def is_like_train(kind: str) -> bool:
            return all(corpus.rows(name_of(kind, n)) == corpus.rows(name_of("train", n)) for n in lengths)

        lengths = [n for n in corpus.lengths if corpus.rows(name_of("train", n))] or [corpus.sequence_length]
        kinds = dict.fromkeys(kind_of(name) for name in corpus.splits)
        packings = [kind for kind in kinds if kind == "train" or kind.startswith(TRAIN_EPOCH_PREFIX)]
        same = [kind for kind in packings if is_like_train(kind)]
        # All packings are opened here, so that their digests are checked before the first step, not hours later.
        self._packings = [{n: PackedDataset(corpus, name_of(kind, n), config.load) for n in lengths} for kind in same]
        names = [name_of("validation", n) for n in corpus.lengths]
        held_out = [PackedDataset(corpus, name, config.load) for name in names if corpus.rows(name)]
        self.validation: Any = ConcatDataset(held_out) if held_out else None
        first = self._packings[0]
        opened = [*first.values()]
        self.isolated, self._seed = corpus.isolated, config.seed
        self.train = first[lengths[-1]]
        self.equal = corpus.layout.padding == "row"
        self.longest: Any = self.train
        if not self.equal:  # time and memory that are measured on the first rows are an upper bound for all rows
            self.longest = Subset(self.train, np.argsort(-self.train.lengths, kind="stable").tolist())
        self.spread = several  # a step with fewer rows has as many passes as the others
        self._mix: Mix = corpus.layout.mix or "tokens"
        self.max_id = max(
            rows.max_id for rows in (*(rows for own in self._packings for rows in own.values()), *held_out)
        )
        self.tokens = sum(rows.tokens for rows in opened)
        self.trained = sum(rows.trained_tokens for rows in opened)
        self.padded_tokens = sum(int(rows.lengths.sum()) for rows in opened)
        self.rows = math.ceil(self.padded_tokens / self.train.length) if several else len(self.train)
        self.notes = list(dict.fromkeys(note for rows in opened for note in rows.notes))
        self.in_memory = all(rows.load == "memory" for rows in opened)
        up_to = "up to " * (corpus.layout.padding == "none")
        of_lengths = ", ".join(f"{counted(len(rows), 'row')} of {up_to}{length:,}" for length, rows in first.items())
        size = sum(rows.nbytes for rows in opened) / 1e6
        self.described = (
            f"{of_lengths}, {100 * self.tokens / self.padded_tokens:.2f} % full, {size:,.1f} MB "
            f"{'in memory' if self.in_memory else 'mapped'}"
        )
        if several:
            self.described += f"; steps of one length each, mix: {self._mix}"
        self.packings = len(same)
        if self.packings > 1:
            self.described += f"; {self.packings} packings, one for each epoch in turn"
        self.balance = balance_of(corpus)  # the steps that rows are ordered for
        if self.balance:
            assert corpus.manifest is not None
            self._groups = [corpus.manifest.splits[kind].groups or [self.rows] for kind in same]
            self.described += f"; balanced for {self.balance.ranks} ranks"

    def collator(self, attention: str) -> Any:
        return Collator(attention)

    def order(self, rows_per_step: int) -> Order:
        """Return the order of rows for steps of a size."""
        if self.spread:
            return partial(mixed_steps, self._packings, rows_per_step, self._mix, self._seed)
        packings = [rows for packing in self._packings for rows in packing.values()]
        if self.balance:
            return partial(balanced_steps, packings, self._groups, self.balance, rows_per_step, self._seed)
        return partial(shuffled_steps, packings, rows_per_step, self._seed)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any, rows_per_step: int | None = None) -> Any:
        """Build the Trainer; without `rows_per_step`, all passes of a step are full."""
        shares = Shares.of(given, rows_per_step)
        rows = StepRows(self.order(shares.rows_per_step), shares, empty_row, spread=self.spread)
        trainer = packed_trainer(model, given, collator, rows, self.validation)
        if not (trainer.model_accepts_loss_kwargs or self.train.corpus.weighted):
            # The model computes the mean loss of each pass, which would be NaN without a trained token.
            rows.filler = first_row
        return trainer

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
    own_loss = False
    in_memory = True

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        from train.data.conversations import padding_tokenizer, sft_dataset

        self.train, counts = sft_dataset(corpus, "train")
        self.validation = sft_dataset(corpus, "validation")[0] if corpus.rows("validation") else None
        self._padding, self._seed = padding_tokenizer(corpus), config.seed
        self.tokens, self.trained = counts.tokens, counts.trained
        lengths = [len(row) for row in self.train["input_ids"]]
        self.rows = len(lengths)
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        self.longest = self.train.select(by_length)
        splits = [split for split in (self.train, self.validation) if split is not None]
        self.max_id = max(max(row) for split in splits for row in split["input_ids"])
        self.padded_tokens = counts.tokens
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
        from train.loop.trainer import conversation_trainer

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
