"""Verify and repair a corpus, and return the results as values.

manifest ─verify_corpus─▶ Verification          manifest ─repair_corpus─▶ Repairs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.verification.rebuild import rebuild
from tasks.verification.repair import repair
from tasks.verification.verify import verify


@dataclass(frozen=True)
class Check:
    """A check that passed, and its result."""

    name: str
    found: str


@dataclass(frozen=True)
class Verification:
    """The checks of a corpus; all of them passed."""

    manifest: Path
    checks: list[Check]


@dataclass(frozen=True)
class Repaired:
    """A restored file, the damage that it had, and the origin of its bytes."""

    path: Path
    why: str
    source: str


@dataclass(frozen=True)
class Repairs:
    """The restored files of a corpus.

    `mended` is named after its key in the JSON output.
    """

    manifest: Path
    mended: list[Repaired]


def verify_corpus(path: Path, rebuilt: bool = False, config: Path | None = None) -> Verification:
    """Check every invariant of a corpus.

    With `rebuilt`, also check that a corpus rebuilt from `config` has the same bytes. Raises DataError, InputMissing,
    StorageError, or NotReproducible if a check fails.
    """
    checks = [Check(name, found) for name, found in verify(path).checks]
    if rebuilt:
        checks.append(Check("rebuild", rebuild(path, config)))
    return Verification(path, checks)


def repair_corpus(path: Path, config: Path | None, report: Callable[[Repaired], None]) -> Repairs:
    """Restore the damaged files of a corpus and report each of them.

    Raises the errors of `repair`.
    """
    repaired = []
    for file in repair(path, config):
        repaired.append(Repaired(file.path, file.why, file.source))
        report(repaired[-1])
    return Repairs(path, repaired)
