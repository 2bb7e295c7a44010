"""Write the corpus folder: shards first, then the other files, the manifest last.

data/corpora/<name>-<key12>/   train-00000-of-00004.arrow …, index.arrow, rows.arrow, rejects.jsonl, tokenizer/,
                               template.jinja (for a Jinja template), tool_use.jinja (if it is only for
                               conversations without tools), README.md, run.json, manifest.json
manifests/<name>-<key12>.json  the same bytes as manifest.json: the commit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.corpus.dataset_card import CARD, dataset_card
from tasks.corpus.manifest_builder import build_manifest, publish
from tasks.corpus.shards import Weighting, write_conversations, write_shard
from tasks.packing.plan import dropped, plan_files
from tasks.recipe import Recipe
from tasks.storage.arrow import to_numpy, xxh3_of
from tasks.storage.facts import FileFacts
from tasks.storage.files import copy_file, read_receipt, sha256_of, to_json, write_bytes
from tasks.storage.layout import RowLayout
from tasks.storage.row_statistics import ROWS
from tasks.storage.token_files import TokenFiles

COPIED = ("index.arrow", ROWS, "rejects.jsonl")  # files of the plan that are part of the corpus


def write_planned_shard(
    path: Path,
    shard: int,
    plan_folder: Path,
    token_files: list[Path],
    special: tuple[int, int] | None,
    layout: RowLayout,
    length: int,
    key: str,
    fetch: Callable[[Path], None] = lambda file: None,
) -> dict[str, Any]:
    """Write shard number `shard` of a plan, and return its receipt.

    `fetch` is called for each token file that the shard needs, and makes it readable. `special` has the ids of EOS and
    padding; without them, the shard has format 2.0.
    """
    facts = read_receipt(plan_folder / "plan.json")
    with _open_plan(plan_folder, shard, facts["placements"][shard]) as plan:
        used = set(to_numpy(plan.column("part")).tolist())
        for number in used:
            fetch(token_files[number])
        tokens = TokenFiles([file if number in used else None for number, file in enumerate(token_files)])
        if special is None:
            return write_conversations(path, plan, tokens, length, key)
        weighting = None
        if "loss_weight" in facts:
            weighting = Weighting(**facts["loss_weight"][facts["weighted_as"][shard]])
        rows = facts["rows_of_shards"][shard]
        return write_shard(path, plan, rows, tokens, special, layout, length, key, weighting)


@contextmanager
def _open_plan(folder: Path, shard: int, checksum: str) -> Iterator[pa.RecordBatch]:
    """Open the placements of a shard.

    If they are damaged, drops the plan and raises StorageError.
    """
    path = folder / "plan.arrow"
    with ExitStack() as stack:
        try:
            plan = pa.ipc.open_file(stack.enter_context(pa.memory_map(str(path)))).get_batch(shard)
            found = xxh3_of(plan)
        except (pa.ArrowException, OSError, IndexError):
            found = ""
        if found != checksum:
            raise dropped(folder, path, folder / "plan.json")
        yield plan


def _check_plan(folder: Path, checksums: dict[str, str]) -> None:
    """Check the files of a plan before they are copied.

    If a file is damaged, drops the plan and raises StorageError.
    """
    for name, expected in checksums.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise dropped(folder, folder / name, folder / "plan.json")


def files_beside(recipe: Recipe) -> dict[str, Path | bytes]:
    """Return the contents of the files next to the shards, by name.

    For files that grow with the corpus, returns the path instead of the contents.
    """
    copies: dict[str, Path | bytes] = {
        name: recipe.plan_folder / name for name in COPIED if name in plan_files(recipe.config)
    }
    copies |= {f"tokenizer/{file.name}": file.read_bytes() for file in recipe.tokenizer_files.files}
    return copies | {name: source.encode() for name, source in recipe.template_sources.items()}


def publish_corpus(recipe: Recipe, shards: list[dict[str, Any]], run_record: dict[str, Any]) -> None:
    """Write the files next to the shards and commit the manifest.

    `shards` are the receipts of all shards, in their order.
    """
    folder = recipe.corpus_folder
    plan = read_receipt(recipe.plan_folder / "plan.json")
    _check_plan(recipe.plan_folder, plan["sha256"])
    files = []
    for name, content in files_beside(recipe).items():
        # Record the checksum of the content. The checksum of the written file would vouch for a damaged copy.
        if isinstance(content, bytes):
            facts = write_bytes(folder / name, content)
        else:
            facts = copy_file(content, folder / name)
            if facts["sha256"] != plan["sha256"][name]:  # it changed since it was checked
                raise dropped(recipe.plan_folder, content, recipe.plan_folder / "plan.json")
        files.append({"path": name} | facts)
    # `repair` uses this record to find the sources.
    made_from = {"folder": str(recipe.folder.absolute()), "part_size": recipe.config.part_size}
    write_bytes(folder / "run.json", to_json(run_record | {"made_from": made_from}))
    manifest = build_manifest(recipe, plan, shards, files)
    card = FileFacts(path=CARD, **write_bytes(folder / CARD, dataset_card(manifest)))
    publish(manifest, card, folder, recipe.published)
