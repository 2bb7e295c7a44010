"""Check the limit and weight of each entry of `sources`, and the mixture figures."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.errors import DataError
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import DROP_REASONS
from tasks.verification.rules import Conversations


class Mixture:
    """Counts of conversations and tokens by entry of `sources`."""

    def __init__(self, manifest: Manifest):
        self._manifest, self._sources = manifest, manifest.config["sources"]
        # Sources or entries that are not in the manifest count as one additional entry, which nothing reads.
        count = len(self._sources)
        entries = (source.entry if 0 <= source.entry < count else count for source in manifest.sources)
        self._entries = np.array([*entries, count])
        self._weights = np.array([*(float(source.get("weight", 1)) for source in self._sources), 1.0])
        self._counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(self._weights), np.int64))

    def add(self, seen: Conversations) -> None:
        """Count the conversations of a block."""
        entries = self._entries[np.minimum(seen["source"], len(self._entries) - 1)]
        over, unweighted = (seen["reason"] == DROP_REASONS.index(name) for name in ("limit", "weight"))
        placed, copies = seen["placed"], seen["copies"]
        in_train = placed & ~seen["validation"]
        whole, rest = np.divmod(self._weights[entries], 1)
        for name, values in (
            ("chosen", placed | unweighted),
            ("over", over),
            ("unweighted", unweighted),
            ("placed", placed),
            ("held_out_twice", placed & (seen["copies_held_out"] > 1)),
            ("twice", placed & (copies > 1)),
            ("in_train", in_train),
            ("above", in_train & (copies > whole)),
            ("other_copies", in_train & (copies != whole) & ((rest == 0) | (copies != whole + 1))),
            ("conversations", copies > 0),
            ("copies", copies),
            ("tokens", seen["places"]),
            ("trained_tokens", seen["trained"]),
        ):
            self._counts[name] += np.bincount(entries, values, minlength=len(self._weights)).astype(np.int64)

    def check_entries(self, where: Path) -> None:
        """Raise DataError if the conversations or copies of an entry are wrong.

        They are wrong if they contradict its `limit` or its `weight`.
        """
        for entry, source in enumerate(self._sources):
            self._check_entry(entry, source, {name: int(own[entry]) for name, own in self._counts.items()}, where)

    def _check_entry(self, entry: int, source: dict[str, Any], counts: dict[str, int], where: Path) -> None:
        def require(held: bool, what: str) -> None:
            if not held:
                raise DataError("bad_index", f"{where}: sources[{entry}]: {what}")

        limit, weight = source.get("limit"), source.get("weight", 1)
        chosen = counts["chosen"]
        require(limit is None or chosen <= limit, f"{chosen:,} conversations are taken, but the limit is {limit}")
        require(
            not counts["over"] or chosen == limit,
            f"only {chosen:,} conversations are taken, but others are dropped by limit: {limit}",
        )
        require(not counts["held_out_twice"], "a conversation is in the validation split twice")
        if self._manifest.config.get("weighting") == "token_share":
            require(not counts["twice"], "token_share: a conversation is packed twice")
            return
        whole, rest = divmod(weight, 1)
        require(
            not counts["unweighted"] or whole == 0, f"conversations are dropped by weight, but the weight is {weight:g}"
        )
        require(not counts["other_copies"], f"copies do not match weight {weight:g}")
        # Training and validation split each round their share up, to at least one.
        extra = counts["above"] if whole else counts["placed"]
        of = counts["in_train"] if whole else chosen
        require(
            abs(extra - rest * of) <= 2 or whole == weight,
            f"{extra:,} of {of:,} conversations have an additional copy, which does not match the weight",
        )

    def check_figures(self, where: Path) -> None:
        """Raise DataError if a recorded figure differs from the counted figure."""
        recorded = self._manifest.mixture
        count = len(self._sources)
        found = {name: self._counts[name][:count] for name in ("conversations", "copies", "tokens", "trained_tokens")}
        shares = {
            f"{name}_percent": 100 * found[name] / max(1, found[name].sum()) for name in ("tokens", "trained_tokens")
        }
        rows = [
            {"path": source["path"], "weight": source.get("weight", 1.0), "limit": source.get("limit")}
            | {name: int(values[entry]) for name, values in found.items()}
            | {name: round(float(values[entry]), 4) for name, values in shares.items()}
            for entry, source in enumerate(self._sources)
        ]
        for row, facts in zip(rows, recorded, strict=False):
            for name, value in row.items():
                if (noted := getattr(facts, name)) != value:
                    raise DataError(
                        "wrong_figure",
                        f"{where}: mixture: {facts.path}: {name} is recorded as {noted}, counted {value}",
                    )
        if len(rows) != len(recorded):
            raise DataError(
                "wrong_figure", f"{where}: mixture has {len(recorded)} entries, but the config has {len(rows)}"
            )
