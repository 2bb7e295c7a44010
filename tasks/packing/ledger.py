"""Account for every conversation and token; an unbalanced ledger fails the run.

Accepted, Pieces ─take_account─▶ Account: sums per source and split, first copies and further copies apart ─▶ figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.conversations.unused_keys import sum_counts
from packcorpus.tasks.packing import bin_packing, several_lengths
from packcorpus.tasks.packing.pieces import CHUNK, Accepted, Pieces
from packcorpus.tasks.packing.placement import Bound
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.facts import Ledger
from packcorpus.tasks.storage.layout import SPLITS, first_packing
from packcorpus.tasks.storage.schemas import ALL_DROP_REASONS, REJECTED
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.tokenization.tokenize_part import (
    APART,
    AS_RENDERED,
    LEFT_OUT,
    PRICE,
    REASONING,
    counts_in,
    noticed_in,
)

# A way out is named if it saves this share of the tokens.
SAVES = 0.1

# Digests of conversations that are sorted at a time, 8 bytes each.
SORTED_AT_ONCE = 1 << 24

# What is summed over pieces. `places` are tokens, separators included.
UNITS = ("pieces", "places", "trained", "separators")


@dataclass(slots=True)
class Losses:
    """Losses of conversations that are not packed whole.

    Token counts do not include separators.
    """

    dropped: dict[str, int]  # conversations, by reason
    truncated: int = 0  # conversations
    split: int = 0  # conversations
    pieces: int = 0  # pieces of split conversations without a trained token
    later: int | None = None  # pieces without the beginning of their conversation; only with split_at: turns, as below
    inside: int | None = None  # of them, those that begin within a turn
    tokens_repeated: int | None = None  # before later pieces
    tokens_dropped: int = 0
    tokens_truncated: int = 0
    trained_truncated: int | None = None  # of tokens_truncated; only with overlong: turns
    tokens_rejected: int = 0


@dataclass(slots=True)
class Written:
    """The rows of a plan: all packings of `train`, and the held-out split."""

    rows_of_shards: list[int] = field(default_factory=list)
    rows_of_splits: dict[str, int] = field(default_factory=dict)
    checksums: list[str] = field(default_factory=list)  # of the placements of each shard
    bounds: list[Bound] = field(default_factory=list)  # of the rows of each split
    sums: dict[str, dict[str, int]] = field(default_factory=dict)  # of row statistics, by split; empty without packing
    places: list[Bound] = field(default_factory=list)  # of places, if rows have several lengths


@dataclass(slots=True)
class Account:
    """Outcome of all conversations and tokens of a corpus."""

    sums: np.ndarray  # int64[UNITS, sources, held out or not, further copy or first], of one packing of each split
    times: np.ndarray  # int64[2], packings of the training split and of the held-out split
    lost: Losses
    # int64[sources, 4]: conversations without a trained token in a row, and their tokens; conversations in a pass over
    # the training split, and their copies
    of_sources: np.ndarray
    packed: int  # conversations
    duplicates: int  # packed conversations with the same content as another one before them
    samples: dict[str, Any] | None  # None if every conversation is one sample
    alignment: int | None  # padding in all rows that rounds pieces up to `align`; None if `align` is 1
    shared: int | None = None  # tokens that are not stored again; None without trees
    least: int | None = None  # tokens that any trees store; only if all samples may be in one

    @property
    def in_train(self) -> int:
        """Return the number of conversations in the training split."""
        return int(self.of_sources[:, 2].sum())

    def of(self, unit: str) -> np.ndarray:
        """Return the sums of one of UNITS: int64[sources, held out, further copy]."""
        return np.asarray(self.sums[UNITS.index(unit)])

    def by_source(self, unit: str) -> np.ndarray:
        """Sum over all rows of all splits: int64[sources]."""
        return np.asarray(self.of(unit).sum(axis=2) @ self.times)

    def total(self, unit: str) -> int:
        return int(self.by_source(unit).sum())

    def once(self, unit: str) -> int:
        """Sum over the first copies."""
        return int(self.of(unit)[:, :, 0].sum())


def take_account(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Account:
    """Count the packed conversations and tokens, and the losses of each source."""
    config, accepted, left, numbers = recipe.config, pieces.accepted, pieces.accepted.left(), source_numbers(recipe)
    sums, alignment, shared = np.zeros((len(UNITS), 4 * len(recipe.files))), 0, 0
    for further, (top, bottom) in enumerate(((0, pieces.once), (pieces.once, len(pieces)))):
        for chunk in pieces.chunks(top, bottom):
            of = pieces.columns(chunk)
            held_out = accepted.held_out[of.conversation]
            group = 4 * numbers[accepted.part(of.conversation)] + 2 * held_out + further
            for unit, values in enumerate((None, of.length, pieces.trained(chunk, tokens), of.separator)):
                sums[unit] += np.bincount(group, values, minlength=sums.shape[1])
            shared += 0 if further else int(of.shared.sum(dtype=np.int64))
            gaps = config.rows.places(of.length) - of.length
            alignment += int(gaps[held_out].sum()) + config.epochs * int(gaps[~held_out].sum())
    of_sources = np.zeros((len(recipe.files), 4), np.int64)
    firsts = np.searchsorted(numbers, np.arange(len(recipe.files) + 1))  # the first part of each source
    for number, (first, last) in enumerate(pairwise(accepted.edges[firsts].tolist())):
        inside = slice(first, last)
        late = np.flatnonzero(accepted.reason[inside] == REJECTED) + first
        chosen = left[inside] & ~accepted.held_out[inside]
        count = int(np.count_nonzero(chosen))
        copies = count if pieces.copies is None else int(pieces.copies[inside][chosen].sum(dtype=np.int64))
        of_sources[number] = _conversations(late, accepted), int(accepted.encoded(late).sum()), count, copies
    samples = None
    if accepted.samples.several:
        counts = np.bincount(accepted.reason, minlength=REJECTED + 1).tolist()
        dropped = zip(ALL_DROP_REASONS, counts[1:], strict=False)
        samples = {
            "read": len(accepted.reason),
            "packed": counts[0],
            "rejected": counts[REJECTED],
            "dropped": {name: count for name, count in dropped if count},
            "repeated_prompt_tokens": int(repeated_prompt_tokens(pieces, tokens).sum()),
        }
    times = np.array([config.epochs, 1])
    return Account(
        sums.astype(np.int64).reshape(len(UNITS), -1, 2, 2),
        times,
        count_losses(pieces, tokens, config),
        of_sources,
        int(np.count_nonzero(left)),
        count_duplicates(left, tokens),
        samples,
        None if config.align == 1 else alignment,
        shared if config.rows.is_shared else None,
        None if pieces.least is None else int(pieces.least @ times),
    )


def count_duplicates(left: np.ndarray, tokens: TokenColumns) -> int:
    """Count the conversations with the same content as another one before them.

    `left` is true at the first sample of each packed conversation: bool[samples]. Memory is bounded: at most about
    SORTED_AT_ONCE digests are sorted at a time.
    """
    packed, distinct = int(np.count_nonzero(left)), 0
    passes = max(1, -(-packed // SORTED_AT_ONCE))
    for number in range(passes):
        of_range = [np.empty(0, np.uint64)]
        for top in range(0, len(left), CHUNK):
            bottom = min(top + CHUNK, len(left))
            digests = tokens.column("digest", top, bottom)[left[top:bottom]]
            if passes > 1:
                digests = digests[digests // np.uint64(-(-(2**64) // passes)) == number]
            of_range.append(digests)
        digests = np.concatenate(of_range)
        digests.sort()
        distinct += int(np.count_nonzero(digests[1:] != digests[:-1])) + bool(len(digests))
    return packed - distinct


def count_losses(pieces: Pieces, tokens: TokenColumns, config: Config) -> Losses:
    """Count the losses by limits, filters, and the overlong policy.

    A conversation counts once, however often it is packed.
    """
    accepted, outcomes = pieces.accepted, pieces.accepted.outcomes()
    lost, ends = Losses({}), np.zeros(REJECTED + 1, np.int64)
    for top in range(0, len(accepted.length), CHUNK):
        chunk = slice(top, top + CHUNK)
        encoded, reasons = accepted.encoded(chunk), accepted.reason[chunk]
        ends += np.bincount(outcomes[chunk], minlength=len(ends))
        lost.tokens_rejected += int(encoded[reasons == REJECTED].sum())
        lost.tokens_dropped += int(encoded[(reasons > 0) & (reasons != REJECTED)].sum())
    dropped = dict(zip(ALL_DROP_REASONS, ends[1:].tolist(), strict=False))
    lost.dropped = {reason: count for reason, count in dropped.items() if count or reason == "too_long"}
    stays = accepted.reason[pieces.cut_of] == 0
    of, (first, taken, _, trained, repeated, inside) = pieces.cut_of[stays], pieces.cuts[stays].T
    cut = np.unique(of)
    separators = accepted.separator[of] & (first + taken == accepted.length[of])
    gone = int(accepted.encoded(cut).sum()) - int(taken.sum()) + int(separators.sum())
    if config.overlong == "split":
        lost.split, lost.tokens_dropped = _conversations(cut, accepted), lost.tokens_dropped + gone
        if config.splits_at_turns:
            lost.later, lost.inside = int(np.count_nonzero(first)), int(inside.sum())
            lost.tokens_repeated = int(repeated.sum())
            # Nothing is missing if each piece begins where the one before it ends, and the last ends the conversation.
            ends, is_first = first + taken, np.append(True, of[1:] != of[:-1])[: len(of)]
            before = np.where(is_first, 0, np.roll(ends, 1))
            is_cut_off = np.roll(is_first, -1) & (ends < accepted.length[of])
            lost.pieces = int(np.count_nonzero(first > before) + np.count_nonzero(is_cut_off))
        else:
            count = np.maximum(1, -(-(accepted.length[cut] - 1) // (config.sequence_length - 1)))  # pieces of each
            lost.pieces = int(count.sum()) - len(of)
    else:
        is_cut = first + taken < accepted.length[of]
        lost.truncated, lost.tokens_truncated = _conversations(of[is_cut], accepted), gone
    if config.overlong == "turns":
        lost.trained_truncated = -int(trained.sum())
        for top in range(0, tokens.edges[-1], CHUNK):
            inside = cut[slice(*np.searchsorted(cut, [top, top + CHUNK]))]
            if len(inside):
                column = tokens.column("trained", top, min(top + CHUNK, tokens.edges[-1]))
                lost.trained_truncated += int(column[inside - top].sum())
    return lost


def _conversations(samples: np.ndarray, accepted: Accepted) -> int:
    """Count the conversations of some samples."""
    return len(np.unique(accepted.samples.first_of(samples)))


def repeated_prompt_tokens(pieces: Pieces, tokens: TokenColumns) -> np.ndarray:
    """Count the prompt tokens of each sample that repeat earlier ones: int64[samples].

    The count is the number of untrained tokens, limited to the length of the previous packed sample of the
    conversation. It is an upper bound if the template leaves out a part of the history. What a tree stores once, and
    further copies, do not count.
    """
    accepted = pieces.accepted
    length, untrained, shared = (np.zeros(len(accepted.length), np.int64) for _ in range(3))
    for chunk in pieces.chunks(0, pieces.once):
        of = pieces.columns(chunk)
        np.add.at(shared, of.conversation, of.shared)
        np.add.at(length, of.conversation, of.shared + of.length)
        np.add.at(untrained, of.conversation, of.shared + of.length - pieces.trained(chunk, tokens))
    packed = np.flatnonzero(accepted.reason == 0)
    first = accepted.samples.first_of(packed)
    repeated = np.zeros(len(accepted.length), np.int64)
    repeated[packed[1:]] = np.minimum(untrained[packed[1:]], length[packed[:-1]]) * (first[1:] == first[:-1])
    return np.maximum(0, repeated - shared)


def plan_facts(
    recipe: Recipe, receipts: Sequence[dict[str, Any]], account: Account, rejected: dict[str, int], written: Written
) -> dict[str, Any]:
    """Return the facts of a plan that the manifest and the shards need.

    `receipts` are the receipts of the token files. `rejected` has the number of rejected conversations by reason.
    Raises DataError if the ledger does not balance.
    """
    config, layout, rows = recipe.config, recipe.config.rows, sum(written.rows_of_splits.values())
    room = sum(count * layout.length_of(split) for split, count in written.rows_of_splits.items())
    places = room * config.packing
    if layout.padding == "none":  # rows may be shorter than they could be
        places = account.total("places") + (account.alignment or 0)
    parts: dict[str, list[dict[str, int]]] = {file.name: [] for file in recipe.files}
    for receipt, number in zip(receipts, source_numbers(recipe), strict=True):
        parts[recipe.files[number].name].append(receipt.get("unused_keys", {}))  # earlier versions did not count them
    unused = {name: counts for name, of_parts in parts.items() if (counts := sum_counts(of_parts))}
    facts: dict[str, Any] = {}
    if layout.has_several_lengths:
        facts["bounds_of_splits"] = [bound for bound, _ in written.bounds]
    facts |= {
        "ledger": make_ledger(receipts, account, rejected, places, rows, recipe).model_dump(),
        "packing_metadata": _packing_metadata(config, account, rows, room, written),
        "sources": source_facts(recipe, receipts, account),
        "mixture": mixture_facts(recipe, account),
        "noticed": noticed_in(receipts) | ({"unused_keys": unused} if unused else {}),
        "rows_of_shards": written.rows_of_shards,
        "placements": written.checksums,
        "row_sums": written.sums,
    }
    if config.loss_weight != "none":
        # The weights need the trained tokens and conversations of a split, with copies. These are counts of one pass,
        # which are the same for all packings of the training split.
        trained = account.of("trained").sum(axis=(0, 2)).tolist()
        conversations = [int(account.of_sources[:, 3].sum()), account.packed - account.in_train]
        kinds = {"of_data": config.reads_loss_weights, "of_conversations": config.weighs_conversations}
        facts["loss_weight"] = {
            split: kinds | {"trained": tokens, "conversations": count}
            for split, tokens, count in zip(SPLITS, trained, conversations, strict=True)
        }
        splits = [first_packing(split) for split in written.rows_of_splits for _ in range(recipe.shards[split])]
        facts["weighted_as"] = splits
    return facts


def make_ledger(
    receipts: Sequence[dict[str, Any]],
    account: Account,
    rejected: dict[str, int],
    places: int,
    rows: float,
    recipe: Recipe,
) -> Ledger:
    """Build the manifest's ledger, and check that it balances.

    `places` is rows × sequence_length, or 0 without packing; with `padding: none`, it is the places that rows have.
    """
    config, lost, samples = recipe.config, account.lost, account.samples
    packed, separators = account.total("places"), account.total("separators")
    encoded = sum(receipt["tokens"] for receipt in receipts) - lost.tokens_rejected
    values = {
        "conversations": {
            "read": sum(receipt["conversations"] for receipt in receipts),
            "packed": account.packed,
            "rejected": dict(sorted(rejected.items())),
            "dropped": lost.dropped,
            "truncated": lost.truncated,
            "split": lost.split,
            "duplicates": account.duplicates,
        },
        "pieces": {
            "packed": account.total("pieces"),
            "dropped": lost.pieces,
            "later": lost.later,
            "inside": lost.inside,
            "repeated_tokens": lost.tokens_repeated,
        },
        "tokens": {
            "encoded": encoded,
            "separators": separators,
            "repeated": packed
            - separators
            - (account.once("places") - account.once("separators"))
            + (lost.tokens_repeated or 0),
            "truncated": lost.tokens_truncated,
            "dropped": lost.tokens_dropped,
            "rejected": lost.tokens_rejected,
            "packed": packed,
            "shared": account.shared,
            "padding": places - packed if places else 0,
            "trained": account.total("trained"),
            "alignment": account.alignment,
            "trained_truncated": lost.trained_truncated,
        },
        "context": {"tokens": packed - account.total("trained"), "left_out": left_out(receipts)},
    }
    if reasoning := left_out_reasoning(receipts, recipe):
        values["reasoning"] = reasoning
    if samples:
        repeated = samples["repeated_prompt_tokens"] / max(1, packed)
        values["samples"] = samples | {
            "repeated_percent": round(100 * repeated, 1),
            "repeated_rows": round(repeated * rows),
            "apart": apart(receipts, samples["read"], encoded),
            "ways_out": ways_out(receipts, recipe, account, encoded, rows),
        }
    if config.turns == "as_rendered":
        counts = counts_in(receipts, AS_RENDERED)
        values["as_rendered"] = {name: counts.get(name, 0) for name in AS_RENDERED}
    ledger = Ledger.model_validate(values)
    ledger.check(places)
    return ledger


def apart(receipts: Sequence[Mapping[str, Any]], samples: float, encoded: float) -> dict[str, Any] | None:
    """Return what `turns: apart` would make of conversations.

    Now, they have so many samples and encoded tokens. Returns None if it would make the same samples.
    """
    more = counts_in(receipts, APART)
    if not more.get("apart_samples"):
        return None
    return {
        "samples": samples + more["apart_samples"],
        "tokens": encoded + more["apart_tokens"],
        "repeated_prompt_tokens": more.get("apart_repeated", 0),
    }


def ways_out(
    receipts: Sequence[Mapping[str, Any]], recipe: Recipe, account: Account, encoded: float, rows: float
) -> dict[str, dict[str, Any]]:
    """Return settings with which conversations have fewer samples.

    The values are what remains of all samples, encoded tokens, and rows. The last sample of a conversation is about its
    one rendering. Tokens of a source fill rows as often as they do now, whatever its weight or the filters. What trees
    would save then is not known, so samples count whole.
    """
    assert account.samples
    config, samples, places = recipe.config, account.samples["read"], account.by_source("places")
    numbers, of_source = source_numbers(recipe), np.zeros(len(places))
    np.add.at(of_source, numbers, [receipt["tokens"] for receipt in receipts])
    copies = (places / np.maximum(1, of_source))[numbers]
    counts = dict.fromkeys(PRICE, 0) | counts_in(receipts, PRICE)
    earlier, tokens, before_round, round_tokens, long_rounds, shared = (counts[name] for name in PRICE)
    whole = 1 + (account.shared or 0) / max(1, account.once("places"))  # of what trees store
    found: dict[str, dict[str, Any]] = {}

    def add(setting: str, fewer: int, name: str) -> None:
        in_rows = copies @ [receipt.get(name, 0) for receipt in receipts]
        left = {"samples": samples - fewer, "tokens": encoded - counts[name]}
        found[setting] = left | {"rows": round((1 - in_rows / max(1, places.sum())) * whole * rows)}

    if not earlier:
        return found
    if config.turns == "apart":
        found["turns: auto"] = {}
    if config.can_share and config.share == "none" and shared > SAVES * encoded:
        add("share: conversation", 0, PRICE[5])
    if long_rounds and before_round and config.train_on == "assistant":
        add("train_on: rounds", before_round, PRICE[3])
    if config.train_on != "last" and not (long_rounds and tokens == round_tokens):
        add("train_on: last", earlier, PRICE[1])
    add("turns: as_rendered", earlier, PRICE[1])
    return found


def left_out(receipts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return what settings left out of the context, by role."""
    return {name.removeprefix("left_out_"): count for name, count in counts_in(receipts, LEFT_OUT).items()}


def left_out_reasoning(receipts: Sequence[Mapping[str, Any]], recipe: Recipe) -> dict[str, Any] | None:
    """Return the reasoning that is in no row; None if there is none."""
    counts = counts_in(receipts, REASONING)
    if not counts:
        return None
    facts = {name: counts.get(count, 0) for name, count in zip(("answers", "tokens"), REASONING, strict=True)}
    if recipe.config.reasoning == "keep":
        return {"unwritten": facts}
    return {"dropped": facts, "template_writes": recipe.template.writes_reasoning}


def _packing_metadata(config: Config, account: Account, rows: int, places: int, written: Written) -> dict[str, Any]:
    """Compute how full the rows are, and compare them with the lower bound.

    If rows have several lengths, each of the bounds of rows is for the pieces that were chosen for one length.
    """
    bound, per_row = sum(count for count, _ in written.bounds), round(account.total("pieces") / rows, 4)
    further, bounds, above, algorithm = {}, written.bounds, rows / bound - 1, bin_packing.ALGORITHM
    if written.places:
        needed = sum(count for count, _ in written.places)
        further = {"places": places, "lower_bound_places": needed}
        above, bounds, algorithm = places / needed - 1, written.places, several_lengths.ALGORITHM
    if account.least is not None:
        further["lower_bound_tokens"] = account.least
    return {
        "enabled": config.packing,
        "algorithm": algorithm if config.packing else "one conversation a row",
        "rows": rows,
        "lower_bound_rows": bound,
        "lower_bound": ", ".join(sorted({name for _, name in bounds if name})),
        "above_lower_bound_percent": round(100 * above, 4),
        "packing_efficiency": round(100 * account.total("places") / places, 4) if config.packing else None,
        "avg_conversations_per_sequence": per_row,
        "compression_ratio": per_row,
    } | further


def source_facts(recipe: Recipe, receipts: Sequence[dict[str, Any]], account: Account) -> list[dict[str, Any]]:
    """Summarize the contribution of each source file."""
    given = np.zeros((len(recipe.files), 3), np.int64)
    for receipt, number in zip(receipts, source_numbers(recipe), strict=True):
        given[number] += [receipt[name] for name in ("conversations", "accepted", "tokens")]
    late, trained = account.of_sources[:, :2].tolist(), account.by_source("trained").tolist()
    return [
        {
            "path": file.name,
            "format": file.format,
            "entry": file.entry,
            "bytes": file.bytes,
            "sha256": file.sha256,
            "conversations": read,
            "accepted": accepted - late[number][0],
            "rejected": read - accepted + late[number][0],
            "tokens": tokens - late[number][1],
            "trained_tokens": trained[number],
        }
        | _split_of(recipe.config, file.entry)
        for number, (file, (read, accepted, tokens)) in enumerate(zip(recipe.files, given.tolist(), strict=True))
    ]


def mixture_facts(recipe: Recipe, account: Account) -> list[dict[str, Any]]:
    """Summarize the contribution of each entry of `sources` to a pass over `train`."""
    facts: list[dict[str, Any]] = [
        {"path": source.path, "weight": source.weight, "limit": source.limit}
        | dict.fromkeys(("conversations", "copies", "tokens", "trained_tokens"), 0)
        | _split_of(recipe.config, entry)
        for entry, source in enumerate(recipe.config.sources)
    ]
    for number, file in enumerate(recipe.files):
        fact = facts[file.entry]
        count, copies = account.of_sources[number, 2:].tolist()
        fact["conversations"] += count
        fact["copies"] += copies
        fact["tokens"] += int(account.of("places")[number, 0].sum())
        fact["trained_tokens"] += int(account.of("trained")[number, 0].sum())
    for name in ("tokens", "trained_tokens"):
        total = max(1, sum(fact[name] for fact in facts))
        for fact in facts:
            fact[f"{name}_percent"] = round(100 * fact[name] / total, 4)
    return facts


def _split_of(config: Config, entry: int) -> dict[str, str]:
    """Return the `split` of an entry of `sources` as a fact, if it has one."""
    split = config.sources[entry].split
    return {"split": split} if split else {}


def source_numbers(recipe: Recipe) -> np.ndarray:
    """Return the index in recipe.files of each part's file: int32[parts]."""
    places = {id(file): index for index, file in enumerate(recipe.files)}
    return np.array([places[id(part.file)] for part in recipe.parts], np.int32)
