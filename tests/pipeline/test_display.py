"""Progress of a run on a terminal, in a log, and as JSON.

A run can also be quiet, and the page of Luigi's scheduler shows it, too.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from support.commands import BIN, ROOT, luigi, write_chats
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.tokenizer_kinds import kind_path

sys.path.insert(0, str(ROOT / "docs"))
from screenshots import on_terminal

from packcorpus.pipeline import display
from packcorpus.pipeline.progress import Count, Stage, State, run
from packcorpus.tasks.core.messages import Note
from packcorpus.tasks.corpus.summary import notes
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.work import Outcome, WriteShard

CONFIG = "name: chats\nsources: [chats.jsonl]\nsequence_length: 128\nadvanced: {vocab_size: 400, part_size: 20000}\n"
HOSTILE = "\x1b[31m[bold]a[/bold]\x07<b>&\u202e"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chats(tmp_path / "chats.jsonl", 400)
    (tmp_path / "corpus.yaml").write_text(CONFIG)
    return tmp_path


def state(**changed: Any) -> State:
    stages = [Stage("tokens", 7, 3, 0.4), Stage("plan", 1, 1, 1.0), Stage("shards", 12, 0, 0.0)]
    known = {
        "name": "sample", "seconds": 61.2, "seconds_left": 12345.6, "stages": stages, "conversations": 1234567,
        "rejected": 2, "tokens": 345_678_901, "conversations_per_second": 20123.4, "tokens_per_second": 5_040_000.0,
        "rows": 338_000, "fill": 99.98,
    }  # fmt: skip
    return State(**known | changed)


class Screen:
    """As much of a terminal as a run needs: text, \\r, \\n, cursor up, clear below."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for found in re.finditer(r"\x1b\[(\d*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", text):
            count, order, back, down, plain = found.groups()
            if order == "A":
                self.row = max(0, self.row - (int(count or 1) or 1))  # terminals treat 0 as 1
            elif order == "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            elif order:
                assert order == "m", f"an order that nobody gave: {found[0]!r}"
            elif back:
                self.column = 0
            elif down:
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)


def on_screen(folder: Path, *arguments: str, columns: int = 100) -> tuple[list[str], str]:
    """Return the final lines of a terminal and all text written to it."""
    words = ["luigi", "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", *arguments]
    code, written = on_terminal(words, folder, columns)
    assert code == 0, written
    screen = Screen()
    screen.write(written)
    return [line.rstrip() for line in screen.lines], written


# One moment


@pytest.mark.parametrize("width", [20, 40, 79, 99, 300])
def test_a_frame_fits_the_terminal_and_restores_the_cursor_position(width: int) -> None:
    drawn = display.frame(state(name=HOSTILE * 3), "live", width)
    screen = Screen()
    screen.write("before\n")
    for _ in range(3):
        screen.write(drawn)
    assert (screen.row, screen.column) == (1, 0)
    assert screen.lines[0] == "before"
    assert len(screen.lines) == 1 + 4, "a header and three stages, once"
    assert max(cell_len(line) for line in screen.lines) <= width
    if width > 60:
        assert "3/7" in screen.lines[2]


def test_a_frame_of_one_line_stays_on_its_line() -> None:
    screen = Screen()
    screen.write("before\n" + 2 * display.frame(state(stages=[]), "live", 80))
    assert (screen.row, screen.lines[0]) == (1, "before")


def test_a_frame_that_cannot_be_drawn_does_not_stop_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new task may appear while the numbers of all tasks are read."""
    tries: list[int] = []
    monkeypatch.setitem(display.EVERY, "lines", 0.0)
    monkeypatch.setattr(display, "state", lambda *_: tries.append(1) or [][1])
    drawing = display._Drawing("a", "lines")
    drawing.start()
    deadline = time.monotonic() + 300
    while len(tries) < 3:
        assert time.monotonic() < deadline, "nothing is drawn"
        time.sleep(0.01)
    drawing.stop()
    assert not drawing.is_alive()


def test_control_characters_in_a_name_are_escaped() -> None:
    for how in ("live", "lines", "json"):
        drawn = display.frame(state(name=HOSTILE), how, 200)
        assert "\x1b[31m" not in drawn
        assert "\x07" not in drawn
    assert "\\x1b[31m[bold]a[/bold]\\x07<b>&\\u202e" in display.frame(state(name=HOSTILE), "live", 200)


def test_a_line_shows_all_figures() -> None:
    line = display.frame(state(), "lines", 0)
    assert line == (
        "61.2 s  3 h 25 min left  parts 3/7 (40 % read)  shards 0/12  1,234,567 conversations (20,123/s)  2 rejected  "
        "345.68 M tokens (5.04 M/s)  99.98 % full\n"
    )
    progress = json.loads(display.frame(state(), "json", 0))["progress"]
    assert (progress["seconds_left"], progress["stages"][0]["done"], progress["rejected"]) == (12345.6, 3, 2)
    assert "left" not in display.frame(state(seconds_left=None), "lines", 0)


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", display.frame(state(), "live", 100))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", display.frame(state(), "live", 100))


# A run


@pytest.mark.parametrize(("workers", "columns"), [("1", 100), ("2", 0)])
def test_a_terminal_keeps_the_messages_and_no_progress_display(folder: Path, workers: str, columns: int) -> None:
    screen, written = on_screen(folder, "--workers", workers, columns=columns)
    assert "tokens" in written, "something was drawn"
    assert screen[0].startswith("chats: 1 file")
    assert screen[1].startswith("planned ")
    assert screen[2].startswith("nothing was lost: 400 conversations, "), "the summary begins with what was lost"
    assert screen[3].startswith("packed in ")
    assert screen[4].startswith("400 conversations: 400 packed")
    assert screen[5].startswith("overlong: 69 conversations longer than 128 tokens split into ")
    assert screen[-2].startswith("manifests/chats-")
    assert not screen[-1]
    assert max(map(len, screen)) < (columns or 80), "no line breaks within a word"
    assert " ".join(line.strip() for line in screen[5:-2]).endswith("; to keep them whole, raise sequence_length")


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"turns": "apart", "overlong": "truncate"},
            [
                "overlong: 1 sample dropped, without a token to train on within 40 tokens, which drops {dropped} "
                "tokens ({share} % of all); to keep them, raise sequence_length or set overlong: split"
            ],
        ),
        (
            {"turns": "apart", "overlong": "drop"},
            [
                "overlong: 1 sample longer than 40 tokens dropped; to keep them, raise sequence_length or set "
                "overlong: split"
            ],
        ),
        (
            {"overlong": "turns"},
            [
                "overlong: 1 conversation cut after the last trained turn that fits in 40 tokens, which drops {cut} "
                "tokens ({cut_share} % of all, {trained} of them trained); to keep them, raise sequence_length or set "
                "overlong: split"
            ],
        ),
        (
            {"overlong": "turns", "turns": "apart"},
            [
                "overlong: 1 sample longer than 40 tokens dropped, without a trained turn that fits; to keep them, "
                "raise sequence_length or set overlong: split"
            ],
        ),
        (
            {"overlong": "split"},
            [
                "overlong: 1 conversation longer than 40 tokens split into {pieces} pieces: 1 piece without the "
                "beginning of the conversation; to keep them whole, raise sequence_length"
            ],
        ),
        (
            {"overlong": "split", "sequence_length": 8, "split_at": "tokens"},
            [
                "overlong: 1 conversation longer than 8 tokens split into {pieces} pieces; {gone} more pieces dropped, "
                "without a token to train on; to keep them whole, raise sequence_length"
            ],
        ),
        (
            {"overlong": "split", "epochs": 2},  # the pieces are not counted once
            [
                "overlong: 1 conversation longer than 40 tokens split: 1 piece without the beginning of the "
                "conversation; to keep them whole, raise sequence_length"
            ],
        ),
        ({"sequence_length": 512}, []),
    ],
)
def test_samples_and_conversations_that_are_too_long_are_reported(
    tmp_path: Path, settings: dict[str, Any], lines: list[str]
) -> None:
    long = [{"role": role, "content": "the train leaves"} for role in ("user", "assistant") * 2]
    recipe = make_recipe(tmp_path, [{"messages": long}], **{"sequence_length": 40} | settings)
    manifest = load_manifest(pack_corpus(recipe))
    ledger = manifest.ledger
    share = f"{100 * ledger.tokens.dropped / ledger.tokens.encoded:.2g}"
    share_cut = f"{100 * ledger.tokens.truncated / ledger.tokens.encoded:.2g}"
    facts = {"cut": ledger.tokens.truncated, "cut_share": share_cut, "trained": ledger.tokens.trained_truncated}
    facts |= {"dropped": ledger.tokens.dropped, "pieces": ledger.pieces.packed, "gone": ledger.pieces.dropped}
    assert [line for line in notes(manifest) if line.startswith("overlong")] == [
        line.format(share=share, **facts) for line in lines
    ]


def test_a_note_is_called_one_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    display.show("note: a")
    monkeypatch.setenv("PACKCORPUS_JSON", "1")
    display.show(Note("note: a", "kind", count=1))
    display.show("b")
    assert capsys.readouterr().err.splitlines() == [
        "note: a",
        '{"note": "a", "kind": "kind", "values": {"count": 1}}',
        '{"note": "b", "kind": "other", "values": {}}',
    ]


@pytest.mark.parametrize(("option", "variable"), [("--quiet", "PACKCORPUS_QUIET"), ("--json", "PACKCORPUS_JSON")])
def test_quiet_and_json_by_option_and_by_environment(folder: Path, option: str, variable: str) -> None:
    by_option = luigi(folder, "--config", "corpus.yaml", option)
    by_variable = luigi(folder, "--config", "corpus.yaml", **{variable: "1"})
    for done in (by_option, by_variable):
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"manifests/chats-\w+\.json\n", done.stdout)
        messages = [json.loads(line) for line in done.stderr.splitlines()]
        if option == "--quiet":
            assert not messages
        else:
            kinds = {line["kind"] for line in messages if "note" in line}
            assert "conversations" in kinds
            assert "other" not in kinds
            keys = {"note", "kind", "values", "progress", "planned", "done"}
            assert {key for line in messages for key in line} <= keys
            [end] = [line["done"] for line in messages if "done" in line]
            assert (end["read"], end["packed"], end["rejected"], end["manifest"]) == (400, 400, 0, done.stdout.strip())
    failed = luigi(folder, "--config", "nowhere.yaml", option)
    assert failed.returncode == 66
    assert ("E102 error: " if option == "--quiet" else '{"error": {"code": "E102"') in failed.stderr


def test_quiet_silences_libraries_too(tmp_path: Path) -> None:
    """The libraries render a tokenizer's own template and encode with it."""
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "hf")
    write_project(tmp_path, conversations(300), tokenizer="hf", template="tokenizer", part_size=10_000)
    done = luigi(tmp_path, "--config", "corpus.yaml", "--workers", "2", PACKCORPUS_QUIET="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"manifests/small-\w+\.json\n", done.stdout)


# The page of Luigi's scheduler


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[int]:
    """Start a luigid for this test and return its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [BIN / "luigid", "--address", "127.0.0.1", "--port", str(port), "--state-path", str(tmp_path / "state")]
    daemon = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while True:
        with suppress(OSError):
            ask(port, "task_list", status="DONE", upstream_status="")
            break
        assert daemon.poll() is None, "luigid has ended; another process may have taken its port"
        assert time.monotonic() < deadline, "luigid does not answer"
        time.sleep(0.05)
    yield port
    daemon.kill()
    daemon.wait()


def ask(port: int, what: str, **data: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/{what}?data={urllib.parse.quote(json.dumps(data))}"
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["response"]


def test_luigid_shows_the_progress_of_a_task_and_the_path_of_the_manifest(folder: Path, scheduler: int) -> None:
    words = ["--scheduler-host", "127.0.0.1", "--scheduler-port", str(scheduler)]
    done = luigi(folder, "--config", "corpus.yaml", *words)
    assert done.returncode == 0, done.stderr
    tasks = ask(scheduler, "task_list", status="DONE", upstream_status="")
    statuses = {
        task["name"]: ask(scheduler, "get_task_status_message", task_id=name)["statusMessage"]
        for name, task in tasks.items()
    }
    assert set(statuses) == {"TrainTokenizer", "TokenizeParts", "PlanPacking", "WriteShards", "PackCorpus"}
    assert re.match(r"\d+ conversations, 0\.\d\d M tokens", statuses["TokenizeParts"])
    assert statuses["PlanPacking"].startswith("planned ")
    manifest = folder / done.stdout.strip()
    [end] = [task for task in tasks.values() if task["name"] == "PackCorpus"]
    assert end["tracking_url"] == manifest.as_uri()
    name = next(name for name, task in tasks.items() if task is end)
    assert ask(scheduler, "get_task_progress_percentage", task_id=name)["progressPercentage"] == 100


# The command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--workerz", "2"], "did you mean --workers?"),
        (["--workers", "two"], "--workers: invalid literal"),
        (["--config"], "argument --config: expected one argument"),
    ],
)
def test_invalid_luigi_options_are_reported_in_one_message(folder: Path, words: list[str], expected: str) -> None:
    done = luigi(folder, *words)
    assert done.returncode == 64
    assert done.stderr.startswith("E101 error: ")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_last_status_of_steps_is_sent_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other statuses are sent only every few seconds: each sums over all steps."""
    sent: list[Any] = []
    counts = [Count() for _ in range(5)]
    task: Any = SimpleNamespace(
        kind=WriteShard, counts=counts, set_status_message=sent.append, set_progress_percentage=sent.append
    )
    monkeypatch.setattr(run, "status_at", 0.0)
    for count in counts:
        count.take(Outcome(seconds=1.0))
        display.status(task)
    assert sent == ["wrote 1 shard", 20, "wrote 5 shards", 100]


def test_a_plan_of_several_lengths_is_compared_by_places(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(display, "show", lambda message, **_: shown.append(message))
    packing = {"enabled": True, "packing_efficiency": 99.5, "rows": 3, "lower_bound_rows": 2}
    task: Any = SimpleNamespace()
    ledger = {"tokens": {}}
    display.planned(task, {"packing_metadata": packing, "ledger": ledger})
    several = packing | {"places": 2048, "lower_bound_places": 1536}
    display.planned(task, {"packing_metadata": several, "ledger": ledger})
    display.planned(task, {"packing_metadata": packing, "ledger": {"tokens": {"shared": 7}}})
    assert shown == [
        "planned 3 rows, 99.50 % full; no plan can use fewer than 2 rows",
        "planned 3 rows with 2,048 places, 99.50 % full; no plan can use fewer than 1,536 places",
        "planned 3 rows, 99.50 % full; no plan of these trees can use fewer than 2 rows",
    ]
