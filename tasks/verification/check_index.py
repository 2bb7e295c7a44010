"""Read the index of a corpus, and check that it follows from the settings.

    index.arrow ─read_index─▶ Index   by_shard          the pieces of one shard
                                      by_conversation   entries of some conversations ─IndexCheck.add─▶ rules, counts

An index may be larger than memory, and it may be in any order, because neither the corpus nor the code that wrote it is
trusted. So its entries are distributed over partitions, by a hash of source and record: a content that is repeated many
times does not fill one of them. None of the code that made the corpus is called.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.keys import RELATIVE
from packcorpus.tasks.storage.layout import SPLITS, kind_of
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import ALL_DROP_REASONS, strings, to_arrow, to_numpy
from packcorpus.tasks.storage.shards import open_index
from packcorpus.tasks.verification.check_dropped import DroppedCheck
from packcorpus.tasks.verification.partitions import Partitions

ENTRIES = 1 << 16  # entries of the index that are handled at a time
RANGE = 12 << 20  # approximate bytes of the index in a partition: about 2^18 entries

# Columns that are null if a conversation was dropped. `dropped` is null otherwise. Other columns have no nulls.
PLACE = {"split", "shard", "row", "start", "first"}

PIECE = np.dtype(
    [
        ("row", "i4"), ("start", "i4"), ("length", "i4"), ("trained", "i4"), ("separator", "?"), ("truncated", "?"),
        ("closed", "?"), ("first", "i4"), ("shared", "i4"),
    ]
)  # fmt: skip

# `split` is an index into `kinds_of_splits`, and `dropped` is an index into ALL_DROP_REASONS; -1 is null or unknown.
# `first` is -1 if the conversation was dropped. `turn` is -1, and `repeated`, `group`, and `shared` 0, if the index has
# no such column.
ENTRY = np.dtype(
    [
        ("source", "i4"), ("record", "i8"), ("turn", "i4"), ("first", "i4"), ("split", "i2"), ("length", "i4"),
        ("trained", "i4"), ("separator", "?"), ("truncated", "?"), ("turns", "i4"), ("digest", "u8"), ("dropped", "i1"),
        ("repeated", "i4"), ("group", "u8"), ("shared", "i4"),
    ]
)  # fmt: skip

CONTENT = np.dtype([("digest", "u8"), ("length", "i8"), ("validation", "?"), ("source", "i4"), ("record", "i8")])
GROUP = np.dtype([("group", "u8"), ("validation", "?"), ("alone", "?"), ("source", "i4"), ("record", "i8")])

# Reasons that concern the whole conversation, so that they drop all of its samples.
WHOLE = ("min_turns", "max_turns", "duplicate", "near_duplicate", "contaminated", "limit", "weight")
OF_CONVERSATION = [ALL_DROP_REASONS.index(name) for name in WHOLE]

Conversations = dict[str, np.ndarray]
"""Columns over conversations: see conversations_of."""


@dataclass(slots=True)
class Index:
    """The entries of an index in partitions, and sums over all of them."""

    by_shard: Partitions  # of PIECE; one partition per shard, over all splits of the manifest
    by_conversation: Partitions  # of ENTRY; a conversation is in one partition
    by_content: Partitions  # of CONTENT; filled by IndexCheck
    by_group: Partitions  # of GROUP, if `validation_by` is set; filled by IndexCheck
    trained: np.ndarray  # int64[sources + 1], tokens; the last is of sources that are not in the manifest
    placed: int = 0  # pieces in rows
    separators: int = 0


def kinds_of_splits(manifest: Manifest) -> list[str]:
    """Return the kinds of splits, whatever the row length, by number in ENTRY."""
    return list(dict.fromkeys([*SPLITS, *map(kind_of, manifest.splits)]))


@contextmanager
def read_index(manifest: Manifest, folder: Path) -> Iterator[Index]:
    """Check and count the columns of an index, and distribute its entries.

    Raises DataError if a column has null values or numbers that are not allowed.
    """
    path, names, kinds = folder / "index.arrow", list(manifest.splits), kinds_of_splits(manifest)
    # By the number of a split. The last element is for unknown splits, which have number -1.
    shards = np.array([*(len(split.shards) for split in manifest.splits.values()), 0])
    kind_of_split = np.array([*(kinds.index(kind_of(name)) for name in names), -1])
    sources, count = len(manifest.sources), max(1, -(-path.stat().st_size // RANGE))
    wrong: dict[str, None] = {}
    with (
        Partitions(int(shards.sum()), PIECE) as by_shard,
        Partitions(count, ENTRY) as by_conversation,
        Partitions(count, CONTENT) as by_content,
        Partitions(count, GROUP) as by_group,
    ):
        index = Index(by_shard, by_conversation, by_content, by_group, np.zeros(sources + 1, np.int64))
        for block in _blocks(manifest, folder):
            if wrong := wrong | dict.fromkeys(_problems(block)):
                continue
            entries, in_row = np.empty(block.num_rows, ENTRY), to_numpy(block.column("row").is_valid())
            for name in set(ENTRY.names or ()) & {*block.schema.names} - PLACE - {"dropped"}:
                entries[name] = to_numpy(block.column(name))
            for name, default in (("turn", -1), ("repeated", 0), ("group", 0), ("shared", 0)):
                if name not in block.schema.names:
                    entries[name] = default
            split, shard = _numbers(block.column("split"), names), _filled(block.column("shard"))
            entries["first"] = _filled(block.column("first"))
            entries["split"] = kind_of_split[split]
            entries["dropped"] = _numbers(block.column("dropped"), ALL_DROP_REASONS)
            index.separators += int(np.count_nonzero(entries["separator"]))
            index.placed += int(np.count_nonzero(in_row))
            source = np.minimum(entries["source"], sources)
            index.trained += np.bincount(source, entries["trained"], sources + 1).astype(np.int64)
            keys = entries["record"].astype(np.uint64) ^ (source.astype(np.uint64) << np.uint64(48))
            by_conversation.add_by_hash(keys * np.uint64(0x9E3779B97F4A7C15), entries)
            exists = in_row & (shard >= 0) & (shard < shards[split])
            pieces, placed = np.empty(np.count_nonzero(exists), PIECE), block.filter(to_arrow(exists))
            for name in PIECE.names or ():
                pieces[name] = to_numpy(placed.column(name)) if name in placed.schema.names else 0
            by_shard.add((np.cumsum(shards) - shards)[split[exists]] + shard[exists], pieces)
        for problem in wrong:
            raise DataError("bad_index", f"{path}: {problem}")
        yield index


def _blocks(manifest: Manifest, folder: Path) -> Iterator[pa.RecordBatch]:
    with open_index(manifest, folder) as reader:
        for batch in reader:
            batch.validate()
            yield from (batch.slice(top, ENTRIES) for top in range(0, batch.num_rows, ENTRIES))


def _problems(block: pa.RecordBatch) -> Iterator[str]:
    """Yield the columns with null values or with numbers that are not allowed."""
    placed = block.column("row").is_valid()
    for name in block.schema.names:
        column = block.column(name)
        if name in PLACE:
            right = column.is_valid().equals(placed)
        else:
            right = column.is_null().equals(placed) if name == "dropped" else not column.null_count
        if not right:
            yield f"{name} has null values that are not allowed"
    for name, least in (("length", 1), ("source", 0)):
        smallest = pc.min(block.column(name)).as_py()
        if smallest is not None and smallest < least:
            yield f"an entry has an invalid {name}"


def _numbers(names: pa.Array, known: tuple[str, ...] | list[str]) -> np.ndarray:
    """Return the index of each name in `known`, or -1 for unknown names and for null."""
    return _filled(pc.index_in(names.cast(pa.string()), strings(known)))


def _filled(numbers: pa.Array) -> np.ndarray:
    """Return int32 numbers, with -1 for null; `fill_null` would import pandas."""
    return to_numpy(pc.coalesce(numbers, to_arrow(np.full(len(numbers), -1, np.int32))))


def conversations_of(entries: np.ndarray, by_sample: bool = False) -> Conversations:
    """Return columns over the conversations, or the samples, of entries (ENTRY).

    The conversations are sorted by source and record.

    source, record, turns           as in the index
    digest, group                   as in the index
    one_turns, one_digest           bool, all its entries have the same number or digest
    one_group                       bool, all its entries have the same group
    first                           offset of the first piece; -1 if it was dropped
    placed, validation, truncated   bool
    length                          tokens of all pieces, and what their trees share with them, or of the whole
                                    conversation if it was dropped; without copies
    tokens                          tokens of all pieces without separators, 0 if it was dropped; without copies
    copies, copies_held_out         number of copies in the split `train`, and in `validation`
    places, trained                 tokens in the split `train`, over all copies
    untrained                       untrained tokens of all pieces, without copies
    later                           number of pieces that begin after the start of a sample, without copies
    again                           tokens that these pieces repeat
    shared                          tokens that trees do not store again, without copies
    reason                          why it was dropped, an index into ALL_DROP_REASONS; -1 if it is packed
    """
    # Copies of a sample begin at one token, but may share more or less of it. They stay in the order of the index.
    begin = entries["first"] - entries["shared"]
    order = np.lexsort([begin, *(entries[name] for name in ("turn", "record", "source"))])
    entries, begin = entries[order], begin[order]
    source, record, turn, first, split = (entries[name] for name in ("source", "record", "turn", "first", "split"))
    length, trained, separator = (entries[name] for name in ("length", "trained", "separator"))
    shared, whole = entries["shared"], length + entries["shared"]

    def changed(values: np.ndarray) -> np.ndarray:
        """Return whether each value differs from the one before; the first one does."""
        return np.append(True, values[1:] != values[:-1])[: len(values)]

    begins = changed(source) | changed(record)
    of_sample = begins | changed(turn)
    once = of_sample | changed(begin)
    heads = np.flatnonzero(of_sample if by_sample else begins)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, heads, dtype=np.int64) if len(heads) else np.empty(0, np.int64)

    in_train, placed = split == 0, first >= 0
    reason = entries["dropped"].astype(np.int64)
    if not by_sample:  # a conversation is dropped for the reason of its other samples
        reason[reason == ALL_DROP_REASONS.index("no_trained_tokens")] = -1
    is_placed, pieces = total(placed) > 0, np.maximum(1, total(once & placed))
    return {name: entries[name][heads] for name in ("source", "record", "turns", "digest", "group", "first")} | {
        **{f"one_{name}": total(~begins & changed(entries[name])) == 0 for name in ("turns", "digest", "group")},
        "placed": is_placed,
        "validation": total(split == 1) > 0,
        "truncated": total(entries["truncated"]) > 0,
        "length": total(whole * once),
        "tokens": total((length - separator - entries["repeated"]) * (once & placed)),
        "copies": total(in_train) // pieces,
        "copies_held_out": total(split == 1) // pieces,
        "places": total(length * in_train),
        "trained": total(trained * in_train),
        "untrained": total((whole - trained) * (once & placed)),
        "later": total(once & (first > 0) & (shared == 0)),
        "again": total(entries["repeated"] * (once & placed)),
        "shared": total(shared * (once & placed)),
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
    later: int = 0  # pieces that begin after the start of a sample
    again: int = 0  # tokens that these pieces repeat
    shared: int = 0  # tokens that trees do not store again
    repeated: int = 0  # prompt tokens that the previous sample of the conversation also contains
    reasons: Counter[int] = field(default_factory=Counter)  # why conversations or samples are not packed

    def add(self, seen: Conversations) -> None:
        placed = seen["placed"]
        self.count += len(placed)
        self.packed += int(np.count_nonzero(placed))
        self.truncated += int(np.count_nonzero(seen["truncated"]))
        self.tokens += int(seen["tokens"].sum())
        self.later += int(seen["later"].sum())
        self.again += int(seen["again"].sum())
        self.shared += int(seen["shared"].sum())
        inside = seen["source"][seen["source"] < len(self.accepted)]
        self.accepted += np.bincount(inside, minlength=len(self.accepted))
        reasons, counts = np.unique(seen["reason"][~placed], return_counts=True)
        self.reasons.update(dict(zip(reasons.tolist(), counts.tolist(), strict=True)))
        names = ("source", "record", "length", "untrained", "shared")
        source, record, length, untrained, shared = (seen[name][placed] for name in names)
        later = (source[1:] == source[:-1]) & (record[1:] == record[:-1])
        self.repeated += int(np.maximum(0, np.minimum(untrained[1:], length[:-1]) - shared[1:])[later].sum())

    def dropped(self, names: tuple[str, ...]) -> dict[str, int]:
        return dict(sorted(((*names, "unknown")[reason], count) for reason, count in self.reasons.items()))


class IndexCheck:
    """Check the entries of an index against the settings, and count them."""

    def __init__(self, manifest: Manifest, folder: Path, index: Index):
        self._manifest, self._settings, self._folder = manifest, manifest.config, folder
        self.conversations, self.samples = (Counts(np.zeros(len(manifest.sources), np.int64)) for _ in range(2))
        self._by = str(self._settings.get("validation_by", "conversation"))
        self._broken: dict[str, tuple[int, int] | None] = {}  # rule → source and record of the first that breaks it
        self._other_epochs: set[str] = set()  # splits whose pieces differ from `train`
        # Sources or entries that are not in the manifest count as one additional entry, which nothing reads.
        count = len(self._settings["sources"])
        entries = (source.entry if 0 <= source.entry < count else count for source in manifest.sources)
        self._entries = np.array([*entries, count])
        splits = [*(source.get("split") for source in self._settings["sources"]), None]
        # For each split, whether a source may only be in it.
        self._only = {name: np.array([splits[entry] == name for entry in self._entries]) for name in SPLITS}
        self._weights = np.array([*(float(source.get("weight", 1)) for source in self._settings["sources"]), 1.0])
        self._mixture: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(count + 1, np.int64))
        self._dropped = DroppedCheck(manifest, folder)
        self._contents, self.contents = index.by_content, 0  # and the number of different contents that are packed
        self.held_out = 0  # packed conversations of the validation split
        self._groups, self.groups = index.by_group, 0  # and those with a prompt, or with a value of the key
        for partition in index.by_conversation:
            self._add(partition)
        for contents in index.by_content:
            self._check_contents(contents)
        for groups in index.by_group:
            self.groups += len(np.unique(groups["group"][groups["validation"] & ~groups["alone"]]))
            groups = groups[np.lexsort((groups["record"], groups["source"]))]
            both = groups["validation"] & np.isin(groups["group"], groups["group"][~groups["validation"]])
            self._require(
                ~both, f"is in the validation split, and the same {self._by} is in the training split", groups
            )

    def _add(self, entries: np.ndarray) -> None:
        samples = seen = conversations_of(entries)
        for name in ("digest", "turns", "group"):
            self._require(seen[f"one_{name}"], f"has entries that differ in {name}", seen)
        self.conversations.add(seen)
        self.held_out += int(np.count_nonzero(seen["placed"] & seen["validation"]))
        numbers = np.minimum(seen["source"], len(self._entries) - 1)
        for name, other in (("train", seen["validation"]), ("validation", seen["copies"] > 0)):
            self._require(~(self._only[name][numbers] & other), f"is not in {name}, the split of its source", seen)
        self._dropped.add(seen["source"], seen["record"], seen["reason"])
        if self._manifest.ledger.samples is not None:
            samples = conversations_of(entries, by_sample=True)
            self.samples.add(samples)
            self._check_samples(seen, samples)
        reason = samples["reason"]
        # A piece without trained tokens is in no row. A piece that is cut off by `split` fills a row. One that is cut
        # off between turns may be short, and nothing shows that more followed.
        longest = self._manifest.sequence_length - (self._settings.get("overlong") == "split")
        whole = (samples["first"] == samples["shared"]) & (samples["length"] <= longest) & ~samples["truncated"]
        for name, values in (("tokens", samples["length"]), ("turns", samples["turns"])):
            for bound, outside in ((f"min_{name}", np.less), (f"max_{name}", np.greater)):
                limit = self._settings.get(bound)
                is_outside = np.zeros(len(reason), bool) if limit is None else outside(values, limit)
                of_bound = reason == ALL_DROP_REASONS.index(bound)
                self._require(~of_bound | is_outside, f"was dropped by {bound}, but is within it", samples)
                # The index does not have all tokens of a truncated conversation.
                checked = whole if name == "tokens" else samples["placed"]
                checked = checked & (bound != "min_tokens" or not self._manifest.splits_at_turns)
                self._require(~(checked & is_outside), f"is packed, but {bound} is {limit}", samples)
        contents = np.empty(np.count_nonzero(seen["placed"]), CONTENT)
        for name in CONTENT.names or ():
            contents[name] = seen[name][seen["placed"]]
        # The first two of equal contents show whether a rule is broken, and where; so a content that is repeated many
        # times does not fill a partition.
        contents = contents[np.lexsort((contents["validation"], contents["length"], contents["digest"]))]
        names = ["digest", "length", "validation"]
        contents = contents[np.append([True, True], contents[names][2:] != contents[names][:-2])[: len(contents)]]
        self._contents.add_by_hash(contents["digest"], contents)
        if self._manifest.is_grouped:
            groups = np.empty(len(seen["placed"]), GROUP)
            for name in ("group", "validation", "source", "record"):
                groups[name] = seen[name]
            groups["alone"] = seen["group"] == seen["digest"]
            groups = groups[seen["placed"]]
            # As for contents: the first of each side suffices.
            groups = groups[np.lexsort((groups["record"], groups["source"], groups["validation"], groups["group"]))]
            sides = groups[["group", "validation"]]
            groups = groups[np.append(True, sides[1:] != sides[:-1])[: len(groups)]]
            self._groups.add_by_hash(groups["group"], groups)
        self._add_to_mixture(seen)
        self._compare_epochs(entries)

    def _require(self, held: np.ndarray, rule: str, of: Conversations | np.ndarray) -> None:
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

        Packed samples are in the same splits, equally often.
        """
        keys = np.stack([samples["source"], samples["record"]])
        owner = np.cumsum(np.append(True, (np.diff(keys) != 0).any(axis=0))[: keys.shape[1]]) - 1
        for name in ("validation", "copies", "copies_held_out"):
            held = ~samples["placed"] | (samples[name] == seen[name][owner])
            self._require(held, "has samples in different splits, or with different numbers of copies", samples)
        self._require(
            ~(seen["placed"][owner] & np.isin(samples["reason"], OF_CONVERSATION)),
            "has a sample that was dropped for a reason of the whole conversation, but another sample is packed",
            samples,
        )

    def _check_contents(self, contents: np.ndarray) -> None:
        """Check that no content is in both splits, or packed twice without leave."""
        contents = contents[np.lexsort((contents["record"], contents["source"]))]
        digest, length, held_out = contents["digest"], contents["length"], contents["validation"]
        self.contents += len(np.unique(digest))
        # With a key, records with the same content may have different values.
        both = held_out & np.isin(digest, digest[~held_out]) & (self._by in ("conversation", "prompt"))
        self._require(~both, "is in the validation split, and the same content is in the training split", contents)
        if self._settings.get("duplicates") in ("exact", "near"):
            first, order = np.ones(len(digest), bool), np.lexsort((length, digest))
            first[order[1:]] = (np.diff(digest[order]) != 0) | (np.diff(length[order]) != 0)
            self._require(first, "is packed, although another packed conversation has the same content", contents)

    def _add_to_mixture(self, seen: Conversations) -> None:
        """Count conversations and tokens by entry of `sources`."""
        entries = self._entries[np.minimum(seen["source"], len(self._entries) - 1)]
        over, unweighted = (seen["reason"] == ALL_DROP_REASONS.index(name) for name in ("limit", "weight"))
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
        for number, name in enumerate(kinds if len(kinds) > 2 else ()):
            if name != "validation":
                of_epoch = entries[entries["split"] == number]
                columns = [of_epoch[column] for column in ("source", "record", "first", "length", "trained", "turn")]
                pieces = np.stack(columns)[:, np.lexsort(columns)]
                wanted = pieces if wanted is None else wanted
                if not np.array_equal(pieces, wanted):
                    self._other_epochs.add(name)

    def check(self) -> None:
        """Raise DataError if anything does not follow from the settings."""
        self._dropped.check()
        where = self._folder / "index.arrow"
        for rule, broken in self._broken.items():
            if broken:
                name = self._manifest.sources[broken[0]].path
                raise DataError("bad_index", f"{where}: {name}:{broken[1]} {rule}")
        sources, recorded = self._settings["sources"], self._manifest.mixture
        for entry, source in enumerate(sources):
            counts = {name: int(values[entry]) for name, values in self._mixture.items()}
            if problem := self._problem_of_entry(source, counts):
                raise DataError("bad_index", f"{where}: sources[{entry}]: {problem}")
        for name in (name for name in kinds_of_splits(self._manifest) if name in self._other_epochs):
            raise DataError("bad_index", f"{where}: {name} has different pieces from train")
        where = self._folder / "manifest.json"
        counted = {name: self._mixture[name][: len(sources)] for name in ("conversations", "copies")}
        shared = {name: self._mixture[name][: len(sources)] for name in ("tokens", "trained_tokens")}
        for entry, (source, facts) in enumerate(zip(sources, recorded, strict=False)):
            values = {"path": source["path"], "weight": source.get("weight", 1.0), "limit": source.get("limit")}
            values |= {name: int(of_entries[entry]) for name, of_entries in (counted | shared).items()}
            for name, of_entries in shared.items():
                values[f"{name}_percent"] = round(float(100 * of_entries[entry] / max(1, of_entries.sum())), 4)
            for name, value in values.items():
                if (noted := getattr(facts, name)) != value:
                    what = f"{name} is recorded as {noted}, counted {value}"
                    raise DataError("wrong_figure", f"{where}: mixture: {facts.path}: {what}")
        if len(sources) != len(recorded):
            raise DataError(
                "wrong_figure", f"{where}: mixture has {len(recorded)} entries, but the config has {len(sources)}"
            )

    def _problem_of_entry(self, source: dict[str, Any], counts: dict[str, int]) -> str:
        """Say how an entry of `sources` contradicts its `limit` or `weight`."""
        limit, weight, chosen = source.get("limit"), source.get("weight", 1), counts["chosen"]
        if limit is not None and chosen > limit:
            return f"{chosen:,} conversations are taken, but the limit is {limit}"
        if counts["over"] and chosen != limit:
            return f"only {chosen:,} conversations are taken, but others are dropped by limit: {limit}"
        if counts["held_out_twice"]:
            return "a conversation is in the validation split twice"
        if source.get("split") == "validation" and self._settings.get("weighting") in RELATIVE:
            return "conversations are dropped by weight" if counts["unweighted"] else ""
        if self._settings.get("weighting") == "token_share":
            return "token_share: a conversation is packed twice" if counts["twice"] else ""
        if self._settings.get("weighting") == "proportions":
            return self._problem_of_share(weight, counts)
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

    def _problem_of_share(self, weight: float, counts: dict[str, int]) -> str:
        """Say how an entry of `sources` contradicts its share of the conversations."""
        if counts["unweighted"]:
            return "conversations are dropped by weight, but weighting is proportions"
        sizes, copies = self._mixture["in_train"], counts["copies"]
        of_entries = zip(self._settings["sources"], sizes.tolist(), strict=False)
        scale = max(size / source.get("weight", 1) for source, size in of_entries)
        wanted = max(counts["in_train"], math.floor(weight * scale + 0.5))
        if copies != wanted:
            return f"{copies:,} conversations are packed, with copies, but its share is {wanted:,}"
        return ""
