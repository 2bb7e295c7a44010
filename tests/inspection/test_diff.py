"""The difference between two corpora is exactly the known changes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import BIN, command
from support.inspected import rendered
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project

from packcorpus.tasks.cli import corpus_view
from packcorpus.tasks.cli.console import UNBOUNDED, open_console
from packcorpus.tasks.cli.options import value_as_json
from packcorpus.tasks.inspection import diff
from packcorpus.tasks.inspection.diff import Change, Difference, _entries, compare
from packcorpus.tasks.inspection.manifests import Listed, Unreadable, list_manifests
from packcorpus.tasks.storage.files import read_json, to_json, write_bytes
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import open_index


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x?"}, {"role": "assistant", "content": answer}]}


def made(folder: Path, records: list[Any], **settings: Any) -> Path:
    return pack_corpus(make_recipe(folder, records, max_rejects=1.0, **settings))


def places(moved: list[Any]) -> list[int]:
    return [one.record for one in moved]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    records = conversations(60)
    return made(tmp_path_factory.mktemp("base"), records), records


@contextmanager
def in_batches(size: int, manifest: Manifest, folder: Path) -> Iterator[Iterator[pa.RecordBatch]]:
    """Open an index like `open_index`, but in batches of another size."""
    with open_index(manifest, folder) as reader:
        yield (batch.slice(top, size) for batch in reader for top in range(0, batch.num_rows, size))


@settings(deadline=None, max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    gone=st.sets(st.integers(0, 59), max_size=8),
    new=st.lists(st.integers(0, 60), max_size=6),
    length=st.sampled_from([32, 128, 256]),
    packed=st.sampled_from([{}, {"epochs": 2}, {"sources": [{"path": "chat.jsonl", "weight": 2.5}]}]),
    batch=st.sampled_from([1, 3, 1 << 16]),
)
def test_added_and_removed_conversations_are_found(
    base: tuple[Path, list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
    gone: set[int],
    new: list[int],
    length: int,
    packed: dict[str, Any],
    batch: int,
) -> None:
    """Added and removed conversations are found anywhere in a file.

    The sequence length, the order of other conversations, copies, epochs, pieces, and the batches in which the index
    is read do not matter.
    """
    before, records = base
    after = [record for number, record in enumerate(records) if number not in gone]
    for number, place in enumerate(sorted(new, reverse=True)):
        after.insert(min(place, len(after)), chat(f"new {number}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "open_index", partial(in_batches, batch))
        patch.setattr(diff, "_RANGE", 7)
        settings = {"sequence_length": length, "overlong": "split", "train_on": "all"} | packed
        manifest = made(tmp_path_factory.mktemp("after"), after, **settings)
        found, back = compare(before, manifest), compare(manifest, before)
        few = compare(before, manifest, 3).conversations
    assert found.conversations.compared
    assert places(found.conversations.went) == sorted(number + 1 for number in gone)
    assert [json.dumps(after[record - 1]) for record in places(found.conversations.came)] == [
        json.dumps(record) for record in after if record not in records
    ]
    assert all("new" in one.text for one in found.conversations.came)
    assert (back.conversations.came, back.conversations.went) == (found.conversations.went, found.conversations.came)
    # All are counted, even if few are listed.
    assert (few.went, few.came) == (found.conversations.went[:3], found.conversations.came[:3])
    for moved, *counts in (
        (found.conversations.went, few.removed, back.conversations.added),
        (found.conversations.came, few.added, back.conversations.removed),
    ):
        assert counts == [{"chat.jsonl": len(moved)} if moved else {}] * 2


def test_a_difference_that_is_not_listed_is_counted(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    page = shown(compare(before, made(tmp_path, records[30:]), 25))
    assert "30 removed, 0 added" in page
    assert "… 10 lines more; --json lists 25 in total (see --limit)" in page
    assert "… 10 lines more; --json lists all" in shown(compare(before, made(tmp_path, records[30:])))


def test_a_corpus_is_the_same_as_itself(base: tuple[Path, list[Any]]) -> None:
    found = compare(base[0], base[0])
    assert found.same
    assert not found.figures


def test_equal_conversations_are_counted(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    found = compare(before, made(tmp_path, [*records, records[0], records[0]]))
    assert (places(found.conversations.went), places(found.conversations.came)) == ([], [61, 62])


def test_settings_sources_and_figures_that_differ_are_named(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    (tmp_path / "more.jsonl").write_text(json.dumps(chat("more")) + "\n")
    more = made(tmp_path, records, sources=[{"path": "chat.jsonl"}, {"path": "more.jsonl"}], seed=7, train_on="last")
    found = compare(before, more)
    assert [source.path for source in found.sources.added] == ["more.jsonl"]
    assert [*found.sources.removed, *found.sources.changed] == []
    assert {
        (change.name, change.before, change.after) for change in found.settings if not change.name.startswith("source ")
    } == {
        ("seed", 42, 7),
        ("train_on", "assistant", "last"),
    }
    read = next(change for change in found.figures if change.name == "ledger.conversations.read")
    assert (read.before, read.after) == (60, 61)
    assert [(one.source, one.record) for one in found.conversations.came] == [("more.jsonl", 1)]
    assert not found.conversations.went


def test_conversations_that_one_side_drops_or_rejects_are_removed(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    found = compare(before, made(tmp_path, records, sequence_length=32, overlong="drop"))
    dropped = load_manifest(before).ledger.conversations.packed - len(found.conversations.went)
    assert 0 < dropped < 60
    assert not found.conversations.came
    assert {one.why for one in found.conversations.went} == {"too_long"}
    assert shown(found).count("dropped now: longer than a row · ") == min(20, len(found.conversations.went))
    back = compare(made(tmp_path, records, sequence_length=32, overlong="drop"), before)
    assert "dropped before: longer than a row · " in shown(back)


def test_another_template_does_not_change_conversations(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    found = compare(before, made(tmp_path, records[1:], template="plain"))
    assert (places(found.conversations.went), found.conversations.came) == ([1], [])


def test_one_of_two_equal_sources_can_be_removed(tmp_path: Path) -> None:
    records = conversations(20)
    folder = tmp_path / "a"
    write_project(folder, records)
    (folder / "chat.jsonl").rename(folder / "copy.jsonl")
    before = made(folder, records, sources=[{"path": "chat.jsonl"}, {"path": "copy.jsonl"}])
    found = compare(before, made(folder, records, sources=[{"path": "chat.jsonl"}]))
    assert (len(found.conversations.went), len(found.conversations.came)) == (20, 0)


def test_a_conversation_in_pieces_is_one(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x " * 200}, {"role": "assistant", "content": "4"}]}
    before = made(tmp_path / "a", [long, *conversations(20)], overlong="split", sequence_length=64)
    after = made(tmp_path / "b", conversations(20), overlong="split", sequence_length=64)
    assert places(compare(before, after).conversations.went) == [1]


def test_a_manifest_without_its_folder_is_compared(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    after = made(tmp_path, records[1:])
    shutil.rmtree(tmp_path / "data" / "corpora")
    found = compare(before, after)
    assert not found.conversations.compared
    assert len(found.sources.changed) == 1


def test_rows_of_format_2_are_compared_by_content(tmp_path: Path) -> None:
    records = conversations(20)
    before = made(tmp_path / "a", records, packing=False)
    after = made(tmp_path / "b", [chat("first"), *records[1:]], packing=False)
    found = compare(before, after)
    assert (places(found.conversations.went), places(found.conversations.came)) == ([1], [1])


def test_each_change_of_a_source_in_the_settings_is_listed(tmp_path: Path) -> None:
    def entry(path: str, **more: Any) -> dict[str, Any]:
        return {"path": path, **more}

    records = conversations(20)
    folder = tmp_path / "a"
    write_project(folder, conversations(8, seed=1))
    (folder / "chat.jsonl").rename(folder / "more.jsonl")
    before = made(folder, records, sources=[entry("chat.jsonl"), entry("more.jsonl")])
    again = [entry("chat.jsonl", weight=2.5), entry("chat.jsonl", limit=5)]
    found = list(_entries([entry("chat.jsonl", weight=1.0, limit=None), entry("more.jsonl")], again))
    assert found == [
        Change("chat.jsonl weight", 1.0, 2.5),
        Change("source more.jsonl", "in the config", "not in the config"),
        Change("source chat.jsonl", "not in the config", "in the config"),
    ]
    assert [change.name for change in _entries([entry("b"), entry("a")], [entry("a"), entry("b")])] == [
        "order of sources"
    ]
    after = made(folder, records[2:], sources=[entry("chat.jsonl", weight=2.5)])
    page = shown(compare(before, after))
    assert re.search(r"^ +before +after$", page, re.M)
    assert re.search(r"^  chat.jsonl weight +1.0 +2.5$", page, re.M)
    assert "[{" not in page
    assert re.search(r"^  chat.jsonl +−2 +\+0$", page, re.M)
    assert re.search(r"^  more.jsonl +−8 +\+0$", page, re.M)


def test_figures_and_names_of_manifests_never_wrap(
    base: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures and names of manifests never wrap, even on narrow terminals.

    A pipe has no width.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == UNBOUNDED
    found = compare(base[0], base[0])
    found.figures.append(Change("ledger.tokens.something_with_a_long_name", 123_456_789_011, 123_456_789_012))
    page = shown(replace(found, same=False, settings=[Change("seed", 1, 2)]), width=40)
    assert "123,456,789,012" in page
    page = rendered(list_manifests(base[0].parent.parent), corpus_view.show_list, width=30)
    assert base[0].name in page


# -- output -----------------------------------------------------------------------------------------------------------


def shown(found: Difference, terminal: bool = False, width: int = 100) -> str:
    found = replace(found, before=Path("a.json"), after=Path("b.json"))
    return rendered(found, corpus_view.show_difference, width, terminal)


def test_figures_have_the_names_that_inspect_has(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    page = shown(compare(base[0], made(tmp_path, base[1][1:], template="plain")))
    for name in ("ledger.", "packing.", "compression_ratio"):
        assert name not in page


def test_long_lists_are_capped_and_shown_as_text(base: tuple[Path, list[Any]], tmp_path: Path) -> None:
    before, records = base
    hostile = [chat(f"{number} \x1b[31mred\x9b [b]x[/b]") for number in range(30)]
    found = compare(before, made(tmp_path, [*records, *hostile]))
    page = shown(found)
    assert "0 removed, 30 added" in page
    assert page.count(r"\x1b[31mred\x9b [b]x[/b]") == 20
    assert "… 10 lines more" in page
    assert "\x1b[31mred" not in shown(found, terminal=True)
    assert len(json.loads(value_as_json(found))["conversations"]["came"]) == 30


# -- the list of manifests, and the commands --------------------------------------------------------------------------


@pytest.fixture
def project(base: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """Copy a project, and add two damaged manifests.

    One is edited, and one has no keys. The valid manifest has the record of its run.
    """
    root = base[0].parent.parent
    for name in ("manifests", "data/corpora"):
        shutil.copytree(root / name, tmp_path / name)
    [corpus] = (tmp_path / "data" / "corpora").iterdir()
    record = read_json(corpus / "run.json")
    write_bytes(corpus / "run.json", to_json(record | {"finished": "2026-03-04T05:06:07+00:00"}))
    [manifest] = (tmp_path / "manifests").iterdir()
    edited = manifest.read_text().replace('"seed": 42', '"seed": 43')
    (tmp_path / "manifests" / "edited[bold].json").write_text(edited)
    (tmp_path / "manifests" / "no.json").write_text("{}")
    return tmp_path


def test_all_manifests_are_listed_the_damaged_ones_with_their_code(project: Path) -> None:
    found = list_manifests(project)
    problems = {one.path.name: one.error.code for one in found.manifests if isinstance(one, Unreadable)}
    assert problems == {"edited[bold].json": "E503", "no.json": "E502"}
    [whole] = [one for one in found.manifests if isinstance(one, Listed)]
    assert whole.finished == "2026-03-04T05:06:07+00:00"
    page = rendered(found, corpus_view.show_list, width=250)
    assert "2026-03-04 05:06" in page
    assert "edited[bold].json" in page
    assert "E502" in page
    next(project.glob("data/corpora/*/run.json")).unlink()
    assert next(one.finished for one in list_manifests(project).manifests if isinstance(one, Listed)) is None


def test_the_commands_take_names_and_folders_and_print_one_object(project: Path) -> None:
    tool = str(BIN / "packcorpus")
    listed = command(project, tool, "list", "--json")
    assert listed.returncode == 0, listed.stderr
    paths = {one["path"]: one for one in json.loads(listed.stdout)["manifests"]}
    assert paths["manifests/no.json"]["error"]["code"] == "E502"
    [whole] = [path for path, one in paths.items() if "error" not in one]
    corpus = next((project / "data" / "corpora").iterdir())
    done = command(project, tool, "diff", whole, str(corpus), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same"]
    wrong = command(project, tool, "diff", whole, "manifests/no.json")
    assert (wrong.returncode, wrong.stderr[:11]) == (65, "E502 error:")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script_and_manifests_to_complete(project: Path, shell: str) -> None:
    tool = str(BIN / "packcorpus")
    script = command(project, tool, _PACKCORPUS_COMPLETE=f"source_{shell}")
    assert script.returncode == 0
    assert "_PACKCORPUS_COMPLETE=complete_" + shell in script.stdout
    for typed in ("packcorpus inspect manifests/s", "packcorpus diff man"):
        asked = command(
            project,
            tool,
            _PACKCORPUS_COMPLETE=f"complete_{shell}",
            _TYPER_COMPLETE_ARGS=typed,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
            COMP_WORDS=typed,
            COMP_CWORD="2",
        )
        assert "manifests/small-" in asked.stdout
        assert ("manifests/no.json" in asked.stdout) == typed.endswith("man")


def test_help_imports_nothing_heavy(project: Path) -> None:
    """The help imports no heavy package, so that it appears at once.

    It takes 0.2 s. numpy alone would take 0.1 s, and pyarrow 0.2 s.
    """
    for words in ([], ["check"]):
        done = command(
            project, str(BIN / "python"), "-X", "importtime", "-m", "packcorpus.tasks.cli.app", *words, "--help"
        )
        assert done.returncode == 0
        loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "typer" in loaded
        assert not loaded & {"numpy", "pyarrow", "luigi", "rich", "torch", "sentencepiece"}
