"""Check that the index follows from the settings in the manifest.

    entries of some conversations ─conversations_of─▶ columns over them ─Selection.add─▶ filters, samples, epochs
                                                                        ├─Contents─▶ duplicates, splits
                                                                        └─Mixture──▶ limits, weights, figures

None of the code that made the corpus is called.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tasks.core.errors import DataError
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import DROP_REASONS, SAMPLE_DROP_REASONS
from tasks.verification.check_contents import Contents
from tasks.verification.check_mixture import Mixture
from tasks.verification.read_index import kinds_of_splits
from tasks.verification.rules import Conversations, Rules


def conversations_of(entries: np.ndarray, apart: bool = False) -> Conversations:
    """Return columns over the conversations of index entries (ENTRY).

    The conversations are sorted by source and record. With `apart`, the columns are over the samples instead.

    source, record, turns, digest   as in the index
    placed, validation, truncated   bool
    length                          tokens of all pieces, or of the whole conversation if it was dropped; without copies
    tokens                          tokens of all pieces without separators, 0 if it was dropped; without copies
    copies, copies_held_out         number of copies in the split `train`, and in `validation`
    places, trained                 tokens in the split `train`, over all copies
    untrained                       untrained tokens of all pieces, without copies
    reason                          why it was dropped, an index into SAMPLE_DROP_REASONS; -1 if it is packed
    """
    entries = entries[np.lexsort([entries[name] for name in ("first", "turn", "record", "source")])]
    source, record, turn, first, split = (entries[name] for name in ("source", "record", "turn", "first", "split"))
    length, trained, separator, truncated, turns, digest = (
        entries[name] for name in ("length", "trained", "separator", "truncated", "turns", "digest")
    )
    begins = np.append(True, (source[1:] != source[:-1]) | (record[1:] != record[:-1]))[: len(source)]
    of_sample = begins | np.append(True, turn[1:] != turn[:-1])[: len(source)]
    begins = of_sample if apart else begins
    once = of_sample | np.append(True, first[1:] != first[:-1])[: len(source)]
    heads = np.flatnonzero(begins)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, heads, dtype=np.int64) if len(heads) else np.empty(0, np.int64)

    in_train, placed = split == 0, first >= 0
    reason = entries["dropped"].astype(np.int64)
    if not apart:  # a conversation is dropped for the reason of its other samples
        reason[reason == SAMPLE_DROP_REASONS.index("no_trained_tokens")] = -1
    is_placed = total(placed) > 0
    pieces = np.maximum(1, total(once & placed))

    return {
        "source": source[heads],
        "record": record[heads],
        "turns": turns[heads],
        "digest": digest[heads],
        "placed": is_placed,
        "validation": total(split == 1) > 0,
        "truncated": total(truncated) > 0,
        "length": total(length * once),
        "tokens": total((length - separator) * (once & placed)),
        "copies": total(in_train) // pieces,
        "copies_held_out": total(split == 1) // pieces,
        "places": total(length * in_train),
        "trained": total(trained * in_train),
        "untrained": total((length - trained) * (once & placed)),
        "reason": np.where(is_placed, -1, np.maximum.reduceat(reason, heads) if len(heads) else reason),
    }


class Selection:
    """Check an index against the settings, block by block.

    A block contains all entries of its conversations. Blocks are in the order of source and record.
    """

    def __init__(self, manifest: Manifest, folder: Path, conversations: int):
        self._manifest, self._folder = manifest, folder
        self._settings, self._where = manifest.config, folder / "index.arrow"
        self._rules, self._contents = Rules(), Contents(manifest, conversations)
        self._mixture = Mixture(manifest)
        self._other_epochs: set[str] = set()  # splits whose pieces differ from `train`

    def add(self, entries: np.ndarray, seen: Conversations, samples: Conversations) -> None:
        """Check entries of the index (ENTRY).

        `seen` and `samples` are the columns over their conversations and over their samples. They are the same object
        if every conversation is one sample.
        """
        rules = self._rules
        if samples is not seen:
            _check_samples(seen, samples, rules)
        reason = samples["reason"]
        whole = samples["placed"] & (samples["length"] <= self._manifest.sequence_length) & ~samples["truncated"]
        for name, values in (("tokens", samples["length"]), ("turns", samples["turns"])):
            for bound, outside in ((f"min_{name}", np.less), (f"max_{name}", np.greater)):
                limit = self._settings.get(bound)
                is_outside = np.zeros(len(reason), bool) if limit is None else outside(values, limit)
                of_bound = reason == DROP_REASONS.index(bound)
                rules.require(~of_bound | is_outside, f"was dropped by {bound}, but is within it", samples)
                # The index does not have all tokens of a truncated conversation.
                checked = whole if name == "tokens" else samples["placed"]
                rules.require(~(checked & is_outside), f"is packed, but {bound} is {limit}", samples)
        self._contents.add(seen)
        self._mixture.add(seen)
        self._compare_epochs(entries)

    def check(self) -> None:
        """Raise DataError if conversations or copies do not follow from the settings."""
        self._contents.check(self._rules)
        self._rules.check(self._manifest, self._where)
        self._mixture.check_entries(self._where)
        for name in (name for name in kinds_of_splits(self._manifest) if name in self._other_epochs):
            raise DataError("bad_index", f"{self._where}: {name} has different pieces from train")
        self._mixture.check_figures(self._folder / "manifest.json")

    def close(self) -> None:
        self._contents.close()

    def _compare_epochs(self, entries: np.ndarray) -> None:
        """Note each epoch whose pieces differ from the pieces of the first epoch."""
        wanted: np.ndarray | None = None
        kinds = kinds_of_splits(self._manifest)
        for number, name in enumerate(kinds):
            if name == "validation" or len(kinds) <= 2:
                continue
            own = entries[entries["split"] == number]
            columns = [own[column] for column in ("source", "record", "first", "length", "trained", "turn")]
            found = np.stack(columns)[:, np.lexsort(columns)]
            wanted = found if wanted is None else wanted
            if not np.array_equal(found, wanted):
                self._other_epochs.add(name)


def _check_samples(seen: Conversations, samples: Conversations, rules: Rules) -> None:
    """Check that the samples of a conversation agree with it.

    All samples have its content. Packed samples are in the same splits, equally often. A reason that concerns the whole
    conversation drops all of its samples.
    """
    keys = np.stack([samples["source"], samples["record"]])
    owner = np.cumsum(np.append(True, (np.diff(keys) != 0).any(axis=0))[: keys.shape[1]]) - 1
    placed = samples["placed"]
    for name in ("digest", "turns"):
        rules.require(samples[name] == seen[name][owner], f"has samples that differ in {name}", samples)
    for name in ("validation", "copies", "copies_held_out"):
        held = ~placed | (samples[name] == seen[name][owner])
        rules.require(held, "has samples in different splits, or with different numbers of copies", samples)
    together = [DROP_REASONS.index(name) for name in ("min_turns", "max_turns", "duplicate", "limit", "weight")]
    alone = ~(seen["placed"][owner] & np.isin(samples["reason"], together))
    rules.require(
        alone,
        "has a sample that was dropped for a reason of the whole conversation, but another sample is packed",
        samples,
    )
