"""A corpus made a second time, in this process, from what its manifest says that it was made from.

manifest + run.json (where the sources lie), or a config ─recipe_for─▶ Recipe of the same key, or the reason why not
Recipe ─make_stages─▶ token files, plan ─make_corpus─▶ shards, manifest ─rebuild─▶ compared with the first, by bytes
"""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks.config import Config, load_config
from tasks.core.errors import DataError, InputMissing, NotReproducible, PackError, UsageError
from tasks.recipe import Recipe, recipe_of
from tasks.stages import Publish, run_all
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.files import read_json
from tasks.storage.manifest import Manifest, load_manifest


def recipe_for(manifest: Manifest, corpus: Path, root: Path, config_file: Path | None) -> Recipe:
    """The recipe of a corpus that is there, its artefacts below `root`.

    Raises UsageError where nothing says in which folder the paths of the config begin, and InputMissing or DataError,
    naming the source or setting, where the recipe of today is another.
    """
    recipe = recipe_of(*config_for(manifest, corpus, config_file), root)
    if why := next(_differences(manifest, recipe), ""):
        raise DataError("origin_changed", f"{manifest.corpus} cannot be made again as it was: {why}")
    return recipe


def config_for(manifest: Manifest, corpus: Path, config_file: Path | None) -> tuple[Config, Path]:
    """The settings of a corpus and the folder that its paths begin in: of a config, or as manifest and run.json say."""
    if config_file is not None:
        return load_config(config_file, str(manifest.sequence_length)), config_file.parent
    record = corpus / "run.json"
    try:
        made_from = read_json(record)["made_from"]
        folder, part_size = Path(made_from["folder"]), made_from["part_size"]
        config = Config.model_validate(manifest.config | {"part_size": part_size})
    except (PackError, LookupError, TypeError, ValueError):
        raise UsageError(
            "config_unknown", f"{record}: does not say where the config lies; name it with --config FILE"
        ) from None
    if not folder.is_dir():
        raise InputMissing(
            "config_folder_missing", f"{folder}: the folder of the config is gone; name the config with --config FILE"
        )
    return config, folder


def _differences(manifest: Manifest, recipe: Recipe) -> Iterator[str]:
    """What is another in the recipe than in the manifest, the sources first."""
    now = {file.name: file.sha256 for file in recipe.files}
    then = {source.path: source.sha256 for source in manifest.sources}
    for name in then | now:
        if name not in now:
            yield f"the source {name} is not there any more"
        elif name not in then:
            yield f"{recipe.folder / name} is a source that was not there then"
        elif now[name] != then[name]:
            yield f"{recipe.folder / name} has changed since (its SHA-256 was {then[name][:12]}…)"
    settings = recipe.settings()
    for name in manifest.config | settings:
        if settings.get(name) != manifest.config.get(name):
            yield f"{name} was {manifest.config.get(name)}, the config has {settings.get(name)}"
    if recipe.tokenizer_digest != manifest.tokenizer.digest:
        yield "the tokenizer is another than then"
    if recipe.template_sha256 != manifest.template.sha256:
        yield f"the template {manifest.template.name} is another than then"
    if recipe.corpus_key != manifest.key:
        yield "the order or the format of the sources, or the version of packcorpus, is another than then"


def rebuild(path: Path, config_file: Path | None = None) -> str:
    """Make the corpus of a manifest again in a temporary folder (TMPDIR) and compare every byte; what was compared.

    Raises NotReproducible, naming the first file that differs, or what it was made from and is not as it was, and
    what `config_for` raises.
    """
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    config_for(manifest, folder, config_file)  # raises where it is not there: that is no answer yet
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as name:
        try:
            recipe = recipe_for(manifest, folder, Path(name), config_file)
        except (DataError, InputMissing) as error:
            raise NotReproducible("not_reproducible", str(error)) from None
        run_all(Publish(recipe))
        names = [*(file.path for file in manifest.listed()), "manifest.json"]
        for file in names:
            again = recipe.corpus_folder / file
            if not again.is_file() or not filecmp.cmp(again, folder / file, shallow=False):
                said = _first_difference(manifest, again) if file == "manifest.json" else ""
                raise NotReproducible("not_reproducible", f"{folder / file}: is another when it is made again{said}")
    return f"{len(names)} files, {sum(file.bytes for file in manifest.listed()):,} bytes: the same bytes"


def _first_difference(manifest: Manifest, again: Path) -> str:
    then, now = manifest.model_dump(), read_json(again)
    where = ""
    while isinstance(then, dict) and isinstance(now, dict):
        key = next(key for key in then if then[key] != now.get(key))
        where, then, now = f"{where}.{key}".lstrip("."), then[key], now.get(key)
    return f": {where} was {then}, is {now}"
