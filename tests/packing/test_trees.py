"""Trees hold the same samples as rows without trees, once what they begin with.

Samples are rebuilt from rows by their definition alone: a place sees the places whose `end` is after it.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import WORDS, make_recipe, pack_corpus, shared_with

from packcorpus.tasks.packing.trees import cut_trees, fewest_again
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import open_shard
from packcorpus.tasks.tokenization.shared_tokens import shared_tokens
from packcorpus.tasks.verification.verify import verify

# Only the last answer keeps its reasoning, so samples part where an answer begins.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and loop.last %}"
    "{{ m.reasoning_content }} {% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)

Sample = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # ids, labels, weights


def records_of(count: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations with up to five answers, each with reasoning."""
    source = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(source.choices(WORDS[:4], k=source.randint(1, most)))

    def turns() -> list[dict[str, str]]:
        asked, thought = {"role": "user", "content": words(4)}, {"reasoning_content": words(3)}
        return [asked, {"role": "assistant", "content": words(6)} | thought]

    systems = [{"role": "system", "content": " ".join(source.choices(WORDS, k=16))} for _ in range(2)]

    def begin() -> list[dict[str, str]]:
        return source.choice([[], [], systems[:1], systems[1:]])

    return [
        {"messages": [*begin(), *(turn for _ in range(source.randint(1, 5)) for turn in turns())]} for _ in range(count)
    ]


def rows_in(manifest_path: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Return the rows of each split."""
    manifest = load_manifest(manifest_path)
    folder, rows = manifest_path.parent.parent / manifest.corpus, dict[str, list[dict[str, np.ndarray]]]()
    for name, split in manifest.splits.items():
        rows[name] = []
        for shard in split.shards:
            with open_shard(manifest, folder, shard) as batches:
                for row in pa.Table.from_batches(list(batches)).to_pylist() if shard.rows else ():
                    rows[name].append({column: np.array(values) for column, values in row.items()})
    return rows


def samples_in(row: dict[str, np.ndarray]) -> list[Sample]:
    """Rebuild the samples of a row from what the last place of each piece sees."""
    positions, length = row["position_ids"], int(row["attention_mask"].sum())
    end = row.get("end")
    starts = [at for at in range(length) if not at or positions[at] != positions[at - 1] + 1 or not positions[at]]
    samples = []
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        seen = np.arange(start, stop)
        if end is not None:
            seen = np.flatnonzero((np.arange(length) < stop) & (end[:length] >= stop))
        assert positions[seen].tolist() == list(range(len(seen))), "the path has each position once"
        own = seen >= start
        labels = np.where(own, row["labels"][seen], -100)
        weights = row["loss_weight"][seen] * own if "loss_weight" in row else np.zeros(len(seen))
        samples.append((tuple(row["input_ids"][seen]), tuple(labels), tuple(weights)))
    if end is not None:
        assert (end[length:] == np.arange(length, len(end)) + 1).all(), "padding sees itself"
    return samples


def packed(folder: Path, records: list[dict[str, Any]], **given: Any) -> tuple[Path, dict[str, Counter[Sample]]]:
    folder.mkdir()
    (folder / "a.jinja").write_text(TEMPLATE)
    path = pack_corpus(make_recipe(folder, records, template="a.jinja", turns="apart", **given))
    verify(path)
    found = dict[str, Counter[Sample]]()
    for name, rows in rows_in(path).items():  # a tree may be in longer rows than its samples are alone
        found.setdefault(kind_of(name), Counter()).update(sample for row in rows for sample in samples_in(row))
    return path, found


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(0, 1000),
    st.fixed_dictionaries(
        {
            "share": st.sampled_from(["conversation", "all"]),
            "sequence_length": st.sampled_from([40, 64, 96, [48, 128]]),
            "overlong": st.sampled_from(["split", "drop", "truncate"]),
            "loss_weight": st.sampled_from(["none", "conversation"]),
            "validation": st.sampled_from([0.0, 0.3]),
            "epochs": st.sampled_from([1, 2]),
            "max_tokens": st.sampled_from([None, 40]),
            "weight": st.sampled_from([1, 1.5]),
        }
    ),
)
def test_trees_have_the_same_samples(seed: int, given: dict[str, Any]) -> None:
    records, given = records_of(12, seed), dict(given)
    trees_of = given.pop("share")
    given["sources"] = [{"path": "chat.jsonl", "weight": given.pop("weight")}]
    with tempfile.TemporaryDirectory() as name:
        (apart, whole), (trees, parts) = (
            packed(Path(name) / share, records, max_rejects=1.0, **given, share=share) for share in ("none", trees_of)
        )
        assert parts == whole
        before, after = (orjson.loads(path.read_bytes()) for path in (apart, trees))
    tokens = after["ledger"]["tokens"]
    assert after["format_version"] == "3.2"
    assert before["format_version"] in ("3.0", "3.1")
    assert before["ledger"]["tokens"].get("shared") is None
    assert before["ledger"]["tokens"]["trained"] == tokens["trained"]
    if given["epochs"] == 1 and given["sources"][0]["weight"] == 1:
        assert before["ledger"]["tokens"]["packed"] == tokens["packed"] + tokens["shared"]


def test_what_samples_begin_with_is_stored_once(tmp_path: Path) -> None:
    records = records_of(60, 1)
    (apart, _), (trees, _) = (
        packed(tmp_path / share, records, share=share, sequence_length=512) for share in ("none", "conversation")
    )
    before, after = (orjson.loads(path.read_bytes())["ledger"] for path in (apart, trees))
    assert after["tokens"]["packed"] < 0.7 * before["tokens"]["packed"]
    # By hand: a sample of turn n repeats what is before the answer of turn n - 1, without the token that is copied.
    assert after["tokens"]["shared"] == before["tokens"]["packed"] - after["tokens"]["packed"]
    repeated = [ledger["samples"]["repeated_prompt_tokens"] for ledger in (before, after)]
    assert repeated[0] - repeated[1] == after["tokens"]["shared"]


tokens_of_samples = st.lists(
    st.lists(st.tuples(st.integers(3, 5), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=8
)


@given(tokens_of_samples, st.data())
def test_shared_tokens_are_untrained_and_alike(drawn: list[list[tuple[int, bool]]], data: st.DataObject) -> None:
    samples = [[token if flag and at else ~token for at, (token, flag) in enumerate(one)] for one in drawn]
    continues = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    continues[0] = False
    values = np.array([value for one in samples for value in one], np.int32)
    offsets = np.cumsum([0, *map(len, samples)])
    found = shared_tokens(values, offsets, np.array(continues)).tolist()
    wanted = [shared_with(samples[n - 1], samples[n]) if continues[n] else 0 for n in range(len(samples))]
    assert found == wanted


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7)), min_size=1, max_size=8), st.integers(8, 20))
def test_trees_are_cut_where_the_fewest_tokens_are_stored_again(drawn: list[tuple[int, int]], room: int) -> None:
    lengths = [length for length, _ in drawn]
    alike = [0, *(min(most, a - 1, b - 1) for (a, _), (b, most) in pairwise(drawn))]

    def stored(shared: tuple[int, ...] | list[int]) -> int | None:
        """Return the tokens of all trees, or None if one is too long."""
        trees = list[int]()
        for length, common in zip(lengths, shared, strict=True):
            trees += [length] if not common else [trees.pop() + length - common]
        return sum(trees) if max(trees) <= room else None

    found = fewest_again(lengths, alike, room)
    every = product(*((common, 0) for common in alike))
    assert stored(found) == min(total for shared in every if (total := stored(shared)) is not None)
    assert all(one in (0, other) for one, other in zip(found, alike, strict=True))


def test_a_sample_between_two_others_may_be_left_out() -> None:
    lengths, alike = np.array([9, 9, 9, 9]), np.array([0, 3, 5, 7])
    kept = np.array([True, False, True, True])
    assert cut_trees(np.array([0]), lengths, kept, alike, 100).tolist() == [0, 0, 3, 7]
    assert cut_trees(np.array([0, 2]), lengths, kept, alike, 100).tolist() == [0, 0, 0, 7]
    assert cut_trees(None, lengths, kept, alike, 100).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("one", "value"), [("padding", "none"), ("align", 2), ("packing", False)])
def test_settings_that_exclude_trees_are_refused(one: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="share"):
        make_recipe(tmp_path, records_of(1, 0), share="conversation", **{one: value})
