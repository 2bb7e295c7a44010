"""Ray makes the same corpus on two nodes and reports each error once.

The tests also lose steps, nodes, and drivers in the middle of a run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.bucket_roots import tree_of
from support.commands import BIN, corpus_bytes, luigi, write_chats
from support.one_file import one_file
from support.servers.ray_cluster import Cluster, cluster_in
from support.servers.remote import needs_remote, new_bucket, s3, use
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.steps import Canceled, DiskFull, Dying, Failing, Meeting, Slow, pack_on

from packcorpus.pipeline import engines
from packcorpus.pipeline.engines import OnRay, leave
from packcorpus.tasks.core.errors import Busy, DataError, InputMissing, StorageError
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.stores.bucket import open_store
from packcorpus.tasks.stores.urls import SCRATCH, root_of

ray = pytest.importorskip("ray", reason="Ray is not installed; run: pip install 'packcorpus[ray]'")

LIMIT = 300  # seconds, with other processes

CONFIG = "name: some\nsources: [a.jsonl]\ntokenizer: tiny.model\nsequence_length: 128\n"
# This template rejects reasoning, because it has no place for it.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one cluster for all tests, with credentials for moto's S3.

    The last test that uses it kills its second node.
    """
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("moto"):
            use(patch, s3())
        with cluster_in(tmp_path_factory.mktemp("ray")) as found:
            yield found
            leave()  # Ray ends every process whose cluster is gone


def test_two_nodes_make_the_same_corpus(tmp_path: Path, cluster: Cluster) -> None:
    settings = {"part_size": 2048, "tokenizer": None, "vocab_size": 400}
    expected = corpus_bytes(pack_corpus(make_recipe(tmp_path / "stages", conversations(80), **settings)))
    with OnRay("ray://auto") as engine:
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        assert corpus_bytes(pack_on(engine, make_recipe(tmp_path / "ray", conversations(80), **settings))) == expected


@pytest.mark.parametrize("kind", [".jsonl.gz", ".parquet"])
def test_two_nodes_share_a_file_that_one_of_them_unpacks(kind: str, tmp_path: Path, cluster: Cluster) -> None:
    expected = corpus_bytes(pack_corpus(one_file(tmp_path / "stages", kind, conversations(300))))
    recipe = one_file(tmp_path / "ray", kind, conversations(300))
    assert len(recipe.parts) > 8
    with OnRay("ray://auto") as engine:
        assert corpus_bytes(pack_on(engine, recipe)) == expected
    assert not list((tmp_path / "ray/data/unpacked").iterdir())


def test_two_nodes_with_sources_and_root_in_a_bucket(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has its own scratch folder and nothing else of the run."""
    needs_remote()
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    store, config = open_store(f"s3://{new_bucket()}"), write_project(tmp_path / "here", conversations(80))
    store.put("chats/chat.jsonl", tmp_path / "here" / "chat.jsonl")
    write_project(tmp_path / "here", (), sources=[store.url_of("chats/*")], part_size=2048)
    pack_corpus(resolve(config, tmp_path / "root"))
    root = store.url_of("root")
    nodes = [path.with_suffix(".scratch") for path in cluster.logs]
    recipe = resolve(config, root_of(root))
    with OnRay("ray://auto") as engine:
        pack_on(engine, recipe)
    assert tree_of(root) == tree_of(tmp_path / "root")
    for kept in ("tokens", "remote"):
        assert any(list(node.glob(f"*/data/{kept}/*/*")) for node in nodes), "what was read and made stays there"


def test_an_error_on_a_node_arrives_whole(tmp_path: Path, cluster: Cluster) -> None:
    with OnRay("ray://auto") as engine:
        with pytest.raises(DataError) as found:
            list(engine.map([Failing(tmp_path, number, fails=number == 2) for number in range(20)]))
        assert (found.value.code, str(found.value)) == ("E310", "chat.jsonl:3: is bad")
        assert found.value.facts == {"line": 3}
        message = r"/99\.out: cannot be written: No space left on device; .* are free there; "
        with pytest.raises(StorageError, match=message):
            list(engine.map([DiskFull(tmp_path, 99)]))
        assert not list(tmp_path.glob(".*"))


def test_running_steps_are_canceled_before_the_connection_ends(
    tmp_path: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray would print a line about each step that it kills with the connection.

    A step that is killed ends with SystemExit, if it ends in time.
    """
    steps = [Canceled(tmp_path, number) for number in range(4)]

    def interrupt() -> None:
        deadline = time.monotonic() + LIMIT
        while sum(step.attempts for step in steps) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), OnRay("ray://auto") as engine:
        list(engine.map(steps))
    stopped = [tmp_path / f"{step.number}.stopped" for step in steps if step.attempts]
    assert len(stopped) >= 2
    assert {path.read_text() for path in stopped} == {"KeyboardInterrupt"}
    assert capfd.readouterr().err == ""


def test_steps_that_end_soon_are_not_canceled(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends this process if a step completes while it is canceled."""
    canceled: list[object] = []
    monkeypatch.setattr(ray, "cancel", canceled.append)
    monkeypatch.setattr(engines, "FINISHING", 60.0)  # on a busy machine, short steps take long
    steps = [Slow(tmp_path, number, 0.02) for number in range(8)]
    engine = OnRay("ray://auto").__enter__()
    next(engine.map(steps))
    assert len(engine._running) >= 6
    engine.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not {*canceled} & {*engine._running}


def test_a_step_that_loses_every_worker_is_named(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer attempts here, because each takes a new worker of Ray."""
    assert engines.ATTEMPTS == 4
    monkeypatch.setattr(engines, "ATTEMPTS", 2)
    steps = [Dying(tmp_path, number, deaths=99 if number == 1 else 0) for number in range(3)]
    with (
        OnRay("ray://auto") as engine,
        pytest.raises(Busy, match=r"chat\.jsonl:2: lost its worker 2 times") as found,
    ):
        list(engine.map(steps))
    assert found.value.code == "E714"
    assert [step.attempts for step in steps] == [1, 2, 1]


def test_a_bad_record_on_a_node_is_reported_as_it_is_here(tmp_path: Path, cluster: Cluster) -> None:
    records = conversations(60)
    records[40]["messages"][-1]["reasoning_content"] = "It has none."
    done = {}
    for on in ("here", "ray://auto"):
        folder = tmp_path / on.partition(":")[0]
        write_project(folder, records, part_size=1024, template="template.jinja")
        (folder / "template.jinja").write_text(TEMPLATE)
        done[on] = luigi(folder, "--config", "corpus.yaml", "--on", on, "--quiet")
    assert done["here"].returncode == done["ray://auto"].returncode == 65
    assert "E418 reasoning_not_written, 1" in done["here"].stderr
    assert done["ray://auto"].stderr == done["here"].stderr
    assert done["ray://auto"].stderr.count("error:") == 1


# Tries to build a corpus twice, with a program that counts connections and forks of tasks. Only the second run accepts
# the bad record.
PROGRAM = """
import os, signal, luigi, ray, pipeline
connections, forks, init = [], [], ray.init
ray.init = lambda **given: connections.append(1) or init(**given)
os.register_at_fork(after_in_parent=lambda: connections and forks.append(1))
for config in ("strict.yaml", "corpus.yaml"):
    connections.clear()
    run = pipeline.PackCorpus(config=config, on="ray://auto")
    done = luigi.build([run], workers=2, local_scheduler=True, log_level="CRITICAL")
    left = not ray.is_initialized() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(f"done: {done}, {len(connections)} connections, {len(forks)} forks, left: {left}")
"""


def test_the_stages_of_a_run_share_one_connection(tmp_path: Path, cluster: Cluster) -> None:
    """The connection ends with the run, even if planning fails.

    Ray does not replace the handler that ends a run on SIGTERM.
    """
    records = [*conversations(40), {"messages": []}]
    write_project(tmp_path, records, part_size=1024, max_rejects=0).rename(tmp_path / "strict.yaml")
    write_project(tmp_path, records, part_size=2048, max_rejects=1)  # other parts, so that all stages run again
    words = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT)
    printed = [line for line in found.stdout.splitlines() if line.startswith("done: ")]
    assert printed == [f"done: {done}, 1 connections, 0 forks, left: True" for done in (False, True)], found
    assert found.stderr.count("E251") == 1


def started(folder: Path) -> subprocess.Popen[str]:
    """Start a run on the cluster, and wait until it has tokenized two more parts."""
    before = len(receipts(folder))
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--on", "ray://auto"]
    run = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + LIMIT
    while len(receipts(folder)) < before + 2:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline, "no part is done"
        time.sleep(0.02)
    return run


def receipts(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("data/tokens/*/*.json")}


def temporary(folder: Path) -> list[Path]:
    return list(folder.rglob("data/**/.*.tmp"))


def test_drivers_that_are_interrupted_killed_and_refused(tmp_path: Path, cluster: Cluster) -> None:
    """The next driver reuses finished work, whatever its engine.

    The cluster keeps running.
    """
    for name in ("one", "other"):
        write_project(tmp_path / name, ())
        write_chats(tmp_path / name / "a.jsonl", 12_000)
        (tmp_path / name / "corpus.yaml").write_text(CONFIG + "part_size: 150000\n")
    folder = tmp_path / "one"

    run = started(folder)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=LIMIT)
    last = "E713 interrupted; run the same command again to resume"
    assert (run.returncode, errors.splitlines()[-1]) == (75, last), errors
    assert not temporary(folder), "the driver waits for the end of its steps, and removes what they were writing"
    interrupted = receipts(folder)

    run = started(folder)
    run.send_signal(signal.SIGSTOP)  # so that it cannot end before the other driver is refused
    try:
        refused = luigi(folder, "--config", "corpus.yaml", "--on", "here")
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
    assert refused.returncode == 75
    assert refused.stderr.startswith("E711 error: ")
    killed = receipts(folder)
    assert interrupted.items() <= killed.items()

    done = luigi(folder, "--config", "corpus.yaml", "--on", "ray://auto")
    assert done.returncode == 0, done.stderr
    assert killed.items() <= receipts(folder).items()
    assert not temporary(folder)
    again = luigi(folder, "--config", "corpus.yaml", "--on", "here")
    assert "nothing to do" in again.stderr
    expected = luigi(tmp_path / "other", "--config", "corpus.yaml", "--on", "here")
    manifest = expected.stdout.strip()
    assert corpus_bytes(folder / manifest) == corpus_bytes(tmp_path / "other" / manifest)


def test_a_lost_node_costs_only_what_it_was_doing(tmp_path: Path, cluster: Cluster) -> None:
    """The node is killed in the middle of a step, which another node takes again."""
    (tmp_path / "meeting").mkdir()
    steps = [Slow(tmp_path, number, 0.2) for number in range(12)]

    def worker_there() -> int | None:
        """Return the process id of a step that the second node runs."""
        scratch = f"{SCRATCH}={cluster.logs[1].with_suffix('.scratch')}".encode()
        for step in steps:
            mark = tmp_path / f"{step.number}.pid"
            worker = mark.read_text() if mark.exists() and not step.outputs()[1].exists() else ""
            if worker and scratch in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0"):
                return int(worker)
        return None

    is_killed = False
    with OnRay("ray://auto") as engine:
        list(engine.map([Meeting(tmp_path / "meeting", number, count=2) for number in range(2)]))  # both nodes work
        found = {}
        for index, outcome in engine.map(steps):
            found[index] = outcome.tokens
            if len(found) >= 3 and not is_killed and (worker := worker_there()):
                os.kill(worker, signal.SIGKILL)
                cluster.second.kill()
                is_killed = True
    assert found == {number: number for number in range(12)}
    assert is_killed
    assert sum(step.attempts for step in steps) <= 13, "one step per CPU of the node, again"


def test_no_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("nobody there\nand more lines")

    monkeypatch.setattr(ray, "init", refuse)
    message = "--on ray://far:10001: no Ray cluster answers: nobody there$"
    with pytest.raises(InputMissing, match=message) as found, OnRay("ray://far:10001"):
        pass
    assert found.value.code == "E715"
