"""Events of a run, from Luigi and the stages: count, print, and forward to luigid.

Luigi's events, stage, TaskProgress, finished ─┬─▶ counters ─▶ display, run.json
                                               ├─▶ messages, each printed once
                                               └─▶ luigid: status, share done, link to the manifest
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import luigi
import luigi.interface

from pipeline.engines.engine import workers_of
from pipeline.progress import counters, display
from pipeline.run_guard import guard
from pipeline.settings import workers
from tasks.core.errors import Busy
from tasks.core.notes import show_notes_with
from tasks.core.printable import aligned, counted, duration, lengths_in_words, printable, with_urls
from tasks.core.process import of_memory, peak_memory
from tasks.corpus.summary import explain_limits, fit_to_width, mixture_table, notes
from tasks.packing.rejects import first_of_each
from tasks.recipe import Recipe
from tasks.stages import Stage, TokenizePart
from tasks.steps import Outcome, Progress
from tasks.storage.corpus_folder import default_report_path, find_listed, listed_file, remember_manifest
from tasks.storage.files import read_receipt
from tasks.storage.manifest import Manifest, load_manifest
from tasks.tokenization.engine_check import Verdict

# Seconds between two messages of a task to luigid: each is a request over the network.
STATUS_EVERY = 2.0


class _Sent:
    """Reports already made in this run."""

    def __init__(self) -> None:
        self.run = -1
        self.notes: set[str] = set()
        self.status_at = 0.0

    def first(self, note: str) -> bool:
        """Return whether `note` is new, and remember it."""
        is_new = note not in self.notes
        self.notes.add(note)
        return is_new


_sent = _Sent()


def begin() -> bool:
    """Start a run and forget an earlier run; return False if this run has started."""
    if _sent.run == guard.run:
        return False
    _sent.run = guard.run
    display.stop()
    display.begin()
    show_notes_with(display.show)
    guard.begin()
    counters.begin()
    _sent.notes.clear()
    return True


# Reports of tasks


@contextmanager
def stage(task: luigi.Task) -> Iterator[None]:
    """Time a task, and report a PackError as one message."""
    counters.restart(task.task_id)
    start, cpu = time.perf_counter(), time.process_time()
    counters.put(task.task_id, cpu_before=cpu)
    with guard.reporting():
        yield
    counters.put(
        task.task_id,
        seconds=time.perf_counter() - start,
        cpu=time.process_time() - cpu,
        peak=peak_memory(),
        done=1,
    )


def announce(recipe: Recipe) -> None:
    """Print the sources, parts, rows, and shards of the run, and notes."""
    if not _sent.first("announced"):
        return
    config = recipe.config
    size = sum(file.bytes for file in recipe.files)
    files, parts = counted(len(recipe.files), "file"), counted(len(recipe.parts), "part")
    rows, shards = f"rows of {lengths_in_words(config.row_lengths)} tokens", counted(len(recipe.shard_names), "shard")
    display.show(f"{config.name}: {files}, {size / 1e6:,.2f} MB, {parts} → {rows}, {shards}")
    if recipe.tokenizer_key is None and recipe.template.markers_as_text:
        markers = ", ".join(recipe.template.markers_as_text)
        display.show(f"note: written as text, because the tokenizer lacks these tokens: {markers}")
    for line in recipe.notes:
        display.show(f"note: {line}")


def proven(verdict: Verdict | None) -> None:
    """Print a note for each fast engine that differs from its reference."""
    notes = []
    if verdict and verdict.differs:
        notes.append(f"{verdict.engine} encodes all texts, because gigatoken encodes {verdict.differs} differently")
    if verdict and verdict.rendering_differs:
        notes.append(f"Jinja2 renders all conversations, because minijinja writes {verdict.rendering_differs}")
    for note in notes:
        if _sent.first(note):
            display.show(f"note: {note}")


class TaskProgress(Progress):
    """Progress of a stage while its task runs, for the counters and luigid.

    Parts report this way only with --on luigi. A step that an engine runs reports when it has ended (`taken`).
    """

    def __init__(self, task: luigi.Task):
        self._task = task

    def tokenized(self, conversations: int, rejected: int, tokens: int, share: float) -> None:
        name = self._task.task_id
        counters.put(name, conversations=conversations, rejected=rejected, tokens=tokens, share=share)
        counters.put(name, cpu=time.process_time() - counters.of_task(name, "cpu_before"))
        counters.put(name, seconds_at_share=time.time() - counters.of_task(name, "started"))
        _status(self._task, _tokens_so_far(conversations, rejected, tokens), share)

    def run_record(self) -> dict[str, Any]:
        return counters.run_record()


def _tokens_so_far(conversations: float, rejected: float, tokens: float) -> str:
    lost = f", {int(rejected):,} rejected" if rejected else ""
    return f"{counted(int(conversations), 'conversation')}, {tokens / 1e6:,.2f} M tokens{lost}"


def taken(task: luigi.Task, number: int, outcome: Outcome) -> None:
    """Count a step that an engine has run.

    `task` stands for all steps of its kind.
    """
    kind = task.of
    counters.put(
        f"{kind} {number}",
        started=time.time() - outcome.seconds,
        seconds=outcome.seconds,
        cpu=outcome.cpu,
        peak=outcome.peak,
        conversations=outcome.conversations,
        rejected=outcome.rejected,
        tokens=outcome.tokens,
        share=1,
        done=1,
    )
    if _is_due(task):  # with many parts, the sums take as long as a small part
        status_of_steps(task)


def status_of_steps(task: luigi.Task) -> None:
    """Report how many steps of a kind an engine has run.

    `task` stands for all steps of its kind.
    """
    kind = task.of
    share = float(counters.each(kind, "done").mean())
    if kind == "TokenizePart":
        _status(
            task, _tokens_so_far(*(counters.total(n, kind) for n in ("conversations", "rejected", "tokens"))), share
        )
    else:
        _status(task, f"wrote {counted(int(counters.total('done', kind)), 'shard')}", share)


def finished(task: luigi.Task, receipt: dict[str, Any]) -> None:
    """Report that a task is done."""
    kind = type(task).__name__
    if kind == "TrainTokenizer":
        proven(Verdict(**receipt))
    if kind == "PlanPacking":
        planned(task, receipt)
    elif kind == "PackCorpus":
        published(task, Path(task.output().path))
    elif kind in ("TrainTokenizer", "WriteShard"):
        _status(task, f"wrote {task.output().path}", 1.0)


def planned(task: luigi.Task, receipt: dict[str, Any]) -> None:
    packing = receipt["packing_metadata"]
    if not packing["enabled"]:
        return
    full = packing["packing_efficiency"]
    counters.put(task.task_id, fill=full, rows=packing["rows"])
    rows, needed = counted(packing["rows"], "row"), counted(packing["lower_bound_rows"], "row")
    if "lower_bound_places" in packing:
        rows += f" with {packing['places']:,} places"
        needed = f"{packing['lower_bound_places']:,} places"
    message = f"planned {rows}, {full:.2f} % full; no plan can use fewer than {needed}"
    display.show(
        message, planned={"rows": packing["rows"], "fill": full, "lower_bound_rows": packing["lower_bound_rows"]}
    )
    _status(task, message, 1.0)


def published(task: luigi.Task, manifest: Path) -> None:
    """Link the task on luigid's page to the report, or to the manifest."""
    _status(task, f"the manifest is {manifest}", 1.0)
    report = default_report_path(Path(task.recipe.corpus_folder))
    with suppress(Exception):
        task.set_tracking_url((report if report.is_file() else manifest).resolve().as_uri())


def _status(task: luigi.Task, message: str, share: float) -> None:
    """Send a status to Luigi's scheduler, at most every few seconds.

    A status that cannot be sent does not fail the run.
    """
    if not _is_due(task, share):
        return
    _sent.status_at = time.monotonic()
    with suppress(Exception):
        task.set_status_message(message)
        task.set_progress_percentage(round(100 * share))


def _is_due(task: luigi.Task, share: float = 0.0) -> bool:
    """Return whether a task can send a status, and is done or has waited long enough."""
    can_send = getattr(task, "set_status_message", None) is not None
    return can_send and (share >= 1 or time.monotonic() - _sent.status_at >= STATUS_EVERY)


def _finish(manifest: Manifest, path: str, news: str) -> None:
    packing, ledger = manifest.packing_metadata, manifest.ledger
    conversations, tokens = ledger.conversations, ledger.tokens
    full = f", {packing.packing_efficiency:.2f} % full" if packing.packing_efficiency is not None else ""
    ends = {
        "packed": conversations.packed,
        "rejected": sum(conversations.rejected.values()),
        "dropped": sum(conversations.dropped.values()),
    }
    rows, kept = counted(packing.rows, "row"), counted(tokens.packed, "token")
    root = Path(path).parent.parent
    folder, shown = root / manifest.corpus, with_urls(path)
    facts = {
        "manifest": shown,
        "rows": packing.rows,
        "fill": packing.packing_efficiency,
        "read": conversations.read,
        **ends,
    }
    display.show(f"{news}: {rows}{full}; {kept}, {tokens.trained:,} trained on", done=facts)
    display.show(
        f"{counted(conversations.read, 'conversation')}: " + ", ".join(f"{n:,} {end}" for end, n in ends.items())
    )
    if ends["rejected"]:
        listed = find_listed(folder, "rejects.jsonl", listed_file(manifest, folder, "rejects.jsonl").bytes)
        display.show(f"all rejects are in {manifest.corpus}/rejects.jsonl; the first of each reason:")
        for line in first_of_each(listed, conversations.rejected):
            display.show(line)
    _print_mixture(manifest, folder)
    for line in notes(manifest):
        display.show(line)
    remember_manifest(root, Path(path).name)
    print(printable(str(shown)), flush=True)


def _print_mixture(manifest: Manifest, folder: Path) -> None:
    weighting = manifest.config.get("weighting")
    table = fit_to_width(mixture_table(manifest.mixture, weighting), display.room())
    if table:
        display.show(f"mixture ({weighting}), in one pass over the training split:")
    for line in aligned(table):
        display.show(line)
    left_out = manifest.ledger.conversations.dropped.get("weight", 0)
    if weighting == "token_share" and left_out:
        from tasks.inspection.lookup import sources_taken_whole

        if limited := explain_limits(
            sources_taken_whole(manifest, folder), left_out, manifest.ledger.conversations.packed
        ):
            display.show(limited)


# Luigi's events


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_DISCOVERED)
def _on_discovered(task: luigi.Task, dependency: luigi.Task) -> None:
    kind, of = type(dependency).__name__, getattr(dependency, "of", "")
    if (of or kind) in counters.STAGES and _sent.first("display started"):
        counters.put(copies=dependency.recipe.copies)
        display.start(dependency.recipe.config.name, workers_of(dependency.on, workers()))
    if of:
        for number, part in enumerate(dependency.members):
            name = f"{of} {number}"
            if counters.register(name, of):
                counters.put(name, size=dependency.size_of(number))
                if part.is_done():
                    _reused(name, part)
    elif kind in counters.STAGES and counters.register(dependency.task_id, kind) and kind == "TokenizePart":
        counters.put(dependency.task_id, size=dependency.size)


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _on_present(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        _finish(load_manifest(task.recipe.published), task.output().path, "already packed, nothing to do")
    elif kind in ("TrainAdapter", "DiagnoseTraining"):
        display.show(f"already {'trained' if kind == 'TrainAdapter' else 'diagnosed'}, nothing to do")
        print(printable(task.output().path), flush=True)
    else:
        _reused(task.task_id, task.stage)


def _reused(name: str, stage: Stage) -> None:
    counters.put(name, reused=1, done=1)
    if isinstance(stage, TokenizePart):
        counters.put(name, tokens_found=read_receipt(stage.outputs()[1])["bytes"] / 4)


@luigi.Task.event_handler(luigi.Event.SUCCESS)
def _on_success(task: luigi.Task) -> None:
    if type(task).__name__ == "PackCorpus":
        display.stop()
        news = f"packed in {duration(counters.elapsed())}"
        reused = counters.each("TokenizePart", "reused")
        if 0 < reused.sum() < len(reused):  # after sources were appended to, or after an interruption
            display.show(f"reused {int(reused.sum()):,} of {len(reused):,} parts from earlier runs")
        _finish(load_manifest(task.recipe.published), task.output().path, news)


@luigi.Task.event_handler(luigi.Event.PROCESS_FAILURE)
def _on_death(task: luigi.Task, message: str) -> None:
    """Report a child that was killed; Luigi prints nothing."""
    killed = re.search(r"exit code -(\d+)", message)
    if killed:
        name = type(task).__name__
        guard.report(
            Busy(
                "killed",
                f"{name} was killed by signal {killed[1]}; if memory ran out{of_memory()}, run again with fewer "
                "--workers",
            )
        )
