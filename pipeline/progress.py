"""What a person sees of a run, and the figures that it leaves behind.

Every task runs in a forked child of its own, and nothing that a child sets reaches the parent. So the counters lie
in shared memory that is made before the fork; the parent counts tasks as Luigi discovers them, a child adds what it
did, and whoever has news draws. On a terminal one line is drawn over and over; elsewhere a line every few seconds.

    error messages, notes, progress → standard error        path of the manifest → standard output, the last line
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import luigi
import luigi.retcodes
from luigi.parameter import ParameterException
from luigi.task_register import TaskClassException

from tasks.encoders import Encoder
from tasks.errors import Busy, Interrupted, PackError, StorageError, UsageError
from tasks.manifest import Manifest, load_manifest
from tasks.messages import DEBUG, foreseen, is_on, told
from tasks.parity import Verdict
from tasks.printable import aligned, counted, printable
from tasks.recipe import Recipe
from tasks.rejects import first_of_each
from tasks.show import mixture_table

LINE_EVERY = {True: 0.1, False: 5.0}  # seconds between two drawings, on a terminal and elsewhere

STAGES = ("TrainTokenizer", "TokenizePart", "PlanPacking", "WriteShard")
_NAMES = (
    "started", "drawn", "parts", "parts_done", "shards", "shards_done", "reused", "conversations", "rejected",
    "tokens", "fill", "characters", "characters_expected", "peak", "exit_code",
    *(f"{stage}.seconds" for stage in STAGES), *(f"{stage}.cpu" for stage in STAGES),
)  # fmt: skip
_shared = multiprocessing.Array("d", len(_NAMES))
_place = {name: index for index, name in enumerate(_NAMES)}
_discovered: set[str] = set()
_reported: set[str] = set()

# Characters of text in a byte of a source, as measured on chats: what remains to be done is guessed from it.
CHARACTERS_PER_BYTE = {False: 0.9, True: 3.5}  # by whether the source is compressed
# Share of the tokens that may go, by a policy that the user chose, without a word.
NOTEWORTHY = 0.05
# Share of the work that is tokenisation; the rest is shards.
TOKENIZATION = 0.85


def begin() -> None:
    """Forget an earlier run of this process, and take SIGTERM for a Ctrl-C: children are to be ended, too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _shared.get_lock():
        for index in range(len(_NAMES)):
            _shared[index] = 0
    _set(started=time.time(), drawn=time.time())
    _discovered.clear()
    _reported.clear()


def _set(**values: float) -> None:
    with _shared.get_lock():
        for name, value in values.items():
            _shared[_place[name]] = value


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
    """Tell an error, once, as a message and before Luigi gets to see it: Luigi would show a traceback."""
    try:
        yield
    except Exception as error:
        failed = foreseen(error)
        if not str(failed):  # told by another process
            _set(exit_code=failed.exit_code)
        elif str(failed) not in _reported:
            _reported.add(str(failed))
            with _shared.get_lock():
                before = _get("exit_code")
                _set(exit_code=failed.exit_code)
            # A disk that is full refuses every worker, each another file: the first says it for all.
            if not before == failed.exit_code == StorageError.exit_code:
                _print(told(failed))
        raise failed from error.__cause__ if failed is error else error


def announce(recipe: Recipe) -> None:
    """What a user should know before the work starts."""
    if "announced" in _reported:
        return
    _reported.add("announced")
    config = recipe.config
    size = sum(file.bytes for file in recipe.files)
    files, parts = counted(len(recipe.files), "file"), counted(len(recipe.parts), "part")
    rows, shards = f"rows of {config.sequence_length:,} tokens", counted(len(recipe.shard_names()), "shard")
    _say(f"{config.name}: {files}, {size / 1e6:,.2f} MB, {parts} → {rows}, {shards}")
    if recipe.tokenizer_key is None and recipe.template.markers_as_text:
        markers = ", ".join(recipe.template.markers_as_text)
        _say(f"note: written as text, since the tokenizer has no such token: {markers}")


def proven(verdict: Verdict, reference: Encoder) -> None:
    """Say it where gigatoken failed the proof."""
    message = f"note: {reference.engine} encodes all, since gigatoken gives other tokens for {verdict.differs}"
    if verdict.differs and message not in _reported:
        _reported.add(message)
        _say(message)


def tokenized(conversations: int, rejected: int, tokens: int, characters: int) -> None:
    _add(conversations=conversations, rejected=rejected, tokens=tokens, characters=characters)
    _draw()


def planned(receipt: dict[str, Any]) -> None:
    packing = receipt["packing_metadata"]
    if packing["enabled"]:
        _set(fill=packing["packing_efficiency"])
        _say(
            f"planned {counted(packing['rows'], 'row')}, {packing['packing_efficiency']:.2f} % full; "
            f"no plan can do with fewer than {packing['lower_bound_rows']:,}"
        )


def run_record() -> dict[str, Any]:
    """What this run took: seconds are summed over the tasks of a stage, which run side by side."""
    seconds = time.time() - _get("started")
    return {
        "seconds": round(seconds, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
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
            for name in (
                "packcorpus",
                "luigi",
                "pyarrow",
                "numpy",
                "sentencepiece",
                "tokenizers",
                "gigatoken",
                "orjson",
            )
        }
        | {"python": sys.version.split()[0]},
    }


def _peak_memory() -> int:
    """Bytes; of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# What a person sees


def _say(message: str) -> None:
    _print(printable(message))


def _tell(error: PackError) -> None:
    _print(told(error))
    _set(exit_code=error.exit_code)


def _print(text: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


def _draw() -> None:
    terminal = sys.stderr.isatty()
    now = time.time()
    with _shared.get_lock():
        if now - _get("drawn") < LINE_EVERY[terminal]:
            return
        _shared[_place["drawn"]] = now
    elapsed = max(now - _get("started"), 0.1)
    done = _share_done()
    facts = [
        f"{elapsed:.1f} s",
        f"{elapsed * (1 - done) / done:,.0f} s left" if done > 0.02 else "",
        f"parts {_get('parts_done'):.0f}/{_get('parts'):.0f}",
        f"shards {_get('shards_done'):.0f}/{_get('shards'):.0f}",
        f"{_get('conversations'):,.0f} conversations ({_get('conversations') / elapsed:,.0f}/s)"
        if _get("conversations")
        else "",
        f"{_get('rejected'):,.0f} rejected" if _get("rejected") else "",
        f"{_get('fill'):.2f} % full" if _get("fill") else "",
        f"{_get('tokens') / 1e6:,.2f} M tokens" if _get("tokens") else "",
    ]
    line = "  ".join(filter(None, facts))
    if terminal:
        line = line[: shutil.get_terminal_size().columns - 1]
    print(f"\r\033[K{line}" if terminal else line, file=sys.stderr, end="" if terminal else "\n", flush=True)


def _share_done() -> float:
    """Between 0 and 1. What was found done does not count, neither as work nor as done."""
    expected = _get("characters_expected")
    tokenized = min(1.0, _get("characters") / expected) if expected else 1.0
    if _get("fill"):
        tokenized = 1.0
    return TOKENIZATION * tokenized + (1 - TOKENIZATION) * _get("shards_done") / max(_get("shards"), 1)


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
    _say(f"{news}: {rows}{full}; {kept}, {tokens.trained:,} trained on")
    _say(f"{counted(conversations.read, 'conversation')}: " + ", ".join(f"{n:,} {end}" for end, n in ends.items()))
    if ends["rejected"]:
        listed = os.path.join(os.path.dirname(path), os.pardir, manifest.corpus, "rejects.jsonl")
        _say(f"each reject is in {manifest.corpus}/rejects.jsonl; the first of each reason:")
        for line in first_of_each(Path(listed), conversations.rejected):
            _say(line)
    if further := [f"{count:,} {reason}" for reason, count in conversations.dropped.items() if reason != "too_long"]:
        _say(f"dropped by filters, limits and weights: {', '.join(further)}")
    for line in aligned(mixture_table(manifest)):
        _say(line)
    lost = {"dropped": tokens.dropped * (not further), "cut off": tokens.truncated}
    for how, count in lost.items():
        if count > NOTEWORTHY * tokens.encoded:
            share = 100 * count / tokens.encoded
            _say(f"note: {share:.1f} % of all tokens were {how}, of conversations longer than a row")
    print(path, flush=True)


class _ExitCode(int):
    """Luigi multiplies each of its codes with whether it applies, when all has ended; a PackError has its own."""

    def __mul__(self, applies: int) -> int:
        return (int(_get("exit_code")) or int(self)) * applies


def use_own_exit_codes() -> None:
    codes = luigi.retcodes.retcode()  # Luigi has one of each config
    for name, _ in codes.get_params():
        setattr(codes, name, _ExitCode(getattr(codes, name)))


# What Luigi tells


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_DISCOVERED)
def _on_discovered(task: luigi.Task, dependency: luigi.Task) -> None:
    if dependency.task_id in _discovered:
        return
    _discovered.add(dependency.task_id)
    kind = type(dependency).__name__
    _add(parts=kind == "TokenizePart", shards=kind == "WriteShard")
    if kind == "TokenizePart" and not dependency.complete():
        part = dependency.recipe.parts[dependency.part]
        compressed = bool(part.file.compression) or part.file.container == "parquet"
        size = part.file.bytes if part.file.container == "parquet" else part.stop - part.start
        _add(characters_expected=size * CHARACTERS_PER_BYTE[compressed])


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)
def _on_present(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        _finish(load_manifest(task.recipe.published), task.output().path, "already packed, nothing to do")
        return
    if kind == "TrainAdapter":
        _say("already trained, nothing to do")
        print(task.output().path, flush=True)
        return
    _add(reused=1, parts_done=kind == "TokenizePart", shards_done=kind == "WriteShard")


@luigi.Task.event_handler(luigi.Event.SUCCESS)
def _on_success(task: luigi.Task) -> None:
    kind = type(task).__name__
    if kind == "PackCorpus":
        seconds = time.time() - _get("started")
        _finish(load_manifest(task.recipe.published), task.output().path, f"packed in {seconds:.1f} s")
        return
    if kind == "TrainAdapter":
        return  # the training has said it all
    _add(parts_done=kind == "TokenizePart", shards_done=kind == "WriteShard")
    _draw()


@luigi.Task.event_handler(luigi.Event.PROCESS_FAILURE)
def _on_death(task: luigi.Task, message: str) -> None:
    """Luigi would not say a word of a child that was killed."""
    killed = re.search(r"exit code -(\d+)", message)
    if killed:
        name = type(task).__name__
        _tell(
            Busy(
                "killed", f"{name} was killed by signal {killed[1]}; if memory ran out, run again with fewer --workers"
            )
        )


_STOP = (signal.SIGINT, signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    for other in _STOP:
        signal.signal(other, lambda *_: None)
    raise SystemExit(128 + number)


def _in_child() -> None:
    """Ctrl-C reaches every process of a terminal, and Luigi ends its children by SIGTERM. A child leaves without a
    word, wherever it is, and removes what it had half-written; the parent says what happened."""
    for number in _STOP:
        signal.signal(number, _leave)


os.register_at_fork(after_in_child=_in_child)


def _on_unraisable(found: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised in some places (a hook of fork, a destructor). An interrupt comes again after it."""
    if not issubclass(found.exc_type, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(found)
        return

    def again(number: int, frame: FrameType | None) -> None:
        raise found.exc_type

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


sys.unraisablehook = _on_unraisable


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _tell(Interrupted("interrupted", "interrupted; the same command goes on from here"))
        for child in multiprocessing.active_children():
            child.join()
        os._exit(Interrupted.exit_code)
    elif is_on(DEBUG) or not isinstance(error, Exception):
        sys.__excepthook__(kind, error, trace)
    else:
        failed = _of_luigi(error)
        _tell(failed)
        # Python would end with 1; nothing runs and nothing is held while the command line is read.
        sys.stdout.flush()
        os._exit(failed.exit_code)


def _of_luigi(error: Exception) -> PackError:
    """What Luigi raises at a command line that it cannot read, as a message of ours."""
    said = " ".join(str(error).split())
    parsing = re.search(r"Error when parsing the default value of '(\w+)'", said)
    if parsing:
        said = f"--{parsing[1].replace('_', '-')}: {error.__cause__}"
    elif not isinstance(error, (ParameterException, TaskClassException)):
        return foreseen(error)
    return UsageError("bad_command_line", f"{said}; see luigi --module pipeline PackCorpus --help")


sys.excepthook = _on_uncaught


class _WithoutOurErrors(logging.Filter):
    """Luigi logs a failing task with its traceback; a PackError has said what a user needs to know, and who pressed
    Ctrl-C knows it. What ends Luigi itself is told here."""

    def filter(self, record: logging.LogRecord) -> bool:
        if is_on(DEBUG):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (PackError, SystemExit)):
            return False
        if isinstance(error, Exception) and record.getMessage() == "Uncaught exception in luigi":
            failed = _of_luigi(error)
            _tell(failed)
            luigi.retcodes.retcode().unhandled_exception = failed.exit_code
            return False
        message = record.getMessage()
        return not any(text in message for text in _reported if "Traceback" in message)


logging.getLogger("luigi-interface").addFilter(_WithoutOurErrors())
