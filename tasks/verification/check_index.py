"""Check that the index follows from the settings in the manifest.

    entries of some contents ─conversations_of─▶ columns over conversations ─IndexCheck.add─▶ rules, counts, mixture

None of the code that made the corpus is called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.errors import DataError
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import DROP_REASONS, SAMPLE_DROP_REASONS
from tasks.verification.read_index import kinds_of_splits

Conversations = dict[str, np.ndarray]
"""Columns over conversations: see conversations_of."""

# Reasons that concern the whole conversation, so that they drop all of its samples.
OF_CONVERSATION = [DROP_REASONS.index(name) for name in ("min_turns", "max_turns", "duplicate", "limit", "weight")]


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
    length, trained, separator = (entries[name] for name in ("length", "trained", "separator"))
    begins = np.append(True, (source[1:] != source[:-1]) | (record[1:] != record[:-1]))[: len(source)]
    of_sample = begins | np.append(True, turn[1:] != turn[:-1])[: len(source)]
    once = of_sample | np.append(True, first[1:] != first[:-1])[: len(source)]
    heads = np.flatnonzero(of_sample if apart else begins)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, heads, dtype=np.int64) if len(heads) else np.empty(0, np.int64)

    in_train, placed = split == 0, first >= 0
    reason = entries["dropped"].astype(np.int64)
    if not apart:  # a conversation is dropped for the reason of its other samples
        reason[reason == SAMPLE_DROP_REASONS.index("no_trained_tokens")] = -1
    is_placed, pieces = total(placed) > 0, np.maximum(1, total(once & placed))
    return {name: entries[name][heads] for name in ("source", "record", "turns", "digest")} | {
        "placed": is_placed,
        "validation": total(split == 1) > 0,
        "truncated": total(entries["truncated"]) > 0,
        "length": total(length * once),
        "tokens": total((length - separator) * (once & placed)),
        "copies": total(in_train) // pieces,
        "copies_held_out": total(split == 1) // pieces,
        "places": total(length * in_train),
        "trained": total(trained * in_train),
        "untrained": total((length - trained) * (once & placed)),
        "reason": np.where(is_placed, -1, np.maximum.reduceat(reason, heads) if len(heads) else reason),
    }


@dataclass(slots=True)
class Counts:
    """Sums over the conversations, or over the samples, of an index."""

    accepted: np.ndarray  # int64[sources]
    count: int = 0
    packed: int = 0
    truncated: int = 0
    tokens: int = 0  # without separators; copies count once
    repeated: int = 0  # prompt tokens that the previous sample of the conversation also contains
    reasons: Counter[int] = field(default_factory=Counter)  # why conversations or samples are not packed

    def add(self, seen: Conversations) -> None:
        placed = seen["placed"]
        self.count += len(placed)
        self.packed += int(np.count_nonzero(placed))
        self.truncated += int(np.count_nonzero(seen["truncated"]))
        self.tokens += int(seen["tokens"].sum())
        inside = seen["source"][seen["source"] < len(self.accepted)]
        self.accepted += np.bincount(inside, minlength=len(self.accepted))
        self.reasons.update(seen["reason"][~placed].tolist())
        source, record, length, untrained = (seen[name][placed] for name in ("source", "record", "length", "untrained"))
        later = (source[1:] == source[:-1]) & (record[1:] == record[:-1])
        self.repeated += int(np.minimum(untrained[1:], length[:-1])[later].sum())

    def dropped(self, names: tuple[str, ...]) -> dict[str, int]:
        return dict(sorted(((*names, "unknown")[reason], count) for reason, count in self.reasons.items()))


class IndexCheck:
    """Check an index against the settings, block by block, and count it.

    A block contains all entries of its conversations, and all conversations with its contents.
    """

    def __init__(self, manifest: Manifest, folder: Path):
        self._manifest, self._settings, self._folder = manifest, manifest.config, folder
        self.conversations, self.samples = (Counts(np.zeros(len(manifest.sources), np.int64)) for _ in range(2))
        self._broken: dict[str, tuple[int, int] | None] = {}  # rule → source and record of the first that breaks it
        self._other_epochs: set[str] = set()  # splits whose pieces differ from `train`
        # Sources or entries that are not in the manifest count as one additional entry, which nothing reads.
        count = len(self._settings["sources"])
        entries = (source.entry if 0 <= source.entry < count else count for source in manifest.sources)
        self._entries = np.array([*entries, count])
        self._weights = np.array([*(float(source.get("weight", 1)) for source in self._settings["sources"]), 1.0])
        self._mixture: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(count + 1, np.int64))

    def add(self, entries: np.ndarray) -> None:
        """Check entries of the index (ENTRY)."""
        samples = seen = conversations_of(entries)
        self.conversations.add(seen)
        if self._manifest.ledger.samples is not None:
            samples = conversations_of(entries, apart=True)
            self.samples.add(samples)
            self._check_samples(seen, samples)
        reason = samples["reason"]
        whole = samples["placed"] & (samples["length"] <= self._manifest.sequence_length) & ~samples["truncated"]
        for name, values in (("tokens", samples["length"]), ("turns", samples["turns"])):
            for bound, outside in ((f"min_{name}", np.less), (f"max_{name}", np.greater)):
                limit = self._settings.get(bound)
                is_outside = np.zeros(len(reason), bool) if limit is None else outside(values, limit)
                of_bound = reason == DROP_REASONS.index(bound)
                self._require(~of_bound | is_outside, f"was dropped by {bound}, but is within it", samples)
                # The index does not have all tokens of a truncated conversation.
                checked = whole if name == "tokens" else samples["placed"]
                self._require(~(checked & is_outside), f"is packed, but {bound} is {limit}", samples)
        self._check_contents({name: values[seen["placed"]] for name, values in seen.items()})
        self._add_to_mixture(seen)
        self._compare_epochs(entries)

    def _require(self, held: np.ndarray, rule: str, of: Conversations) -> None:
        """Note the first conversation that breaks a rule.

        `held` is a bool per conversation, False if the conversation breaks the rule.
        """
        broken = self._broken.setdefault(rule, None)
        if not held.all():
            at = int(np.flatnonzero(~held)[0])
            first = int(of["source"][at]), int(of["record"][at])
            self._broken[rule] = min(broken or first, first)

    def _check_samples(self, seen: Conversations, samples: Conversations) -> None:
        """Check that the samples of a conversation agree with it.

        All samples have its content. Packed samples are in the same splits, equally often.
        """
        keys = np.stack([samples["source"], samples["record"]])
        owner = np.cumsum(np.append(True, (np.diff(keys) != 0).any(axis=0))[: keys.shape[1]]) - 1
        for name in ("digest", "turns"):
            self._require(samples[name] == seen[name][owner], f"has samples that differ in {name}", samples)
        for name in ("validation", "copies", "copies_held_out"):
            held = ~samples["placed"] | (samples[name] == seen[name][owner])
            self._require(held, "has samples in different splits, or with different numbers of copies", samples)
        self._require(
            ~(seen["placed"][owner] & np.isin(samples["reason"], OF_CONVERSATION)),
            "has a sample that was dropped for a reason of the whole conversation, but another sample is packed",
            samples,
        )

    def _check_contents(self, packed: Conversations) -> None:
        """Check that no content is in both splits, or packed twice without leave."""
        digest, length, held_out = packed["digest"], packed["length"], packed["validation"]
        both = held_out & np.isin(digest, digest[~held_out])
        self._require(~both, "is in the validation split, and the same content is in the training split", packed)
        first = np.ones(len(digest), bool)
        if self._settings.get("duplicates") == "drop":
            order = np.lexsort((length, digest))
            first[order[1:]] = (np.diff(digest[order]) != 0) | (np.diff(length[order]) != 0)
        self._require(first, "is packed, although another packed conversation has the same content", packed)

    def _add_to_mixture(self, seen: Conversations) -> None:
        """Count conversations and tokens by entry of `sources`."""
        entries = self._entries[np.minimum(seen["source"], len(self._entries) - 1)]
        over, unweighted = (seen["reason"] == DROP_REASONS.index(name) for name in ("limit", "weight"))
        placed, copies = seen["placed"], seen["copies"]
        in_train = placed & ~seen["validation"]
        whole, rest = np.divmod(self._weights[entries], 1)
        for name, values in {
            "chosen": placed | unweighted,
            "over": over,
            "unweighted": unweighted,
            "placed": placed,
            "held_out_twice": placed & (seen["copies_held_out"] > 1),
            "twice": placed & (copies > 1),
            "in_train": in_train,
            "above": in_train & (copies > whole),
            "other_copies": in_train & (copies != whole) & ((rest == 0) | (copies != whole + 1)),
            "conversations": copies > 0,
            "copies": copies,
            "tokens": seen["places"],
            "trained_tokens": seen["trained"],
        }.items():
            self._mixture[name] += np.bincount(entries, values, minlength=len(self._weights)).astype(np.int64)

    def _compare_epochs(self, entries: np.ndarray) -> None:
        """Note each epoch whose pieces differ from the pieces of the first epoch."""
        wanted: np.ndarray | None = None
        kinds = kinds_of_splits(self._manifest)
        for number, name in enumerate(kinds):
            if name == "validation" or len(kinds) <= 2:
                continue
            of_epoch = entries[entries["split"] == number]
            columns = [of_epoch[column] for column in ("source", "record", "first", "length", "trained", "turn")]
            pieces = np.stack(columns)[:, np.lexsort(columns)]
            wanted = pieces if wanted is None else wanted
            if not np.array_equal(pieces, wanted):
                self._other_epochs.add(name)

    def check(self) -> None:
        """Raise DataError if conversations or copies do not follow from the settings."""
        where = self._folder / "index.arrow"
        for rule, broken in self._broken.items():
            if broken:
                name = self._manifest.sources[broken[0]].path
                raise DataError("bad_index", f"{where}: {name}:{broken[1]} {rule}")
        for entry, source in enumerate(self._settings["sources"]):
            counts = {name: int(values[entry]) for name, values in self._mixture.items()}
            if problem := self._problem_of_entry(source, counts):
                raise DataError("bad_index", f"{where}: sources[{entry}]: {problem}")
        for name in (name for name in kinds_of_splits(self._manifest) if name in self._other_epochs):
            raise DataError("bad_index", f"{where}: {name} has different pieces from train")
        self._check_figures(self._folder / "manifest.json")

    def _problem_of_entry(self, source: dict[str, Any], counts: dict[str, int]) -> str:
        """Say how an entry of `sources` contradicts its `limit` or `weight`."""
        limit, weight, chosen = source.get("limit"), source.get("weight", 1), counts["chosen"]
        if limit is not None and chosen > limit:
            return f"{chosen:,} conversations are taken, but the limit is {limit}"
        if counts["over"] and chosen != limit:
            return f"only {chosen:,} conversations are taken, but others are dropped by limit: {limit}"
        if counts["held_out_twice"]:
            return "a conversation is in the validation split twice"
        if self._settings.get("weighting") == "token_share":
            return "token_share: a conversation is packed twice" if counts["twice"] else ""
        whole, rest = divmod(weight, 1)
        if counts["unweighted"] and whole:
            return f"conversations are dropped by weight, but the weight is {weight:g}"
        if counts["other_copies"]:
            return f"copies do not match weight {weight:g}"
        # Training and validation split each round their share up, to at least one.
        extra, of = (counts["above"], counts["in_train"]) if whole else (counts["placed"], chosen)
        if abs(extra - rest * of) > 2 and whole != weight:
            return f"{extra:,} of {of:,} conversations have an additional copy, which does not match the weight"
        return ""

    def _check_figures(self, where: Path) -> None:
        """Raise DataError if a recorded figure of the mixture differs from the counts."""
        recorded, sources = self._manifest.mixture, self._settings["sources"]
        names = ("conversations", "copies", "tokens", "trained_tokens")
        counted = {name: self._mixture[name][: len(sources)] for name in names}
        for entry, (source, facts) in enumerate(zip(sources, recorded, strict=False)):
            values = {"path": source["path"], "weight": source.get("weight", 1.0), "limit": source.get("limit")}
            values |= {name: int(of_entries[entry]) for name, of_entries in counted.items()}
            for name in ("tokens", "trained_tokens"):
                share = 100 * counted[name][entry] / max(1, counted[name].sum())
                values[f"{name}_percent"] = round(float(share), 4)
            for name, value in values.items():
                if (noted := getattr(facts, name)) != value:
                    raise DataError(
                        "wrong_figure",
                        f"{where}: mixture: {facts.path}: {name} is recorded as {noted}, counted {value}",
                    )
        if len(sources) != len(recorded):
            raise DataError(
                "wrong_figure", f"{where}: mixture has {len(recorded)} entries, but the config has {len(sources)}"
            )
