"""From token files to a plan, its ledger, index, and rejects, and to the rows.

Nothing is lost or duplicated.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage.kinds import flip
from support.profiles import examples
from support.small_corpus import (
    EOS,
    PAD,
    TRUNCATED,
    Tokens,
    ids_of,
    make_shards_small,
    token_file,
    tokens_of,
    write_receipt,
)

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.corpus.shards import write_shard
from packcorpus.tasks.packing import pieces as pieces_module
from packcorpus.tasks.packing.plan import make_plan
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.storage.files import read_receipt
from packcorpus.tasks.storage.layout import Layout, RowLayout
from packcorpus.tasks.storage.schemas import INDEX_SCHEMA, PLAN_SCHEMA
from packcorpus.tasks.storage.token_files import TokenFiles

SPECIAL = EOS, PAD


@dataclass
class PartInput:
    """One part of a source: its accepted conversations and rejects, by line.

    `says` has (content hash, turns) by line. Every other line has unique content and two turns.
    """

    accepted: dict[int, Tokens]
    rejected: dict[int, str]
    lines: int
    says: dict[int, tuple[int, int]] = field(default_factory=dict)


@st.composite
def part_inputs(draw: st.DrawFn, longest: int) -> PartInput:
    kinds = draw(st.lists(st.sampled_from(["accepted", "accepted", "rejected", "blank"]), max_size=6))
    accepted = {line: draw(tokens_of(longest)) for line, kind in enumerate(kinds) if kind == "accepted"}
    rejected = {
        line: draw(st.sampled_from(["bad_role", "bad_json"])) for line, kind in enumerate(kinds) if kind == "rejected"
    }
    # Equal content has equal length, as in a token file.
    says = {
        line: (hash_of(len(values), draw(st.integers(0, 3))), len(values) % 5) for line, (values, _) in accepted.items()
    }
    return PartInput(accepted, rejected, len(kinds), says)


def hash_of(*numbers: int) -> int:
    return int.from_bytes(blake2b(bytes(numbers), digest_size=8).digest(), "big")


@contextmanager
def recipe_of(sources: Sequence[Sequence[PartInput]], /, **values: Any) -> Iterator[Recipe]:
    """Write token files where the plan expects them, and yield their recipe.

    A source is a list of parts.
    """
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if values.pop("several_shards", False):
            make_shards_small(patch, shard=3)
        root = Path(name)
        (root / "any.model").write_bytes(b"never opened here")
        without_file: dict[str, Any] = {"tokenizer": "any.model", "unknown_markers": "text"}
        config = Config(**{"sources": [Source(path="x")]} | without_file | TRUNCATED | values)
        files, parts = [], []
        for number, own in enumerate(sources):
            container = "jsonl" if number % 2 == 0 else "csv"
            file = SourceFile(
                root / f"s{number}", f"s{number}.x", container, "", "messages", (), 10, f"{number:064x}", 0,
                min(number, len(config.sources) - 1),
            )  # fmt: skip
            files.append(file)
            parts += [Part(file, at, at + 1, f"{number:032x}{at:032x}") for at in range(len(own))]
        recipe = Recipe(config, root, Layout(root), tuple(files), tuple(parts))
        vars(recipe)["encoder"] = SimpleNamespace(eos_id=EOS)
        left = iter(parts)
        for number, own in enumerate(sources):
            base = 0
            for given_part in own:
                write_part(recipe, next(left), given_part, 1000 * number + base)
                base += given_part.lines
        yield recipe


def write_part(recipe: Recipe, part: Part, given_part: PartInput, base: int) -> None:
    key = recipe.tokens_key(part)
    lines = list(given_part.accepted)
    says = [given_part.says.get(line, (0x9E3779B97F4A7C15 * (base + line + 1) % 2**64, 2)) for line in lines]
    digests, turns = [content for content, _ in says], [count for _, count in says]
    receipt = token_file(recipe.layout.token_file(key), list(given_part.accepted.values()), lines, digests, turns)
    receipt["conversations"] += len(given_part.rejected)
    receipt["records"] = given_part.lines
    receipt["rejects"] = [[line, code, f"why {code}"] for line, code in given_part.rejected.items()]
    write_receipt(recipe.layout.token_receipt(key), receipt)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[PartInput]], dict[str, Any]]:
    length = draw(st.integers(8, 32))
    parts = st.lists(part_inputs(3 * length), min_size=1, max_size=3)
    sources = draw(st.lists(parts, min_size=1, max_size=3))
    weights = st.sampled_from([0.3, 1.0, 2.0, 2.5])
    limits = st.sampled_from([None, None, 1, 4])
    weighting = draw(st.sampled_from(["repeat", "repeat", "token_share"]))
    entries = [Source(path=f"s{n}.x", weight=draw(weights), limit=draw(limits)) for n in range(len(sources))]
    mixed = {"sources": entries, "weighting": weighting} if draw(st.booleans()) else {}
    return sources, mixed | {
        "sequence_length": length,
        "overlong": draw(st.sampled_from(["truncate", "turns", "drop", "split"])),
        "validation": draw(st.sampled_from([0.0, 0.4])),
        "duplicates": draw(st.sampled_from(["keep", "exact"])),
        "min_tokens": draw(st.sampled_from([None, None, 4])),
        "max_tokens": draw(st.sampled_from([None, None, 2 * length])),
        "min_turns": draw(st.sampled_from([None, None, 2])),
        "max_turns": draw(st.sampled_from([None, None, 3])),
        "epochs": draw(st.sampled_from([1, 1, 3])),
        "several_shards": draw(st.booleans()),
        "max_rejects": 1.0,
        "seed": draw(st.integers(0, 5)),
    }


def read_stream(path: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(path)) as file:
        rows: list[dict[str, Any]] = pa.ipc.open_stream(file).read_all().to_pylist()
    return rows


def write_shards(recipe: Recipe) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the rows of every shard of the plan, by split and number."""
    folder = recipe.plan_folder
    receipt = orjson.loads((folder / "plan.json").read_bytes())
    tokens = TokenFiles([recipe.layout.token_file(recipe.tokens_key(part)) for part in recipe.parts])
    found = {}
    assert len(receipt["rows_of_shards"]) == sum(recipe.shards.values())
    for number, name in enumerate(recipe.shard_names):
        with pa.memory_map(str(folder / "plan.arrow")) as file:
            plan = pa.ipc.open_file(file)
            assert plan.schema.equals(PLAN_SCHEMA)
            pieces = plan.get_batch(number)
            places = [(piece["row"], piece["start"]) for piece in pieces.to_pylist()]
            assert places == sorted(places), "the pieces of a shard stand by row and start"
            rows = receipt["rows_of_shards"][number]
            length = recipe.config.sequence_length
            write_shard(folder / name, pieces, rows, tokens, SPECIAL, RowLayout((length,)), length, "k")
            split = name.split("-")[0]
            found[split, sum(s == split for s, _ in found)] = read_stream(folder / name)
    return found


@settings(max_examples=examples(120), deadline=None)
@given(cases())
def test_every_token_stands_in_one_row_and_the_ledger_knows_of_it(
    case: tuple[list[list[PartInput]], dict[str, Any]],
) -> None:
    sources, values = case
    conversations = {}  # (source, line of the file) → tokens
    says = {}
    early = []
    for number, own in enumerate(sources):
        base = 0
        for part in own:
            conversations |= {(number, base + line + 1): tokens for line, tokens in part.accepted.items()}
            says |= {(number, base + line + 1): content for line, content in part.says.items()}
            early += [(number, base + line + 1, code) for line, code in part.rejected.items()]
            base += part.lines
    with recipe_of(sources, **values) as recipe:
        try:
            receipt = make_plan(recipe, recipe.plan_folder)
        except DataError as error:
            assert error.reason in {"nothing_to_pack", "empty_share"}  # noqa: PT017 - or no error
            assert not (recipe.plan_folder / "plan.json").exists()
            config = recipe.config
            filters = [config.max_tokens, config.min_tokens, config.min_turns, config.max_turns, *(
                source.limit for source in config.sources)]  # fmt: skip
            if not any(filters) and error.reason == "nothing_to_pack":
                assert all(len(tokens) > config.sequence_length for tokens, _ in conversations.values())
            return
        check_corpus(recipe, receipt, conversations, says, early)


def check_corpus(
    recipe: Recipe,
    receipt: dict[str, Any],
    conversations: dict[tuple[int, int], Tokens],
    says: dict[tuple[int, int], tuple[int, int]],
    early: list[tuple[int, int, str]],
) -> None:
    config, ledger = recipe.config, receipt["ledger"]
    shards = write_shards(recipe)
    with pa.memory_map(str(recipe.plan_folder / "index.arrow")) as file:
        assert pa.ipc.open_stream(file).schema.equals(INDEX_SCHEMA)
    index = read_stream(recipe.plan_folder / "index.arrow")
    rejects = [orjson.loads(line) for line in (recipe.plan_folder / "rejects.jsonl").read_bytes().splitlines()]

    # The index is in source order. Its pieces tile the rows and match the tokens of the conversations.
    pieces: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for entry in index:
        pieces.setdefault((entry["source"], entry["record"], entry["first"] or 0), []).append(entry)
    assert list(pieces) == sorted(pieces), "further copies come after all"
    free = {
        (*shard, at): set(range(sum(row["attention_mask"])))
        for shard, rows in shards.items()
        for at, row in enumerate(rows)
    }
    seen: Counter[str] = Counter()
    packed, reasons, sides = set(), {}, {}
    for entry in index:
        key = entry["source"], entry["record"]
        values, has_separator = conversations[key]
        assert (entry["digest"], entry["turns"]) == says[key]
        if entry["row"] is None:
            assert {entry[name] for name in ("split", "shard", "start", "first")} == {None}
            assert (entry["length"], entry["trained"], entry["separator"]) == (len(values), 0, False)
            reasons[key] = entry["dropped"]
            continue
        packed.add(key)
        assert entry["dropped"] is None
        held_out = entry["split"] == "validation"
        assert sides.setdefault(says[key][0], held_out) == held_out, "what it says is on both sides of the split"
        row = shards[entry["split"], entry["shard"]][entry["row"]]
        start, length, first = entry["start"], entry["length"], entry["first"]
        places = set(range(start, start + length))
        assert places <= free[entry["split"], entry["shard"], entry["row"]], "two pieces in one place"
        free[entry["split"], entry["shard"], entry["row"]] -= places
        ids, labels = row["input_ids"][start : start + length], row["labels"][start : start + length]
        own = values[first : first + length]
        closed = ids_of(own) != ids
        is_cut = first + length - closed < len(values)
        if config.overlong == "turns" and is_cut:
            assert closed, "no turn of these conversations ends with EOS"
            assert labels[-2] != -100, "cut elsewhere than after a trained turn"
            assert values[length - 1] < 0, "cut within a trained turn"
        if closed:
            own = values[first : first + length - 1]
            assert ids == [*ids_of(own), EOS]
            assert labels[-1] == -100
        assert labels[0] == -100
        assert labels[1 : len(own)] == [v if v >= 0 else -100 for v in own[1:]]
        assert row["position_ids"][start : start + length] == list(range(length))
        assert sum(label != -100 for label in labels) == entry["trained"] > 0
        assert entry["separator"] == (closed or (has_separator and first + length == len(values)))
        assert entry["truncated"] == (is_cut and config.overlong in ("truncate", "turns"))
        seen["packed"] += length
        seen["trained"] += entry["trained"]
        seen["separators"] += entry["separator"]
        seen["pieces"] += 1
        if entry is not pieces[(*key, first)][0]:
            seen["repeated"] += length - entry["separator"]
        else:
            seen["truncated"] += entry["truncated"]
    assert not any(free.values()), "a token that no piece of the index covers"
    assert all(any(label != -100 for label in row["labels"]) for rows in shards.values() for row in rows)
    check_copies(config, pieces, reasons, conversations)
    check_reasons(config, packed, reasons, conversations, says)

    # Conversations that are missing from the index were rejected.
    late = set(conversations) - packed - reasons.keys()
    lines = {(r["source"], r.get("line", r.get("record"))): r["reason"] for r in rejects}
    assert len(lines) == len(rejects)
    wanted = {(f"s{n}.x", line): code for n, line, code in early}
    wanted |= {(f"s{n}.x", line): "no_trained_tokens" for n, line in late}
    assert lines == wanted
    assert all(("line" in r) == (int(r["source"][1]) % 2 == 0) for r in rejects), "lines of JSONL, records of the rest"
    for n, line in late:
        assert all(v < 0 for v in conversations[n, line][0][1 : config.sequence_length - 1])

    # The ledger, counted separately.
    rows = sum(map(len, shards.values()))
    encoded = sum(len(v) - s for key, (v, s) in conversations.items() if key not in late)
    assert ledger["conversations"] == {
        "read": len(conversations) + len(early),
        "packed": len(packed),
        "rejected": dict(Counter(lines.values())),
        "dropped": {"too_long": 0} | Counter(reasons.values()),
        "truncated": seen["truncated"],
        "split": sum(len(conversations[key][0]) > config.sequence_length for key in packed)
        if config.overlong == "split"
        else 0,
        "duplicates": len(packed) - len({says[key][0] for key in packed}),
    }
    tokens = ledger["tokens"]
    assert tokens["encoded"] == encoded
    for name in ("packed", "trained", "separators", "repeated"):
        assert tokens[name] == seen[name], name
    assert tokens["packed"] + tokens["padding"] == rows * config.sequence_length
    assert tokens["encoded"] + tokens["separators"] + tokens["repeated"] == (
        tokens["packed"] + tokens["truncated"] + tokens["dropped"]
    )
    assert tokens["rejected"] == sum(len(conversations[key][0]) - conversations[key][1] for key in late)
    assert ("trained_truncated" in tokens) == (config.overlong == "turns")
    if config.overlong == "turns":
        kept = sum(of[0]["trained"] for of in pieces.values() if of[0]["truncated"])
        cut = {(source, record) for (source, record, _), of in pieces.items() if of[0]["truncated"]}
        assert tokens["trained_truncated"] == sum(v >= 0 for key in cut for v in conversations[key][0]) - kept
    if config.overlong != "split":
        assert tokens["dropped"] == sum(len(conversations[key][0]) - conversations[key][1] for key in reasons)
    assert ledger["pieces"]["packed"] == seen["pieces"]

    # Sources and packing figures.
    for number, facts in enumerate(receipt["sources"]):
        of_source = {key for key in conversations if key[0] == number}
        assert facts["accepted"] == len(of_source - late)
        assert facts["rejected"] == len(of_source & late) + sum(n == number for n, *_ in early)
        assert facts["conversations"] == facts["accepted"] + facts["rejected"]
        assert facts["tokens"] == sum(len(conversations[key][0]) - conversations[key][1] for key in of_source - late)
        assert facts["trained_tokens"] == sum(r["trained"] for r in index if r["source"] == number)
    packing = receipt["packing_metadata"]
    assert packing["rows"] == rows >= packing["lower_bound_rows"] >= -(-seen["packed"] // config.sequence_length)
    assert packing["packing_efficiency"] == round(100 * seen["packed"] / (rows * config.sequence_length), 4)
    assert packing["compression_ratio"] == round(seen["pieces"] / rows, 4)
    for number, facts in enumerate(receipt["mixture"]):
        in_train = [r for r in index if r["split"] == "train" and min(r["source"], len(config.sources) - 1) == number]
        assert facts["conversations"] == len({(r["source"], r["record"]) for r in in_train})
        assert facts["tokens"] == sum(r["length"] for r in in_train)
        assert facts["trained_tokens"] == sum(r["trained"] for r in in_train)


def check_copies(
    config: Config,
    pieces: dict[tuple[int, int, int], list[dict[str, Any]]],
    reasons: dict[tuple[int, int], str],
    conversations: dict[tuple[int, int], Tokens],
) -> None:
    """Check that each conversation is packed as often as weight and epochs say.

    Within a source, the numbers of copies differ by at most one.
    """
    copies: dict[int, set[int]] = {}
    for (source, _, _), entries in pieces.items():
        splits = Counter(entry["split"] for entry in entries)
        if splits.keys() <= {None}:
            continue
        if "validation" in splits:
            assert splits == {"validation": 1}
            continue
        assert splits.keys() == {"train", *(f"train_epoch_{n}" for n in range(2, config.epochs + 1))}
        assert len(set(splits.values())) == 1, "an epoch has other pieces"
        copies.setdefault(min(source, len(config.sources) - 1), set()).add(splits["train"])
    for entry, found in copies.items():
        weight = config.sources[entry].weight if config.weighting == "repeat" else 1
        assert found <= {max(1, int(weight)), int(weight) + (weight % 1 > 0)}


def check_reasons(
    config: Config,
    packed: set[tuple[int, int]],
    reasons: dict[tuple[int, int], str],
    conversations: dict[tuple[int, int], Tokens],
    says: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Check that drops have the first reason that holds, and all else is in bounds."""

    def filtered(key: tuple[int, int]) -> str:
        length, turns = len(conversations[key][0]), says[key][1]
        bounds = {
            "min_tokens": config.min_tokens is not None and length < config.min_tokens,
            "max_tokens": config.max_tokens is not None and length > config.max_tokens,
            "min_turns": config.min_turns is not None and turns < config.min_turns,
            "max_turns": config.max_turns is not None and turns > config.max_turns,
        }
        return next((name for name, holds in bounds.items() if holds), "")

    assert not any(map(filtered, packed))
    seen = set()
    for key in sorted(conversations):
        reason = filtered(key)
        if not reason and config.duplicates == "exact":
            content = says[key][0], len(conversations[key][0])
            reason = "duplicate" if content in seen else ""
            seen.add(content)
        if not reason and is_too_long(conversations[key][0], config):
            reason = "too_long"
        if reason:
            assert reasons[key] == reason
        elif key in reasons:
            assert reasons[key] in ("limit", "weight")
    for entry, source in enumerate(config.sources):
        own = [key for key in packed if min(key[0], len(config.sources) - 1) == entry]
        assert source.limit is None or len(own) <= source.limit
        limited = [key for key, reason in reasons.items() if reason == "limit" and key[0] == entry]
        assert (
            not limited
            or len(own) + sum(reason == "weight" and key[0] == entry for key, reason in reasons.items()) == source.limit
        )


def is_too_long(values: list[int], config: Config) -> bool:
    """Return whether `overlong` drops a conversation."""
    length = config.sequence_length
    if len(values) <= length:
        return False
    turns = any(values[end - 1] >= 0 > values[end] for end in range(2, length))
    return config.overlong == "drop" or (config.overlong == "turns" and not turns)


# -- rejects ---------------------------------------------------------------------------------------------------------

GOOD: Tokens = ([~5, 6, 7], False)


def rejected(good: int, bad: int) -> list[list[PartInput]]:
    return [
        [PartInput(dict.fromkeys(range(good), GOOD), dict.fromkeys(range(good, good + bad), "bad_role"), good + bad)]
    ]


@pytest.mark.parametrize(
    ("good", "bad", "limit"), [(1, 0, 0.0), (71, 29, 0.29), (43, 57, 0.57), (1, 1, 0.5), (1, 9, 1.0)]
)
def test_as_many_rejects_as_allowed(good: int, bad: int, limit: float) -> None:
    with recipe_of(rejected(good, bad), max_rejects=limit) as recipe:
        make_plan(recipe, recipe.plan_folder)


@pytest.mark.parametrize(("good", "bad", "limit"), [(1, 1, 0.0), (71, 30, 0.29), (1, 9, 0.8)])
def test_one_reject_too_many(good: int, bad: int, limit: float) -> None:
    with recipe_of(rejected(good, bad), max_rejects=limit) as recipe:
        with pytest.raises(DataError) as caught:
            make_plan(recipe, recipe.plan_folder)
        message = str(caught.value)
        assert f"{bad} of {good + bad} conversations were rejected" in message
        assert f"\n  E207 bad_role, {bad}: s0.x:{good + 1} why bad_role\n" in message
        [enough] = re.findall(r"\nset max_rejects: (\S+) to accept this$", message)
        listed = recipe.plan_folder / "rejects.jsonl"
        assert str(listed) in message
        assert len(listed.read_bytes().splitlines()) == bad
        assert not (recipe.plan_folder / "plan.json").exists(), "a failed plan left its receipt"
    with recipe_of(rejected(good, bad), max_rejects=float(enough)) as recipe:
        make_plan(recipe, recipe.plan_folder)


def refusal(part: PartInput, **values: Any) -> str:
    with recipe_of([[part]], sequence_length=8, **values) as recipe, pytest.raises(DataError) as caught:
        make_plan(recipe, recipe.plan_folder)
    return str(caught.value)


def test_late_rejects_count_towards_the_limit() -> None:
    message = refusal(PartInput({0: GOOD, 2: ([~5] * 20, False)}, {}, 3))
    assert "1 of 2 conversations were rejected (50.00 %), max_rejects allows 1.00 %" in message
    assert "E236 no_trained_tokens, 1: s0.x:3 no trained token is left within 8 tokens (overlong: truncate)" in message
    assert message.endswith(
        "\nall of them have no trained token left in a row: increase sequence_length to keep them, set overlong: drop "
        "to leave out all conversations longer than a row, or set max_rejects: 0.5 to accept this"
    )
    mixed = PartInput({0: GOOD, 2: ([~5] * 20, False), 3: ([~5] * 20, False)}, {4: "bad_role"}, 5)
    assert "\nmost of them have no trained token left" in refusal(mixed)
    other = PartInput({0: GOOD, 2: ([~5] * 20, False)}, {4: "bad_role"}, 5)
    assert refusal(other).endswith("\nset max_rejects: 0.6667 to accept this")


def test_a_damaged_token_file_is_refused_by_name() -> None:
    with recipe_of([[PartInput({line: ([~1, 2, EOS], True) for line in range(3)}, {}, 3)]]) as recipe:
        file = recipe.layout.token_file(recipe.tokens_key(recipe.parts[0]))
        flip(file)
        with pytest.raises(StorageError, match=rf"{file.name}: damaged"):
            make_plan(recipe, recipe.plan_folder)


def test_nothing_to_pack() -> None:
    assert "no conversation is left to pack: 0 read" in refusal(PartInput({}, {}, 0))
    long = PartInput({0: ([~5] * 20 + [6], False)}, {}, 1)
    assert "1 read, 0 rejected, 1 dropped as longer than 8 tokens" in refusal(long, overlong="drop")


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_a_receipt_that_lies_fails_the_plan() -> None:
    for name in ("conversations", "tokens"):
        with recipe_of(rejected(3, 0)) as recipe:
            path = recipe.layout.token_receipt(recipe.tokens_key(recipe.parts[0]))
            receipt = read_receipt(path)
            write_receipt(path, receipt | {name: receipt[name] + 1})
            with pytest.raises(DataError, match="the ledger does not balance"):
                make_plan(recipe, recipe.plan_folder)
            assert not (recipe.plan_folder / "plan.json").exists()


# -- same bytes ------------------------------------------------------------------------------------------------------


def test_parts_do_not_matter() -> None:
    """The bytes of index, rejects, and rows are equal for one and for three parts."""
    lines: list[Tokens] = [([~5, *range(6, 7 + i % 5)], False) for i in range(9)]
    found = []
    for edges in ([0, 9], [0, 2, 3, 9]):
        parts = [PartInput(dict(enumerate(lines[a:b])), {}, b - a) for a, b in pairwise(edges)]
        with recipe_of([parts], sequence_length=8, validation=0.3) as recipe:
            make_plan(recipe, recipe.plan_folder)
            names = ("index.arrow", "rejects.jsonl", "plan.json")
            rows = orjson.dumps(list(write_shards(recipe).values()))
            index, rejects, plan = ((recipe.plan_folder / name).read_bytes() for name in names)
            of_the_parts = {"token_files", "sha256", "placements", "seal"}
            facts = {name: value for name, value in orjson.loads(plan).items() if name not in of_the_parts}
            found.append([index, rejects, facts, rows])
    assert found[0] == found[1]


# -- how many ----------------------------------------------------------------------------------------------------------


def test_more_conversations_than_one_plan_can_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receipts of the parts suffice: no token file is read."""
    monkeypatch.setattr(pieces_module, "MOST_CONVERSATIONS", 100)
    lines: list[Tokens] = [([~5, 6], False)] * 51
    with recipe_of([[PartInput(dict(enumerate(lines)), {}, 51)] * 2]) as recipe:
        for key in recipe.token_keys:
            recipe.layout.token_file(key).unlink()
        message = "has 102 conversations, but a corpus can have at most 100; .* several"
        with pytest.raises(DataError, match=message) as caught:
            make_plan(recipe, recipe.plan_folder)
        assert caught.value.reason == "too_many_conversations"


def test_pieces_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.core.numbers.MOST", 40)
    lines: list[Tokens] = [([~5, *range(6, 30)], False)] * 10
    with (
        recipe_of([[PartInput(dict(enumerate(lines)), {}, 10)]], overlong="split", sequence_length=8) as recipe,
        pytest.raises(DataError, match=r"pieces of overlong ones: 50 exceeds the limit of a plan \(40\)"),
    ):
        make_plan(recipe, recipe.plan_folder)
