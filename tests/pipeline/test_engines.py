"""Every engine makes the same corpus and reports each error once.

Steps are small, and they may run twice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.commands import corpus_bytes, packcorpus
from support.small_corpus import conversations, make_recipe, make_shards_small, pack_corpus, write_project
from support.steps import Failing, Marked, pack_on, steps_of

from packcorpus.pipeline import graph, progress
from packcorpus.pipeline.engines import Engine, Here, Workers, lost, open_engine, start_method, workers_of
from packcorpus.tasks.core.errors import DataError, StorageError, UsageError
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.storage.files import HashingWriter
from packcorpus.tasks.verification.verify import verify
from packcorpus.tasks.work import Outcome, TokenizePart, Work, attempt

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"part_size": 2048},
    "trained tokenizer, weights, epochs": {"part_size": 2048, "tokenizer": None, "vocab_size": 400, "epochs": 2},
    "format 2.0": {"part_size": 2048, "packing": False},
    "validation": {"part_size": 2048, "validation": 0.2},
    "jinja": {"part_size": 2048, "template": "template.jinja"},
}
JINJA = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Disordered(Workers):
    """Runs steps in a random order, and each of them twice, perhaps at once."""

    def __init__(self) -> None:
        super().__init__(3)

    def map(self, steps: Sequence[Work]) -> Iterator[tuple[int, Outcome]]:
        order = [index for index in range(len(steps)) for _ in range(2)]
        random.Random(5).shuffle(order)
        outcomes = {order[at]: outcome for at, outcome in super().map([steps[index] for index in order])}
        yield from outcomes.items()


ENGINES: dict[str, Callable[[], Engine]] = {
    "here": Here,
    "two workers": lambda: Workers(2),
    "spawned": lambda: Workers(2, multiprocessing.get_context("spawn")),
    "disordered": Disordered,
}


def recipe_in(folder: Path, settings: dict[str, Any]) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.jinja").write_text(JINJA)
    return make_recipe(folder, conversations(120), **settings)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_corpus_is_the_same_on_every_engine(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards_small(monkeypatch, shard=4000)
    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "stages", settings)))
    for name, engine in ENGINES.items():
        if name == "spawned" and "template" not in settings:
            continue  # takes three seconds
        recipe = recipe_in(tmp_path / name, settings)
        assert len(recipe.parts) > 3
        with engine() as opened:
            assert corpus_bytes(pack_on(opened, recipe)) == expected, name


def test_a_step_is_small_however_many_sources_there_are(tmp_path: Path) -> None:
    config = write_project(tmp_path, conversations(200), part_size=1024, max_rejects=1)
    for number in range(200):
        (tmp_path / f"more-{number:03}.jsonl").write_text(json.dumps({"text": f"Number {number}."}) + "\n")
    values = json.dumps({"name": "many", "sources": ["*.jsonl"], "tokenizer": "tiny.model", "part_size": 1024})
    config.write_text(values)
    recipe = resolve(config, tmp_path)
    assert len(recipe.parts) > 200
    with Here() as engine:
        pack_on(engine, recipe)
    sizes = [len(pickle.dumps(step)) for step in steps_of(recipe)]
    assert max(sizes) < 4096


@dataclass(frozen=True)
class Forgetful(Marked):
    def run(self) -> dict[str, Any]:
        return {}


def test_an_output_that_cannot_be_read_back_is_an_error(tmp_path: Path) -> None:
    error = attempt(Forgetful(tmp_path, 1)).error
    assert isinstance(error, StorageError)
    assert str(error).startswith(f"{tmp_path}/1.out: was written, but cannot be read back")


def test_a_step_that_was_taken_is_not_taken_again(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, SETTINGS["plain"])
    step = steps_of(recipe)[0]
    outcome = attempt(step)
    file = step.outputs()[0]
    before = file.stat().st_mtime_ns
    assert attempt(step).tokens == outcome.tokens > 0
    assert file.stat().st_mtime_ns == before
    file.unlink()
    assert attempt(step).tokens == outcome.tokens
    assert file.is_file()


def test_a_step_may_be_taken_by_a_process_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray worker runs in its own folder, and --root is relative by default."""
    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "one", SETTINGS["plain"])))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")

    class Elsewhere(Here):
        def map(self, steps: Sequence[Work]) -> Iterator[tuple[int, Outcome]]:
            sent = pickle.dumps(steps)
            monkeypatch.chdir(tmp_path / "elsewhere")
            yield from super().map(pickle.loads(sent))  # noqa: S301 - our own
            monkeypatch.chdir(tmp_path / "other")

    assert corpus_bytes(pack_on(Elsewhere(), recipe_in(Path(), SETTINGS["plain"]))) == expected
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_engine_makes_the_steps_of_the_sources_as_they_are_now(tmp_path: Path) -> None:
    """Luigi keeps a task for all runs of a process, but its sources may change."""
    recipe = recipe_in(tmp_path, SETTINGS["plain"])
    task = graph.TokenizeParts(config=str(tmp_path / "corpus.yaml"), root=str(tmp_path), on="here")
    assert task.works == TokenizePart.all_of(task.recipe)
    assert [part.outputs() for part in task.works] == [part.outputs() for part in TokenizePart.all_of(recipe)]
    recipe = recipe_in(tmp_path, SETTINGS["plain"] | {"train_on": "all"})
    progress.run.begin(1)
    assert [part.outputs() for part in task.works] == [part.outputs() for part in TokenizePart.all_of(recipe)]


def test_another_tokenizer_where_a_step_is_taken_is_an_error(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, SETTINGS["plain"])
    steps = steps_of(recipe)
    with (tmp_path / "tiny.model").open("ab") as file:
        file.write(b"\0")
    with Workers(1, multiprocessing.get_context("spawn")) as engine, pytest.raises(DataError) as found:
        list(engine.map(steps))
    assert found.value.code == "E321"


def test_every_step_may_be_taken_twice_at_the_same_moment(tmp_path: Path) -> None:
    """Two processes can run the same step at once and make the same corpus.

    This happens if the machines of two drivers do not see each other's locks, or if a worker was given up too early.
    """
    fork = multiprocessing.get_context("fork")

    class Twins(Here):
        def map(self, steps: Sequence[Work]) -> Iterator[tuple[int, Outcome]]:
            start = fork.Barrier(2)

            def take() -> None:
                for step in steps:
                    start.wait(300)
                    step.run()  # even if the other process has just finished it

            both = [fork.Process(target=take) for _ in range(2)]
            for child in both:
                child.start()
            for child in both:
                child.join()
            assert [child.exitcode for child in both] == [0, 0]
            yield from super().map(steps)

    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "stages", SETTINGS["plain"])))
    assert corpus_bytes(pack_on(Twins(), recipe_in(tmp_path / "twins", SETTINGS["plain"]))) == expected
    assert not list((tmp_path / "twins").rglob(".*.tmp"))


def test_a_system_without_calls_of_linux_makes_the_same_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system such as macOS makes the same corpus as Linux.

    It has no /proc, advice, or preadv, it syncs with another call, and its workers are not forked.
    """
    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "linux", SETTINGS["jinja"])))
    synced: list[int] = []
    opened, read_bytes = open, Path.read_bytes

    def without(path: Any) -> Any:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return path

    monkeypatch.setattr("builtins.open", lambda path, *rest, **more: opened(without(path), *rest, **more))
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(without(path)))
    monkeypatch.setattr("packcorpus.tasks.core.process.STATM", tmp_path / "statm")
    monkeypatch.setattr(sys, "platform", "darwin")
    for module, name in ((os, "posix_fadvise"), (os, "preadv"), (os, "sched_getaffinity"), (mmap, "MADV_DONTNEED")):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda handle, call: synced.append(call))
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("this leaves bytes in the disk's cache"))

    with Here() as engine:
        manifest = pack_on(engine, recipe_in(tmp_path / "other", SETTINGS["jinja"]))
    assert corpus_bytes(manifest) == expected
    assert set(synced) == {51}
    verify(manifest)
    assert start_method().get_start_method() == "forkserver"
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert start_method().get_start_method() == "spawn"


def test_two_drivers_with_different_engines_publish_the_same_corpus(tmp_path: Path) -> None:
    """Two drivers on two machines have no lock that refuses the second run."""
    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "stages", SETTINGS["plain"])))
    recipe_in(tmp_path / "both", SETTINGS["plain"])
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(2)

    def drive(engine: Callable[[], Engine]) -> None:
        recipe = resolve(tmp_path / "both" / "corpus.yaml", tmp_path / "both")
        start.wait(300)
        with engine() as opened:
            pack_on(opened, recipe)

    drivers = [fork.Process(target=drive, args=(engine,)) for engine in (Here, lambda: Workers(2))]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert [driver.exitcode for driver in drivers] == [0, 0]
    [manifest] = (tmp_path / "both" / "manifests").glob("*.json")
    assert corpus_bytes(manifest) == expected
    verify(manifest)


@pytest.mark.parametrize("engine", [Here, lambda: Workers(2)], ids=["here", "workers"])
def test_a_full_disk_is_one_clear_error(
    tmp_path: Path, engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(tmp_path, SETTINGS["plain"])
    steps = steps_of(recipe)[:5]
    write = HashingWriter.write

    def full(file: HashingWriter, data: Any) -> int:
        if file.size > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(HashingWriter, "write", full)  # workers are forks, so it applies to them, too
    message = r"/data/tokens/.*\.arrow: cannot be written: No space left on device; .* are free there; "
    with engine() as opened, pytest.raises(StorageError, match=message) as found:
        list(opened.map(steps))
    assert (found.value.code, found.value.exit_code) == ("E702", 74)
    assert not list(tmp_path.rglob("data/tokens/*/*.arrow"))
    assert not list(tmp_path.rglob("data/tokens/*/*.json"))
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_lost_step_is_named_by_file_and_bytes(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, SETTINGS["plain"])
    first, second, *_ = recipe.parts
    error = lost(steps_of(recipe)[1], "it was killed by signal 9")
    place = f"chat.jsonl, from {first.stop:,} to {second.stop:,}"
    assert str(error) == f"{place}: lost its worker 4 times: it was killed by signal 9"


@pytest.mark.parametrize("engine", [Here, lambda: Workers(2)], ids=["here", "workers"])
def test_an_error_arrives_whole_and_ends_the_run(tmp_path: Path, engine: Callable[[], Engine]) -> None:
    steps = [Failing(tmp_path, number, fails=number == 2) for number in range(20)]
    with engine() as opened, pytest.raises(DataError) as found:
        list(opened.map(steps))
    assert (found.value.code, str(found.value)) == ("E310", "chat.jsonl:3: is bad")
    assert found.value.facts == {"line": 3}
    begun = {int(file.name) for file in tmp_path.iterdir()}
    assert len(begun) < len(steps), "not all further steps were started"


@pytest.mark.parametrize(
    ("on", "count"), [("here", 1), ("workers", 7), ("workers:3", 3), ("ray://auto", 7), ("ray://a:1", 7)]
)
def test_an_engine_takes_as_many_steps_at_once_as_its_name_says(on: str, count: int) -> None:
    assert workers_of(on, 7) == count


@pytest.mark.parametrize(
    "on", ["", "luigi", "worker:2", "workers:", "workers:0", "workers:-1", "ray://", "ray:auto", "ray://a"]
)
def test_an_unknown_engine_is_an_error(on: str) -> None:
    with pytest.raises(UsageError, match="--on") as found:
        open_engine(on, 2)
    assert "ray://HOST:PORT" in str(found.value)


def test_shares_of_the_work_make_the_same_corpus(tmp_path: Path) -> None:
    """Every stage, and each of three shares, is run by its own command."""
    settings = SETTINGS["trained tokenizer, weights, epochs"]
    expected = corpus_bytes(pack_corpus(recipe_in(tmp_path / "stages", settings)))
    recipe = recipe_in(tmp_path / "shares", settings)
    folder = tmp_path / "shares"

    def part(stage: str, *words: str) -> Any:
        done = packcorpus(folder, "part", "corpus.yaml", "--stage", stage, *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    early = packcorpus(folder, "part", "corpus.yaml", "--stage", "write", "--share", "1/3")
    assert (early.returncode, early.stderr[:4]) == (75, "E716")
    for stage, count in (("prepare", 1), ("tokenize", len(recipe.parts)), ("plan", 1), ("write", 2)):
        shares = [("--share", f"{number}/3") for number in (3, 1, 2)] if count > 1 else [()]
        left = count
        for words in shares:
            done = part(stage, *words)
            assert done["all"] == count
            assert done["steps"] <= count // len(shares) + 1
            left -= done["steps"]
            assert done["found_done"] == 0
            assert part(stage, *words)["found_done"] == done["steps"]
        assert left == 0
    tokens = {path: path.stat().st_mtime_ns for path in folder.rglob("data/tokens/*/*")}
    shards = {path: path.stat().st_mtime_ns for path in folder.rglob("data/corpora/*/*.arrow")}
    published = part("publish")["manifest"]
    assert corpus_bytes(folder / published) == expected
    done = packcorpus(folder, "pack", "corpus.yaml", "--quiet")
    assert (done.returncode, done.stdout.strip()) == (0, published)
    assert all(path.stat().st_mtime_ns == time for path, time in (tokens | shards).items()), "nothing is done twice"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "tokenze", "--share", "1/2"], "did you mean tokenize"),
        (["--stage", "write", "--share", "0/2"], "--share 0/2: expected I/N"),
        (["--stage", "write", "--share", "3/2"], "--share 3/2: expected I/N"),
        (["--stage", "write", "--share", "1"], "--share 1: expected I/N"),
        (["--stage", "plan", "--share", "1/2"], "--share 1/2: --stage plan has no shares; run it once, without"),
        (["--stage", "pack"], "--stage pack: is now two stages: --stage plan, then --stage write"),
        (["--share", "1/2"], "--stage : expected prepare, tokenize, plan, write, publish"),
    ],
)
def test_a_share_that_does_not_exist_is_an_error(tmp_path: Path, words: list[str], message: str) -> None:
    write_project(tmp_path, conversations(3))
    done = packcorpus(tmp_path, "part", "corpus.yaml", *words)
    assert done.returncode == 64
    assert message in done.stderr
