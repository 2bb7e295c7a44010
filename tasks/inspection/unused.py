"""Find the files of data/ that no corpus of the root uses, and delete them.

    manifests/, data/corpora/ ─▶ names, digests of sources and tokenizers ─┐
    data/plans/KEY/plan.json ─▶ its corpus, and its token files ───────────┴─▶ used or unused, by kind ─▶ delete

Only files that a run can write again are deleted, and only under the names that a run gives them. Anything else stays.
A run holds a shared lock of the root until it ends. Files are deleted under an exclusive lock, after another look.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packcorpus.tasks.core.errors import Busy, InputMissing, PackError, StorageError, UsageError
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.files import TEMPORARY, alone, is_abandoned, read_json, read_receipt
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.stores.store import Facts, place_of_copy
from packcorpus.tasks.stores.urls import url_of

# What `clean` looks into, by folder of data/. The command's help has the same words.
CLEANED = {
    "tokens": "token files: without them, a run tokenizes again",
    "plans": "plans: the place of each conversation in the rows",
    "digests": "checksums of source files: without them, a run hashes them again",
    "engines": "proofs that the fast encoder gives the same tokens",
    "tokenizers": "tokenizers that runs have trained",
    "remote": "copies of remote source files",
    "unpacked": "parts of source files that a run has unpacked, until it reads them",
}
TEMPORARY_FILES = "of runs that were killed"
# Never cleaned.
KEPT = {
    "corpora": "corpora",
    "exports": "exports for other trainers",
    "adapters": "adapters and checkpoints of training runs",
    "merged": "merged models",
    "diagnoses": "records of diagnoses",
    "models": "the random model of --base-model toy",
    "sample": "the bundled sample",
}
UNKNOWN = "not written by packcorpus"

_KEY, _PLAN_KEY = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{12}")
_PLAN_FILE = re.compile(r"(plan|index|rows)\.arrow|rejects\.jsonl|shard-\d+\.json|plan\.json")
_COPY = re.compile("[0-9a-f]{32}")


@dataclass
class Files:
    """Some files, and their size on disk in bytes."""

    files: int = 0
    bytes: int = 0
    paths: list[Path] = field(default_factory=list, repr=False)

    def add(self, *paths: Path) -> None:
        """Add those of the paths that are files and no links."""
        for path in paths:
            with suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    facts = path.stat()
                    self.files += 1
                    self.bytes += min(facts.st_size, 512 * facts.st_blocks)  # a copy may have holes
                    self.paths.append(path)


@dataclass
class Kind:
    """The files of one folder of data/, or the temporary files of all."""

    name: str
    what: str
    used: Files = field(default_factory=Files)
    unused: Files = field(default_factory=Files)


@dataclass(frozen=True)
class Usage:
    """What is in data/, and what of it nothing uses.

    `gone` are the manifests whose corpus folder is missing, `unlinked` the corpus folders without a manifest, and
    `unreadable` the manifests that cannot be read. `is_busy` is whether a run is working in the root.
    """

    root: Path
    kinds: list[Kind]
    gone: list[Path]
    unlinked: list[Path]
    unreadable: list[Path]
    is_busy: bool

    @property
    def unused(self) -> Files:
        """Return all files that nothing uses."""
        found = Files()
        for kind in self.kinds:
            found.files += kind.unused.files
            found.bytes += kind.unused.bytes
            found.paths += kind.unused.paths
        return found


@dataclass
class _Uses:
    """What the corpora of a root use, and the manifests to name."""

    corpora: set[str] = field(default_factory=set)  # NAME-KEY12
    sources: set[str] = field(default_factory=set)  # paths or URLs, and SHA-256
    tokenizers: set[str] = field(default_factory=set)  # SHA-256
    engines: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    gone: list[Path] = field(default_factory=list)
    unlinked: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)


def find_unused(root: Path) -> Usage:
    """Find out which files below data/ no corpus of the root uses.

    Raises UsageError if the root is in a bucket, and InputMissing if it has no data/.
    """
    layout, data = Layout(root), root / "data"
    if url := url_of(root):
        cache = f"its scratch folder here, {root}, may be deleted when no run uses it"
        raise UsageError("url_not_supported", f"{url}: only local roots are cleaned; {cache}")
    if not data.is_dir():
        raise InputMissing("file_missing", f"{data}: no such folder; name the root of the corpora with --root")
    uses = _uses(layout)
    finders: dict[str, Callable[[Layout, _Uses, Kind], None]] = {
        "plans": _plans,  # names the token files
        "tokens": _tokens,
        "digests": _digests,  # names the copies that are read in blocks
        "engines": _engines,
        "tokenizers": _tokenizers,
        "remote": _remote,
        "unpacked": _unpacked,
    }
    kinds = {name: Kind(name, what) for name, what in CLEANED.items()}
    for name, find in finders.items():
        find(layout, uses, kinds[name])
    temporary = Kind("temporary files", TEMPORARY_FILES)
    for folder in layout.outputs():
        for path in _files_below(folder):
            if TEMPORARY.fullmatch(path.name):
                (temporary.unused if is_abandoned(path) else temporary.used).add(path)
    others = [Kind(path.name, KEPT.get(path.name, UNKNOWN)) for path in _entries(data) if path.name not in CLEANED]
    for kind in others:
        kind.used.add(*(_files_below(data / kind.name) if (data / kind.name).is_dir() else [data / kind.name]))
    every = [*kinds.values(), temporary, *others]
    shown = [kind for kind in every if kind.used.files or kind.unused.files]
    return Usage(root, shown, uses.gone, uses.unlinked, uses.unreadable, is_busy=_is_busy(layout))


def delete_unused(usage: Usage) -> Files:
    """Delete the unused files of `usage` that are still unused, and return them.

    Raises Busy if a run is working in the root, and StorageError if a file cannot be deleted.
    """
    deleted, wanted = Files(), set(usage.unused.paths)
    with alone(Layout(usage.root).runs_lock()) as is_alone:
        if not is_alone:
            raise Busy("busy", f"{usage.root}: a run is working here; wait until it ends, then run again")
        found = [path for path in find_unused(usage.root).unused.paths if path in wanted]
        # Receipts first: without its receipt, a file counts as missing.
        for path in sorted(found, key=lambda path: path.suffix != ".json"):
            size = Files()
            size.add(path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError("cannot_write", f"{path}: cannot be deleted: {error.strerror}") from error
            deleted.files += size.files
            deleted.bytes += size.bytes
        for folder in {path.parent for path in found} - set(Layout(usage.root).outputs()):
            if folder.parent.name in CLEANED:
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
    return deleted


def _is_busy(layout: Layout) -> bool:
    if not layout.runs_lock().is_file():
        return False
    with alone(layout.runs_lock()) as is_alone:
        return not is_alone


# -- what the corpora use ----------------------------------------------------------------------------------------------


def _uses(layout: Layout) -> _Uses:
    uses = _Uses()
    folders = [path for path in _entries(layout.root / "data" / "corpora") if path.is_dir()]
    for path in sorted(path for path in _entries(layout.root / "manifests") if path.suffix == ".json"):
        if _read(path, uses) and not (path.name.startswith(".") or _has_folder(path)):
            uses.gone.append(path)
    for folder in folders:
        published = layout.root / "manifests" / f"{folder.name}.json"
        uses.corpora.add(folder.name)
        if not published.is_file():
            uses.unlinked.append(folder)
            if (folder / "manifest.json").is_file():
                _read(folder / "manifest.json", uses)
        with suppress(PackError, LookupError, TypeError):
            uses.engines.add(str(read_json(folder / "run.json")["proof"]))
    return uses


def _read(path: Path, uses: _Uses) -> bool:
    """Add what a manifest uses; return whether it can be read."""
    uses.corpora.add(path.stem)
    try:
        manifest = load_manifest(path)
    except PackError:
        uses.unreadable.append(path)
        return False
    uses.corpora.add(_name_of(manifest.name, manifest.key))
    for source in manifest.sources:
        uses.sources |= {source.path, source.sha256}
    uses.tokenizers |= {manifest.tokenizer.sha256, str(manifest.tokenizer.path or "")}
    return True


def _has_folder(path: Path) -> bool:
    manifest: Manifest = load_manifest(path)
    try:
        corpus_folder(manifest, path)
    except InputMissing as error:
        return error.reason != "corpus_missing"
    except PackError:
        pass
    return True


def _name_of(name: str, key: str) -> str:
    return f"{name}-{key[:12]}"


# -- the kinds of files ------------------------------------------------------------------------------------------------


def _plans(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for folder in _entries(layout.root / "data" / "plans"):
        if not (_PLAN_KEY.fullmatch(folder.name) and folder.is_dir()):
            continue
        facts = _facts(folder / "plan.json")
        is_used = bool(facts) and _name_of(str(facts.get("name")), str(facts.get("corpus"))) in uses.corpora
        if is_used:
            uses.tokens |= set(map(str, facts.get("token_files", ())))
        _place(kind, is_used).add(*(path for path in _entries(folder) if _PLAN_FILE.fullmatch(path.name)))


def _tokens(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for folder in _entries(layout.root / "data" / "tokens"):
        for path in _entries(folder) if len(folder.name) == 2 else ():
            if path.suffix in (".arrow", ".json") and _KEY.fullmatch(path.stem) and path.stem[:2] == folder.name:
                _place(kind, path.stem in uses.tokens).add(path)


def _digests(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for path in _entries(layout.digests()):
        if not (path.suffix == ".json" and _KEY.fullmatch(path.stem)):
            continue
        entry = _facts(path)
        is_used = bool(uses.unreadable) or entry.get("sha256", entry.get("path")) in uses.sources
        _place(kind, is_used).add(path)
        if is_used:
            with suppress(LookupError, TypeError, ValueError):
                size, identity = entry["state"]
                facts = Facts(int(size), str(identity))
                uses.copies.add(place_of_copy(entry["path"], facts, layout.remote(), with_holes=True).parent.name)


def _engines(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for path in _entries(layout.root / "data" / "engines"):
        if path.suffix == ".json" and _KEY.fullmatch(path.stem):
            _place(kind, path.stem in uses.engines).add(path)


def _tokenizers(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for folder in _entries(layout.root / "data" / "tokenizers"):
        if _PLAN_KEY.fullmatch(folder.name) and folder.is_dir():
            digest = _facts(folder / "receipt.json").get("sha256")
            is_used = bool(uses.unreadable) or digest in uses.tokenizers
            _place(kind, is_used).add(folder / "tokenizer.model", folder / "receipt.json")


def _remote(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for folder in _entries(layout.remote()):
        if not (_COPY.fullmatch(folder.name) and folder.is_dir()):
            continue
        files = [path for path in _entries(folder) if not path.name.startswith(".")]
        digests = {_facts(path).get("sha256") for path in files if path.name.endswith(".receipt.json")}
        is_used = bool(uses.unreadable) or folder.name in uses.copies or bool(digests & uses.sources)
        _place(kind, is_used).add(*files)


def _unpacked(layout: Layout, uses: _Uses, kind: Kind) -> None:
    for path in _entries(layout.root / "data" / "unpacked"):
        if _KEY.fullmatch(path.name) and path.is_dir():
            kind.unused.add(*(copy for copy in _entries(path) if re.fullmatch(r"\d+-\d+", copy.name)))
        elif path.suffix == ".lock" and _KEY.fullmatch(path.stem):
            kind.unused.add(path)


def _place(kind: Kind, is_used: bool) -> Files:
    return kind.used if is_used else kind.unused


def _facts(receipt: Path) -> dict[str, Any]:
    """Return the values of a receipt, or nothing if there is none or it is damaged."""
    try:
        return read_receipt(receipt)
    except PackError:
        return {}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files_below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)
