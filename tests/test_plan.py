"""From token files to a plan, its ledger, index and rejects, and on to the rows: nothing is lost, nothing is twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import EOS, PAD, Tokens, flip, ids_of, token_file, tokens_of, write_receipt

from tasks.config import Config, Source
from tasks.errors import DataError, StorageError
from tasks.index import INDEX_SCHEMA
from tasks.keys import Layout
from tasks.ledger import check_ledger
from tasks.plan import make_plan
from tasks.recipe import Recipe
from tasks.shards import PLAN_SCHEMA, write_shard
from tasks.sources import Part, SourceFile
from tasks.token_files import TokenFiles

ENCODER: Any = SimpleNamespace(eos_id=EOS, pad_id=PAD)


@dataclass
class PartInput:
    """One part of a source: its accepted conversations by line, and its rejected lines."""

    accepted: dict[int, Tokens]
    rejected: dict[int, str]
    lines: int


@st.composite
def part_inputs(draw: st.DrawFn, longest: int) -> PartInput:
    kinds = draw(st.lists(st.sampled_from(["accepted", "accepted", "rejected", "blank"]), max_size=6))
    accepted = {line: draw(tokens_of(longest)) for line, kind in enumerate(kinds) if kind == "accepted"}
    rejected = {
        line: draw(st.sampled_from(["bad_role", "bad_json"])) for line, kind in enumerate(kinds) if kind == "rejected"
    }
    return PartInput(accepted, rejected, len(kinds))


@contextmanager
def recipe_of(sources: Sequence[Sequence[PartInput]], **values: Any) -> Iterator[Recipe]:
    """A recipe whose token files lie where the plan looks for them. A source is a list of parts."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "any.model").write_bytes(b"never opened here")
        config = Config(sources=[Source(path="x")], tokenizer="any.model", **values)
        files, parts = [], []
        for number, own in enumerate(sources):
            container = "jsonl" if number % 2 == 0 else "csv"
            file = SourceFile(
                root / f"s{number}", f"s{number}.x", container, "", "messages", (), 10, f"{number:064x}", 0
            )
            files.append(file)
            parts += [Part(file, at, at + 1, f"{number:032x}{at:032x}") for at in range(len(own))]
        recipe = Recipe(config, root, Layout(root), tuple(files), tuple(parts))
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
    digests = [0x9E3779B97F4A7C15 * (base + line + 1) % 2**64 for line in lines]
    receipt = token_file(recipe.layout.token_file(key), list(given_part.accepted.values()), lines, digests)
    receipt["conversations"] += len(given_part.rejected)
    receipt["records"] = given_part.lines
    receipt["rejects"] = [[line, code, f"why {code}"] for line, code in given_part.rejected.items()]
    write_receipt(recipe.layout.token_receipt(key), receipt)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[PartInput]], dict[str, Any]]:
    length = draw(st.integers(8, 32))
    parts = st.lists(part_inputs(3 * length), min_size=1, max_size=3)
    sources = draw(st.lists(parts, min_size=1, max_size=3))
    return sources, {
        "sequence_length": length,
        "overlong": draw(st.sampled_from(["truncate", "drop", "split"])),
        "validation": draw(st.sampled_from([0.0, 0.4])),
        "plan_group": draw(st.sampled_from([2, 1000])),
        "max_rejects": 1.0,
        "seed": draw(st.integers(0, 5)),
    }


def read_stream(path: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(path)) as file:
        rows: list[dict[str, Any]] = pa.ipc.open_stream(file).read_all().to_pylist()
    return rows


def write_shards(recipe: Recipe) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The rows of every shard of the plan, by split and number."""
    folder = recipe.plan_folder
    receipt = orjson.loads((folder / "plan.json").read_bytes())
    tokens = TokenFiles([recipe.layout.token_file(recipe.tokens_key(part)) for part in recipe.parts])
    found = {}
    with pa.memory_map(str(folder / "plan.arrow")) as file:
        plan = pa.ipc.open_file(file)
        assert plan.schema.equals(PLAN_SCHEMA)
        assert plan.num_record_batches == len(receipt["rows_of_shards"]) == sum(recipe.shards.values())
        for number, name in enumerate(recipe.shard_names()):
            places = [(piece["row"], piece["start"]) for piece in plan.get_batch(number).to_pylist()]
            assert places == sorted(places), "the pieces of a shard stand by row and start"
            rows = receipt["rows_of_shards"][number]
            length = recipe.config.sequence_length
            write_shard(folder / name, plan.get_batch(number), rows, tokens, ENCODER, length, "k")
            split = name.split("-")[0]
            found[split, sum(s == split for s, _ in found)] = read_stream(folder / name)
    return found


@settings(max_examples=120, deadline=None)
@given(cases())
def test_every_token_stands_in_one_row_and_the_ledger_knows_of_it(
    case: tuple[list[list[PartInput]], dict[str, Any]],
) -> None:
    sources, values = case
    conversations = {}  # (source, line of the file) → tokens
    early = []
    for number, own in enumerate(sources):
        base = 0
        for part in own:
            conversations |= {(number, base + line + 1): tokens for line, tokens in part.accepted.items()}
            early += [(number, base + line + 1, code) for line, code in part.rejected.items()]
            base += part.lines
    with recipe_of(sources, **values) as recipe:
        try:
            receipt = make_plan(recipe, recipe.plan_folder)
        except DataError as error:
            assert "no conversation is left to pack" in str(error)  # noqa: PT017 - or no error
            assert not (recipe.plan_folder / "plan.json").exists()
            length = values["sequence_length"]
            assert all(len(tokens) > length for tokens, _ in conversations.values())
            return
        check_corpus(recipe, receipt, conversations, early)


def check_corpus(
    recipe: Recipe,
    receipt: dict[str, Any],
    conversations: dict[tuple[int, int], Tokens],
    early: list[tuple[int, int, str]],
) -> None:
    config, ledger = recipe.config, receipt["ledger"]
    shards = write_shards(recipe)
    with pa.memory_map(str(recipe.plan_folder / "index.arrow")) as file:
        assert pa.ipc.open_stream(file).schema.equals(INDEX_SCHEMA)
    index = read_stream(recipe.plan_folder / "index.arrow")
    rejects = [orjson.loads(line) for line in (recipe.plan_folder / "rejects.jsonl").read_bytes().splitlines()]

    # The index: in source order, its pieces tile the rows, each holds the tokens that it says.
    assert [(r["source"], r["record"]) for r in index] == sorted((r["source"], r["record"]) for r in index)
    free = {
        (*shard, at): set(range(sum(row["attention_mask"])))
        for shard, rows in shards.items()
        for at, row in enumerate(rows)
    }
    seen: Counter[str] = Counter()
    packed, dropped, sides = set(), set(), {}
    for entry in index:
        key = entry["source"], entry["record"]
        values, has_separator = conversations[key]
        if entry["row"] is None:
            assert {entry[name] for name in ("split", "shard", "start", "first")} == {None}
            assert (entry["length"], entry["trained"], entry["separator"]) == (len(values), 0, False)
            assert len(values) > config.sequence_length
            dropped.add(key)
            continue
        packed.add(key)
        assert sides.setdefault(key, entry["split"]) == entry["split"], "pieces on both sides of the split"
        row = shards[entry["split"], entry["shard"]][entry["row"]]
        start, length, first = entry["start"], entry["length"], entry["first"]
        places = set(range(start, start + length))
        assert places <= free[entry["split"], entry["shard"], entry["row"]], "two pieces in one place"
        free[entry["split"], entry["shard"], entry["row"]] -= places
        ids, labels = row["input_ids"][start : start + length], row["labels"][start : start + length]
        own = values[first : first + length]
        closed = ids_of(own) != ids
        if closed:
            own = values[first : first + length - 1]
            assert ids == [*ids_of(own), EOS]
            assert labels[-1] == -100
        assert labels[0] == -100
        assert labels[1 : len(own)] == [v if v >= 0 else -100 for v in own[1:]]
        assert row["position_ids"][start : start + length] == list(range(length))
        assert sum(label != -100 for label in labels) == entry["trained"] > 0
        assert entry["separator"] == (closed or (has_separator and first + length == len(values)))
        assert entry["truncated"] == (closed and config.overlong == "truncate")
        seen["packed"] += length
        seen["trained"] += entry["trained"]
        seen["separators"] += entry["separator"]
        seen["truncated"] += entry["truncated"]
        seen["pieces"] += 1
    assert not any(free.values()), "a token that no piece of the index covers"
    assert all(any(label != -100 for label in row["labels"]) for rows in shards.values() for row in rows)

    # What is not in the index was rejected.
    late = set(conversations) - packed - dropped
    lines = {(r["source"], r.get("line", r.get("record"))): r["reason"] for r in rejects}
    assert len(lines) == len(rejects)
    wanted = {(f"s{n}.x", line): code for n, line, code in early}
    wanted |= {(f"s{n}.x", line): "no_trained_tokens" for n, line in late}
    assert lines == wanted
    assert all(("line" in r) == (int(r["source"][1]) % 2 == 0) for r in rejects), "lines of JSONL, records of the rest"
    for n, line in late:
        assert all(v < 0 for v in conversations[n, line][0][1 : config.sequence_length - 1])

    # The ledger, counted a second time.
    rows = sum(map(len, shards.values()))
    encoded = sum(len(v) - s for key, (v, s) in conversations.items() if key not in late)
    assert ledger["conversations"] == {
        "read": len(conversations) + len(early),
        "packed": len(packed),
        "rejected": dict(Counter(lines.values())),
        "dropped": {"too_long": len(dropped)},
        "truncated": seen["truncated"],
        "split": sum(len(conversations[key][0]) > config.sequence_length for key in packed)
        if config.overlong == "split"
        else 0,
    }
    tokens = ledger["tokens"]
    assert tokens["encoded"] == encoded
    for name in ("packed", "trained", "separators"):
        assert tokens[name] == seen[name], name
    assert tokens["packed"] + tokens["padding"] == rows * config.sequence_length
    assert tokens["encoded"] + tokens["separators"] == tokens["packed"] + tokens["truncated"] + tokens["dropped"]
    assert tokens["rejected"] == sum(len(conversations[key][0]) - conversations[key][1] for key in late)
    if config.overlong == "drop":
        assert tokens["dropped"] == sum(len(conversations[key][0]) - conversations[key][1] for key in dropped)
    assert ledger["pieces"]["packed"] == seen["pieces"]

    # Sources and packing figures.
    for number, facts in enumerate(receipt["sources"]):
        own = {key for key in conversations if key[0] == number}
        assert facts["accepted"] == len(own - late)
        assert facts["rejected"] == len(own & late) + sum(n == number for n, *_ in early)
        assert facts["conversations"] == facts["accepted"] + facts["rejected"]
        assert facts["tokens"] == sum(len(conversations[key][0]) - conversations[key][1] for key in own - late)
        assert facts["trained_tokens"] == sum(r["trained"] for r in index if r["source"] == number)
    packing = receipt["packing_metadata"]
    assert packing["rows"] == rows >= packing["lower_bound_rows"] >= -(-seen["packed"] // config.sequence_length)
    assert packing["packing_efficiency"] == round(100 * seen["packed"] / (rows * config.sequence_length), 4)
    assert packing["compression_ratio"] == round(seen["pieces"] / rows, 4)


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
        assert f"E207 s0.x:{good + 1} why bad_role" in message
        assert ("… and" in message) == (bad > 20)
        listed = recipe.plan_folder / "rejects.jsonl"
        assert str(listed) in message
        assert len(listed.read_bytes().splitlines()) == bad
        assert not (recipe.plan_folder / "plan.json").exists(), "a failed plan left its receipt"


def refusal(part: PartInput, **values: Any) -> str:
    with recipe_of([[part]], sequence_length=8, **values) as recipe, pytest.raises(DataError) as caught:
        make_plan(recipe, recipe.plan_folder)
    return str(caught.value)


def test_late_rejects_count_towards_the_limit() -> None:
    message = refusal(PartInput({0: GOOD, 2: ([~5] * 20, False)}, {}, 3))
    assert "1 of 2 conversations were rejected (50.00%), max_rejects allows 0.00%" in message
    assert "E236 s0.x:3 no trained token is left within 8 tokens (overlong: truncate)" in message


def test_a_damaged_token_file_is_refused_by_name() -> None:
    with recipe_of([[PartInput({line: ([~1, 2, EOS], True) for line in range(3)}, {}, 3)]]) as recipe:
        file = recipe.layout.token_file(recipe.tokens_key(recipe.parts[0]))
        flip(file)
        with pytest.raises(StorageError, match=rf"{file.name}: is damaged"):
            make_plan(recipe, recipe.plan_folder)


def test_nothing_to_pack() -> None:
    assert "no conversation is left to pack: 0 read" in refusal(PartInput({}, {}, 0))
    long = PartInput({0: ([~5] * 20 + [6], False)}, {}, 1)
    assert "1 read, 0 rejected, 1 dropped as longer than 8 tokens" in refusal(long, overlong="drop")


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_a_ledger_that_does_not_close_fails() -> None:
    ledger: dict[str, Any] = {
        "conversations": {"read": 10, "packed": 6, "rejected": {"a": 1, "b": 1}, "dropped": {"too_long": 2}},
        "tokens": {"encoded": 100, "separators": 6, "packed": 90, "truncated": 10, "dropped": 6},
    }
    check_ledger(ledger)
    for group, names in (("conversations", ("read", "packed")), ("tokens", tuple(ledger["tokens"]))):
        for name in names:
            for change in (-1, 1):
                changed = orjson.loads(orjson.dumps(ledger))
                changed[group][name] += change
                with pytest.raises(DataError, match="the ledger does not close"):
                    check_ledger(changed)
    for name, reason in (("rejected", "b"), ("dropped", "too_long")):
        changed = orjson.loads(orjson.dumps(ledger))
        changed["conversations"][name][reason] += 1
        with pytest.raises(DataError, match="10 conversations read, 11 ended"):
            check_ledger(changed)


def test_a_receipt_that_lies_fails_the_plan() -> None:
    for name in ("conversations", "tokens"):
        with recipe_of(rejected(3, 0)) as recipe:
            path = recipe.layout.token_receipt(recipe.tokens_key(recipe.parts[0]))
            receipt = orjson.loads(path.read_bytes())
            path.write_bytes(orjson.dumps(receipt | {name: receipt[name] + 1}))
            with pytest.raises(DataError, match="the ledger does not close"):
                make_plan(recipe, recipe.plan_folder)
            assert not (recipe.plan_folder / "plan.json").exists()


# -- same bytes ------------------------------------------------------------------------------------------------------


def test_parts_do_not_matter() -> None:
    """The same conversations in one part and in three: index, rejects and rows are the same bytes."""
    lines: list[Tokens] = [([~5, *range(6, 7 + i % 5)], False) for i in range(9)]
    found = []
    for edges in ([0, 9], [0, 2, 3, 9]):
        parts = [PartInput(dict(enumerate(lines[a:b])), {}, b - a) for a, b in pairwise(edges)]
        with recipe_of([parts], sequence_length=8, validation=0.3) as recipe:
            make_plan(recipe, recipe.plan_folder)
            names = ("index.arrow", "rejects.jsonl", "plan.json")
            rows = orjson.dumps(list(write_shards(recipe).values()))
            index, rejects, plan = ((recipe.plan_folder / name).read_bytes() for name in names)
            of_the_parts = {"token_files", "sha256"}
            facts = {name: value for name, value in orjson.loads(plan).items() if name not in of_the_parts}
            found.append([index, rejects, facts, rows])
    assert found[0] == found[1]
