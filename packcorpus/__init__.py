"""Turn raw conversations into packed training rows.

    packcorpus.pack(…) ─┐
    packcorpus.open(…) ─┴▶ Corpus: rows, conversations, batches, a Dataset of torch
    packcorpus.check(…), packcorpus.verify(…)     what a run would make, and whether a corpus is as it was made
    PackedDataset, Collator, require_isolation, …  for training loops of your own

The names in `__all__` are the public API (docs/reference/python.md). `import packcorpus` loads no other library: each
name loads its module on first use.

    packcorpus/
      pipeline ─▶ ../pipeline    the order of the work: the Luigi graph
      tasks    ─▶ ../tasks       the work of each step, and the command line
      train    ─▶ ../train       the consumer of the rows

All code is imported by its name in this package (`packcorpus.tasks.…`), so a module of your own that is called `tasks`,
`train`, or `pipeline` never replaces ours, and ours never replaces yours.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packcorpus.commands import DryRun, check, pack, verify
    from packcorpus.conversation import Conversation, Sample
    from packcorpus.corpus import Corpus, open
    from packcorpus.rows import Batches, Rows
    from packcorpus.tasks.core.errors import (
        Bug,
        Busy,
        DataError,
        InputMissing,
        Interrupted,
        NotReproducible,
        PackError,
        PartMissing,
        StorageError,
        UsageError,
    )
    from packcorpus.train.data.conversations import SFT_SETTINGS, padding_tokenizer, sft_dataset
    from packcorpus.train.data.dataset import PackedDataset
    from packcorpus.train.model.attention import Collator, segments
    from packcorpus.train.model.isolation import check_isolation, require_isolation
    from packcorpus.train.model.token_loss import weigh_loss

__all__ = [
    "SFT_SETTINGS",
    "Batches",
    "Bug",
    "Busy",
    "Collator",
    "Conversation",
    "Corpus",
    "DataError",
    "DryRun",
    "InputMissing",
    "Interrupted",
    "NotReproducible",
    "PackError",
    "PackedDataset",
    "PartMissing",
    "Rows",
    "Sample",
    "StorageError",
    "UsageError",
    "check",
    "check_isolation",
    "open",
    "pack",
    "padding_tokenizer",
    "require_isolation",
    "segments",
    "sft_dataset",
    "verify",
    "weigh_loss",
]

_MODULES = {
    "commands": ("DryRun", "check", "pack", "verify"),
    "conversation": ("Conversation", "Sample"),
    "corpus": ("Corpus", "open"),
    "rows": ("Batches", "Rows"),
    "tasks.core.errors": (
        *("Bug", "Busy", "DataError", "InputMissing", "Interrupted", "NotReproducible", "PackError", "PartMissing"),
        *("StorageError", "UsageError"),
    ),
    "train.data.conversations": ("SFT_SETTINGS", "padding_tokenizer", "sft_dataset"),
    "train.data.dataset": ("PackedDataset",),
    "train.model.attention": ("Collator", "segments"),
    "train.model.isolation": ("check_isolation", "require_isolation"),
    "train.model.token_loss": ("weigh_loss",),
}
_MODULE_OF = {name: f"packcorpus.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in ("", __name__):
            raise
        from packcorpus.failures import library_missing

        raise library_missing(library) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _require_links() -> None:
    """Raise ImportError, or end a command, if a folder of this package is missing."""
    # A copy without symbolic links lacks them: a ZIP file, or a checkout with core.symlinks=false.
    here = os.path.dirname(os.path.abspath(__file__))
    lost = [name for name in ("pipeline", "tasks", "train") if not os.path.isdir(os.path.join(here, name))]
    if lost:
        problem = f"{os.path.join(here, lost[0])}: is not a folder, so this copy of packcorpus is incomplete"
        message = f"E722 error: {problem}; install it with pip, or clone it again with symbolic links"
        # While `python -m` imports a package, the name of the program is -m.
        if sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") in ("luigi", "packcorpus"):
            print(message, file=sys.stderr)
            sys.exit(69)
        raise ImportError(message, name=__name__)


_require_links()
