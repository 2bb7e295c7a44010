"""Feed rows to the Trainer, depending on the format of the corpus.

    format 3.0   packed rows from memory ─default collator─▶ Trainer
                 in the order of balanced steps, if the corpus has `balance` ─▶ Trainer
                 streamed, dealt to the ranks (load: stream) ─▶ Trainer
    format 3.1   packed rows of several lengths, steps of one length each ─▶ Trainer
    format 2.0   one conversation per row, tokenized with the manifest's template ─TRL's collator─▶ SFTTrainer

All feeds have the same interface, so a run does not depend on the format.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch

from tasks.core.printable import counted
from tasks.row_settings import Balance
from tasks.storage.splits import TRAIN_EPOCH_PREFIX, kind_of
from tasks.stores.mirror import remote_with
from train.config import TrainingConfig
from train.data.balanced_rows import BalancedRows, balance_of
from train.data.corpus import Corpus
from train.data.dataset import Longest, PackedDataset, Passes
from train.data.dealt_rows import DealtRows, empty_row
from train.data.mixed_rows import JoinedRows, Mix, MixedRows
from train.data.shard_reader import last_id
from train.data.stream import StreamedRows, check_streamable
from train.loop.run_folder import WITHOUT_VALIDATION
from train.loop.trainer import packed_trainer
from train.machine.ranks import together
from train.model.attention import Collator


class PackedFeed:
    """Packed rows of format 3.0.

    `tokens` and `trained` count the tokens of one epoch without padding, and `padded_tokens` with padding. The
    `packings` of the training split are used in turn, one in each epoch.
    """

    balance: Balance | None = None  # the steps that rows are ordered for
    own_loss = True  # the model computes the loss, not the trainer
    in_turn = False  # whether rows are read in a fixed order; if not, any rank may ask for any row

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        self.isolated = corpus.isolated
        load = "auto" if config.load == "stream" else config.load  # only StreamedFeed streams
        # All packings are opened here, so that their digests are checked before the first step, not hours later.
        packings = [name for name in corpus.splits if name == "train" or name.startswith(TRAIN_EPOCH_PREFIX)]
        same = [name for name in packings if corpus.rows(name) == corpus.rows("train")]
        self.passes = Passes([PackedDataset(corpus, name, load) for name in same])
        self.train = self.passes.packings[0]
        self.validation = PackedDataset(corpus, "validation", load) if corpus.rows("validation") else None
        splits = [split for split in (*self.passes.packings, self.validation) if split]
        self.max_id = max(split.max_id for split in splits)
        self.tokens, self.trained = self.train.tokens, self.train.trained_tokens
        self.padded_tokens = int(self.train.lengths.sum())
        self.rows = len(self.train)
        self.notes = list(self.train.notes)
        self.in_memory = self.train.load == "memory"
        self.equal = corpus.shape.padding == "row"
        self.longest: Any = self.train if self.equal else Longest(self.train)
        full = 100 * self.tokens / self.padded_tokens
        rows = counted(len(self.train), "row")
        self.described = f"{rows} of {_size(corpus)}, {full:.2f} % full, {_location(self.train)}"
        self.packings = len(same)
        if self.packings > 1:
            self.described += f"; {self.packings} packings, one for each epoch in turn"
        self._seed, self.balance = config.seed, balance_of(corpus)
        splits_of_manifest = corpus.manifest.splits if corpus.manifest else {}
        self._groups = [splits_of_manifest[name].groups or [self.rows] for name in same] if self.balance else []
        if self.balance:
            self.described += f"; balanced for {self.balance.ranks} ranks"

    def collator(self, attention: str) -> Any:
        return Collator(attention)

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        if self.balance is None:
            return packed_trainer(model, given, collator, self.passes, self.validation)
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        steps = (ranks, given["per_device_train_batch_size"], given["gradient_accumulation_steps"])
        rows = BalancedRows(self.passes, self._groups, self.balance, steps, self._seed)
        given |= {"train_sampling_strategy": "sequential"}  # the rows are already in order
        return packed_trainer(model, given, collator, rows, self.validation)

    def positions(self) -> torch.Tensor:
        """Return the position_ids of typical rows, one after another, int[1, tokens].

        A row without position_ids has 0 … L - 1.
        """
        rows = [self.train[row] for row in range(min(64, len(self.train)))]
        return torch.cat([row.get("position_ids", torch.arange(len(row["input_ids"]))) for row in rows])[None]


class StreamedFeed(PackedFeed):
    """Packed rows of format 3.0 that are streamed in order.

    Measurements use the first shard. Token counts are estimates from the counts of the whole corpus, in proportion to
    the rows.
    """

    in_turn = True

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        check_streamable(corpus)
        assert corpus.manifest is not None
        self._corpus, self._config, self.isolated = corpus, config, corpus.isolated
        packings = [name for name in corpus.splits if name == "train" or name.startswith(TRAIN_EPOCH_PREFIX)]
        self._splits = [name for name in packings if corpus.rows(name) == corpus.rows("train")]
        self.rows, self.packings, self.in_memory = corpus.rows("train"), len(self._splits), False
        shards = corpus.splits["train"]
        self.train = PackedDataset(replace(corpus, splits={"train": shards[:1]}), "train", "mmap")
        self.equal = corpus.shape.padding == "row"
        self.longest = self.train if self.equal else Longest(self.train)
        self.validation = PackedDataset(corpus, "validation") if corpus.rows("validation") else None
        self.max_id = last_id(corpus)
        ledger, of_all = corpus.manifest.ledger.tokens, corpus.manifest.packing_metadata.rows
        self.padded_tokens = round(self.rows * (ledger.packed + ledger.padding) / of_all)
        full = ledger.packed / (ledger.packed + ledger.padding)
        self.tokens = round(full * self.padded_tokens)
        self.trained = round(self.tokens * ledger.trained / ledger.packed)
        self.notes = []
        if config.loader_workers:
            self.notes.append("loader_workers: has no effect with load: stream, where threads read ahead")
        remote = remote_with(corpus.folder)
        where = f"copied to {config.cache}" if config.cache else "copied from the bucket" if remote else "mapped"
        self.described = (
            f"{counted(self.rows, 'row')} of {_size(corpus)}, {100 * full:.2f} % full, streamed from "
            f"{counted(len(shards), 'shard')}, {where}"
        )
        if self.packings > 1:
            self.described += f"; {self.packings} packings, one for each epoch in turn"

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        config, micro_batch = self._config, given["per_device_train_batch_size"]
        with together():
            ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            rows = StreamedRows(
                self._corpus,
                micro_batch * given["gradient_accumulation_steps"] * ranks,
                seed=config.seed,
                splits=self._splits,
                cache=config.cache,
                cache_bytes=config.cache_bytes,
            )
        dealt = DealtRows(rows, micro_batch, empty_row(self._corpus))
        # The rows are already in order, and a process that copies rows would only add work.
        given |= {"train_sampling_strategy": "sequential", "dataloader_num_workers": 0}
        trainer = packed_trainer(model, given, collator, dealt, self.validation)
        if not trainer.model_accepts_loss_kwargs:  # the loss of a batch without trained tokens would be NaN
            dealt.filler = self.train[0]
        return trainer


class MixedFeed(PackedFeed):
    """Packed rows of several lengths (format 3.1).

    `rows` is the number of rows of the longest length that have as many tokens. Measurements before the first step use
    the longest rows, because passes of shorter rows have the same number of tokens.
    """

    in_turn = True
    equal = True  # every pass has the same number of tokens

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        assert corpus.manifest is not None
        self._corpus, self._config, self.isolated = corpus, config, corpus.isolated
        self._mix: Mix = corpus.shape.mix or "tokens"
        load = "auto" if config.load == "stream" else config.load
        lengths = [length for length in corpus.lengths if corpus.rows(f"train-{length}")]
        kinds = dict.fromkeys(kind_of(name) for name in corpus.splits)
        same = [
            kind
            for kind in kinds
            if kind != "validation"
            and all(corpus.rows(f"{kind}-{length}") == corpus.rows(f"train-{length}") for length in lengths)
        ]
        self._packings = [
            {length: PackedDataset(corpus, f"{kind}-{length}", load) for length in lengths} for kind in same
        ]
        held_out = [
            PackedDataset(corpus, f"validation-{length}", load)
            for length in corpus.lengths
            if corpus.rows(f"validation-{length}")
        ]
        first = self._packings[0]
        self.train = self.longest = first[lengths[-1]]
        self.validation: Any = JoinedRows(held_out) if held_out else None
        self.max_id = max(rows.max_id for own in (*(own.values() for own in self._packings), held_out) for rows in own)
        self.tokens = sum(rows.tokens for rows in first.values())
        self.trained = sum(rows.trained_tokens for rows in first.values())
        self.padded_tokens = sum(len(rows) * length for length, rows in first.items())
        self.rows = math.ceil(self.padded_tokens / self.longest.length)
        self.notes = list(dict.fromkeys(note for rows in first.values() for note in rows.notes))
        self.in_memory = all(rows.load == "memory" for rows in first.values())
        of_lengths = ", ".join(f"{counted(len(rows), 'row')} of {length:,}" for length, rows in first.items())
        size = sum(rows.nbytes for rows in first.values()) / 1e6
        self.described = (
            f"{of_lengths}, {100 * self.tokens / self.padded_tokens:.2f} % full, {size:,.1f} MB "
            f"{'in memory' if self.in_memory else 'mapped'}; steps of one length each, mix: {self._mix}"
        )
        self.packings = len(same)
        if self.packings > 1:
            self.described += f"; {self.packings} packings, one for each epoch in turn"

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        micro_batch = given["per_device_train_batch_size"]
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        batches, longest = given["gradient_accumulation_steps"] * ranks, self.train.length
        mixed = MixedRows(self._packings, longest, micro_batch, batches, self._mix, self._config.seed)
        given |= {"train_sampling_strategy": "sequential"}  # the rows are already in order
        trainer = packed_trainer(model, given, collator, mixed, self.validation)
        if not trainer.model_accepts_loss_kwargs:  # the loss of a batch without trained tokens would be NaN
            mixed.fillers = {length: rows[0] for length, rows in self._packings[0].items()}
        return trainer


class ConversationFeed:
    """Conversations of format 2.0, one per row, padded to the longest of a batch."""

    equal = True  # padded by the collator
    in_turn = False
    balance = None
    isolated = False  # nothing to isolate: a row is one conversation
    packings = 1
    own_loss = False
    in_memory = True

    def __init__(self, corpus: Corpus, config: TrainingConfig):
        from train.data.conversations import padding_tokenizer, sft_dataset

        self.train, counts = sft_dataset(corpus, "train")
        self.validation = sft_dataset(corpus, "validation")[0] if corpus.rows("validation") else None
        self._padding = padding_tokenizer(corpus)
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

    def trainer(self, model: Any, given: dict[str, Any], collator: Any) -> Any:
        from train.loop.sft_trainer import conversation_trainer

        return conversation_trainer(model, given, collator, self.train, self.validation, self._padding)

    def positions(self) -> torch.Tensor:
        return torch.arange(self._mean)[None]


Feed = PackedFeed | ConversationFeed


def open_feed(corpus: Corpus, config: TrainingConfig) -> Feed:
    """Open the rows and check the digests of shards.

    Streamed shards are checked when they are read. Raises DataError or InputMissing, which name the file.
    """
    feed: Feed
    if config.load == "stream":
        feed = StreamedFeed(corpus, config)
    elif len(corpus.lengths) > 1:
        feed = MixedFeed(corpus, config)
    else:
        feed = PackedFeed(corpus, config) if corpus.packed else ConversationFeed(corpus, config)
    if config.cache and config.load != "stream":
        feed.notes.append("cache: has no effect without load: stream")
    if os.environ.get(WITHOUT_VALIDATION):
        feed.validation = None
    return feed


def _size(corpus: Corpus) -> str:
    return f"{'up to ' * (corpus.shape.padding == 'none')}{corpus.sequence_length:,}"


def _location(dataset: PackedDataset) -> str:
    return f"{dataset.nbytes / 1e6:,.1f} MB {'in memory' if dataset.load == 'memory' else 'mapped'}"
