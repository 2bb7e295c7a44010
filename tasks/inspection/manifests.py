"""Find the manifest that a user names, and list all manifests of a project.

nothing                              ─▶ the manifest of the latest run, or else the newest in manifests/
a file, or a folder with a manifest  ─▶ the manifest; for any other file, an error that names its kind
mix-0123456789ab, mix, 0123456789ab  ─▶ manifests/mix-0123456789ab.json, by file name, corpus name, or key
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.core.printable import counted, printable, suggest
from packcorpus.tasks.stores.urls import scratch_with, url_of

if TYPE_CHECKING:
    from packcorpus.tasks.packing.balance import Waiting
    from packcorpus.tasks.storage.manifest import Manifest

HERE = Path()
SHORTEST_KEY = 4  # characters of a key that are enough to name a manifest
LISTED = 5
SHORT = 4096  # bytes in which every manifest has its version


def manifests_of(root: Path) -> Path:
    return root / "manifests"


def find_manifest(path: Path | None, root: Path = HERE) -> Path:
    """Return the manifest that `path` names.

    `path` is a file, a folder, or the name or key of a manifest in the manifests/ of `root`. Raises InputMissing if
    there is no such manifest, UsageError if a key is ambiguous, and DataError if the file is of another kind.
    """
    return _checked_kind(find_file(path, root, "manifest"), root)


def find_file(path: Path | None, root: Path = HERE, wanted: str = "file") -> Path:
    """Return the file that `path` names, of any kind.

    Without a path, it is the manifest of the latest run. Raises InputMissing, whose message uses `wanted` for the kind
    of file, or UsageError.
    """
    path = _fetched(path, root)
    if path is None:
        if latest := _latest_manifest(root):
            return latest
        fix = "make one with: packcorpus pack CONFIG, or name one elsewhere"
        raise InputMissing("manifest_missing", f"{manifests_of(root)}/ has no manifests; {fix}")
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / "manifest.json"):
        return path / "manifest.json"
    if named := by_name(str(path), root):
        return named
    from packcorpus.tasks.storage.manifest import lost_hint

    if os.path.isdir(path):
        hint = lost_hint(path / "manifest.json")
        raise InputMissing("manifest_missing", f"{path}: is not a corpus folder (it has no manifest.json){hint}")
    if hint := lost_hint(path):
        raise InputMissing("manifest_missing", f"{path}: is missing{hint}")
    stems = [file.stem for file in _manifests(root)]
    names = [name for stem in stems for name in (stem, stem.rpartition("-")[0])]
    hint = suggest(path.name.removesuffix(".json"), names, LISTED)
    ending, reason = path.suffix.lower(), ""
    if wanted != "manifest":
        reason = "config_missing" if ending in (".yaml", ".yml") else "source_missing" * (ending not in ("", ".json"))
    if reason:
        raise InputMissing(reason, f"{path}: no such {wanted}{hint}")
    known = f"which has {', '.join(reversed(stems[-LISTED:]))}" if stems else "which has no manifests"
    message = f"{path}: no such {wanted}, and no such name or key in {manifests_of(root)}/{hint or f', {known}'}"
    raise InputMissing("manifest_missing", message)


def _fetched(path: Path | None, root: Path) -> Path | None:
    """Fetch a manifest, or all manifests of the root, if they are in a bucket."""
    if not (url_of(root) or (path and scratch_with(path))):
        return path
    from packcorpus.tasks.stores.mirror import mirror_of, remote_with

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
        return _checked_kind(path, root)
    # If a published manifest is missing, the corpus folder may have a copy.
    return path if os.path.isdir(path) else by_name(str(path), root) or path


def _latest_manifest(root: Path) -> Path | None:
    """Return the latest run's or else the newest manifest, and print it on stderr."""
    from packcorpus.tasks.storage.corpus_folder import last_manifest

    found, why = last_manifest(root), ": from the latest run"
    if not found and (manifests := _manifests(root)):
        found, why = manifests[-1], f": the newest of {len(manifests)}" * (len(manifests) > 1)
    if found:
        print(printable(f"{found}{why}"), file=sys.stderr)
    return found


def complete_manifest(incomplete: str) -> list[str]:
    """Return shell completions: manifests, by path or by name, then folders."""
    return _complete(incomplete, os.path.isdir)


def complete_file(incomplete: str) -> list[str]:
    """Return shell completions for any file."""
    return _complete(incomplete, lambda path: True)


def _complete(incomplete: str, is_wanted: Callable[[str], bool]) -> list[str]:
    paths = sorted(map(str, _manifests(HERE)))
    found = [path for path in paths if path.startswith(incomplete)]
    found += [Path(path).stem for path in paths if incomplete and Path(path).stem.startswith(incomplete)]
    others = [path for path in sorted(glob.glob(f"{glob.escape(incomplete)}*")) if is_wanted(path)]
    return found + [path for path in others if path not in found]


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


def _checked_kind(path: Path, root: Path) -> Path:
    """Return a path, or raise DataError if it is a config, a shard, or a source."""
    from packcorpus.tasks.inspection.sources import corpora_of, kind_of

    kind = kind_of(path)
    if kind == "manifest":
        return path
    if kind == "source" and path.suffix == ".json" and not _begins_with_json(path):
        from packcorpus.tasks.storage.manifest import read_values

        read_values(path)  # its error says what is wrong with the file
    advice = f"run: packcorpus inspect {path}"
    if kind == "config":
        from packcorpus.tasks.config import load_config

        made: list[Path] = []
        with suppress(PackError):
            made = corpora_of(load_config(path), manifests_of(root))
        none = f"{manifests_of(root)}/ has no corpus with its settings; make it with: packcorpus pack {path}"
        advice = f"its corpora: {', '.join(map(str, made))}" if made else none
    elif kind == "shard" and (beside := path.parent / "manifest.json").is_file():
        advice = f"its manifest: {beside}"
    raise DataError("bad_manifest", f"{path}: is a {kind}, not a manifest; {advice}")


def _begins_with_json(path: Path) -> bool:
    """Return whether a file is JSON or JSON Lines, or larger than a broken manifest."""
    import orjson

    if path.stat().st_size > SHORT:
        return True
    content = path.read_bytes()
    for text in (content, content.partition(b"\n")[0]):
        with suppress(orjson.JSONDecodeError):
            orjson.loads(text)
            return True
    return False


@dataclass(frozen=True)
class Overview:
    """A manifest and its corpus folder."""

    manifest: Path
    content: Manifest
    corpus: Path | None  # None if the folder is missing
    waiting: list[Waiting]  # an estimate for the training split; see `waiting_of`


def overview(path: Path) -> Overview:
    """Read a manifest, and estimate how long ranks wait for each other in training."""
    from packcorpus.tasks.storage.corpus_folder import checked_folder
    from packcorpus.tasks.storage.manifest import load_manifest

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
    from packcorpus.tasks.packing.balance import MOST_ROWS, forecast
    from packcorpus.tasks.storage.shards import statistics_of_split

    if len(manifest.row_lengths) > 1 or manifest.row_layout.padding != "row":
        return []
    found = statistics_of_split(manifest, folder, "train", MOST_ROWS)
    return [] if found is None else forecast(found.squares, found.trained, manifest.length_of_split("train"))


@dataclass(frozen=True)
class Listed:
    """A manifest in a listing."""

    path: Path
    name: str
    key: str
    sequence_length: int  # the longest
    rows: int
    packing_efficiency: float | None
    finished: str | None  # when its run ended, in UTC
    row_lengths: tuple[int, ...]
    is_gone: bool  # the corpus folder is missing
    differs: dict[str, Any]  # the settings in which it differs from other corpora of its name


@dataclass(frozen=True)
class Problem:
    """An error."""

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
    listed = [_listed(path) for path in sorted(manifests_of(root).glob("*.json"))]
    settings = {one.path: one.differs for one in listed if isinstance(one, Listed)}
    found: list[Listed | Unreadable] = []
    for one in listed:
        if isinstance(one, Listed):
            others = [settings[each.path] for each in listed if isinstance(each, Listed) and each.name == one.name]
            differs = {
                key: value for key, value in one.differs.items() if any(other.get(key) != value for other in others)
            }
            one = replace(one, differs=differs)
        found.append(one)
    return Listing(found)


def _identity(manifest: Manifest) -> dict[str, Any]:
    """Return what makes a corpus: its settings, and the digests of its files."""
    names = sorted({source.path for source in manifest.sources})
    digest = hashlib.sha256("".join(source.sha256 for source in manifest.sources).encode()).hexdigest()
    sources = f"{names[0] if len(names) == 1 else counted(len(names), 'file')} {digest[:8]}"
    tokenizer = f"{manifest.config.get('tokenizer') or 'trained here'} {manifest.tokenizer.sha256[:8]}"
    template = f"{manifest.template.name} {manifest.template.sha256[:8]}"
    # The length has a column of its own.
    settings = {key: value for key, value in manifest.config.items() if key not in ("sequence_length", "sources")}
    return settings | {"tokenizer": tokenizer, "template": template, "sources": sources}


def _listed(path: Path) -> Listed | Unreadable:
    from packcorpus.tasks.storage.files import read_json

    try:
        found = overview(path)
    except PackError as error:
        return Unreadable(path, Problem(error.code, str(error)))
    manifest, packing, record = found.content, found.content.packing_metadata, None
    if found.corpus:
        with suppress(PackError):
            record = read_json(found.corpus / "run.json")
    finished = record.get("finished") if isinstance(record, dict) else None
    return Listed(
        path, manifest.name, manifest.key, manifest.sequence_length, packing.rows, packing.packing_efficiency,
        finished if isinstance(finished, str) else None, manifest.row_lengths, found.corpus is None,
        _identity(manifest),
    )  # fmt: skip
