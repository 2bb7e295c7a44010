"""Train an adapter on a corpus.

This package never imports `pipeline`.

    packcorpus train sample --base-model Qwen/Qwen3-8B

    manifest ─data─▶ verified rows in memory ──────────────────────┐
    settings ─model─▶ base model with an adapter, proven isolated ─┴─loop─▶ adapter, tokenizer, record, picture
    machine: the device, one process per GPU, signals

The names in `__all__` are the library for other trainers. Importing `train` does not load torch. Each name loads its
module on first use:

    from packcorpus.train import PackedDataset
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packcorpus.train.data.conversations import SFT_SETTINGS, padding_tokenizer, sft_dataset
    from packcorpus.train.data.corpus import open_corpus
    from packcorpus.train.data.dataset import PackedDataset
    from packcorpus.train.model.attention import Collator, segments
    from packcorpus.train.model.isolation import check_isolation, require_isolation
    from packcorpus.train.model.token_loss import weigh_loss

__all__ = [
    "SFT_SETTINGS",
    "Collator",
    "PackedDataset",
    "check_isolation",
    "open_corpus",
    "padding_tokenizer",
    "require_isolation",
    "segments",
    "sft_dataset",
    "weigh_loss",
]

_MODULES = {
    "packcorpus.train.data.conversations": ("SFT_SETTINGS", "padding_tokenizer", "sft_dataset"),
    "packcorpus.train.data.corpus": ("open_corpus",),
    "packcorpus.train.data.dataset": ("PackedDataset",),
    "packcorpus.train.model.attention": ("Collator", "segments"),
    "packcorpus.train.model.isolation": ("check_isolation", "require_isolation"),
    "packcorpus.train.model.token_loss": ("weigh_loss",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
