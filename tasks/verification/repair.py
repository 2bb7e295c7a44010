"""A damaged corpus → the same corpus, whole: each file that is not as recorded is put back, and no other is touched.

    manifest ─ the copy that nobody edited speaks for both
    listed file, of another SHA-256 ─▶ the first of these that has its bytes ─digest checked─▶ renamed into its place
        a copy of it    what a link leads to, other corpora, trained tokenizers, the tokenizer that the config names
        the manifest    the dataset card, which follows from it
        planned         the plan and the token files that the corpus was made from, wherever the sources are by now
        made again      from the sources with the token files that are whole, else with nothing that was kept

Nothing is published whose SHA-256 is not the recorded one, and nothing is taken away before what replaces it is there.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from tasks.config import path_in
from tasks.core.errors import Busy, DataError, InputMissing, PackError
from tasks.corpus.dataset_card import CARD, dataset_card
from tasks.corpus.publish import copies_beside, write_planned_shard
from tasks.encoders.corpus_tokenizer import open_tokenizer
from tasks.encoders.tokenizer_files import find_tokenizer
from tasks.recipe import Recipe
from tasks.stages import Plan, has_artifact, run_all
from tasks.storage.corpus_folder import check_listed, corpus_folder, foreign_files, refuse
from tasks.storage.files import CHUNK, atomic_file, lock, read_json, sha256_of, write_bytes
from tasks.storage.manifest import FileFacts, Manifest, Shard, load_manifest
from tasks.storage.paths import Layout
from tasks.verification.rebuild import config_for, recipe_for

Content = Path | bytes
Listed = Shard | FileFacts


class Mended(NamedTuple):
    """A file that was put back, what was wrong with it, and where its bytes came from."""

    path: Path
    why: str
    source: str


def repair(path: Path, config_file: Path | None = None) -> Iterator[Mended]:
    """Mend the corpus of a manifest (the file, or the corpus folder), and say of each file that it is mended.

    Raises Busy while a run makes this corpus, and DataError, InputMissing or UsageError with the reason where a file
    cannot be had as it was. What was mended until then stays so; all else is as it was found.
    """
    given = _find_manifest(path)
    manifest, folder = given.manifest, given.folder
    # Where token files and plans lie: the project that the corpus is in or, for one that was moved, the current folder.
    home = folder.resolve()
    root = home.parents[2] if home.parts[-3:] == Path(manifest.corpus).parts else Path.cwd()
    layout = Layout(root)
    if (root / "data").is_dir() and not lock(layout.lock(manifest.name, manifest.key)):
        raise Busy("busy", f"{folder}: a run is making this corpus; wait for it, then repair")
    damaged = [(file, why) for file in _tokenizer_first(manifest) if (why := _damage(folder, file))]
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        places = _Places(manifest, folder, layout, config_file, Path(scratch))
        for file, why in damaged:
            yield Mended(folder / file.path, why, _mend(folder / file.path, file, places))
    for copy, why in given.wrong.items():
        write_bytes(copy, given.content)
        yield Mended(copy, why, "the other copy")
    refuse(foreign_files(manifest, folder), folder)


# -- what is damaged -------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    manifest: Manifest
    folder: Path
    content: bytes
    wrong: dict[Path, str]  # copies of the manifest, and what is wrong with them


def _find_manifest(path: Path) -> _Given:
    """The copy that nobody edited, and those that are to be made like it."""
    own = path / "manifest.json" if path.is_dir() else path
    whole: dict[Path, Manifest] = {}
    wrong: dict[Path, str] = {}
    copies = _copies(own)
    folder = next(copy.parent for copy in copies if copy.name == "manifest.json")
    for copy in copies:
        try:
            whole[copy] = load_manifest(copy)
            if copy.is_symlink() and copy.parent == folder:
                wrong[copy] = "is a link"
        except PackError as error:
            wrong[copy] = _said(error, copy)
    if not whole:
        raise DataError("bad_manifest", f"{own}: no copy of the manifest is whole ({wrong[own]}); run PackCorpus again")
    first = next(iter(whole))
    content = first.read_bytes()
    for copy in whole:
        if copy.read_bytes() != content:
            raise DataError(
                "manifests_differ",
                f"{first} and {copy} differ, and each is as it was signed; keep the right one, then repair",
            )
    return _Given(whole[first], folder, content, wrong)


def _copies(own: Path) -> list[Path]:
    """The manifest that was named and its other copy, where there is to be one."""
    home = own.absolute().parent
    if own.name == "manifest.json":
        in_project = home.parts[-3:-1] == ("data", "corpora")
        return [own, *[home.parents[2] / "manifests" / f"{home.name}.json"] * in_project]
    corpus = home.parent / "data" / "corpora" / own.stem
    if home.name == "manifests" and corpus.is_dir():
        return [own, corpus / "manifest.json"]
    return [own, corpus_folder(load_manifest(own), own) / "manifest.json"]


def _tokenizer_first(manifest: Manifest) -> list[Listed]:
    """Shards are written with the corpus's own tokenizer."""
    return sorted(manifest.listed(), key=lambda file: (not file.path.startswith("tokenizer/"), file.path))


def _damage(folder: Path, file: Listed) -> str:
    """What is wrong with a listed file, or nothing."""
    try:
        check_listed(folder, file)
    except PackError as error:
        return _said(error, folder / file.path)
    return ""


def _said(error: PackError, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ").partition("; mend it with")[0]


# -- where its bytes are to be had -----------------------------------------------------------------------------------


class _Places:
    """Where the content of a listed file may be had, the cheapest place first. A place that has none gives None."""

    def __init__(self, manifest: Manifest, folder: Path, layout: Layout, config_file: Path | None, scratch: Path):
        self.manifest, self.folder, self.layout = manifest, folder, layout
        self.config_file, self.scratch = config_file, scratch
        self.in_order: dict[str, Callable[[Listed], Content | None]] = {
            "a copy of it": self._lying_about,
            "the plan and its token files": self._planned,
            "the sources": lambda file: self._content(self._made_again, file),
            "the sources, with nothing that was kept": lambda file: self._content(self._made_afresh, file),
        }
        self.of_card: dict[str, Callable[[Listed], Content | None]] = {
            "a copy of it": self._lying_about,
            "the manifest": lambda _: dataset_card(manifest),
        }
        self._shards = [shard.path for split in manifest.splits.values() for shard in split.shards]
        self._whole: dict[Path, bool] = {}

    def _lying_about(self, file: Listed) -> Content | None:
        data, name = self.layout.root / "data", Path(file.path)
        candidates = [self.folder / name, *sorted(data.glob(f"corpora/*/{escape(file.path)}"))]
        candidates += sorted(data.glob(f"tokenizers/*/{escape(name.name)}"))
        if name.parts[0] in ("tokenizer", "template.jinja"):
            candidates += self._named(name.parts[0])
        for candidate in candidates:
            if candidate.is_file() and candidate.stat().st_size == file.bytes and sha256_of(candidate) == file.sha256:
                return candidate
        return None

    def _named(self, name: str) -> list[Path]:
        """The files of the tokenizer or template that the config names, of whatever content."""
        try:
            config, folder = config_for(self.manifest, self.folder, self.config_file)
            if name == "template.jinja":
                return [path_in(folder, config.template)]
            return [*find_tokenizer(path_in(folder, config.tokenizer)).files] if config.tokenizer else []
        except PackError:
            return []

    def _planned(self, file: Listed) -> Content | None:
        if self._plan is None:
            return None
        plan_folder, keys = self._plan
        if file.path not in self._shards:
            return plan_folder / file.path if file.path in ("index.arrow", "rejects.jsonl") else None
        return self._shard(file, plan_folder, self.layout, keys)

    @cached_property
    def _plan(self) -> tuple[Path, list[str]] | None:
        """A plan of this corpus that is whole, and the keys of its token files."""
        sources = [source.path for source in self.manifest.sources]
        for receipt in sorted(self.layout.plan_folder("*").parent.glob("*/plan.json")):
            try:
                plan = read_json(receipt)
                named = (plan["name"], plan["corpus"], [source["path"] for source in plan["sources"]])
                if named == (self.manifest.name, self.manifest.key, sources) and all(
                    sha256_of(receipt.parent / name) == digest for name, digest in plan["sha256"].items()
                ):
                    return receipt.parent, plan["token_files"]
            except (PackError, OSError, LookupError, TypeError, AttributeError):
                continue
        return None

    @cached_property
    def _recipe(self) -> Recipe:
        return recipe_for(self.manifest, self.folder, self.layout.root, self.config_file)

    @cached_property
    def _made_again(self) -> Recipe:
        run_all(Plan(self._recipe), check_content=True)
        self._whole.clear()
        return self._recipe

    @cached_property
    def _made_afresh(self) -> Recipe:
        recipe = replace(self._recipe, layout=Layout(self.scratch))
        run_all(Plan(recipe), check_content=True)
        return recipe

    def _content(self, recipe: Recipe, file: Listed) -> Content:
        if file.path not in self._shards:
            return copies_beside(recipe)[file.path]
        return self._shard(file, recipe.plan_folder, recipe.layout, [recipe.tokens_key(part) for part in recipe.parts])

    def _shard(self, file: Listed, plan_folder: Path, layout: Layout, keys: list[str]) -> Path:
        """A shard, written to the scratch folder from the token files that are whole."""
        path = self.scratch / "shard.arrow"
        for key in keys:
            if layout.token_file(key) not in self._whole:
                file_and_receipt = layout.token_file(key), layout.token_receipt(key)
                self._whole[file_and_receipt[0]] = has_artifact(*file_and_receipt, checksum="xxh3")
        tokens = [layout.token_file(key) for key in keys]
        tokens = [token_file if self._whole[token_file] else self.scratch / token_file.name for token_file in tokens]
        encoder = open_tokenizer(self.manifest, self.folder) if self.manifest.packing_metadata.enabled else None
        length, key = self.manifest.sequence_length, self.manifest.key
        write_planned_shard(path, self._shards.index(file.path), plan_folder, tokens, encoder, length, key)
        return path


def _mend(where: Path, file: Listed, places: _Places) -> str:
    """Put a file back; where its bytes came from. Raises the last reason why that cannot be."""
    reason: PackError = InputMissing("origin_missing", "nothing has its bytes")
    for name, find in (places.of_card if file.path == CARD else places.in_order).items():
        try:
            content = find(file)
            if content is None:
                continue
            if _publish(content, where, places.folder, file):
                return name
            reason = DataError("cannot_mend", f"{name} give another SHA-256 than is recorded")
        except PackError as error:
            reason = error
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            # A token file or plan that is damaged, too.
            reason = DataError("cannot_mend", f"{name} cannot be used: {error}")
    raise type(reason)(reason.reason, f"{where}: cannot be put back as it was: {reason}; it was left as it is")


def _publish(content: Content, where: Path, folder: Path, file: Listed) -> bool:
    """Write the content to its place, if it is what the manifest records."""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
            return False
        for above in where.relative_to(folder).parents[:-1]:
            if (folder / above).is_symlink():
                (folder / above).unlink()  # the link alone: what it leads to is not ours
        if where.is_dir() and not where.is_symlink():
            raise DataError("cannot_mend", f"{where}: is a folder; move it elsewhere")
        stream.seek(0)
        with atomic_file(where) as out:
            while chunk := stream.read(CHUNK):
                out.write(chunk)
            if out.digest() != file.sha256:
                raise DataError("cannot_mend", f"{where}: what it is made from changed meanwhile; repair again")
    return True
