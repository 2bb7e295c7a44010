"""Find the manifest that a user names, and list all manifests of a project.

nothing                              ─▶ the manifest of the latest run, or else the newest in manifests/
a file, or a folder with a manifest  ─▶ the manifest; for any other file, an error that names its kind
mix-0123456789ab, mix, 0123456789ab  ─▶ manifests/mix-0123456789ab.json, by file name, corpus name, or key
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError, InputMissing, PackError, UsageError
from tasks.core.printable import printable, suggest
from tasks.stores.urls import scratch_with, url_of

if TYPE_CHECKING:
    from tasks.packing.balance import Waiting
    from tasks.storage.manifest import Manifest

HERE = Path()
SHORTEST_KEY = 4  # characters of a key that are enough to name a manifest
LISTED = 5


def manifests_of(root: Path) -> Path:
    """Return the folder of manifests of a project."""
    return root / "manifests"


def find_manifest(path: Path | None, root: Path = HERE) -> Path:
    """Return the manifest that `path` names.

    `path` is a file, a folder, or the name or key of a manifest in the manifests/ of `root`. Raises InputMissing if
    there is no such manifest, UsageError if a key is ambiguous, and DataError if the file is of another kind.
    """
    found = find_file(path, root, "manifest")
    _check_kind(found, root)
    return found


def find_file(path: Path | None, root: Path = HERE, wanted: str = "file") -> Path:
    """Return the file that `path` names, of any kind.

    Without a path, it is the manifest of the latest run. Raises InputMissing, whose message uses `wanted` for the kind
    of file, or UsageError.
    """
    path = _fetched(path, root)
    if path is None:
        latest = latest_manifest(root)
        if latest is None:
            raise InputMissing(
                "manifest_missing",
                f"{manifests_of(root)}/ has no manifests; make one with: packcorpus pack CONFIG, or name one elsewhere",
            )
        return latest
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / "manifest.json"):
        return path / "manifest.json"
    if named := by_name(str(path), root):
        return named
    from tasks.storage.manifest import lost_hint

    if os.path.isdir(path):
        hint = lost_hint(path / "manifest.json")
        raise InputMissing("manifest_missing", f"{path}: is not a corpus folder (it has no manifest.json){hint}")
    if hint := lost_hint(path):
        raise InputMissing("manifest_missing", f"{path}: is missing{hint}")
    stems = [file.stem for file in _manifests(root)]
    names = [name for stem in stems for name in (stem, stem.rpartition("-")[0])]
    hint = suggest(path.name.removesuffix(".json"), names, LISTED)
    message = f"{path}: no such {wanted}{hint}"
    ending = path.suffix.lower()
    if wanted != "manifest" and ending in (".yaml", ".yml"):
        raise InputMissing("config_missing", message)
    if wanted != "manifest" and ending not in ("", ".json"):
        raise InputMissing("source_missing", message)
    known = f"which has {', '.join(reversed(stems[-LISTED:]))}" if stems else "which has no manifests"
    message = f"{path}: no such {wanted}, and no such name or key in {manifests_of(root)}/{hint or f', {known}'}"
    raise InputMissing("manifest_missing", message)


def _fetched(path: Path | None, root: Path) -> Path | None:
    """Fetch a manifest, or all manifests of the root, if they are in a bucket.

    Returns the path of the manifest. Raises PackError.
    """
    if not (url_of(root) or (path and scratch_with(path))):
        return path
    from tasks.stores.mirror import mirror_of, remote_with

    if path and (remote := remote_with(path)):
        path = path if path.suffix == ".json" else path / "manifest.json"
        remote.fetch_manifest(path)
    elif url_of(root):
        mirror_of(root).fetch_manifests()
    return path


def find_damaged(path: Path | None, root: Path = HERE) -> Path:
    """Return the manifest or corpus folder that `path` names, even if it is damaged.

    Raises UsageError if it is in a bucket.
    """
    for place in (path, root):
        if place and (folder := scratch_with(place / "manifest.json")):
            raise UsageError(
                "url_not_supported",
                f"{url_of(folder)}: a corpus in a bucket is repaired by a run: delete the damaged objects, then run: "
                "packcorpus pack CONFIG --root URL",
            )
    if path is None:
        return find_file(None, root)
    if os.path.isfile(path):
        _check_kind(path, root)
        return path
    # If a published manifest is missing, the corpus folder may have a copy.
    return path if os.path.isdir(path) else by_name(str(path), root) or path


def latest_manifest(root: Path = HERE) -> Path | None:
    """Return the manifest of the latest run, or else the newest in manifests/.

    Reports the choice on stderr.
    """
    from tasks.storage.corpus_folder import last_manifest

    if last := last_manifest(root):
        print(printable(f"{last}: from the latest run"), file=sys.stderr)
        return last
    found = _manifests(root)
    if found:
        print(printable(f"{found[-1]}{f': the newest of {len(found)}' * (len(found) > 1)}"), file=sys.stderr)
    return found[-1] if found else None


def complete_manifest(incomplete: str) -> list[str]:
    """Return shell completions for a manifest.

    They are the manifests in manifests/, by path or by name, then folders.
    """
    return list(_complete(incomplete, os.path.isdir))


def complete_file(incomplete: str) -> list[str]:
    """Return shell completions for any file."""
    return list(_complete(incomplete, lambda path: True))


def _complete(incomplete: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    paths = sorted(map(str, _manifests(HERE)))
    found = [path for path in paths if path.startswith(incomplete)]
    found += [Path(path).stem for path in paths if incomplete and Path(path).stem.startswith(incomplete)]
    others = [path for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")) if wanted(path)]
    yield from found
    yield from (path for path in others if path not in found)


def _manifests(root: Path) -> list[Path]:
    """Return the manifests in manifests/, the newest last."""
    return sorted(manifests_of(root).glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))


def by_name(text: str, root: Path = HERE) -> Path | None:
    """Return the manifest with a file name, a corpus name, or a prefix of a key.

    If several manifests have the corpus name, the newest is returned and reported on stderr. Returns None if there is
    no such manifest. Raises UsageError if several keys have the prefix.
    """
    found = _manifests(root)
    for path in found:
        if text in (path.name, path.stem):
            return path
    if named := [path for path in found if path.stem.rpartition("-")[0] == text]:
        if len(named) > 1:
            print(printable(f"{named[-1]}: the newest of {len(named)} named {text}"), file=sys.stderr)
        return named[-1]
    keyed = [path for path in found if path.stem.rpartition("-")[2].startswith(text)]
    if len(text) < SHORTEST_KEY or not keyed:
        return None
    if len(keyed) > 1:
        names = " and ".join(path.stem for path in keyed[:LISTED])
        raise UsageError(
            "bad_command_line", f"{text}: is ambiguous: it matches {len(keyed)} keys ({names}); use a longer prefix"
        )
    return keyed[0]


def _check_kind(path: Path, root: Path) -> None:
    """Raise DataError if a file is a config, a shard, or a source.

    `inspect` uses the same rules.
    """
    from tasks.inspection.sources import corpora_of, kind_of

    kind = kind_of(path)
    if kind == "manifest":
        return
    advice = f"run: packcorpus inspect {path}"
    if kind == "config":
        from tasks.config import load_config

        made: list[Path] = []
        with suppress(PackError):
            made = corpora_of(load_config(path), manifests_of(root))
        advice = (
            f"its corpora: {', '.join(map(str, made))}"
            if made
            else f"{manifests_of(root)}/ has no corpus with its settings; make it with: packcorpus pack {path}"
        )
    elif kind == "shard" and (beside := path.parent / "manifest.json").is_file():
        advice = f"its manifest: {beside}"
    raise DataError("bad_manifest", f"{path}: is a {kind}, not a manifest; {advice}")


@dataclass(frozen=True)
class Overview:
    """A manifest and its corpus folder.

    `corpus` is None if the folder is missing. `waiting` is an estimate for the training split, which is empty without
    statistics of rows.
    """

    manifest: Path
    content: Manifest
    corpus: Path | None
    waiting: list[Waiting]


def overview(path: Path) -> Overview:
    """Read a manifest, and estimate how long ranks wait for each other in training.

    Raises DataError or InputMissing, naming the wrong or missing file.
    """
    from tasks.storage.corpus_folder import checked_folder
    from tasks.storage.manifest import load_manifest

    manifest = load_manifest(path)
    try:
        folder = checked_folder(manifest, path)
    except InputMissing as error:
        if error.reason != "corpus_missing":
            raise
        return Overview(path, manifest, None, [])
    return Overview(path, manifest, folder, waiting_of(manifest, folder))


def waiting_of(manifest: Manifest, folder: Path) -> list[Waiting]:
    """Estimate how long the ranks of a step wait for the slowest rank.

    The estimate is from the first rows of the training split. The result is empty if the corpus has no statistics of
    rows, or rows of several lengths or without padding. Raises DataError or InputMissing if rows.arrow is missing or
    damaged.
    """
    from tasks.packing.balance import MOST_ROWS, forecast
    from tasks.storage.row_statistics import statistics_of_split

    if len(manifest.row_lengths) > 1 or manifest.row_layout.padding != "row":
        return []
    found = statistics_of_split(manifest, folder, "train", MOST_ROWS)
    return [] if found is None else forecast(found.squares, found.trained, manifest.length_of_split("train"))


@dataclass(frozen=True)
class Listed:
    """A manifest in a listing.

    `finished` is the time when its run ended, in UTC, or None if it is not recorded.
    """

    path: Path
    name: str
    key: str
    sequence_length: int  # the longest
    rows: int
    packing_efficiency: float | None
    finished: str | None
    row_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """The code and the message of an error."""

    code: str
    message: str


@dataclass(frozen=True)
class Unreadable:
    """A manifest that cannot be read, and the error."""

    path: Path
    error: Problem


@dataclass(frozen=True)
class Listing:
    """All manifests of a project, sorted by name."""

    manifests: list[Listed | Unreadable]


def list_manifests(root: Path = HERE) -> Listing:
    """List the manifests in manifests/."""
    _fetched(None, root)
    return Listing([_listed(path) for path in sorted(manifests_of(root).glob("*.json"))])


def _listed(path: Path) -> Listed | Unreadable:
    try:
        found = overview(path)
    except PackError as error:
        return Unreadable(path, Problem(error.code, str(error)))
    manifest = found.content
    return Listed(
        path,
        manifest.name,
        manifest.key,
        manifest.sequence_length,
        manifest.packing_metadata.rows,
        manifest.packing_metadata.packing_efficiency,
        _finished(found.corpus),
        manifest.row_lengths,
    )


def _finished(folder: Path | None) -> str | None:
    from tasks.storage.files import read_json

    try:
        record = read_json(folder / "run.json") if folder else None
    except PackError:
        return None
    finished = record.get("finished") if isinstance(record, dict) else None
    return finished if isinstance(finished, str) else None
