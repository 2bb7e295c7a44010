"""Call the tokenizers library within limits of memory and time.

    Replace("a" → 1,000 × "a"), three times  ─check_growth─▶  E402: 200 characters would become 200,000,000,000
    Split("a*a*b"), 100,000 × "a"            ─run_native───▶  TimeoutError after SECONDS
    Split("(a+)+b"), 50 × "a"                ─run_native───▶  Panic: the match took ten million steps

The library holds a text as a whole at each step, and ends the process if memory runs out. It matches patterns by
backtracking, for as long as it takes. If it panics, it writes a report to stderr in any case.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import orjson

from packcorpus.tasks.core.errors import DataError

T = TypeVar("T")

# Published tokenizers reach 3. A text that is encoded at once has up to a million characters.
MOST_GROWTH = 16
# Unicode itself replaces U+FDFA by 18 characters, and so does each SentencePiece model that normalizes.
_UNICODE_GROWTH = 18
# Seconds of CPU time for one call, which usually takes up to one second.
SECONDS = 30.0


class Panic(Exception):
    """The library failed in a way that it does not report as an error."""


def read_spec(path: Path) -> dict[str, Any]:
    """Read a tokenizer.json; raises DataError if it is damaged."""
    try:
        spec = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError("bad_tokenizer", f"{path}: not a valid tokenizer.json: {error}") from None
    if not isinstance(spec, dict):
        raise DataError("bad_tokenizer", f"{path}: not a valid tokenizer.json: expected an object")
    return spec


def tokenizer_of(spec: Mapping[str, Any], path: Path) -> Any:
    """Load a tokenizer.json that was read from the file at `path`, or made of it.

    Raises DataError if it is not valid, or if a step may make a text far longer.
    """
    from tokenizers import Tokenizer

    for key in ("normalizer", "pre_tokenizer", "decoder"):
        check_growth(_growth(spec.get(key)), f"{path}: its {key}")
    try:
        return run_native(lambda: Tokenizer.from_str(orjson.dumps(spec).decode()))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError("bad_tokenizer", f"{path}: not a valid tokenizer.json: {error}") from None


# -- memory -----------------------------------------------------------------------------------------------------------


def check_growth(growth: float, what: str) -> None:
    """Raise DataError if a step of a tokenizer may make a text far longer."""
    if growth > MOST_GROWTH:
        raise DataError(
            "bad_tokenizer",
            f"{what} can make a text {growth:,.0f} times as long, but at most {MOST_GROWTH} times is supported; "
            "shorten the contents of its replacements, or use another tokenizer",
        )


def growth_of_charsmap(charsmap: bytes) -> float:
    """Return how many times as long as in Unicode's normal forms a text can become."""
    # The map of SentencePiece is the size of a trie, the trie, and all replacements, which end with NUL.
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    longest = max(len(text.decode(errors="replace")) for text in replacements.split(b"\0"))
    return max(1, longest / _UNICODE_GROWTH)


def _growth(node: Any) -> float:
    """Return how many times as long a text of one character can become."""
    if not isinstance(node, dict):
        return 1
    if node.get("type") == "Replace":
        content = len(str(node.get("content") or ""))
        pattern = node["pattern"] if isinstance(node.get("pattern"), dict) else {}
        if isinstance(text := pattern.get("String"), str):
            least = len(text)  # number of characters that the pattern may match
        else:
            try:
                least = 0 if re.match(str(pattern.get("Regex")), "") else 1
            except (re.error, RecursionError, OverflowError):  # the library has other rules
                least = 1
        return max(1, content / least) if least else content + 1
    if isinstance(charsmap := node.get("precompiled_charsmap"), str):
        with suppress(binascii.Error):  # the library refuses it
            return growth_of_charsmap(base64.b64decode(charsmap))
    inner = prod(
        _growth(child)
        for name in ("normalizers", "pretokenizers", "decoders")
        for child in (node[name] if isinstance(node.get(name), list) else ())
    )
    added = [node.get(name) for name in ("prepend", "prefix", "replacement")]
    return inner * (1 + sum(len(text) for text in added if isinstance(text, str) and len(text) > 1))


# -- time and panics --------------------------------------------------------------------------------------------------


def run_native(call: Callable[[], T]) -> T:
    """Return the result of a call of the library that releases the GIL.

    Raises Panic, and TimeoutError after SECONDS of CPU time, although the thread works until the process ends.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    with _without_panics():
        start = time.process_time()
        threading.Thread(target=run, daemon=True).start()
        while not wait([outcome], SECONDS).done:
            # In a process that waits for its CPU, or was stopped, only other time has passed.
            if time.process_time() - start >= SECONDS:
                raise TimeoutError(f"more than {SECONDS:g} s")
    try:
        return outcome.result()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a type from Rust, which cannot be imported
            raise
        raise Panic(str(error)) from None


_PANIC = re.compile(
    rb"(?:^\n)?^thread '[^\n]*panicked at [^\n]*\n[^\n]*(?:\n|$)(?:stack backtrace:\n(?: [^\n]*\n)*)?"
    rb"(?:note: [^\n]*RUST_BACKTRACE[^\n]*(?:\n|$))?",
    re.MULTILINE,
)
_lock = threading.Lock()
_blocks = 0  # blocks that hold stderr; threads share it, so they share their blocks
_held: tuple[Any, int] | None = None  # the file that holds it, and a copy of the descriptor of stderr


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hold stderr until the block ends, and leave out the reports of panics."""
    global _blocks, _held
    with _lock:
        _blocks += 1
        if _blocks == 1:
            with suppress(OSError):  # stderr is closed, or no file can be written
                _held = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115
                os.dup2(_held[0].fileno(), 2)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _held:
                file, before = _held
                _held = None
                os.dup2(before, 2)
                file.seek(0)
                if text := _PANIC.sub(b"", file.read()):
                    os.write(before, text)
                os.close(before)
                file.close()
