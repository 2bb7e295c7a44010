"""Build the manifest of a corpus and publish it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.encoders.tokenizer_files import joined_sha256
from tasks.recipe import Recipe
from tasks.storage.facts import FileFacts, Ledger
from tasks.storage.files import sync_folder, to_json, write_bytes
from tasks.storage.keys import VERSIONS, format_version_of
from tasks.storage.layout import first_packing, kind_of
from tasks.storage.manifest import Manifest, manifest_digest


def build_manifest(
    recipe: Recipe, plan: dict[str, Any], shards: list[dict[str, Any]], files: list[dict[str, Any]]
) -> Manifest:
    """Build the manifest, and check that its ledger balances.

    Raises DataError if it does not balance, or if the tokenizer changed during the run.
    """
    config, encoder, template, settings = recipe.config, recipe.encoder, recipe.template, recipe.config.settings()
    # The checksums are of the copies in the corpus, not of the original files.
    tokenizer_sha256 = joined_sha256(
        (Path(file["path"]).name, file["sha256"]) for file in files if file["path"].startswith("tokenizer/")
    )
    recipe.check_tokenizer(tokenizer_sha256)
    splits: dict[str, Any] = {}
    described = list(zip(recipe.shard_names, shards, strict=True))
    for split, count in recipe.shards.items():
        own, described = described[:count], described[count:]
        listed = [
            {"path": name, "rows": shard["rows"], "bytes": shard["bytes"], "sha256": shard["sha256"]}
            for name, shard in own
        ]
        splits[split] = {"rows": sum(shard["rows"] for shard in listed), "shards": listed}
        if config.packing:
            splits[split]["statistics"] = plan["row_sums"][split]
        if len(config.row_lengths) > 1:
            splits[split] |= {
                "sequence_length": config.rows.length_of(split),
                "tokens": sum(shard["packed"] for _, shard in own),
                "lower_bound_rows": plan["bounds_of_splits"][len(splits) - 1],
            }
    ledger = Ledger.model_validate(plan["ledger"])
    lengths = [recipe.length_of_shard(number) * config.packing for number in range(len(shards))]
    _check_shards(ledger, plan["rows_of_shards"], shards, lengths)
    undefined = recipe.undefined
    values: dict[str, Any] = {
        "format_version": format_version_of(settings),
        "name": config.name,
        "key": recipe.corpus_key,
        "key_version": VERSIONS["corpus"],
        "texts_version": VERSIONS["texts"],
        "corpus": recipe.layout.corpus_name(config.name, recipe.corpus_key),
        "sequence_length": config.sequence_length,
        **({"shape": config.rows.recorded} if config.rows.recorded else {}),
        "tokenizer": {
            "kind": encoder.kind,
            "path": f"tokenizer/{recipe.tokenizer_files.main.name}",
            "sha256": tokenizer_sha256,
            "vocab_size": encoder.vocab_size,
            "bos_token_id": encoder.bos_id,
            "eos_token_id": encoder.eos_id,
            "pad_token_id": encoder.pad_id,
            "engine": encoder.engine,
            "trained_here": recipe.tokenizer_key is not None,
            "digest": recipe.tokenizer_digest,
        },
        "template": {
            "name": config.template,
            "sha256": recipe.template_sha256,
            "markers_as_text": list(template.markers_as_text),
            "leading_space": encoder.leading_space,
        },
        "train_on": config.train_on,
        "seed": config.seed,
        "sources": [
            {"path": file.name, "container": file.container, "compression": file.compression, "format": file.format}
            | {"columns": dict(file.columns)}
            | file.reading
            | ({"revision": file.revision} if file.revision else {})
            | facts
            for file, facts in zip(recipe.files, plan["sources"], strict=True)
        ],
        "mixture": plan["mixture"],
        "ledger": ledger.model_dump(),
        "noticed": plan["noticed"] | ({"undefined_names": undefined} if undefined else {}),
        "packing_metadata": plan["packing_metadata"],
        "splits": splits,
        **({"loss_weight": _weight_sums(recipe, plan, shards)} if config.loss_weight != "none" else {}),
        "files": files,
        "config": settings,
    }
    return Manifest.model_validate(values | {"digest": manifest_digest(values)})


def _weight_sums(recipe: Recipe, plan: dict[str, Any], shards: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add up the weights in the shards of each split, over all lengths of rows."""
    sums, first = dict[str, list[float]](), 0
    for split, count in recipe.shards.items():
        own, first = shards[first : first + count], first + count
        sums.setdefault(kind_of(split), []).extend(shard["loss_weight"] for shard in own)
    found = {}
    for kind, written in sums.items():
        facts = plan["loss_weight"][first_packing(kind)]
        found[kind] = {name: facts[name] for name in ("trained", "conversations")}
        found[kind]["loss_weight"] = math.fsum(written)
    return found


def _check_shards(
    ledger: Ledger, planned_rows: list[int], shards: list[dict[str, Any]], lengths: Sequence[int]
) -> None:
    """Raise DataError if the shards do not have the planned rows and tokens.

    `lengths` has the length of the rows in each shard, or 0 without packing.
    """
    for name, planned in (("packed", ledger.tokens.packed), ("trained", ledger.tokens.trained)):
        written = sum(shard[name] for shard in shards)
        if written != planned:
            raise DataError(
                "open_ledger", f"the ledger does not balance: {planned:,} {name} tokens planned, {written:,} written"
            )
    rows = [shard["rows"] for shard in shards]
    # If rows have no padding, shards count their places.
    places = sum(shard.get("places", n * length) for shard, n, length in zip(shards, rows, lengths, strict=True))
    ledger.check(places)
    if rows != planned_rows:
        raise DataError("open_ledger", "the ledger does not balance: the rows per shard differ from the plan")


def publish(manifest: Manifest, card: FileFacts, corpus: Path, published: Path) -> None:
    """Commit: write the manifest to the corpus folder, then to manifests/.

    Its last file is the dataset card, which is made from the manifest without it.
    """
    values = manifest.model_copy(update={"files": [*manifest.files, card]}).model_dump()
    data = to_json(values | {"digest": manifest_digest(values)})
    write_bytes(corpus / "manifest.json", data)
    # A killed run may have created the folders of data/corpora/<corpus> without syncing their parents.
    for folder in corpus.absolute().parents[:3]:
        sync_folder(folder)
    write_bytes(published, data)
