"""Pack a corpus again with another row length, or write it without packing.

manifest ─config_for─▶ Config + changes ─run_all─▶ a corpus below `folder`, from the token files that exist
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.config import Config
from tasks.core.errors import UsageError
from tasks.recipe import recipe_of
from tasks.storage.manifest import load_manifest
from tasks.verification.rebuild import config_for, revisions_of
from tasks.work import Publish, run_all
from train.data.corpus import Corpus

# Folders that packing reads and never changes. They do not depend on the length of the rows.
REUSED = ("tokens", "tokenizers", "engines", "remote")


def lost(corpus: Corpus, manifest: Path) -> str:
    """Return a text about conversations that a replanned corpus lacks; "" if none."""
    assert corpus.manifest
    before, now = (one.ledger.conversations for one in (corpus.manifest, load_manifest(manifest)))
    return f"without {before.packed - now.packed} of {before.packed} conversations" * (now.packed < before.packed)


def replan(corpus: Corpus, changes: Mapping[str, Any], root: Path, folder: Path) -> Path:
    """Return the manifest of a corpus with changed settings, made below `folder`.

    `root` is the root folder in which the corpus was built. Raises PackError, for example if the sources are gone.
    """
    if corpus.manifest is None:
        raise UsageError("config_unknown", f"{corpus.folder}: has no manifest, so it cannot be packed again")
    config, sources = config_for(corpus.manifest, corpus.folder, None)
    if len(config.row_lengths) > 1:  # a trial has rows of one length
        one = {"sequence_length": config.sequence_length, "mix": "tokens"}
        config = Config.model_validate(config.model_dump() | one)
    for name in REUSED:
        known, link = root / "data" / name, folder / "data" / name
        if known.is_dir() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(known.resolve(), target_is_directory=True)
    revisions = revisions_of(corpus.manifest)
    # Shorter rows may lose conversations, which the trial reports.
    recipe = recipe_of(config.model_copy(update={"max_rejects": 1.0, **changes}), sources, folder, revisions)
    run_all(Publish(recipe))
    return recipe.published
