"""Show a run to a person, or to a script, while it runs.

    State ─┬─ live    on a terminal: a few lines, drawn over and over by a thread
           ├─ lines   otherwise: a line every few seconds
           ├─ json    PACKCORPUS_JSON=1, --json: {"progress": {…}}, {"note": …}, {"done": {…}}
           └─ quiet   PACKCORPUS_QUIET=1, --quiet: nothing
    errors, notes, progress → standard error             path of the manifest → standard output, the last line

After each drawing, the cursor is at the start of the drawing. A message clears from there to the end of the screen. The
next drawing is below the message, and nothing needs to know the height of a drawing.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import luigi

from packcorpus.pipeline.progress import STAGES, Stage, State, run, state
from packcorpus.tasks.core.messages import JSON, Note, is_on, note_as_json
from packcorpus.tasks.core.printable import (
    aligned,
    counted,
    duration,
    from_here,
    lengths_in_words,
    printable,
    with_urls,
)
from packcorpus.tasks.corpus.summary import explain_limits, explain_losses, fit_to_width, lost_of, mixture_table, notes
from packcorpus.tasks.dry_run.expected_mixture import expected_mixture
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.corpus_folder import default_report_path, find_listed, listed_file, remember_manifest
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.work import Plan, Publish, TokenizePart, TrainTokenizer

if TYPE_CHECKING:
    from packcorpus.tasks.tokenization.checks import EngineChoice


QUIET = "PACKCORPUS_QUIET"
Mode = Literal["live", "lines", "json", "quiet"]
EVERY = {"live": 0.25, "lines": 5.0, "json": 1.0}  # seconds between two drawings

_BAR_CELLS = 24
_CLEAR = "\r\x1b[J"


class output(luigi.Config):
    """Options that every command line of the pipeline has."""

    use_cmdline_section = False
    quiet = luigi.BoolParameter(default=False, always_in_help=True, description="Show only errors.")
    json = luigi.BoolParameter(
        default=False, always_in_help=True, description="Print progress and errors as JSON lines."
    )


def mode() -> Mode:
    """Return the mode in which this run is shown."""
    if is_on(JSON):
        return "json"
    if is_on(QUIET):
        return "quiet"
    return "live" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "lines"


def begin() -> None:
    """Apply --json and --quiet through the environment, which all processes inherit."""
    stop()
    options = output()
    for name, is_set in ((JSON, options.json), (QUIET, options.quiet)):
        if is_set:
            os.environ[name] = "1"


# Messages


def room() -> int:
    """Return the width available to a line: 10,000 unless a drawing is shown."""
    # A new pseudo-terminal has 0 columns until its size is set.
    return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if mode() == "live" else 10_000


def show(message: str, **facts: Any) -> None:
    """Print a line for a person, or `facts` as JSON for a machine."""
    how = mode()
    if how == "json":
        write(json.dumps(facts, default=str) if facts else note_as_json(message))
    elif how != "quiet":
        write(_wrapped(printable(message), room()))


def _wrapped(line: str, width: int) -> str:
    """Break a line that is longer than `width` between words."""
    if len(line) <= width:
        return line
    return fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def write(text: str) -> None:
    """Print to standard error, above the drawing."""
    if mode() == "live":
        print(_CLEAR, end="", file=sys.stderr, flush=True)
    print(text, file=sys.stderr, flush=True)


# Progress


def frame(now: State, how: Mode, width: int) -> str:
    """Return the text to write for one moment."""
    if how == "json":
        return json.dumps({"progress": asdict(now)}) + "\n"
    if how == "live":
        lines = _drawn(now, width)
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""  # terminals treat 0 as 1
        return _CLEAR + "\n".join(lines) + "\r" + up
    by_name = {stage.name: stage for stage in now.stages}
    facts = [
        f"{now.seconds:.1f} s",
        f"{duration(now.seconds_left)} left" if now.seconds_left is not None else "",
        *(
            f"{label} {by_name[name].done:,}/{by_name[name].tasks:,}{_read(by_name[name])}"
            for name, label in (("tokens", "parts"), ("shards", "shards"))
            if name in by_name
        ),
        f"{now.conversations:,} conversations ({now.conversations_per_second:,.0f}/s)" if now.conversations else "",
        f"{now.rejected:,} rejected" if now.rejected else "",
        f"{now.tokens / 1e6:,.2f} M tokens ({now.tokens_per_second / 1e6:.2f} M/s)" if now.tokens else "",
        f"{now.fill:.2f} % full" if now.fill else "",
    ]
    return "  ".join(filter(None, facts)) + "\n"


def _read(stage: Stage) -> str:
    """Return the share of the bytes that was read, if parts are being read."""
    is_reading = stage.name == "tokens" and 0 < stage.share < 1
    return f" ({100 * stage.share:.0f} % read)" if is_reading else ""


def _drawn(now: State, width: int) -> list[str]:
    from io import StringIO

    from rich.console import Console  # rich takes 0.03 s to load, and only this mode needs it
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = f" · {duration(now.seconds_left)} left" if now.seconds_left is not None else ""
    rejected = f" · {now.rejected:,} rejected" if now.rejected else ""
    head = Text.assemble((printable(now.name), "bold"), f"  {duration(now.seconds)}{left}", (rejected, "yellow"))
    lines = Table.grid(padding=(0, 1))
    for column in ({"no_wrap": True, "style": "dim"}, {}, {"justify": "right", "no_wrap": True}, {"no_wrap": True}):
        lines.add_column(**column)
    bar = _BAR_CELLS if width >= 100 else _BAR_CELLS // 2
    for stage in now.stages:
        facts = ""
        if stage.name == "tokens" and now.conversations:
            facts = f"{now.conversations_per_second:,.0f} conversations/s · {now.tokens_per_second / 1e6:.2f} Mtok/s"
        elif stage.name == "tokens" and (share := _read(stage)):
            facts = share.strip(" ()")
        elif stage.name == "plan" and now.fill:
            facts = f"{now.rows:,} rows, {now.fill:.2f} % full"
        lines.add_row(
            f"  {stage.name}",
            ProgressBar(total=1.0, completed=stage.share, width=bar, finished_style="green", complete_style="cyan"),
            f"{stage.done:,}/{stage.tasks:,}",
            Text(facts and f" {facts}"),
        )
    whole = Table.grid()
    whole.add_column(no_wrap=True, overflow="ellipsis")
    whole.add_row(head)
    whole.add_row(lines)
    colors: Literal["standard"] | None = None if os.environ.get("NO_COLOR") else "standard"
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=colors, markup=False, emoji=False)
    console.print(whole, end="", crop=True)
    return file.getvalue().rstrip("\n").split("\n")


class _Drawing(threading.Thread):
    """Draw until the run has ended.

    It takes no lock that a forked worker could find locked: it has its own console and bypasses Python's buffers.
    """

    def __init__(self, name: str, how: Mode):
        super().__init__(daemon=True)
        self._of, self._how = printable(name), how
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(EVERY[self._how]):
            # The terminal may be closed, or work may be added between two reads. No drawing is worth a traceback.
            with suppress(Exception):
                os.write(sys.stderr.fileno(), frame(state(self._of), self._how, room()).encode("utf-8", "replace"))
        if self._how == "live":
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _CLEAR.encode())

    def stop(self) -> None:
        self._end.set()
        self.join()


_drawing: _Drawing | None = None


def start(name: str) -> None:
    """Start drawing, once it is known that there is work to do."""
    global _drawing
    stop()
    how = mode()
    if how == "quiet":
        return
    frame(state(name), how, 80)  # imports the modules of the thread now, because a fork may come at any time
    _drawing = _Drawing(name, how)
    _drawing.start()


def stop() -> None:
    """Stop drawing and clear the drawing."""
    global _drawing
    if _drawing and _drawing.is_alive():
        _drawing.stop()
    _drawing = None


atexit.register(stop)


# Seconds between two messages of a task to luigid: each is a request over the network.
STATUS_EVERY = 2.0


def announce(recipe: Recipe) -> None:
    """Print what the run reads and makes, and notes, and start the display."""
    config = recipe.config
    size = sum(file.bytes for file in recipe.files)
    files, parts = counted(len(recipe.files), "file"), counted(len(recipe.parts), "part")
    rows, shards = f"rows of {lengths_in_words(config.row_lengths)} tokens", counted(len(recipe.shard_names), "shard")
    facts = {"files": len(recipe.files), "bytes": size, "parts": len(recipe.parts), "shards": len(recipe.shard_names)}
    text = f"{config.name}: {files}, {size / 1e6:,.2f} MB, {parts} → {rows}, {shards}"
    show(Note(text, "start", name=config.name, lengths=config.row_lengths, **facts))
    if recipe.tokenizer_key is None and recipe.template.markers_as_text:
        markers = ", ".join(recipe.template.markers_as_text)
        text = f"note: written as text, because the tokenizer lacks these tokens: {markers}"
        show(Note(text, "markers_as_text", tokens=recipe.template.markers_as_text))
    for kind, lines in (("settings", recipe.notes), ("mixture", expected_mixture(recipe))):
        for line in lines:
            show(Note(f"note: {line}", kind))
    run.copies = recipe.copies
    start(config.name)


def proven(choice: EngineChoice | None) -> None:
    """Print a note for each fast engine that differs from its reference."""
    notes = []
    if choice and choice.differs:
        notes.append(f"{choice.engine} encodes all texts, because gigatoken encodes {choice.differs} differently")
    if choice and choice.rendering_differs:
        notes.append(f"Jinja2 renders all conversations, because minijinja writes {choice.rendering_differs}")
    for note in notes:
        if run.first(note):
            show(Note(f"note: {note}", "engine"))


def status(task: luigi.Task) -> None:
    """Report to luigid how much of a task is done, at most every few seconds."""
    done = [count.outcome for count in task.counts if count.is_done]
    share = len(done) / len(task.counts)
    if share < 1 and time.monotonic() - run.status_at < STATUS_EVERY:  # the sums take as long as a small part
        return
    message = f"wrote {counted(len(done), 'shard')}"
    if task.kind is TokenizePart:
        tokens, rejected = sum(part.tokens for part in done), sum(part.rejected for part in done)
        message = f"{counted(sum(part.conversations for part in done), 'conversation')}, {tokens / 1e6:,.2f} M tokens"
        message += f", {rejected:,} rejected" * bool(rejected)
    _send(task, message, share)


def _send(task: luigi.Task, message: str, share: float = 1.0) -> None:
    run.status_at = time.monotonic()
    with suppress(Exception):  # it does not fail the run
        task.set_status_message(message)
        task.set_progress_percentage(round(100 * share))


def finished(task: luigi.Task) -> None:
    """Report that the work of a task is done."""
    if task.kind is TrainTokenizer:
        from packcorpus.tasks.tokenization.checks import choose_engines

        _send(task, f"wrote {task.output().path}")
        proven(choose_engines(task.recipe))
    elif task.kind is Plan:
        planned(task, task.works[0].receipt())
    elif task.kind is Publish:
        manifest = Path(task.output().path)
        _send(task, f"the manifest is {manifest}")
        report = default_report_path(Path(task.recipe.corpus_folder))
        with suppress(Exception):  # the link on luigid's page
            task.set_tracking_url((report if report.is_file() else manifest).resolve().as_uri())
        stop()
        if reused := _reused(task.recipe):
            show(reused)
        _finish(load_manifest(task.recipe.published), task.output().path, f"packed in {duration(run.elapsed)}")


def _reused(recipe: Recipe) -> Note | None:
    """Say what of earlier runs this run has used, or return None if nothing."""
    counts = {stage: sum(count.is_reused for count in run.of(stage)) for stage in STAGES}
    if counts["plan"]:  # Luigi asks nothing about the parts of a plan that is there
        counts["tokenize"] = len(recipe.parts)
    every = {"tokenize": len(recipe.parts), "write": len(recipe.shard_names)}
    what = ["the tokenizer"] * bool(counts["prepare"])
    what += [f"tokens of {counts['tokenize']:,} of {counted(every['tokenize'], 'part')}"] * bool(counts["tokenize"])
    what += ["the plan"] * bool(counts["plan"])
    what += [f"{counts['write']:,} of {counted(every['write'], 'shard')}"] * bool(counts["write"])
    return Note(f"reused: {', '.join(what)}", "reused", **counts) if what else None


def planned(task: luigi.Task, receipt: dict[str, Any]) -> None:
    packing = receipt["packing_metadata"]
    if not packing["enabled"]:
        return
    run.fill, run.rows = packing["packing_efficiency"], packing["rows"]
    rows, needed = counted(packing["rows"], "row"), counted(packing["lower_bound_rows"], "row")
    if "lower_bound_places" in packing:
        rows += f" with {packing['places']:,} places"
        needed = f"{packing['lower_bound_places']:,} places"
    plans = "no plan of these trees" if receipt["ledger"]["tokens"].get("shared") is not None else "no plan"
    message = f"planned {rows}, {run.fill:.2f} % full; {plans} can use fewer than {needed}"
    show(message, planned={"rows": run.rows, "fill": run.fill, "lower_bound_rows": packing["lower_bound_rows"]})
    _send(task, message)


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
    lost = {name: {"lost": count, "of": of} for name, count, of in lost_of(ledger)}
    for line in explain_losses(ledger):
        show(Note(line, "lost", **lost))
    show(f"{news}: {rows}{full}; {kept}, {tokens.trained:,} trained on", done=facts)
    text = f"{counted(conversations.read, 'conversation')}: " + ", ".join(f"{n:,} {end}" for end, n in ends.items())
    show(Note(text, "conversations", read=conversations.read, **ends))
    if ends["rejected"]:
        from packcorpus.tasks.packing.rejects import first_of_each

        listed = find_listed(folder, "rejects.jsonl", listed_file(manifest, folder, "rejects.jsonl").bytes)
        text = from_here(f"all rejects are in {with_urls(str(listed))}; the first of each reason:")
        show(Note(text, "rejects", path=from_here(with_urls(str(listed))), reasons=conversations.rejected))
        for line in first_of_each(listed, conversations.rejected):
            show(Note(line, "reject"))
    _print_mixture(manifest, folder)
    for line in notes(manifest):
        show(line)
    remember_manifest(root, Path(path).name)
    print(printable(str(shown)), flush=True)


def _print_mixture(manifest: Manifest, folder: Path) -> None:
    weighting = manifest.config.get("weighting")
    table = fit_to_width(mixture_table(manifest.mixture, weighting), room())
    if table:
        text = f"mixture ({weighting}), in one pass over the training split:"
        show(Note(text, "mixture", entries=[entry.model_dump(mode="json") for entry in manifest.mixture]))
    for line in aligned(table):
        show(Note(line, "mixture_line"))
    left_out = manifest.ledger.conversations.dropped.get("weight", 0)
    if weighting == "token_share" and left_out:
        from packcorpus.tasks.inspection.lookup import sources_taken_whole

        if limited := explain_limits(
            sources_taken_whole(manifest, folder), left_out, manifest.ledger.conversations.packed
        ):
            show(Note(limited, "mixture", left_out=left_out))


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _on_present(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        _finish(load_manifest(task.recipe.published), task.output().path, "already packed, nothing to do")
    elif kind in ("TrainAdapter", "DiagnoseTraining"):
        show(f"already {'trained' if kind == 'TrainAdapter' else 'diagnosed'}, nothing to do")
        print(printable(task.output().path), flush=True)
