"""Check rules on all conversations, block by block."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.core.errors import DataError
from tasks.storage.manifest import Manifest

Conversations = dict[str, np.ndarray]
"""Columns over conversations: see check_selection.conversations_of."""


class Rules:
    """The first conversation that breaks each rule.

    Blocks of conversations are checked one after another, each against all rules in the same order.
    """

    def __init__(self) -> None:
        self._broken: dict[str, tuple[int, int] | None] = {}  # rule → source and record

    def require(self, held: np.ndarray, rule: str, of: Conversations) -> None:
        """Note the first conversation of a block that breaks a rule.

        `held` is a bool per conversation, False if the conversation breaks the rule.
        """
        broken = self._broken.setdefault(rule, None)
        if broken is None and not held.all():
            at = int(np.flatnonzero(~held)[0])
            self._broken[rule] = int(of["source"][at]), int(of["record"][at])

    def check(self, manifest: Manifest, where: Path) -> None:
        """Raise DataError for the first broken rule, with its first conversation."""
        for rule, broken in self._broken.items():
            if broken:
                name = manifest.sources[broken[0]].path
                raise DataError("bad_index", f"{where}: {name}:{broken[1]} {rule}")
