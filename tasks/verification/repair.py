"""Restore the damaged or missing files of a corpus to their recorded SHA-256.

    damaged copy of the manifest ─▶ replaced by the unedited copy
    damaged file ─▶ the first of these origins that has its bytes ─checked─▶ renamed into place
        a copy          the target of a link, other corpora, trained tokenizers, the tokenizer or template of the config
        the manifest    for the dataset card, which is generated from the manifest
        the plan        and the token files that the corpus was made from, even if the sources are gone
        the sources     with the token files that are complete, or else from scratch

No other file is changed. A file is replaced only by content with the recorded SHA-256, and only when that content is
ready.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path, PurePosixPath

import pyarrow as pa

from packcorpus.tasks.config import path_in
from packcorpus.tasks.core.errors import Busy, DataError, InputMissing, PackError
from packcorpus.tasks.corpus.publish import CARD, COPIED, dataset_card, files_beside, write_planned_shard
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, locate_tokenizer, open_tokenizer
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.corpus_folder import check_listed, corpus_folder, foreign_files, published_copy, raise_all
from packcorpus.tasks.storage.facts import FileFacts, Shard
from packcorpus.tasks.storage.files import (
    CHUNK,
    acquire_lock,
    atomic_file,
    has_artifact,
    hold_shared,
    sha256_of,
    write_bytes,
)
from packcorpus.tasks.storage.layout import TEMPLATE, TOOL_TEMPLATE, Layout
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, without_repair_hint
from packcorpus.tasks.verification.check_samples import find_plan, layout_of
from packcorpus.tasks.verification.rebuild import (
    commit_of_tokenizer,
    config_for,
    has_other_texts,
    other_texts,
    recipe_for,
)
from packcorpus.tasks.work import Plan, run_all

Content = Path | bytes
Listed = Shard | FileFacts


@dataclass(frozen=True)
class RestoredFile:
    """A restored file, the damage that it had, and the origin of its bytes."""

    path: Path
    why: str
    source: str


def repair(path: Path, config_file: Path | None = None) -> Iterator[RestoredFile]:
    """Restore the damaged files of a corpus and yield each restored file.

    `path` is the manifest or the corpus folder. Raises Busy while a run makes this corpus. Raises DataError,
    InputMissing, or UsageError with the reason if a file cannot be restored. Files that were restored before the error
    stay restored; all other files are unchanged.
    """
    unedited, folder, wrong_copies = _find_manifest(path)
    content = unedited.read_bytes()
    manifest = load_manifest(unedited)
    # Token files and plans are in the project of the corpus, or in the working directory if the corpus was moved.
    layout = layout_of(manifest, folder)
    if (layout.root / "data").is_dir():
        hold_shared(layout.runs_lock())
        if not acquire_lock(layout.lock(manifest.name, manifest.key)):
            raise Busy("busy", f"{folder}: a run is packing this corpus; wait for it, then run repair again")
    # Shards are written with the corpus's own copy of the tokenizer, so it is restored first.
    listed = sorted(manifest.listed(), key=lambda file: (not file.path.startswith("tokenizer/"), file.path))
    damaged = [(file, damage) for file in listed if (damage := _damage(folder, file))]
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        origins = _Origins(manifest, folder, layout, config_file, Path(scratch))
        for where, file in ((folder / file.path, file) for file, _ in damaged):
            if where.is_file() and where.stat().st_size != file.bytes and sha256_of(where) == file.sha256:
                _check_size(where, where.stat().st_size, file)
        for file, damage in damaged:
            yield RestoredFile(folder / file.path, damage, _restore(folder / file.path, file, origins))
    for copy, damage in wrong_copies.items():
        _refuse_folder(copy)
        write_bytes(copy, content)
        yield RestoredFile(copy, damage, "the other copy")
    raise_all(foreign_files(manifest, folder), folder)


# -- damage ----------------------------------------------------------------------------------------------------------


def _find_manifest(path: Path) -> tuple[Path, Path, dict[Path, str]]:
    """Return the unedited manifest, the corpus folder, and the damage of copies."""
    named = path / "manifest.json" if path.is_dir() and path.suffix != ".json" else path
    home = named.absolute().parent
    corpus = home.parent / "data" / "corpora" / named.stem
    manifest = None
    with suppress(PackError):
        manifest = load_manifest(named)
    if named.name == "manifest.json":
        folder = named.parent
    elif home.name == "manifests" and corpus.is_dir():
        folder = corpus
    else:
        folder = corpus_folder(manifest or load_manifest(named), named)
    copies = [copy for copy in (named, folder / "manifest.json", published_copy(folder, manifest)) if copy]
    whole, wrong = dict[Path, Manifest](), dict[Path, str]()
    for copy in [*{copy.parent.resolve() / copy.name: copy for copy in reversed(copies)}.values()][::-1]:
        try:
            whole[copy] = load_manifest(copy)
            if copy.is_symlink() and copy.parent == folder:
                wrong[copy] = "is a link"
        except PackError as error:
            wrong[copy] = _message(error, copy)
    names = {copy: PurePosixPath(manifest.corpus).name for copy, manifest in whole.items()}
    if folder.resolve().name in names.values():
        for copy in (copy for copy, name in names.items() if name != folder.resolve().name):
            wrong[copy] = f"is the manifest of another corpus, {whole.pop(copy).corpus}"
    if not whole:
        raise DataError(
            "bad_manifest", f"{named}: every copy of the manifest is damaged ({wrong[named]}); run PackCorpus again"
        )
    first, *others = whole
    for copy in others:
        if copy.read_bytes() != first.read_bytes():
            what = "differ, and neither was edited; delete the wrong copy, then run repair"
            raise DataError("manifests_differ", f"{first} and {copy} {what}")
    return first, folder, wrong


def _damage(folder: Path, file: Listed) -> str:
    try:
        check_listed(folder, file)
    except PackError as error:
        return _message(error, folder / file.path)
    return ""


def _message(error: PackError, path: Path) -> str:
    return without_repair_hint(error).removeprefix(f"{path}: ")


# -- origins ---------------------------------------------------------------------------------------------------------


class _Origins:
    """Origins of the content of a listed file, cheapest first."""

    def __init__(self, manifest: Manifest, folder: Path, layout: Layout, config_file: Path | None, scratch: Path):
        self.manifest, self.folder, self.layout = manifest, folder, layout
        self.config_file, self.scratch = config_file, scratch
        self._shards = [shard.path for split in manifest.splits.values() for shard in split.shards]
        self._complete: dict[Path, bool] = {}

    def of(self, file: Listed) -> dict[str, Callable[[Listed], Content | None]]:
        if file.path == CARD:
            return {"a copy": self._copied, "the manifest": lambda _: dataset_card(self.manifest)}
        return {
            "a copy": self._copied,
            "the plan and its token files": self._planned,
            "the sources": lambda file: self._content(self._rebuilt, file),
            "the sources (rebuilt from scratch)": lambda file: self._content(self._rebuilt_from_nothing, file),
        }

    def _copied(self, file: Listed) -> Content | None:
        data, name = self.layout.root / "data", Path(file.path)
        candidates = [self.folder / name, *sorted(data.glob(f"corpora/*/{escape(file.path)}"))]
        candidates += sorted(data.glob(f"tokenizers/*/{escape(name.name)}"))
        if name.parts[0] in ("tokenizer", TEMPLATE, TOOL_TEMPLATE):
            with suppress(PackError):  # the tokenizer or template that the config names
                config, folder = config_for(self.manifest, self.folder, self.config_file)
                commit, found = commit_of_tokenizer(self.manifest, config), None
                if config.tokenizer:
                    place, _ = locate_tokenizer(config.tokenizer, path_in(folder, config.tokenizer), commit)
                    found = find_tokenizer(place, config.tokenizer_as)
                candidates += [] if name.parts[0] == "tokenizer" or not found else [path_in(folder, config.template)]
                candidates += [*found.files, *found.templates] if found else []
        for candidate in candidates:
            if candidate.is_file() and candidate.stat().st_size == file.bytes and sha256_of(candidate) == file.sha256:
                return candidate
        return None

    def _planned(self, file: Listed) -> Content | None:
        if self._plan is None:
            return None
        plan_folder, keys = self._plan
        if file.path not in self._shards:
            return plan_folder / file.path if file.path in COPIED else None
        return self._shard(file, plan_folder, self.layout, keys)

    @cached_property
    def _plan(self) -> tuple[Path, list[str]] | None:
        return find_plan(self.manifest, self.layout)

    @cached_property
    def _recipe(self) -> Recipe:
        return recipe_for(self.manifest, self.folder, self.layout.root, self.config_file)

    @cached_property
    def _rebuilt(self) -> Recipe:
        run_all(Plan(self._recipe), check_content=True)
        self._complete.clear()
        return self._recipe

    @cached_property
    def _rebuilt_from_nothing(self) -> Recipe:
        recipe = replace(self._recipe, layout=Layout(self.scratch))
        run_all(Plan(recipe), check_content=True)
        return recipe

    def _content(self, recipe: Recipe, file: Listed) -> Content:
        if file.path not in self._shards:
            return files_beside(recipe)[file.path]
        return self._shard(file, recipe.plan_folder, recipe.layout, recipe.token_keys)

    def _shard(self, file: Listed, plan_folder: Path, layout: Layout, keys: list[str]) -> Path:
        """Write a shard to the scratch folder, using only complete token files."""
        path, manifest, tokens = self.scratch / "shard.arrow", self.manifest, list[Path]()
        for key in keys:
            token_file = layout.token_file(key)
            if token_file not in self._complete:
                self._complete[token_file] = has_artifact(token_file, layout.token_receipt(key), checksum="xxh3")
            tokens.append(token_file if self._complete[token_file] else self.scratch / token_file.name)
        special = None
        if manifest.packing_metadata.enabled:
            encoder = open_tokenizer(manifest, self.folder)
            special = encoder.eos_id, encoder.pad_id
        number, length = self._shards.index(file.path), manifest.length_of(file.path)
        write_planned_shard(path, number, plan_folder, tokens, special, manifest.row_layout, length, manifest.key)
        return path


def _refuse_folder(where: Path) -> None:
    if where.is_dir() and not where.is_symlink():
        raise DataError("cannot_mend", f"{where}: is a folder; move it elsewhere")


class _WrongManifest(DataError):
    """The recorded size and SHA-256 contradict each other, so no origin can match."""


def _check_size(where: Path, size: int, file: Listed) -> None:
    """Raise _WrongManifest unless the size of the right content is as recorded."""
    if size != file.bytes:
        raise _WrongManifest(
            "cannot_mend",
            f"{where}: the content with the recorded SHA-256 has {size:,} bytes, but {file.bytes:,} are recorded: the "
            "manifest was edited and its digest recomputed; the file was not changed; pack the corpus again",
        )


def _restore(where: Path, file: Listed, origins: _Origins) -> str:
    """Restore a file and return its origin, or raise the error of the last origin."""
    reason: PackError = InputMissing("origin_missing", "no copy or source of it exists")
    for name, find in origins.of(file).items():
        try:
            content = find(file)
            if content is None:
                continue
            if _publish(content, where, origins.folder, file):
                return name
            reason = DataError("cannot_mend", f"the content from {name} does not have the recorded SHA-256")
            if has_other_texts(origins.manifest, file.path):
                reason = DataError("origin_changed", f"it was {other_texts(origins.manifest)}")
        except _WrongManifest:
            raise
        except PackError as error:
            reason = error
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            # A token file or plan may be damaged, too.
            reason = DataError("cannot_mend", f"{name} cannot be used: {error}")
    lines = f"{where}: cannot be restored: {reason}; the file was not changed"
    raise type(reason)(reason.reason, lines.split("\n"))


def _publish(content: Content, where: Path, folder: Path, file: Listed) -> bool:
    """Write content if it has the recorded SHA-256, and return whether it has."""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
            return False
        _check_size(where, stream.seek(0, io.SEEK_END), file)
        for above in where.relative_to(folder).parents[:-1]:
            if (folder / above).is_symlink():
                (folder / above).unlink()  # only the link: its target is not part of the corpus
        _refuse_folder(where)
        stream.seek(0)
        with atomic_file(where) as out:
            while chunk := stream.read(CHUNK):
                out.write(chunk)
            if out.digest() != file.sha256:
                raise DataError("cannot_mend", f"{where}: its source changed while it was copied; run repair again")
    return True
