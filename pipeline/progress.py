"""What a person sees of a run, and the figures that it leaves behind.

Every task runs in a forked child of its own, and nothing that a child sets reaches the parent. So the counters lie
in shared memory that is made before the fork; the parent counts tasks as Luigi discovers them, a child adds what it
did, and whoever has news draws. On a terminal one line is drawn over and over; elsewhere a line every few seconds.

    error messages, notes, progress → standard error        path of the manifest → standard output, the last line
"""

from __future__ import annotations

import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import luigi

from tasks.errors import PackError
from tasks.manifest import Manifest, load_manifest
from tasks.recipe import Recipe

LINE_EVERY = {True: 0.1, False: 5.0}  # seconds between two drawings, on a terminal and elsewhere

STAGES = ("TrainTokenizer", "TokenizePart", "PlanPacking", "WriteShard")
_NAMES = (
    "started", "drawn", "parts", "parts_done", "shards", "shards_done", "reused", "conversations", "rejected",
    "tokens", "packed", "row_tokens", "peak",
    *(f"{stage}.seconds" for stage in STAGES), *(f"{stage}.cpu" for stage in STAGES),
)  # fmt: skip
_shared = multiprocessing.Array("d", len(_NAMES))
_place = {name: index for index, name in enumerate(_NAMES)}
_discovered: set[str] = set()
_reported: set[str] = set()


def _add(**amounts: float) -> None:
    with _shared.get_lock():
        for name, amount in amounts.items():
            _shared[_place[name]] += amount


def _get(name: str) -> float:
    return float(_shared[_place[name]])


# What tasks report


@contextmanager
def stage(task: luigi.Task) -> Iterator[None]:
    """Time a task, and turn a PackError into its one message."""
    start, cpu = time.perf_counter(), time.process_time()
    with reporting():
        yield
    name = type(task).__name__
    if name in STAGES:
        _add(**{f"{name}.seconds": time.perf_counter() - start, f"{name}.cpu": time.process_time() - cpu})
    with _shared.get_lock():
        _shared[_place["peak"]] = max(_get("peak"), _peak_memory())


@contextmanager
def reporting() -> Iterator[None]:
    """Say the message of a PackError, once, before Luigi gets to see it."""
    try:
        yield
    except PackError as error:
        if str(error) not in _reported:
            _reported.add(str(error))
            _say(f"error: {error}")
        raise


def announce(recipe: Recipe) -> None:
    """What a user should know before the work starts."""
    if "announced" in _reported:
        return
    _reported.add("announced")
    config = recipe.config
    size = sum(file.bytes for file in recipe.files)
    _say(
        f"{config.name}: {len(recipe.files)} files, {size / 1e6:,.1f} MB, {len(recipe.parts)} parts → rows of "
        f"{config.sequence_length:,} tokens, {len(recipe.shard_names())} shards"
    )
    if recipe.tokenizer_key is None and recipe.template.markers_as_text:
        markers = ", ".join(recipe.template.markers_as_text)
        _say(f"note: the tokenizer has no control token for {markers}; the template writes them as text")


def tokenized(conversations: int, rejected: int, tokens: int) -> None:
    _add(conversations=conversations, rejected=rejected, tokens=tokens)
    _draw()


def planned(receipt: dict[str, Any]) -> None:
    packing = receipt["packing_metadata"]
    if packing["enabled"]:
        _say(f"planned {packing['rows']:,} rows, {packing['packing_efficiency']:.2f} % full")


def written(receipt: dict[str, Any]) -> None:
    _add(packed=receipt["packed"], row_tokens=receipt["rows"])
    _draw()


def run_record() -> dict[str, Any]:
    """What this run took: seconds are summed over the tasks of a stage, which run side by side."""
    seconds = time.time() - _get("started")
    return {
        "seconds": round(seconds, 3),
        "stages": {
            name: {"seconds": round(_get(f"{name}.seconds"), 3), "cpu_seconds": round(_get(f"{name}.cpu"), 3)}
            for name in STAGES
        },
        "conversations": int(_get("conversations")),
        "tokens": int(_get("tokens")),
        "conversations_per_second": round(_get("conversations") / seconds, 1),
        "tokens_per_second": round(_get("tokens") / seconds, 1),
        "peak_memory_bytes": int(max(_get("peak"), _peak_memory())),
        "tasks_found_done": int(_get("reused")),
        "versions": {
            name: metadata.version(name)
            for name in ("packcorpus", "luigi", "pyarrow", "numpy", "sentencepiece", "tokenizers", "orjson")
        }
        | {"python": sys.version.split()[0]},
    }


def _peak_memory() -> int:
    """Bytes; of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# What a person sees


def _say(message: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{message}", file=sys.stderr, flush=True)


def _draw() -> None:
    terminal = sys.stderr.isatty()
    now = time.time()
    with _shared.get_lock():
        if now - _get("drawn") < LINE_EVERY[terminal]:
            return
        _shared[_place["drawn"]] = now
    elapsed = now - _get("started")
    line = (
        f"{elapsed:5.1f} s  parts {_get('parts_done'):.0f}/{_get('parts'):.0f}  "
        f"shards {_get('shards_done'):.0f}/{_get('shards'):.0f}  {_get('conversations'):,.0f} conversations "
        f"({_get('conversations') / max(elapsed, 0.1):,.0f}/s)  {_get('tokens') / 1e6:,.2f} M tokens"
    )
    if _get("rejected"):
        line += f"  {_get('rejected'):,.0f} rejected"
    print(f"\r\033[K{line}" if terminal else line, file=sys.stderr, end="" if terminal else "\n", flush=True)


def _finish(manifest: Manifest, path: str, news: str) -> None:
    packing, ledger = manifest.packing_metadata, manifest.ledger
    conversations, tokens = ledger.conversations, ledger.tokens
    full = f", {packing.packing_efficiency:.2f} % full" if packing.packing_efficiency is not None else ""
    rejected, dropped = sum(conversations.rejected.values()), sum(conversations.dropped.values())
    _say(
        f"{news}: {conversations.read:,} conversations read, {conversations.packed:,} packed, {rejected:,} rejected, "
        f"{dropped:,} dropped, {conversations.truncated:,} truncated; {packing.rows:,} rows{full}; "
        f"{tokens.packed:,} tokens, {tokens.trained:,} trained on"
    )
    print(path, flush=True)


# What Luigi tells


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_DISCOVERED)
def _on_discovered(task: luigi.Task, dependency: luigi.Task) -> None:
    if not _get("started"):
        _add(started=time.time())
    if dependency.task_id in _discovered:
        return
    _discovered.add(dependency.task_id)
    kind = type(dependency).__name__
    _add(parts=kind == "TokenizePart", shards=kind == "WriteShard")


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _on_present(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        path = task.output().path
        _finish(load_manifest(task.recipe.published), path, "already packed, nothing to do")
        return
    _add(reused=1, parts_done=kind == "TokenizePart", shards_done=kind == "WriteShard")


@luigi.Task.event_handler(luigi.Event.SUCCESS)
def _on_success(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        seconds = time.time() - _get("started")
        _finish(load_manifest(task.recipe.published), task.output().path, f"packed in {seconds:.1f} s")
        return
    _add(parts_done=kind == "TokenizePart", shards_done=kind == "WriteShard")
    _draw()


class _WithoutOurErrors(logging.Filter):
    """Luigi logs a failing task with its traceback; a PackError has said what a user needs to know."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], PackError):
            return False
        message = record.getMessage()
        return not any(text in message for text in _reported if "Traceback" in message)


logging.getLogger("luigi-interface").addFilter(_WithoutOurErrors())
