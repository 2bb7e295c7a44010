"""Mixtures, limits, filters, and duplicates on small corpora.

The tests check which conversations are packed, how often, and the messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import BIN, command, luigi
from support.mixtures import EVERYTHING, FEW, project
from support.profiles import examples
from support.small_corpus import pack_corpus, write_project

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.printable import aligned
from packcorpus.tasks.corpus.summary import SHARE_NOTE, explain_limits, fit_to_width, mixture_table
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.dry_run.expected_mixture import expected_mixture
from packcorpus.tasks.inspection.lookup import sources_taken_whole
from packcorpus.tasks.packing import mixture
from packcorpus.tasks.packing.pieces import Pieces
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.facts import MixtureFacts
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.schemas import drop_code
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify


def packed(recipe: Recipe) -> tuple[Manifest, list[dict[str, Any]]]:
    """Pack a corpus; return the manifest, checked by `verify`, and the index."""
    path = pack_corpus(recipe)
    verify(path)
    with pa.memory_map(str(recipe.corpus_folder / "index.arrow")) as file:
        return load_manifest(path), pa.ipc.open_stream(file).read_all().to_pylist()


def copies(index: list[dict[str, Any]], split: str = "train") -> Counter[tuple[int, int]]:
    return Counter((row["source"], row["record"]) for row in index if row["split"] == split)


MIXED = [
    {"path": "few.jsonl", "weight": 2.5},
    {"path": "many.jsonl", "limit": 60, "weight": 0.5},
    {"path": "twice.jsonl"},
]


@pytest.mark.slow
def test_the_same_bytes_for_every_part_size_and_made_again(tmp_path: Path) -> None:
    found = []
    for part_size in (1 << 10, 5000, 1 << 26):
        recipe = project(tmp_path / str(part_size), MIXED, **EVERYTHING, part_size=part_size)
        path = pack_corpus(recipe)
        verify(path)
        files = [path, *recipe.corpus_folder.glob("*.arrow"), recipe.corpus_folder / "rejects.jsonl"]
        found.append({file.name: file.read_bytes() for file in files})
    assert found[0] == found[1] == found[2]
    assert rebuild(path, recipe.folder / "corpus.yaml")


def test_proportions_are_shares_of_the_result_and_leave_out_nothing(tmp_path: Path) -> None:
    found = []
    sources = [{"path": "few.jsonl", "weight": 70}, {"path": "many.jsonl", "weight": 30}, {"path": "twice.jsonl"}]
    for number, (part_size, scale) in enumerate([(1 << 10, 1), (5000, 1), (1 << 26, 0.01)]):
        entries = [source | {"weight": source.get("weight", 1) * scale} for source in sources[:2]]
        recipe = project(tmp_path / str(number), entries, weighting="proportions", part_size=part_size)
        manifest, index = packed(recipe)
        few, many = manifest.mixture
        assert (few.conversations, few.copies, many.conversations, many.copies) == (30, 210, 90, 90)
        assert manifest.ledger.conversations.dropped == {"too_long": 0}
        found.append(copies(index))
    assert found[0] == found[1] == found[2], "shares and percentages are the same, for any part size"
    assert rebuild(recipe.published)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(50, 500), st.integers(1, 100)), min_size=1, max_size=5))
def test_proportions_repeat_as_little_as_the_shares_allow(entries: list[tuple[int, int]]) -> None:
    config = Config(
        sources=[Source(path=f"{n}", weight=weight) for n, (_, weight) in enumerate(entries)], weighting="proportions"
    )
    counts = mixture._proportions({n: size for n, (size, _) in enumerate(entries)}, config)
    assert all(counts[n] >= size for n, (size, _) in enumerate(entries)), "none is left out"
    assert any(counts[n] == size for n, (size, _) in enumerate(entries)), "one source is packed once"
    total, weights = sum(counts.values()), sum(weight for _, weight in entries)
    for n, (_, weight) in enumerate(entries):
        assert abs(counts[n] - Fraction(weight * total, weights)) <= len(entries), "the shares are as the weights say"


def test_proportions_that_repeat_without_end_are_refused(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl", "weight": 999}, {"path": "many.jsonl", "weight": 0.01}]
    with pytest.raises(UsageError, match=r"sources\[0\] few\.jsonl: weighting: proportions would pack its 30 conv"):
        packed(project(tmp_path, sources, weighting="proportions"))


def test_a_weight_in_percent_names_proportions(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"sources\[0\]\.weight: must be a number; .* weighting: proportions and weight"
    ):
        project(tmp_path, [{"path": "few.jsonl", "weight": "70%"}])


def test_a_run_says_before_it_what_weights_leave_out(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl", "weight": 0.7}, {"path": "many.jsonl", "weight": 0.3}]
    recipe = project(tmp_path, sources)
    line = (
        "weights and limits leave out 72 of 120 conversations (60 %): few.jsonl 9 (weight 0.7), many.jsonl 63 "
        "(weight 0.3); for shares of the result that leave out none, set weighting: proportions"
    )
    assert expected_mixture(recipe) == [line]
    assert line in predict(recipe.config, recipe.folder, tmp_path).warnings
    assert expected_mixture(project(tmp_path / "all", [{"path": "few.jsonl"}])) == []


def test_what_proportions_repeat_is_an_estimate_until_rejects_and_filters_are_known(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl", "weight": 0.7}, {"path": "many.jsonl", "weight": 0.3}]
    recipe = project(tmp_path, sources, weighting="proportions", max_rejects=1.0)
    with (recipe.folder / "few.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "no answer"}]}\n' * 30)
    recipe = resolve(recipe.folder / "corpus.yaml", recipe.folder)
    line = "weighting: proportions leaves out no conversation, and packs those of few.jsonl"
    assert expected_mixture(recipe) == [f"{line} about 3.5 times"], "60 records, of which 30 are rejected"
    assert f"{line} 7.0 times" in predict(recipe.config, recipe.folder, tmp_path).warnings
    few = packed(recipe)[0].mixture[0]
    assert few.copies / few.conversations == 7


def test_repeat_takes_each_so_often_and_a_seeded_part_once_more(tmp_path: Path) -> None:
    manifest, index = packed(
        project(tmp_path, [{"path": "few.jsonl", "weight": 2.5}, {"path": "many.jsonl"}], overlong="truncate")
    )
    times = copies(index)
    assert Counter(times[0, n] for n in range(1, 31)) == {2: 15, 3: 15}
    assert {times[1, n] for n in range(1, 91)} == {1}
    few, many = manifest.mixture
    assert (few.conversations, few.copies, many.conversations, many.copies) == (30, 75, 90, 90)
    tokens = manifest.ledger.tokens
    assert tokens.encoded + tokens.separators + tokens.repeated == tokens.packed + tokens.truncated
    assert manifest.ledger.conversations.packed == 120
    apart = Counter((row["source"], row["record"], row["shard"], row["row"]) for row in index)
    assert sum(count > 1 for count in apart.values()) <= 10, "copies of a conversation share a row"


def test_a_larger_share_adds_to_a_smaller_one_and_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    def chosen(folder: str, weight: float, reverse: bool = False, seed: int = 42) -> set[int]:
        sources = [{"path": "few.jsonl", "weight": weight}, {"path": "many.jsonl"}]
        recipe = project(tmp_path / folder, sources, weighting="subsample", seed=seed)
        if reverse:
            file = recipe.folder / "few.jsonl"
            file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
            recipe = resolve(recipe.folder / "corpus.yaml", recipe.folder)
        index = packed(recipe)[1]
        return {row["digest"] for row in index if row["source"] == 0 and row["split"]}

    half = chosen("half", 0.5)
    assert len(half) == 15
    assert half == chosen("reversed", 0.5, reverse=True)
    assert half < chosen("more", 0.7)
    assert half != chosen("seed", 0.5, seed=43)
    assert len(chosen("least", 0.001)) == 1, "a source is not lost by a small share"


@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weights=st.tuples(*[st.floats(0.01, 1000)] * 3))
def test_token_shares_are_met_but_for_half_a_conversation(weights: tuple[float, ...], tmp_path: Path) -> None:
    sources = [
        {"path": name, "weight": weight}
        for name, weight in zip(("few.jsonl", "many.jsonl", "twice.jsonl"), weights, strict=True)
    ]
    whole = packed(project(tmp_path, [{"path": source["path"]} for source in sources]))[1]
    trained, longest = ([f(r["trained"] for r in whole if r["source"] == n) for n in range(3)] for f in (sum, max))
    manifest, index = packed(project(tmp_path, sources, weighting="token_share"))
    assert set(copies(index).values()) == {1}, "nothing is taken twice"
    scale = min(trained[number] / weight for number, weight in enumerate(weights))
    for number, (facts, weight) in enumerate(zip(manifest.mixture, weights, strict=True)):
        assert abs(facts.trained_tokens - weight * scale) <= max(longest[number], 1) / 2 or facts.copies == 1
    assert any(facts.trained_tokens == trained[number] for number, facts in enumerate(manifest.mixture))


def test_a_limit_is_a_seeded_choice_and_one_above_the_source_takes_all(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl", "limit": 7}, {"path": "many.jsonl", "limit": 1000}]
    manifest, index = packed(project(tmp_path, sources))
    chosen = {record for source, record in copies(index) if source == 0}
    assert len(chosen) == 7
    assert chosen != set(range(1, 8)), "not the first ones"
    assert manifest.ledger.conversations.dropped == {"too_long": 0, "limit": 23}
    assert [facts.copies for facts in manifest.mixture] == [7, 90]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("once", "copies do not match weight 3"),
        ("validation", "is in the validation split twice"),
        ("limit", "only 6 conversations are taken, but others are dropped by limit: 12"),
        ("share", "have an additional copy"),
    ],
)
def test_verify_counts_copies_and_limits_again(
    wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, orders = mixture._copied, mixture._orders

    def otherwise(pieces: Pieces, copies: np.ndarray) -> Pieces:
        if wrong == "once":
            copies = np.minimum(copies, 1)
        if wrong == "validation":
            copies = copies * np.where(pieces.accepted.held_out, 3, 1).astype(copies.dtype)
        return copied(pieces, copies)

    def halved(pieces: Pieces, *rest: Any) -> dict[int, np.ndarray]:
        found = orders(pieces, *rest)
        pieces.accepted.reason[found[1][6:]] = drop_code("limit")
        return found | {1: found[1][:6]}

    monkeypatch.setattr(mixture, "_copied", otherwise)
    if wrong == "limit":
        monkeypatch.setattr(mixture, "_orders", halved)
    if wrong == "share":
        monkeypatch.setattr(mixture, "_share", lambda share, count: count)
    weight = {"once": 3, "share": 1.25}.get(wrong, 1)
    sources = [{"path": "few.jsonl", "weight": weight}, {"path": "many.jsonl", "limit": 12}]
    with pytest.raises(DataError, match=said):
        packed(project(tmp_path, sources, validation=0.3))


def test_a_limit_leaves_something_on_both_sides_of_the_split(tmp_path: Path) -> None:
    for limit in (2, 3, 4):
        manifest, _ = packed(project(tmp_path, [{"path": "many.jsonl", "limit": limit}], validation=0.02))
        assert manifest.splits["validation"].rows == 1


def test_a_limit_holds_for_all_files_of_a_path(tmp_path: Path) -> None:
    manifest, _ = packed(project(tmp_path, [{"path": "[fm]*.jsonl", "limit": 50}]))
    assert manifest.ledger.conversations.packed == 50
    assert all(source.trained_tokens for source in manifest.sources), "of both files"


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_what_says_the_same_is_packed_once_whatever_its_format(validation: float, tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl"}, {"path": "twice.jsonl"}, {"path": "many.jsonl"}]
    manifest, index = packed(project(tmp_path / "drop", sources, duplicates="exact", validation=validation))
    assert manifest.ledger.conversations.dropped == {"too_long": 0, "duplicate": 5}
    assert {row["source"] for row in index if row["dropped"]} == {1}, "the first is kept"
    kept, index = packed(project(tmp_path / "keep", sources, validation=validation))
    assert kept.ledger.conversations.dropped == {"too_long": 0}
    sides: dict[int, set[str]] = {}
    for row in index:
        sides.setdefault(row["digest"], set()).add(row["split"])
    assert all(len(found) == 1 for found in sides.values()), "kept, they are on one side of the split all the same"


def test_filters_count_what_they_take_by_reason(tmp_path: Path) -> None:
    values = {"min_tokens": 30, "max_tokens": 150, "min_turns": 3}
    manifest, index = packed(project(tmp_path, [{"path": "few.jsonl"}, {"path": "many.jsonl"}], **values))
    reasons = Counter(row["dropped"] for row in index if row["dropped"])
    assert manifest.ledger.conversations.dropped == {"too_long": 0} | reasons
    assert set(reasons) == {"min_tokens", "max_tokens", "min_turns"}
    assert {row["turns"] for row in index if row["split"]} == {4}


def test_a_system_message_is_no_turn(tmp_path: Path) -> None:
    record = {"messages": [{"role": "system", "content": "Be brief."}, *FEW[0]["messages"]]}
    write_project(tmp_path, [record])
    recipe = resolve(tmp_path / "corpus.yaml", tmp_path)
    index = packed(recipe)[1]
    assert index[0]["turns"] == len(FEW[0]["messages"])


# -- effects of a bad setting ----------------------------------------------------------------------------------------


def refusal(folder: Path, sources: Sequence[Mapping[str, Any]], **values: Any) -> str:
    with pytest.raises(DataError) as caught:
        pack_corpus(project(folder, sources, **values))
    return str(caught.value)


def test_when_all_is_filtered_away_the_filters_are_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, [{"path": "few.jsonl"}], min_tokens=5000)
    assert (
        said == "small: no conversation is left to pack: 30 read, 0 rejected, 0 dropped as longer than 256 tokens, "
        "30 dropped by min_tokens: 5000"
    )


def test_a_source_that_can_have_no_share_is_named(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl"}, {"path": "twice.jsonl", "weight": 3}]
    said = refusal(tmp_path, sources, weighting="token_share", duplicates="exact")
    assert said.startswith("sources[1] twice.jsonl: has no conversation left in the training split")


def test_a_token_share_of_one_source_is_all_of_it(tmp_path: Path) -> None:
    manifest, _ = packed(project(tmp_path, [{"path": "few.jsonl", "weight": 7}], weighting="token_share"))
    assert manifest.mixture[0].trained_tokens_percent == 100
    assert manifest.ledger.conversations.packed == 30


# -- the messages ----------------------------------------------------------------------------------------------------


def facts(path: str, **values: Any) -> MixtureFacts:
    usual = {"weight": 1, "limit": None, "conversations": 7473, "copies": 7473, "tokens": 1_385_220}
    usual |= {"trained_tokens": 902_114, "tokens_percent": 12.345, "trained_tokens_percent": 23.456}
    return MixtureFacts(path=path, **(usual | values))


LONG_NAME = "chats/llamafactory_glaive_toolcall_en_demo.json"


def test_a_table_of_a_mixture_fits_a_terminal(tmp_path: Path) -> None:
    mixture = [facts("chats/a.jsonl"), facts(LONG_NAME, weight=0.25)]
    table = mixture_table(mixture, "token_share")
    wide = fit_to_width(table, 10_000)
    assert wide[0] == ["source", "weight", "packed", "tokens", "%", "trained", "%"]
    assert wide[2][0] == "llamafactory_glaive_toolcall_en_demo.json"
    narrow = fit_to_width(table, 78)
    assert max(map(len, aligned(narrow))) == 78
    assert narrow[2][0].startswith("llamafactory")
    assert narrow[2][0].endswith("demo.json")
    assert len(narrow[0]) == 7
    everything = [facts(LONG_NAME, limit=123_456, copies=18_000, tokens=10**8, trained_tokens=10**8) for _ in range(2)]
    shown = fit_to_width(mixture_table(everything, "repeat"), 78)
    assert shown[0] == ["source", "limit", "packed", "copies", "tokens", "trained", "%"]
    assert max(map(len, aligned(shown))) <= 78
    assert len(mixture_table(everything, "repeat")[0]) == 9, "a page and a card have all columns"
    assert fit_to_width([], 78) == []


def test_the_source_that_limits_the_others_is_named(tmp_path: Path) -> None:
    sources = [{"path": "few.jsonl", "weight": 9}, {"path": "many.jsonl"}]
    recipe = project(tmp_path, sources, weighting="token_share")
    manifest, index = packed(recipe)
    left_out = sum(place["dropped"] == "weight" for place in index)
    share = round(100 * left_out / manifest.ledger.conversations.read)
    assert share > 50
    said = f"few.jsonl is used in full and limits the others (token_share): {share} % of the conversations are "
    assert sources_taken_whole(manifest, recipe.corpus_folder) == ["few.jsonl"]
    assert said in explain_limits(["few.jsonl"], left_out, manifest.ledger.conversations.packed)
    warning, *_ = predict(recipe.config, tmp_path, tmp_path).warnings
    assert warning.startswith(said)
    shown = luigi(tmp_path, "--config", "corpus.yaml").stderr
    assert "mixture (token_share), in one pass over the training split:\nsource" in shown
    assert said in shown
    assert explain_limits(["a", "b"], 0, 7) == explain_limits([], 7, 7) == ""
    assert "a and b are used in full and limit the others" in explain_limits(["a", "b"], 1, 1)


@pytest.mark.slow
def test_a_share_of_the_sample_differs_from_a_share_of_a_pass(tmp_path: Path) -> None:
    remark = SHARE_NOTE
    for number, sources in enumerate(([{"path": "few.jsonl", "weight": 2}], [{"path": "few.jsonl"}])):
        recipe = project(tmp_path / str(number), sources)
        packed(recipe)
        for words in (["inspect"], ["check", "corpus.yaml"]):
            done = command(tmp_path / str(number), str(BIN / "packcorpus"), *words, COLUMNS="200")
            assert (remark in done.stdout) == (number == 0), (words, done.stderr)
