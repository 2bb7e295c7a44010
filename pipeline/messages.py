"""What a run says: messages for a person, and the status of its tasks for luigid."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import luigi

from pipeline import display
from pipeline.progress import run
from tasks.core.printable import aligned, counted, duration, lengths_in_words, printable, with_urls
from tasks.corpus.summary import explain_limits, fit_to_width, mixture_table, notes
from tasks.recipe import Recipe
from tasks.storage.corpus_folder import default_report_path, find_listed, listed_file, remember_manifest
from tasks.storage.manifest import Manifest, load_manifest
from tasks.work import Plan, Publish, TokenizePart, TrainTokenizer

if TYPE_CHECKING:
    from tasks.tokenization.checks import EngineChoice

# Seconds between two messages of a task to luigid: each is a request over the network.
STATUS_EVERY = 2.0


def announce(recipe: Recipe) -> None:
    """Print what the run reads and makes, and notes, and start the display."""
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
    run.copies = recipe.copies
    display.start(config.name)


def proven(choice: EngineChoice | None) -> None:
    """Print a note for each fast engine that differs from its reference."""
    notes = []
    if choice and choice.differs:
        notes.append(f"{choice.engine} encodes all texts, because gigatoken encodes {choice.differs} differently")
    if choice and choice.rendering_differs:
        notes.append(f"Jinja2 renders all conversations, because minijinja writes {choice.rendering_differs}")
    for note in notes:
        if run.first(note):
            display.show(f"note: {note}")


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
    """Report a status to luigid; a failure to do so does not fail the run."""
    run.status_at = time.monotonic()
    with suppress(Exception):
        task.set_status_message(message)
        task.set_progress_percentage(round(100 * share))


def finished(task: luigi.Task) -> None:
    """Report that the work of a task is done."""
    if task.kind is TrainTokenizer:
        from tasks.tokenization.checks import choose_engines

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
        display.stop()
        reused = [part.is_reused for part in run.of("tokenize")]
        if 0 < sum(reused) < len(reused):  # after sources were appended to, or after an interruption
            display.show(f"reused {sum(reused):,} of {len(reused):,} parts from earlier runs")
        _finish(load_manifest(task.recipe.published), task.output().path, f"packed in {duration(run.elapsed)}")


def planned(task: luigi.Task, receipt: dict[str, Any]) -> None:
    packing = receipt["packing_metadata"]
    if not packing["enabled"]:
        return
    run.fill, run.rows = packing["packing_efficiency"], packing["rows"]
    rows, needed = counted(packing["rows"], "row"), counted(packing["lower_bound_rows"], "row")
    if "lower_bound_places" in packing:
        rows += f" with {packing['places']:,} places"
        needed = f"{packing['lower_bound_places']:,} places"
    message = f"planned {rows}, {run.fill:.2f} % full; no plan can use fewer than {needed}"
    display.show(message, planned={"rows": run.rows, "fill": run.fill, "lower_bound_rows": packing["lower_bound_rows"]})
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
    display.show(f"{news}: {rows}{full}; {kept}, {tokens.trained:,} trained on", done=facts)
    display.show(
        f"{counted(conversations.read, 'conversation')}: " + ", ".join(f"{n:,} {end}" for end, n in ends.items())
    )
    if ends["rejected"]:
        from tasks.packing.rejects import first_of_each

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


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _on_present(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        _finish(load_manifest(task.recipe.published), task.output().path, "already packed, nothing to do")
    elif kind in ("TrainAdapter", "DiagnoseTraining"):
        display.show(f"already {'trained' if kind == 'TrainAdapter' else 'diagnosed'}, nothing to do")
        print(printable(task.output().path), flush=True)
