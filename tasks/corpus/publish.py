"""Write the corpus folder: shards first, then the other files, the manifest last.

data/corpora/<name>-<key12>/   train-00000-of-00004.arrow …, index.arrow, rejects.jsonl, tokenizer/, template.jinja (for
                               a Jinja template), README.md, run.json, manifest.json
manifests/<name>-<key12>.json  the same bytes as manifest.json: the commit
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.core.errors import Busy, PackError
from tasks.corpus.dataset_card import CARD, dataset_card
from tasks.corpus.manifest_builder import build_manifest, publish, with_file
from tasks.corpus.shards import write_conversations, write_shard
from tasks.encoders.encoder import Encoder
from tasks.recipe import Recipe
from tasks.storage.arrow import to_numpy
from tasks.storage.files import lock, read_json, sync_folder, to_json, write_bytes
from tasks.storage.manifest import FileFacts, load_manifest
from tasks.storage.token_files import TokenFiles


def claim(recipe: Recipe) -> None:
    """Lock the corpus for this run, before workers are forked. Raises Busy if another run holds the lock."""
    path = recipe.layout.lock(recipe.config.name, recipe.corpus_key)
    if not lock(path):
        raise Busy("busy", f"{recipe.corpus_folder}: another run is writing this corpus; wait for it, then run again")


def has_artefact(file: Path, receipt: Path, refused: str = "") -> bool:
    """Return whether a receipt and its file exist, at the recorded size and not made by the engine `refused`."""
    if not (receipt.is_file() and file.is_file()):
        return False
    try:
        found = read_json(receipt)
        return bool(found["bytes"] == file.stat().st_size) and not (refused and found.get("engine") == refused)
    except (PackError, KeyError, TypeError, OSError):
        return False


def has_plan(folder: Path) -> bool:
    """Return whether a plan's receipt and all files it lists exist, at their recorded sizes."""
    try:
        sizes = read_json(folder / "plan.json")["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (PackError, KeyError, TypeError, AttributeError, OSError):
        return False


def shard_file(recipe: Recipe, shard: int) -> Path:
    return recipe.corpus_folder / recipe.shard_names()[shard]


def shard_receipt(recipe: Recipe, shard: int) -> Path:
    return recipe.plan_folder / f"shard-{shard:05d}.json"


def write_shard_of(recipe: Recipe, shard: int) -> dict[str, Any]:
    """Write shard number `shard` of the plan, then its receipt; return the receipt."""
    config = recipe.config
    receipt = write_planned_shard(
        shard_file(recipe, shard),
        shard,
        recipe.plan_folder,
        [recipe.layout.token_file(recipe.tokens_key(part)) for part in recipe.parts],
        recipe.encoder if config.packing else None,
        config.sequence_length,
        recipe.corpus_key,
    )
    write_bytes(shard_receipt(recipe, shard), to_json(receipt))
    return receipt


def write_planned_shard(
    path: Path, shard: int, plan_folder: Path, token_files: list[Path], encoder: Encoder | None, length: int, key: str
) -> dict[str, Any]:
    """Write shard number `shard` of a plan from the token files the plan refers to.

    Without an encoder, the shard has format 2.0. Returns the shard's receipt.
    """
    with pa.memory_map(str(plan_folder / "plan.arrow")) as file:
        plan = pa.ipc.open_file(file).get_batch(shard)
        used = set(to_numpy(plan.column("part")).tolist())
        tokens = TokenFiles([file if number in used else None for number, file in enumerate(token_files)])
        if encoder is None:
            return write_conversations(path, plan, tokens, length, key)
        rows = read_json(plan_folder / "plan.json")["rows_of_shards"][shard]
        return write_shard(path, plan, rows, tokens, encoder, length, key)


def copies_beside(recipe: Recipe) -> dict[str, bytes]:
    """Return the files to copy into the corpus folder next to the shards: contents by name."""
    copies = {name: (recipe.plan_folder / name).read_bytes() for name in ("index.arrow", "rejects.jsonl")}
    copies |= {f"tokenizer/{file.name}": file.read_bytes() for file in recipe.tokenizer_files.files}
    if recipe.template_source is not None:
        copies["template.jinja"] = recipe.template_source.encode()
    return copies


def publish_corpus(recipe: Recipe, run_record: dict[str, Any]) -> Path:
    """Write the remaining files of the corpus folder, commit the manifest, and return its path."""
    folder = recipe.corpus_folder
    shards = [read_json(shard_receipt(recipe, shard)) for shard in range(len(recipe.shard_names()))]
    plan = read_json(recipe.plan_folder / "plan.json")
    files = []
    for name, content in copies_beside(recipe).items():
        # Record the checksum of the content, not of the file: the latter would vouch for a damaged copy.
        files.append({"path": name} | write_bytes(folder / name, content))
    # `repair` finds the sources by this.
    made_from = {"folder": str(recipe.folder.absolute()), "part_size": recipe.config.part_size}
    write_bytes(folder / "run.json", to_json(run_record | {"made_from": made_from}))
    manifest = build_manifest(recipe, plan, shards, files)
    card = FileFacts(path=CARD, **write_bytes(folder / CARD, dataset_card(manifest)))
    publish(with_file(manifest, card), folder, recipe.published)
    return recipe.published


def is_published(recipe: Recipe) -> bool:
    """Return whether the corpus is committed and complete.

    That is, its manifest is unmodified and every file exists at its recorded size.
    """
    if not recipe.published.is_file():
        return False
    try:
        manifest = load_manifest(recipe.published)
        folder = recipe.corpus_folder
        if (folder / "manifest.json").read_bytes() != recipe.published.read_bytes():
            return False
        # A killed run may have written the manifest without syncing its folder.
        sync_folder(recipe.published.parent)
        return all((folder / file.path).stat().st_size == file.bytes for file in manifest.listed())
    except (PackError, OSError):
        return False
