"""What the Trainer is fed, by the format that was given.

    format 3.0   packed rows from memory ─default collator─▶ Trainer
    format 2.0   one conversation a row, tokenised by the manifest's template ─TRL's collator─▶ SFTTrainer

Both have the same face, so that a run need not know which it is.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.storage.splits import ANEW
from train.config import TrainingConfig
from train.data.corpus import PACKED, Corpus
from train.data.dataset import PackedDataset, Passes
from train.loop.trainer import packed_trainer
from train.model.attention import Collator


class PackedFeed:
    """Rows of format 3.0. `tokens` and `trained` are those of one epoch, without pads; `places` are with pads.
    `packings` of the training split are used in turn, one in each epoch."""

    own_loss = True  # the model's, not the trainer's

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        self.isolated = corpus.isolated
        # Digests of all packings are checked before the first step, and not hours later.
        packings = [name for name in corpus.splits if name == "train" or name.startswith(ANEW)]
        same = [name for name in packings if corpus.rows(name) == corpus.rows("train")]
        self.passes = Passes([PackedDataset(corpus, name, config.load) for name in same])
        self.train = self.passes.packings[0]
        self.validation = PackedDataset(corpus, "validation", config.load) if corpus.rows("validation") else None
        splits = [split for split in (*self.passes.packings, self.validation) if split]
        self.max_id = max(split.max_id for split in splits)
        self.tokens, self.trained = self.train.tokens, self.train.trained_tokens
        self.places = len(self.train) * corpus.sequence_length
        self.notes = list(self.train.notes)
        self.longest: Any = self.train  # every row is as long
        full = 100 * self.tokens / self.places
        self.described = (
            f"{len(self.train):,} rows of {corpus.sequence_length:,}, {full:.2f} % full, {_where(self.train)}"
        )
        self.packings = len(same)
        if self.packings > 1:
            self.described += f"; {self.packings} packings, each pass has the next"

    def collator(self, attention: str) -> Any:
        return Collator(attention)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        return packed_trainer(model, given, collator, self.passes, self.validation)

    def positions(self) -> torch.Tensor:
        """Of typical rows, int[rows, L]; without them a row is one conversation."""
        rows = [self.train[row] for row in range(min(64, len(self.train)))]
        length = len(rows[0]["input_ids"])
        return torch.stack([row.get("position_ids", torch.arange(length)) for row in rows])


class ConversationFeed:
    """Conversations of format 2.0, a row each, padded to the longest of a batch."""

    isolated = False  # nothing to keep apart: a row is one conversation
    packings = 1
    own_loss = False

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        from train.data.conversations import padding_tokenizer, sft_dataset

        self.train, counts = sft_dataset(corpus, "train")
        self.validation = sft_dataset(corpus, "validation")[0] if corpus.rows("validation") else None
        self._padding = padding_tokenizer(corpus)
        self.tokens, self.trained = counts.tokens, counts.trained
        lengths = [len(row) for row in self.train["input_ids"]]
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        self.longest = self.train.select(by_length)
        splits = [split for split in (self.train, self.validation) if split is not None]
        self.max_id = max(max(row) for split in splits for row in split["input_ids"])
        self.places = counts.tokens
        self._mean = max(1, round(counts.tokens / len(lengths)))
        self.notes = []
        if counts.dropped or counts.truncated:
            self.notes.append(
                f"of {counts.read:,} conversations {counts.truncated:,} were cut off at {corpus.sequence_length:,} "
                f"tokens and {counts.dropped:,} dropped, with no trained token within that"
            )
        self.described = f"{len(lengths):,} conversations, one a row, {self._mean:,} tokens on average"

    def collator(self, attention: str) -> Any:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(pad_token_id=self._padding.pad_token_id)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        from train.loop.sft_trainer import conversation_trainer

        return conversation_trainer(model, given, collator, self.train, self.validation, self._padding)

    def positions(self) -> torch.Tensor:
        return torch.arange(self._mean)[None]


Feed = PackedFeed | ConversationFeed


def open_feed(corpus: Corpus, config: TrainingConfig) -> Feed:
    """Read the rows, each shard's digest checked. Raises DataError or InputMissing, naming the file."""
    return PackedFeed(corpus, config) if corpus.format_version == PACKED else ConversationFeed(corpus, config)


def _where(dataset: PackedDataset) -> str:
    return f"{dataset.nbytes / 1e6:,.1f} MB {'in memory' if dataset.load == 'memory' else 'mapped'}"
