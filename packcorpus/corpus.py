"""A packed corpus: its figures, rows, conversations, and batches.

name, key, manifest, folder, URL ─open─▶ Corpus ─rows─────────▶ Rows, numpy arrays of the shards
                                                ├conversation─▶ Conversation: messages, tokens, labels, weights
                                                ├batches──────▶ Batches, in the order of `packcorpus train`
                                                └dataset──────▶ PackedDataset, for torch
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from packcorpus.conversation import Conversation, find_conversation
from packcorpus.failures import explained, needs_extra
from packcorpus.rows import Batches, Rows, order_of_split
from packcorpus.tasks.cli.console import grid, indented, say
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.printable import counted, lengths_in_words, printable
from packcorpus.tasks.inspection.manifests import find_manifest
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.facts import Ledger
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.stores.urls import local_path_of, root_of
from packcorpus.views import as_html, as_text

if TYPE_CHECKING:
    from packcorpus.train.data.dataset import PackedDataset

# Sources that a summary names.
SHOWN_SOURCES = 3


@explained
def open(corpus: str | os.PathLike[str] | None = None, *, root: str | os.PathLike[str] = ".") -> Corpus:
    """Open a packed corpus.

    `corpus` is the name or the key of a manifest in the `manifests/` of `root`, the path or URL of a manifest, or a
    corpus folder. Without it, the corpus of the latest run is opened. If several corpora have the name, it is the
    newest. Nothing is loaded but the manifest.

    Raises InputMissing if there is no such corpus, UsageError if a key is ambiguous, and DataError if the manifest is
    damaged or a file of another kind.

        corpus = packcorpus.open("mine")
        print(corpus)
    """
    place = root_of(_text_or_path(root))
    return Corpus(find_manifest(None if corpus is None else local_path_of(_text_or_path(corpus)), place))


def _text_or_path(value: str | os.PathLike[str]) -> str | Path:
    return Path(value) if isinstance(value, PurePath) else os.fspath(value)


class Corpus(os.PathLike[str]):
    """A packed corpus, as `open` and `pack` return it.

    It can be passed wherever a manifest can, for example to `verify` and `PackedDataset`. A notebook shows it as a
    summary.

    path             Path of the manifest
    name, key        str; the key is the SHA-256 of everything that the corpus was made from
    folder           Path of the corpus folder, with the shards
    manifest         the whole manifest, with the keys of the [manifest](manifest.md) as attributes
    splits           dict: the number of rows of each split
    ledger           conversations and tokens: where each of them went, as `ledger.tokens.packed`
    sequence_length  int: tokens in a row; if rows have several lengths, the longest

        corpus = packcorpus.open("mine")
        print(corpus.name, corpus.splits["train"], corpus.ledger.tokens.trained)
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest: Manifest = load_manifest(path)
        self.folder = checked_folder(self.manifest, path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return as_text(show_corpus, self)

    def _repr_html_(self) -> str:
        return as_html(show_corpus, self)

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def sequence_length(self) -> int:
        return self.manifest.sequence_length

    @property
    def ledger(self) -> Ledger:
        return self.manifest.ledger

    @cached_property
    def splits(self) -> dict[str, int]:
        return {name: split.rows for name, split in self.manifest.splits.items()}

    @explained
    def rows(self, split: str = "train") -> Rows:
        """Return the rows of a split as numpy arrays.

        `split` is `train`, `validation`, or another key of `splits`, such as `train-512` if rows have several lengths.
        See `Rows`. Raises UsageError if the corpus has no such split.

            rows = packcorpus.open("mine").rows("train")
            for row in rows:
                ids, labels = row["input_ids"], row["labels"]
        """
        self._check_split(split)
        return Rows(self.manifest, self.folder, split)

    @explained
    def conversation(self, place: str | int) -> Conversation:
        """Find a conversation by its place in a source, and read it from the rows.

        `place` is FILE:LINE, such as `chats.jsonl:3`, where FILE may be the end of the path; the `id` of its record, as
        ID or FILE:ID; or the number of the conversation in the index. See `Conversation`. Raises UsageError if the
        corpus has no such conversation, or several with this id; if it was rejected, the message has the reason.

            conversation = packcorpus.open("mine").conversation("chats.jsonl:3")
            print(conversation)
            print(conversation.messages[0]["content"], len(conversation.tokens))
        """
        return find_conversation(self.path, self.manifest, self.folder, place)

    @explained
    def batches(
        self,
        batch_size: int,
        *,
        split: str = "train",
        epochs: int = 1,
        seed: int = 42,
        framework: Literal["numpy", "torch"] = "numpy",
    ) -> Batches:
        """Return batches of rows, in the order of `packcorpus train`.

        `batch_size` is the number of rows in a batch; if rows have several lengths, a batch of shorter rows has as many
        tokens. Batch k has the rows of step k of `packcorpus train` with the same `seed` and number of rows per step,
        also with `balance`, several lengths, and several packings. The last batch of an epoch has the remaining rows.
        Other splits than `train` are read in order.

        A batch is {"input_ids": int32[B, L], "labels": int32[B, L], "position_ids": int32[B, L]}, with "loss_weight":
        float32[B, L] if the corpus has weights, and "end": int32[B, L] if samples share tokens, which
        `require_isolation` makes a model follow. It has no `attention_mask`, with which models do not keep
        conversations apart. Rows without padding are joined: [1, tokens]. With `framework="torch"`, a batch has
        tensors, and labels are int64.

        Raises UsageError for an impossible argument, DataError for a corpus with `packing: false`, and PartMissing if
        torch is not installed.

            for batch in packcorpus.open("mine").batches(8, epochs=2):
                ids = batch["input_ids"]
        """
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if type(value) is not int or value < 1:
                raise UsageError("bad_setting", f"{name}: must be an integer of at least 1, found {value!r}")
        if framework not in ("numpy", "torch"):
            raise UsageError("bad_setting", f"framework: must be numpy or torch, found {framework!r}")
        if not self.manifest.packing_metadata.enabled:
            problem = "has conversations, not packed rows; read them with rows(), or pack with packing: true"
            raise DataError("not_trainable", f"{self.path}: {problem}")
        if framework == "torch":
            needs_extra("torch")
        if split != "train" or self.splits.get(split):
            self._check_split(split)
        return Batches(order_of_split(self.manifest, self.rows, split, batch_size, seed), epochs, framework)

    @explained
    def dataset(self, split: str = "train", load: Literal["auto", "memory", "mmap"] = "auto") -> PackedDataset:
        """Return a split as a Dataset of torch, with verified rows.

        See `PackedDataset`. Needs the extra `train`: raises PartMissing, with the command that installs it, without
        torch. Raises DataError or InputMissing, naming the file, if a shard is damaged.

            rows = packcorpus.open("mine").dataset("train")
            loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=packcorpus.Collator("sdpa"))
        """
        needs_extra("torch")
        from packcorpus.train.data.dataset import PackedDataset

        return PackedDataset(self.path, split, load)

    def _check_split(self, split: str) -> None:
        if split not in self.splits:
            of_kind = [name for name in self.splits if kind_of(name) == split] or list(self.splits)
            problem = f"{printable(str(split))}: is not a split of {self.name}; its splits are {', '.join(of_kind)}"
            raise UsageError("not_in_it", problem)


def show_corpus(corpus: Corpus, console: Console) -> None:
    """Print the summary of a corpus, in about ten lines."""
    manifest, ledger = corpus.manifest, corpus.ledger
    unit, full = "one conversation per row", ""
    if manifest.packing_metadata.enabled:
        size = "up to " * (manifest.row_layout.padding == "none") + lengths_in_words(manifest.row_lengths)
        unit = f"rows of {size} tokens"
        full = f", {manifest.packing_metadata.packing_efficiency:.2f} % full"
    title = ("Corpus ", ""), (printable(corpus.name), "bold"), (f" {corpus.key[:12]}", "")
    say(console, *title, (f"  format {manifest.format_version}, {unit}", "dim"))
    of, tokens = ledger.conversations, ledger.tokens
    lost = {"rejected": sum(of.rejected.values()), "dropped": sum(of.dropped.values())}
    trained = f"{tokens.trained:,} trained on ({100 * tokens.trained / max(tokens.packed, 1):.1f} %)"
    left_out = {"truncated": tokens.truncated, "dropped": tokens.dropped}
    sources = [f"{printable(source.path)} ({source.conversations:,})" for source in manifest.sources[:SHOWN_SOURCES]]
    if (more := len(manifest.sources) - SHOWN_SOURCES) > 0:
        sources.append(f"{more:,} more")
    tokenizer = f"{Path(manifest.tokenizer.path).name}, {counted(manifest.tokenizer.vocab_size, 'token')}"
    facts = {
        "rows": ", ".join(f"{printable(name)} {rows:,}" for name, rows in corpus.splits.items()) + full,
        "conversations": ", ".join([f"{of.packed:,} of {of.read:,} packed", *_parts(lost)]),
        "tokens": ", ".join([f"{tokens.packed:,} packed", trained, *_parts(left_out)]),
        "sources": ", ".join(sources),
        "tokenizer": printable(tokenizer),
        "template": printable(manifest.template.name),
        "folder": printable(str(corpus.folder)),
    }
    table = grid(False, False)
    for name, value in facts.items():
        table.add_row(Text(name, "dim"), value)
    indented(console, table)


def _parts(counts: dict[str, int]) -> list[str]:
    return [f"{count:,} {name}" for name, count in counts.items() if count]
