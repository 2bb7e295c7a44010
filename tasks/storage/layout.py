"""Name all artifacts below the root; describe the rows and splits of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from packcorpus.tasks.storage.keys import PACKED, SHAPED, SHARED

# The Jinja templates of a corpus, next to its shards. The second one is for conversations with tools, if the tokenizer
# has such a template.
TEMPLATE, TOOL_TEMPLATE = "template.jinja", "tool_use.jinja"

SPLITS = ("train", "validation")
TRAIN_EPOCH_PREFIX = "train_epoch_"  # plus the number of an epoch: the conversations of train in other rows


class Layout:
    """Paths of all artifacts below the project root, without any file access."""

    def __init__(self, root: Path):
        self.root = root
        self._tokens = root / "data" / "tokens"  # named for every part, many times

    def outputs(self) -> list[Path]:
        """Return the folders that contain only outputs of runs, with links resolved."""
        names = ("tokenizers", "tokens", "engines", "digests", "plans", "corpora", "remote", "unpacked")
        folders = [*(self.root / "data" / name for name in names), self.root / "manifests"]
        return [folder.resolve() for folder in folders]

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def remote(self) -> Path:
        return self.root / "data" / "remote"

    def unpacked(self, key: str) -> Path:
        return self.root / "data" / "unpacked" / key

    def tokenizer(self, key: str) -> Path:
        return self.root / "data" / "tokenizers" / key[:12] / "tokenizer.model"

    def tokenizer_receipt(self, key: str) -> Path:
        return self.tokenizer(key).with_name("receipt.json")

    def token_file(self, key: str) -> Path:
        return self._tokens.joinpath(key[:2], f"{key}.arrow")

    def token_receipt(self, key: str) -> Path:
        return self._tokens.joinpath(key[:2], f"{key}.json")

    def engine(self, key: str) -> Path:
        return self.root / "data" / "engines" / f"{key}.json"

    def digests(self) -> Path:
        return self.root / "data" / "digests"

    def plan_folder(self, key: str) -> Path:
        return self.root / "data" / "plans" / key[:12]

    def lock(self, name: str, key: str) -> Path:
        return self.root / "data" / "plans" / f"{name}-{key[:12]}.lock"

    def runs_lock(self) -> Path:
        """Return the lock that all runs share, and that `clean` holds alone."""
        return self.root / "data" / "plans" / ".runs.lock"

    def corpus(self, name: str, key: str) -> Path:
        return self.root / self.corpus_name(name, key)

    @staticmethod
    def corpus_name(name: str, key: str) -> str:
        return f"data/corpora/{name}-{key[:12]}"

    def published(self, name: str, key: str) -> Path:
        return self.root / "manifests" / f"{name}-{key[:12]}.json"


@dataclass(frozen=True)
class RowLayout:
    """The layout of the rows of a corpus: made once from its settings, then asked."""

    lengths: tuple[int, ...]  # ascending
    align: int = 1  # pieces start at multiples of this number
    padding: Literal["row", "none"] = "row"  # none: rows are lists that end after their last piece
    mix: Literal["tokens", "blocks"] | None = None  # order of the training steps of several lengths
    loss_weight: str = "none"  # origin of the weights in rows; none: rows have no weights
    share: str = "none"  # whose samples share what they begin with; none: each is stored whole

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the layout that recorded settings describe."""
        given = settings["sequence_length"]
        several = {"lengths": tuple(given), "mix": settings.get("mix", "tokens")} if isinstance(given, list) else {}
        others = {name: settings[name] for name in ("align", "padding", "loss_weight", "share") if name in settings}
        return cls(**{"lengths": (given,), **several, **others})

    @property
    def length(self) -> int:
        return self.lengths[-1]

    @property
    def has_several_lengths(self) -> bool:
        return len(self.lengths) > 1

    @property
    def capacity(self) -> int:
        """Return the length of the longest rows in multiples of `align`."""
        return self.length // self.align

    @property
    def is_weighted(self) -> bool:
        return self.loss_weight != "none"

    @property
    def is_shared(self) -> bool:
        return self.share != "none"

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the manifest's `shape`: everything that differs from format 3.0."""
        values: dict[str, Any] = {"align": self.align} if self.align > 1 else {}
        values |= {"padding": self.padding} if self.padding != "row" else {}
        values |= {"share": self.share} if self.is_shared else {}
        return values | ({"lengths": [*self.lengths], "mix": self.mix} if self.has_several_lengths else {})

    @property
    def format_version(self) -> str:
        return SHARED if self.is_shared else SHAPED if self.recorded else PACKED

    def multiples(self, tokens: Any) -> Any:
        """Return lengths of pieces in multiples of `align`, rounded up.

        Pieces fit in a row exactly if the sum of these lengths is at most `capacity`, so bounds stay valid.
        """
        return tokens if self.align == 1 else -(-tokens // self.align)

    def places(self, tokens: Any) -> Any:
        """Return the places from the start of a piece to the next possible start."""
        return self.multiples(tokens) * self.align

    def splits(self, kind: str) -> tuple[str, ...]:
        """Return the splits of one kind: train, or train-512 and train-1024."""
        return tuple(f"{kind}-{length}" for length in self.lengths) if self.has_several_lengths else (kind,)

    def split_names(self, epochs: int) -> tuple[str, ...]:
        """Return the names of all splits, in the order of their shards."""
        kinds = (*SPLITS, *(f"{TRAIN_EPOCH_PREFIX}{epoch}" for epoch in range(2, epochs + 1)))
        return tuple(name for kind in kinds for name in self.splits(kind))

    def length_of(self, split: str) -> int:
        _, _, length = split.partition("-")
        return int(length) if length.isdecimal() else self.length


def kind_of(split: str) -> str:
    """Return train, validation, train_epoch_2, …: a split without its row length."""
    return split.partition("-")[0]


def first_packing(split: str) -> str:
    """Return train or validation: the kind with the same conversations as a split."""
    return "validation" if kind_of(split) == "validation" else "train"
