"""Check the index against the manifest's settings: filters, duplicates, limits, copies, splits, and epochs.

    index ─conversations_of─▶ a row for each conversation ─check_choice─▶ filters, duplicates, limits, splits, mixture

No code that made the corpus is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.core.errors import DataError
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import DROP_REASONS, SAMPLE_DROP_REASONS

Conversations = dict[str, np.ndarray]


def conversations_of(index: pa.Table, apart: bool = False) -> Conversations:
    """Return columns over the conversations of an index, sorted by source and record.

    With `apart`, every sample of a conversation has a row of its own.

    source, record, turns, digest   as in the index
    placed, validation, truncated   bool
    length                          tokens: of all pieces, once, or of the whole if it was dropped
    tokens                          without separators, of all pieces, once; 0 if it was dropped
    copies, copies_held_out         in the split `train`, and in `validation`
    places, trained                 in the split `train`, over all copies
    untrained                       tokens, of all pieces, once
    reason                          why it was dropped, an index into SAMPLE_DROP_REASONS; -1 if it is packed
    """
    source, record = index["source"].to_numpy(), index["record"].to_numpy()
    first = index["first"].fill_null(-1).to_numpy()
    turn = index["turn"].to_numpy() if "turn" in index.schema.names else np.full(len(source), -1)
    order = np.lexsort((first, turn, record, source))
    source, record, first, turn = source[order], record[order], first[order], turn[order]
    split = _numbers(index["split"], ("train", "validation"))[order]
    length, trained, separator, truncated, turns, digest = (
        index[name].to_numpy()[order] for name in ("length", "trained", "separator", "truncated", "turns", "digest")
    )
    begins = np.append(True, (source[1:] != source[:-1]) | (record[1:] != record[:-1]))[: len(source)]
    of_sample = begins | np.append(True, turn[1:] != turn[:-1])[: len(source)]
    begins = of_sample if apart else begins
    once = of_sample | np.append(True, first[1:] != first[:-1])[: len(source)]
    heads = np.flatnonzero(begins)

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, heads, dtype=np.int64) if len(heads) else np.empty(0, np.int64)

    in_train, placed = split == 0, first >= 0
    reason = _numbers(index["dropped"], SAMPLE_DROP_REASONS)[order]
    if not apart:  # that of a sample counts only if no other has another one
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


def _numbers(names: pa.ChunkedArray, known: tuple[str, ...]) -> np.ndarray:
    """Return the index of each name in `known`; -1 for others and for null."""
    found = pc.index_in(names.cast(pa.string()), pa.array(known)).fill_null(-1)
    return found.to_numpy()


def check_choice(
    manifest: Manifest, folder: Path, index: pa.Table, seen: Conversations, samples: Conversations
) -> None:
    """Raise DataError if the selection of conversations or copies does not follow from the settings.

    `seen` and `samples` are the conversations of the index and their samples.
    """
    settings, where = manifest.config, folder / "index.arrow"

    def require(held: np.ndarray, what: str, of: Conversations = seen) -> None:
        if not held.all():
            at = int(np.flatnonzero(~held)[0])
            name = manifest.sources[int(of["source"][at])].path
            raise DataError("bad_index", f"{where}: {name}:{of['record'][at]} {what}")

    if samples is not seen:
        _check_samples(seen, samples, require)
    reason = samples["reason"]
    whole = samples["placed"] & (samples["length"] <= manifest.sequence_length) & ~samples["truncated"]
    for name, values in (("tokens", samples["length"]), ("turns", samples["turns"])):
        for bound, outside in ((f"min_{name}", np.less), (f"max_{name}", np.greater)):
            limit = settings.get(bound)
            is_outside = np.zeros(len(reason), bool) if limit is None else outside(values, limit)
            require(
                (reason != DROP_REASONS.index(bound)) | is_outside, f"was dropped by {bound}, but is within it", samples
            )
            # The index does not have all tokens of a truncated conversation.
            checked = whole if name == "tokens" else samples["placed"]
            require(~(checked & is_outside), f"is packed, but {bound} is {limit}", samples)
    _check_contents(settings, seen, require)
    entries = np.array([source.entry for source in manifest.sources])[seen["source"]]
    for entry, source in enumerate(settings["sources"]):
        _check_entry(settings, source, entry, seen, entries == entry, where)
    _check_epochs(manifest, where, index)
    _check_mixture(manifest, folder, seen, entries)


def _check_samples(seen: Conversations, samples: Conversations, require: Any) -> None:
    """Check that all samples of a conversation have its content, and are packed together or not at all."""
    keys = np.stack([samples["source"], samples["record"]])
    owner = np.cumsum(np.append(True, (np.diff(keys) != 0).any(axis=0))[: keys.shape[1]]) - 1
    placed = samples["placed"]
    for name in ("digest", "turns"):
        require(samples[name] == seen[name][owner], f"has samples that differ in {name}", samples)
    for name in ("validation", "copies", "copies_held_out"):
        held = ~placed | (samples[name] == seen[name][owner])
        require(held, "has samples that are packed in other splits, or more often than others", samples)
    together = [DROP_REASONS.index(name) for name in ("min_turns", "max_turns", "duplicate", "limit", "weight")]
    alone = ~(seen["placed"][owner] & np.isin(samples["reason"], together))
    require(alone, "has a sample that was dropped with its conversation, but another one is packed", samples)


def _check_entry(
    settings: dict[str, Any], source: dict[str, Any], entry: int, seen: Conversations, own: np.ndarray, where: Path
) -> None:
    """Check the limit and the weight of one entry of `sources`."""

    def require(held: bool, what: str) -> None:
        if not held:
            raise DataError("bad_index", f"{where}: sources[{entry}]: {what}")

    limit, weight = source.get("limit"), source.get("weight", 1)
    over, unweighted = (own & (seen["reason"] == DROP_REASONS.index(name)) for name in ("limit", "weight"))
    placed = own & seen["placed"]
    chosen = np.count_nonzero(placed | unweighted)
    require(limit is None or chosen <= limit, f"{chosen:,} are taken, but limit is {limit}")
    require(not over.any() or chosen == limit, f"{chosen:,} are taken, but others are dropped by limit: {limit}")
    require(bool((seen["copies_held_out"][placed] <= 1).all()), "a conversation is in the validation split twice")
    if settings.get("weighting") == "token_share":
        require(bool((seen["copies"][placed] <= 1).all()), "token_share: a conversation is packed twice")
        return
    whole, rest = divmod(weight, 1)
    require(not unweighted.any() or whole == 0, f"some are dropped by weight, but weight is {weight:g}")
    copies = seen["copies"][placed & ~seen["validation"]]
    require(bool(np.isin(copies, [whole, whole + (rest > 0)]).all()), f"copies do not match weight {weight:g}")
    # Each side of the split rounds its share up, to at least one.
    extra = np.count_nonzero(copies > whole) if whole else np.count_nonzero(placed)
    of = len(copies) if whole else chosen
    require(abs(extra - rest * of) <= 2 or whole == weight, f"{extra:,} of {of:,} have one more copy")


def _check_contents(settings: dict[str, Any], seen: Conversations, require: Any) -> None:
    """Check that no content is in both splits and, if duplicates are dropped, that none is packed twice."""
    placed = np.flatnonzero(seen["placed"])
    digest, validation = seen["digest"][placed], seen["validation"][placed]
    both = np.zeros(len(seen["placed"]), bool)
    both[placed[validation]] = np.isin(digest[validation], digest[~validation])
    require(~both, "is in the validation split, and the same content is in the training split")
    if settings.get("duplicates") == "drop":
        order = np.lexsort((seen["length"][placed], digest))
        same = (digest[order[1:]] == digest[order[:-1]]) & (np.diff(seen["length"][placed][order]) == 0)
        again = np.zeros(len(seen["placed"]), bool)
        again[placed[order[1:][same]]] = True
        require(~again, "is packed, and another one with the same content is, too")


def _check_epochs(manifest: Manifest, where: Path, index: pa.Table) -> None:
    """Check that every packing of the training split has the same pieces."""
    split = index["split"].cast(pa.string())
    wanted: np.ndarray | None = None
    for name in manifest.splits:
        if name == "validation" or len(manifest.splits) <= 2:
            continue
        own = index.filter(pc.equal(split, name))
        names = ("source", "record", "first", "length", "trained", *(n for n in own.schema.names if n == "turn"))
        columns = [own[column].to_numpy() for column in names]
        found = np.stack(columns)[:, np.lexsort(columns)]
        wanted = found if wanted is None else wanted
        if not np.array_equal(found, wanted):
            raise DataError("bad_index", f"{where}: {name} has different pieces from train")


def _check_mixture(manifest: Manifest, folder: Path, seen: Conversations, entries: np.ndarray) -> None:
    count = len(manifest.config["sources"])
    in_train = seen["copies"] > 0
    found = {
        name: np.bincount(entries, values, minlength=count).astype(np.int64)
        for name, values in (
            ("conversations", in_train),
            ("copies", seen["copies"]),
            ("tokens", seen["places"]),
            ("trained_tokens", seen["trained"]),
        )
    }
    shares = {f"{name}_percent": 100 * found[name] / max(1, found[name].sum()) for name in ("tokens", "trained_tokens")}
    rows = [
        {"path": source["path"], "weight": source.get("weight", 1.0), "limit": source.get("limit")}
        | {name: int(values[entry]) for name, values in found.items()}
        | {name: round(float(values[entry]), 4) for name, values in shares.items()}
        for entry, source in enumerate(manifest.config["sources"])
    ]
    for row, facts in zip(rows, manifest.mixture, strict=False):
        for name, value in row.items():
            if getattr(facts, name) != value:
                raise DataError(
                    "wrong_figure",
                    f"{folder / 'manifest.json'}: mixture: {facts.path}: {name} is recorded as {getattr(facts, name)}, "
                    f"counted {value}",
                )
    if len(rows) != len(manifest.mixture):
        raise DataError(
            "wrong_figure", f"{folder / 'manifest.json'}: mixture has {len(manifest.mixture)} entries, not {len(rows)}"
        )
