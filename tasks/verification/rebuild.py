"""Rebuild a corpus from the sources and settings that its manifest records.

manifest + run.json (where the sources are), or a config ─recipe_for─▶ Recipe with the same key, or an error
Recipe ─run_all─▶ token files, plan, shards, manifest ─rebuild─▶ compared with the corpus byte for byte
"""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from packcorpus.tasks.config import Config, check_recorded, config_of, load_config
from packcorpus.tasks.core.errors import DataError, InputMissing, NotReproducible, PackError, UsageError
from packcorpus.tasks.corpus.publish import CARD
from packcorpus.tasks.recipe import Recipe, recipe_of
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.files import read_json
from packcorpus.tasks.storage.keys import VERSIONS, with_current_names
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import ROWS, has_statistics
from packcorpus.tasks.work import Publish, run_all

# Files whose wording may change between versions. keys.VERSIONS["texts"] is the version of the wording.
TEXTS = ("rejects.jsonl", CARD)


def recipe_for(manifest: Manifest, corpus: Path, root: Path, config_file: Path | None) -> Recipe:
    """Return the recipe of an existing corpus, with its artifacts below `root`.

    Raises UsageError if the folder of the config is not recorded. Raises InputMissing or DataError, naming the source
    or setting, if a source is missing or the key differs from the manifest.
    """
    config, folder = config_for(manifest, corpus, config_file)
    config._is_recorded = True
    recipe = recipe_of(config, folder, root, revisions_of(manifest), commit=commit_of_tokenizer(manifest, config))
    if difference := next(_differences(manifest, recipe), ""):
        raise DataError("origin_changed", f"{manifest.corpus} cannot be rebuilt: {difference}")
    return recipe


def revisions_of(manifest: Manifest) -> dict[int, str]:
    """Return the recorded commits of datasets on the Hub, by their index in `sources`."""
    return {source.entry: source.revision for source in manifest.sources if source.revision}


def commit_of_tokenizer(manifest: Manifest, config: Config) -> str:
    """Return the recorded commit of the tokenizer that a config names, or ""."""
    named = config.model_dump(include={"tokenizer"})["tokenizer"]
    return (manifest.tokenizer.revision or "") if named == manifest.config["tokenizer"] else ""


def config_for(manifest: Manifest, corpus: Path, config_file: Path | None) -> tuple[Config, Path]:
    """Return the config of a corpus and the folder that its paths are relative to.

    The config is read from `config_file` or, without one, from the manifest and run.json. Raises UsageError if the
    corpus depends on a removed setting, or if run.json does not record the folder. Raises InputMissing if the folder
    does not exist.
    """
    check_recorded(manifest.config, corpus / "manifest.json")
    if config_file is not None:
        return load_config(config_file, ",".join(map(str, manifest.row_lengths))), config_file.parent
    record = corpus / "run.json"
    try:
        made_from = read_json(record)["made_from"]
        folder, part_size = Path(made_from["folder"]), made_from["part_size"]
        config = config_of(manifest.config, part_size)
    except (PackError, LookupError, TypeError, ValueError):
        raise UsageError(
            "config_unknown", f"{record}: does not record the folder of the config; name the config with --config FILE"
        ) from None
    if not folder.is_dir():
        raise InputMissing(
            "config_folder_missing",
            f"{folder}: the folder of the config does not exist; name the config with --config FILE",
        )
    return config, folder


def _differences(manifest: Manifest, recipe: Recipe) -> Iterator[str]:
    """Yield the differences between the recipe and the manifest, sources first."""
    now = {file.name: file.sha256 for file in recipe.files}
    then = {source.path: source.sha256 for source in manifest.sources}
    for name in then | now:
        if name not in now:
            yield f"the source {name} does not exist anymore"
        elif name not in then:
            yield f"{recipe.folder / name} is a new source"
        elif now[name] != then[name]:
            yield f"{recipe.folder / name} has changed since (its SHA-256 was {then[name][:12]}…)"
    files = {file.path: file.sha256 for file in manifest.evaluation}
    for file in recipe.evaluation:
        if files.get(file.name) != file.sha256:
            yield f"the evaluation set {recipe.folder / file.name} has changed since"
    settings = recipe.config.settings()
    for name in manifest.config | settings:
        if settings.get(name) != manifest.config.get(name):
            yield f"{name} was {manifest.config.get(name)}, but the config has {settings.get(name)}"
    if recipe.tokenizer_digest != manifest.tokenizer.digest:
        yield "the tokenizer has changed"
    if recipe.template_sha256 != manifest.template.sha256:
        yield f"the template {manifest.template.name} has changed"
    if recipe.corpus_key != manifest.key:
        yield "the order or the format of the sources, or the version of packcorpus, has changed"


def rebuild(path: Path, config_file: Path | None = None) -> str:
    """Rebuild a corpus in a temporary directory, and compare every byte.

    Raises NotReproducible, naming the first file that differs, or the source or setting that changed. Also raises the
    errors of `config_for`.
    """
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    config_for(manifest, folder, config_file)  # a config that cannot be found does not mean "not reproducible"
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as name:
        try:
            recipe = recipe_for(manifest, folder, Path(name), config_file)
        except (DataError, InputMissing) as error:
            raise NotReproducible("not_reproducible", str(error)) from None
        run_all(Publish(recipe))
        _compare(manifest, folder, recipe.corpus_folder)
    listed = manifest.listed()
    return f"{len(listed) + 1} files, {sum(file.bytes for file in listed):,} bytes: identical"


def _compare(manifest: Manifest, folder: Path, rebuilt: Path) -> None:
    """Raise NotReproducible if a file of the corpus differs from the rebuilt file."""

    def same(name: str) -> bool:
        return (rebuilt / name).is_file() and filecmp.cmp(rebuilt / name, folder / name, shallow=False)

    differ = [file.path for file in manifest.listed() if not same(file.path)]
    if others := [name for name in differ if not has_other_texts(manifest, name)]:
        raise NotReproducible("not_reproducible", f"{folder / others[0]}: differs after rebuilding")
    if same("manifest.json"):
        return
    then, now = (load_manifest(place / "manifest.json").model_dump() for place in (folder, rebuilt))
    if not has_statistics(manifest):
        now["files"] = [file for file in now["files"] if file["path"] != ROWS]
        for split in now["splits"].values():
            split.pop("statistics", None)
    config = read_json(folder / "manifest.json")["config"]
    is_earlier = not has_statistics(manifest) or with_current_names(config) != config
    if manifest.ledger.conversations.duplicates is None:  # earlier versions did not count these
        is_earlier = True
        del now["ledger"]["conversations"]["duplicates"]
        now["ledger"].pop("reasoning", None)
        now["noticed"].pop("unknown_markers", None)
    if is_earlier:
        now["digest"] = then["digest"]
        if then == now:
            return
    if manifest.texts_version != VERSIONS["texts"]:
        for values in (then, now):
            # In manifests of early versions, `engine` is the encoder of the run, which may differ.
            values.pop("texts_version", None)  # absent before version 2
            del values["tokenizer"]["engine"]
            values["files"] = [file for file in values["files"] if file["path"] not in differ]
    if then != now:
        before, after, where = cast(Any, then), cast(Any, now), ""
        while isinstance(before, dict) and isinstance(after, dict):
            key = next(key for key in before | after if before.get(key) != after.get(key))
            where, before, after = f"{where}.{key}".lstrip("."), before.get(key), after.get(key)
        difference = f"differs after rebuilding: {where} was {before}, is {after}"
        raise NotReproducible("not_reproducible", f"{folder / 'manifest.json'}: {difference}")
    names = ", ".join([*differ, "manifest.json"])
    raise NotReproducible(
        "not_reproducible", f"{folder}: {names}: {other_texts(manifest)}; all other files are identical"
    )


def has_other_texts(manifest: Manifest, name: str) -> bool:
    """Return whether a file contains the wording of another version of packcorpus."""
    return name in TEXTS and manifest.texts_version != VERSIONS["texts"]


def other_texts(manifest: Manifest) -> str:
    """Explain why rejects.jsonl and the dataset card cannot be reproduced."""
    texts = f"(texts {manifest.texts_version}, this version writes texts {VERSIONS['texts']})"
    return f"written by another version of packcorpus {texts}"
