"""What a person names → the file that is meant.

nothing                              ─▶ the newest in manifests/
a file, or a folder with one         ─▶ it, where a manifest is wanted and it is none: what it is instead
mix-0123456789ab, mix, 0123456789ab  ─▶ manifests/mix-0123456789ab.json: as `list` shows it, by name, by key
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasks.core.errors import DataError, InputMissing, PackError, UsageError
from tasks.core.suggest import suggest

if TYPE_CHECKING:
    from tasks.storage.manifest import Manifest

MANIFESTS = Path("manifests")
SHORTEST_KEY = 4  # characters of a key that are taken for one
LISTED = 5


def find_manifest(path: Path | None) -> Path:
    """The manifest that is meant. Raises InputMissing where there is none, UsageError where several are, and DataError
    where a file is something else."""
    found = find_file(path, "")
    _check_kind(found)
    return found


def find_file(path: Path | None, wanted: str = "file") -> Path:
    """The same for a file of any kind. Raises InputMissing, which calls what is missing a `wanted`, or UsageError."""
    if path is None:
        newest = newest_manifest()
        if newest is None:
            raise InputMissing(
                "manifest_missing",
                f"{MANIFESTS}/ holds no manifest; make one with: luigi --module pipeline PackCorpus --config FILE, or "
                "name one that lies elsewhere",
            )
        return newest
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / "manifest.json"):
        return path / "manifest.json"
    if named := by_name(str(path)):
        return named
    if os.path.isdir(path):
        raise InputMissing("manifest_missing", f"{path}: is no corpus folder (it holds no manifest.json)")
    stems = [file.stem for file in _manifests()]
    names = {name: None for stem in stems for name in (stem, stem.rpartition("-")[0])}
    hint = suggest(path.name.removesuffix(".json"), names, LISTED)
    if not wanted:
        raise InputMissing("manifest_missing", f"{path}: no such manifest{hint}")
    told, ending = f"{path}: no such {wanted}{hint}", path.suffix.lower()
    if ending in (".yaml", ".yml"):
        raise InputMissing("config_missing", told)
    if ending not in ("", ".json"):
        raise InputMissing("source_missing", told)
    raise InputMissing("manifest_missing", told)


def find_damaged(path: Path | None) -> Path:
    """A manifest or corpus folder that may be damaged or half gone. Raises UsageError where none is named."""
    if path is None:
        newest = newest_manifest(tell=False)
        example = f"; the newest: packcorpus repair {newest}" if newest else ""
        raise UsageError("bad_command_line", f"repair changes files: name the manifest or corpus folder{example}")
    if os.path.isfile(path):
        _check_kind(path)
        return path
    # Of a published manifest that is gone its corpus may have the other copy.
    return path if os.path.isdir(path) else by_name(str(path)) or path


def newest_manifest(tell: bool = True) -> Path | None:
    """The newest in manifests/, which is told on standard error."""
    found = _manifests()
    if found and tell:
        print(f"{found[-1]}: the newest of {len(found)}" if len(found) > 1 else f"{found[-1]}", file=sys.stderr)
    return found[-1] if found else None


def complete_manifest(incomplete: str) -> list[str]:
    """What the shell offers for a manifest: those in manifests/, by path or by name; else folders."""
    return list(_complete(incomplete, os.path.isdir))


def complete_file(incomplete: str) -> list[str]:
    """The same with all files."""
    return list(_complete(incomplete, lambda path: True))


def _complete(incomplete: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    paths = sorted(map(str, _manifests()))
    found = [path for path in paths if path.startswith(incomplete)]
    found += [Path(path).stem for path in paths if incomplete and Path(path).stem.startswith(incomplete)]
    others = [path for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")) if wanted(path)]
    yield from found
    if not found or wanted("."):
        yield from (path for path in others if path not in found)


def _manifests() -> list[Path]:
    """Those in manifests/, the newest last."""
    return sorted(MANIFESTS.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))


def by_name(text: str) -> Path | None:
    """The manifest of this file name, corpus name (the newest of them, which is told) or begin of a key."""
    found = _manifests()
    for path in found:
        if text in (path.name, path.stem):
            return path
    if named := [path for path in found if path.stem.rpartition("-")[0] == text]:
        if len(named) > 1:
            print(f"{named[-1]}: the newest of {len(named)} named {text}", file=sys.stderr)
        return named[-1]
    keyed = [path for path in found if path.stem.rpartition("-")[2].startswith(text)]
    if len(text) < SHORTEST_KEY or not keyed:
        return None
    if len(keyed) > 1:
        names = " and ".join(path.stem for path in keyed[:LISTED])
        raise UsageError("bad_command_line", f"{text}: is the begin of {len(keyed)} keys: {names}; write more of it")
    return keyed[0]


def _check_kind(path: Path) -> None:
    """Raises DataError where a file is a config, a shard or a source, by the rules of `inspect`."""
    from tasks.inspection.kinds import kind_of
    from tasks.inspection.sources import corpora_of

    kind = kind_of(path)
    if kind == "manifest":
        return
    advice = f"look at it with: packcorpus inspect {path}"
    if kind == "config":
        from tasks.config import load_config

        made: list[Path] = []
        with suppress(PackError):
            made = corpora_of(load_config(path), MANIFESTS)
        advice = (
            f"its corpora: {', '.join(map(str, made))}"
            if made
            else f"no corpus in {MANIFESTS}/ was made with its settings; make it with: "
            f"luigi --module pipeline PackCorpus --config {path}"
        )
    elif kind == "shard" and (beside := path.parent / "manifest.json").is_file():
        advice = f"its manifest: {beside}"
    raise DataError("bad_manifest", f"{path}: is a {kind}, not a manifest; {advice}")


class Listed(NamedTuple):
    """One manifest, or the `problem` with it. `finished`: when its run ended, in UTC; "" where no record says so."""

    path: Path
    manifest: Manifest | None
    finished: str
    problem: PackError | None


def find_manifests(folder: Path) -> list[Listed]:
    """Every manifest in `folder`, by name; one that cannot be read is listed with its problem."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Listed:
    from tasks.storage.manifest import load_manifest

    try:
        manifest = load_manifest(path)
    except PackError as error:
        return Listed(path, None, "", error)
    return Listed(path, manifest, _finished(manifest, path), None)


def _finished(manifest: Manifest, path: Path) -> str:
    from tasks.storage.corpus_folder import corpus_folder
    from tasks.storage.files import read_json

    try:
        record = read_json(corpus_folder(manifest, path) / "run.json")
    except PackError:
        return ""
    finished = record.get("finished") if isinstance(record, dict) else None
    return finished if isinstance(finished, str) else ""
