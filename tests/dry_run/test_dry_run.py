"""The prediction of `check` equals the run if it reads everything.

The prediction is close if it reads a sample. Nothing is written. Runs call the stages of the graph in this process.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import BIN, SHARED, command, needs_shared
from support.inspected import rendered
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project

from packcorpus.tasks.cli.check_view import show_prediction
from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.dry_run import sample
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.dry_run.prediction import Prediction
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.files import read_json
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.work import Plan, run_all


def predicted(config: Path, **options: Any) -> Prediction:
    return predict(load_config(config), config.parent, config.parent, **options)


def figures_of(found: Manifest | Prediction) -> dict[str, Any]:
    """Return the figures that a manifest and a prediction share."""
    is_manifest = isinstance(found, Manifest)
    return {
        "ledger": found.ledger.model_dump(),
        "rows": {name: split.rows for name, split in found.splits.items()} if is_manifest else found.rows,
        "efficiency": found.packing_metadata.packing_efficiency if is_manifest else found.packing_efficiency,
        "of_sources": [(source.tokens, source.trained_tokens, source.rejected) for source in found.sources],
        "mixture": found.mixture,
    }


def warnings_of(found: Prediction) -> list[str]:
    """Return the warnings about steps."""
    return [warning for warning in found.warnings if warning.startswith(("An epoch has", "A step has"))]


def mixture(first: float, second: float, limit: int | None = None) -> list[dict[str, Any]]:
    """Return sources with these weights, the second with a limit."""
    return [{"path": "chat.jsonl", "weight": first}, {"path": "other.jsonl", "weight": second, "limit": limit}]


# -- everything is read -----------------------------------------------------------------------------------------------


SYSTEM = "the train leaves at 9 and takes 40 minutes, so it is there in the afternoon of the same day"


@pytest.fixture(scope="module")
def files() -> tuple[list[Any], str]:
    """Return the records of one source, and the lines of another with duplicates."""
    records: list[Any] = conversations(400)
    records[7] = {"messages": [{"role": "assistent", "content": "x"}]}
    records[9] = {"messages": [{"role": "user", "content": "no answer"}]}
    others = [*conversations(150, seed=1, longest=30), *records[:40], *records[:40]]
    return records, "".join(f"{json.dumps(record)}\n" for record in others)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlong": "drop", "sequence_length": 40},
        {"overlong": "split", "sequence_length": 24},
        {"overlong": "turns", "sequence_length": 40, "validation": 0.2},
        {"overlong": "truncate", "sequence_length": 48, "validation": 0.2, "train_on": "last"},
        {"packing": False},
        {"engine": "reference", "template": "llama2"},
        {"duplicates": "exact", "validation": 0.3},
        {"min_tokens": 20, "max_tokens": 60, "min_turns": 2, "max_turns": 3},
        {"epochs": 3, "validation": 0.2, "overlong": "split", "sequence_length": 24},
        {"sources": mixture(2.5, 0.4), "validation": 0.2},
        {"sources": mixture(0.25, 1, limit=17), "weighting": "subsample", "overlong": "split", "sequence_length": 24},
        {"sources": mixture(3, 1), "weighting": "token_share", "overlong": "truncate", "sequence_length": 40},
        {"sources": mixture(1, 3, limit=50), "weighting": "token_share", "validation": 0.2, "duplicates": "exact"},
        {"sources": mixture(2, 3), "packing": False, "validation": 0.1, "duplicates": "exact", "min_tokens": 20},
        {"sources": mixture(1.5, 2), "epochs": 2, "validation": 1e-9, "overlong": "drop", "sequence_length": 48},
        {"share": "all", "sources": mixture(2.5, 0.4), "epochs": 2, "validation": 0.2, "default_system": SYSTEM},
    ],
    ids=str,
)
def test_figures_are_exact_if_everything_is_read(
    files: tuple[list[Any], str], tmp_path: Path, settings: dict[str, Any]
) -> None:
    records, others = files
    (tmp_path / "other.jsonl").write_text(others)
    recipe = make_recipe(tmp_path, records, max_rejects=1.0, **{"sources": mixture(1, 1), **settings})
    manifest = load_manifest(pack_corpus(recipe))
    found = predicted(tmp_path / "corpus.yaml")
    assert found.whole
    assert figures_of(found) == figures_of(manifest)
    corpus = tmp_path / manifest.corpus
    shards = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    # Arrow adds a schema to each file and a header to every batch, which the estimate does not include.
    assert found.bytes_on_disk["shards"] == pytest.approx(shards, rel=0.1, abs=12_000)
    assert found.bytes_on_disk["index"] == pytest.approx((corpus / "index.arrow").stat().st_size, rel=0.02, abs=5_000)


def test_trees_of_a_sample_stand_for_those_of_all_data(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(3000), share="all", default_system=SYSTEM, sequence_length=512)
    whole, part = predicted(config), predicted(config, budget=60_000)
    assert (whole.whole, part.whole) == (True, False)
    assert part.ledger.tokens.shared is not None
    # The more conversations there are, the longer are the beginnings that some have in common.
    assert whole.ledger.tokens.shared is not None
    assert 0.5 * whole.ledger.tokens.shared < part.ledger.tokens.shared < whole.ledger.tokens.shared
    assert part.rows["train"] == pytest.approx(whole.rows["train"], rel=0.3)
    config = write_project(tmp_path, conversations(3000), default_system=SYSTEM, sequence_length=512)
    apart = predicted(config)
    assert apart.share_all_tokens == whole.ledger.tokens.packed
    assert any(text.startswith(f"share: all stores {whole.ledger.tokens.packed:,} tokens") for text in apart.warnings)
    assert whole.share_all_tokens is None


def test_small_parts_cost_little_time_and_save_no_memory(tmp_path: Path) -> None:
    """Small parts cost little time and do not save memory.

    A worker is forked once for all its parts, and keeps the words of all parts.
    """
    found = []
    for part_size in (1 << 10, 1 << 30):
        config = write_project(tmp_path, conversations(3000), part_size=part_size)
        found.append(predicted(config, workers=1))
    small, large = found
    assert small.peak_memory_bytes == large.peak_memory_bytes
    parts = (tmp_path / "chat.jsonl").stat().st_size / (1 << 10)
    assert parts > 300
    assert small.seconds - large.seconds < 0.01 * parts + 1, "a second is more than the two measured to encode"


def test_a_tokenizer_trained_on_everything_equals_the_one_of_the_run(tmp_path: Path) -> None:
    write_project(tmp_path, conversations(300))
    config = tmp_path / "corpus.yaml"
    config.write_text("name: small\nsources: [chat.jsonl]\nvocab_size: 400\nsequence_length: 64\n")
    recipe = recipe_of(load_config(config), tmp_path, tmp_path)
    manifest = load_manifest(pack_corpus(recipe))
    found = predicted(config)
    assert figures_of(found) == figures_of(manifest)
    assert found.settings == load_config(config).model_dump(mode="json"), "it names no tokenizer"


# -- a sample is read --------------------------------------------------------------------------------------------------


def test_a_larger_corpus_is_planned_at_a_smaller_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = mixture(2, 1, limit=1000)
    (tmp_path / "other.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in conversations(2000, seed=1)))
    config = write_project(tmp_path, conversations(3000), sources=sources, validation=0.1)
    exact, larger = predicted(config), predicted(config, budget=200_000)
    monkeypatch.setattr(sample, "MOST_REPEATED", 1250)
    assert figures_of(predicted(config)) == figures_of(exact), "everything is read"
    exact, found = larger, predicted(config, budget=200_000)
    assert not found.whole
    dropped = exact.ledger.conversations.dropped["limit"]
    assert found.ledger.conversations.dropped["limit"] == pytest.approx(dropped, rel=0.05)
    assert found.ledger.tokens.packed == pytest.approx(exact.ledger.tokens.packed, rel=0.05)
    assert found.rows["train"] == pytest.approx(exact.rows["train"], rel=0.05)
    assert found.mixture[1].limit == 1000


@needs_shared
def test_efficiency_of_real_conversations_is_within_two_points(tmp_path: Path) -> None:
    """Predicted packing efficiency is within two points of the real efficiency.

    The prediction reads a sixteenth of the data. One file is sorted by its tasks, one is packed, and one alternates
    short and long conversations.
    """
    names = ("gsm8k_train.jsonl", "llamafactory_alpaca_en_demo.json", "llamafactory_glaive_toolcall_en_demo.json")
    config = Config.model_validate(
        {
            "sources": [{"path": str(SHARED / "corpora" / name)} for name in names],
            "tokenizer": str(SHARED / "tokenizers" / "mistral_v3_32k.model"),
            "unknown_markers": "text",
            "overlong": "drop",
        }
    )
    recipe = recipe_of(config, tmp_path, tmp_path)
    for length in (512, 1024, 2048):
        sized = config.model_copy(update={"sequence_length": length})
        other = replace(recipe, config=sized)
        run_all(Plan(other), check_content=True)
        plan = read_json(other.plan_folder / "plan.json")
        found = predict(sized, tmp_path, tmp_path, budget=(6 << 20) // 16)
        assert not found.whole
        real = plan["packing_metadata"]
        assert found.packing_efficiency == pytest.approx(real["packing_efficiency"], abs=2)
        assert sum(found.rows.values()) == pytest.approx(real["rows"], rel=0.06)
        assert found.ledger.tokens.encoded == pytest.approx(plan["ledger"]["tokens"]["encoded"], rel=0.06)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return a folder with a source of 6,000 conversations, and those of another."""
    folder = tmp_path_factory.mktemp("large")
    others = [json.dumps(record) for record in conversations(6_000, seed=1, longest=30)]
    (folder / "other.jsonl").write_text("".join(f"{line}\n" for line in others))
    return folder, conversations(8_000)


@pytest.mark.parametrize("weighting", ["repeat", "token_share"])
def test_mixture_is_estimated_from_a_sample(large: tuple[Path, list[Any]], weighting: str) -> None:
    """The mixture is estimated from a sample.

    The sample has a tenth of the conversations. A limit of 3,000 is far above the sample.
    """
    folder, records = large
    settings = {"weighting": weighting, "sources": mixture(1.5, 1, limit=3_000), "validation": 0.1, "min_tokens": 15}
    settings |= {"overlong": "truncate"}
    recipe = make_recipe(folder, records, **settings)  # the other weighting has the same tokens
    run_all(Plan(recipe), check_content=True)
    plan = read_json(recipe.plan_folder / "plan.json")
    found = predicted(folder / "corpus.yaml", budget=180_000)
    assert found.looked_at < 2_000
    for estimate, real in zip(found.mixture, plan["mixture"], strict=True):
        for name in ("conversations", "copies", "tokens", "trained_tokens"):
            assert getattr(estimate, name) == pytest.approx(real[name], rel=0.08), name
        assert estimate.trained_tokens_percent == pytest.approx(real["trained_tokens_percent"], abs=2)
    dropped = plan["ledger"]["conversations"]["dropped"]
    assert set(found.ledger.conversations.dropped) == set(dropped)
    for reason, count in dropped.items():
        assert found.ledger.conversations.dropped[reason] == pytest.approx(
            count, rel=0.15, abs=350 if reason == "weight" else 60
        ), reason
    assert found.ledger.conversations.packed == pytest.approx(plan["ledger"]["conversations"]["packed"], rel=0.05)
    assert found.rows["validation"] == pytest.approx(sum(plan["rows_of_shards"][recipe.shards["train"] :]), rel=0.15)


def test_warnings_for_empty_shares_and_duplicates(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps(conversations(1)[0]) + "\n")
    settings = {"weighting": "token_share", "sources": mixture(1, 1), "duplicates": "exact"}
    config = write_project(tmp_path, conversations(400), **settings)
    found = predicted(config)
    limited = [{"path": "chat.jsonl", "limit": 10}, {"path": "other.jsonl"}]
    with_limit = predicted(write_project(tmp_path, conversations(400), **settings | {"sources": limited}))
    assert with_limit.ledger.conversations.dropped["limit"] == 390, "limits count without the weights, too"
    config = write_project(tmp_path, conversations(400), **settings)
    assert [
        warning
        for warning in found.failures
        if "other.jsonl: has no conversation left in the training split" in warning
    ]
    assert found.rows["train"], "without the weights"
    assert not [warning for warning in found.warnings if "duplicates" in warning]
    [warning] = [text for text in predicted(config, budget=20_000).warnings if "duplicates" in text]
    assert "only found within the sample" in warning


def test_rejects_are_extrapolated_from_a_sample(tmp_path: Path) -> None:
    records: list[Any] = conversations(12_000)
    for number in range(0, 12_000, 10):
        records[number] = {"messages": [{"role": "assistent", "content": "x"}]}
    config = write_project(tmp_path, records)
    found = predicted(config, budget=300_000)
    assert found.looked_at < 4000
    [reject] = found.rejects
    assert (reject.reason, reject.place) == ("bad_role", "chat.jsonl:1")
    assert reject.expected == pytest.approx(1200, rel=0.15)
    assert re.search(r"(9\.9|10\.0)\d %", found.failures[0])
    assert "The run will fail" in found.failures[0]
    again = predicted(config, budget=300_000)
    assert figures_of(again) == figures_of(found)


# -- the printed page -------------------------------------------------------------------------------------------------

HOSTILE = "\x1b[31mred\x1b[0m \x9b1m [bold]no[/bold] :smile: <|im_end|> ⟦trained⟧"


def shown(config: Path, batches: list[int], terminal: bool = False) -> str:
    return rendered(predicted(config, batches=batches), show_prediction, 100, terminal)


def test_a_conversation_of_each_source_is_shown_as_text_with_its_labels(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "word " * 500}]}
    config = write_project(tmp_path / "a[bold]\x1b", [chat, *conversations(20)], sequence_length=4096)
    page = shown(config, [])
    assert r"\x1b[31mred\x1b[0m \x9b1m [bold]no[/bold] :smile: <|im_end|> \u27e6trained\u27e7" in page
    assert "\x1b" not in page
    assert page.count("⟦word ") == 2
    assert " characters … " in page, "of a long answer the middle is left out"
    assert "━━ chat.jsonl:1  " in page
    on_terminal = shown(config, [], terminal=True)
    assert "\x1b[31mred" not in on_terminal
    assert "\x9b" not in on_terminal


def test_steps_for_a_batch_size_and_the_warning_for_few_steps(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(400))
    found = predicted(config, batches=[16, 1])
    count, trained = found.steps[0].steps, found.steps[0].trained_tokens_per_step
    assert count == -(-found.rows["train"] // 16)
    assert count * trained == pytest.approx(found.ledger.tokens.trained, rel=0.01)
    warnings = warnings_of(found)
    assert f"An epoch has {count} steps at 16 rows per step, fewer than 100." in warnings[0]
    assert "A step has few trained tokens (" in warnings[-1]
    assert "at 1 row per step), fewer than 1,000." in warnings[-1]
    assert f"{count:,}" in shown(config, [16])


def test_advice_for_few_steps_is_feasible(tmp_path: Path) -> None:
    [warning, *_] = warnings_of(predicted(write_project(tmp_path, conversations(2)), batches=[8]))
    assert warning == (
        "An epoch has 1 step at 8 rows per step, fewer than 100. Only more conversations can change that."
    )
    many = predicted(write_project(tmp_path, conversations(300), sequence_length=64), batches=[16, 8])
    assert 200 < many.rows["train"] < 400, "the corpus of this test lacks what it is for"
    [warning, _] = warnings_of(many)
    assert re.search(r"An epoch has \d+ steps at 16 rows, \d+ steps at 8 rows per step", warning), "one line for all"
    assert re.search(r"Use \d epochs at 8 rows\.$", warning), "a step of two rows has too few trained tokens"


def test_failures_are_printed_first(tmp_path: Path) -> None:
    page = shown(write_project(tmp_path, [*conversations(9), {"messages": 1}]), [])
    failure = "10.00 % of the conversations are rejected"
    assert page.count(failure) == 1
    assert page.index(failure) < page.index("config ") < page.index("Sources")
    assert "exact: all data was read" not in page
    assert "Prediction  for a run that does not fail" in page


def test_check_writes_nothing_and_prints_one_object(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(50), sequence_length=64)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    words = [
        str(BIN / "packcorpus"),
        "check",
        "--config",
        str(config),
        "--batch-size",
        "8",
        "--tokens-per-step",
        "1024",
    ]
    done = command(tmp_path, *words, "--sequence-length", "128", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["settings"]["sequence_length"] == 128
    assert [step["rows_per_step"] for step in printed["steps"]] == [8, 8]
    assert printed["whole"]
    assert printed["ledger"]["conversations"]["read"] == 50
    [source] = printed["sources"]
    assert source["shown"]["place"] == "chat.jsonl:1"
    assert "".join(span["text"] for span in source["shown"]["spans"]).startswith("<|im_start|>user")
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    failed = command(tmp_path, *words[:3], "nope.yaml", "--json")
    assert (failed.returncode, json.loads(failed.stdout)["error"]["code"]) == (66, "E102")


def test_mixture_and_dropped_conversations_are_shown(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps(conversations(1, seed=1)[0]) + "\n")
    settings = {"sources": mixture(2, 0.5), "min_turns": 3, "epochs": 30}
    page = shown(write_project(tmp_path, conversations(400), **settings), [])
    assert "than min_turns: 3" in page
    assert "in each of 30 epochs" in page
    assert "Mixture  repeat, in one epoch of the training split" in page
    assert "train_epoch" not in page


def test_overlong_conversations_that_fail_the_run_are_reported(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(50), sequence_length=24, overlong="error")
    [warning] = [text for text in predicted(config).failures if "overlong is error" in text]
    assert "The run will fail: 49 conversations are longer" in warning


def test_an_empty_source_is_an_error_as_in_a_run(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(5))
    os.truncate(tmp_path / "chat.jsonl", 0)
    done = command(tmp_path, str(BIN / "packcorpus"), "check", "--config", str(config))
    assert (done.returncode, done.stderr[:11]) == (65, "E310 error:")


def test_exit_code_of_a_run_that_will_fail(tmp_path: Path) -> None:
    records = [*conversations(50), {"messages": [{"role": "assistent", "content": "x"}]}]
    config = write_project(tmp_path, records)
    tool = str(BIN / "packcorpus")
    failing = command(tmp_path, tool, "check", "corpus.yaml")
    assert failing.returncode == 65
    printed = " ".join(failing.stdout.split())  # lines may be wrapped
    assert "The run will fail: 1.96 % of the conversations are rejected, but max_rejects allows 1.00 %. " in printed
    assert "shows the first of each reason; the most frequent reason is bad_role; fix: map the name" in printed
    assert "; set max_rejects: 0.0197 to accept this" in printed
    write_project(tmp_path, records, max_rejects=0.1)
    assert command(tmp_path, tool, "check", "corpus.yaml").returncode == 0
    twice = command(tmp_path, tool, "check", "corpus.yaml", "--config", str(config))
    assert (twice.returncode, twice.stderr[:11]) == (64, "E101 error:")


def test_if_everything_is_rejected_the_first_reason_is_reported(tmp_path: Path) -> None:
    config = tmp_path / "corpus.yaml"
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "assistent", "content": "x"}]}\n' * 3)
    config.write_text("sources: [chat.jsonl]\n")
    with pytest.raises(DataError, match=r"the first of 3 rejects: \S*chat\.jsonl:1: .*assistent"):
        predicted(config)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_an_error_of_the_template_names_the_place(tmp_path: Path, engine: str) -> None:
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    reasoned = [chat[0], chat[1] | {"reasoning": "Two and two."}]
    config = write_project(tmp_path, [{"messages": reasoned}] * 2, engine=engine)
    with pytest.raises(DataError, match=r"chat\.jsonl:1: messages\[1\] has reasoning.* first 2 conversations all fail"):
        predict(load_config(config), tmp_path, tmp_path)
    config = write_project(tmp_path, [{"messages": chat}, {"messages": reasoned}], engine=engine)
    found = predict(load_config(config), tmp_path, tmp_path)
    assert [(reject.reason, reject.place) for reject in found.rejects] == [("reasoning_not_written", "chat.jsonl:2")]
    assert "50.00 % of the conversations are rejected" in found.failures[0]
    assert "the most frequent reason is reasoning_not_written; fix: set reasoning: drop, or" in found.failures[0]
