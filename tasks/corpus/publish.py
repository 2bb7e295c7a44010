"""Write the corpus folder: shards first, then the other files, the manifest last.

data/corpora/<name>-<key12>/   train-00000-of-00004.arrow …, index.arrow, rows.arrow, rejects.jsonl, tokenizer/,
                               dropped.jsonl (if something is cleaned away),
                               template.jinja (for a Jinja template), tool_use.jinja (if it is only for
                               conversations without tools), README.md, run.json, manifest.json
manifests/<name>-<key12>.json  the same bytes as manifest.json: the commit
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from minijinja import Environment

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted, lengths_in_words, printable
from packcorpus.tasks.corpus.shards import Weighting, write_conversations, write_shard
from packcorpus.tasks.corpus.summary import TRAINED_TURNS, mixture_table
from packcorpus.tasks.encoders.tokenizer_files import joined_sha256
from packcorpus.tasks.packing.dropped import DROPPED
from packcorpus.tasks.packing.plan import discard_receipts, plan_files
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.facts import FileFacts, Ledger
from packcorpus.tasks.storage.files import copy_file, read_receipt, sha256_of, sync_folder, to_json, write_bytes
from packcorpus.tasks.storage.keys import VERSIONS, format_version_of
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX, RowLayout, first_packing, kind_of
from packcorpus.tasks.storage.manifest import Manifest, manifest_digest
from packcorpus.tasks.storage.schemas import to_numpy, xxh3_of
from packcorpus.tasks.storage.shards import ROWS
from packcorpus.tasks.storage.token_files import TokenFiles
from packcorpus.tasks.templates.sections import explain_sections, sections_of_config

CARD = "README.md"  # the dataset card

COPIED = ("index.arrow", ROWS, "rejects.jsonl", DROPPED)  # files of the plan that are part of the corpus


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
    padding; without them, the shard has format 2.0. If the plan is damaged, drops it and raises StorageError.
    """
    facts = read_receipt(plan_folder / "plan.json")
    file = plan_folder / "plan.arrow"
    with ExitStack() as stack:
        try:
            plan = pa.ipc.open_file(stack.enter_context(pa.memory_map(str(file)))).get_batch(shard)
            checksum = xxh3_of(plan)
        except (pa.ArrowException, OSError, IndexError):
            checksum = ""
        if checksum != facts["placements"][shard]:
            raise discard_receipts(plan_folder, file, plan_folder / "plan.json")
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
    for name, expected in plan["sha256"].items():
        if not (recipe.plan_folder / name).is_file() or sha256_of(recipe.plan_folder / name) != expected:
            raise discard_receipts(recipe.plan_folder, recipe.plan_folder / name, recipe.plan_folder / "plan.json")
    files = []
    for name, content in files_beside(recipe).items():
        # Record the checksum of the content. The checksum of the written file would vouch for a damaged copy.
        if isinstance(content, bytes):
            facts = write_bytes(folder / name, content)
        else:
            facts = copy_file(content, folder / name)
            if facts["sha256"] != plan["sha256"][name]:  # it changed since it was checked
                raise discard_receipts(recipe.plan_folder, content, recipe.plan_folder / "plan.json")
        files.append({"path": name} | facts)
    # `repair` uses this record to find the sources.
    made_from = {"folder": str(recipe.folder.absolute()), "part_size": recipe.config.part_size}
    write_bytes(folder / "run.json", to_json(run_record | {"made_from": made_from}))
    manifest = build_manifest(recipe, plan, shards, files)
    card = FileFacts(path=CARD, **write_bytes(folder / CARD, dataset_card(manifest)))
    commit(manifest, card, folder, recipe.published)


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
            **({"revision": recipe.tokenizer_commit} if recipe.tokenizer_commit else {}),
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
        **({"evaluation": plan["evaluation"]} if recipe.evaluation else {}),
        "ledger": ledger.model_dump(),
        **({"held_out": plan["held_out"]} if "held_out" in plan else {}),
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
    sums, receipts = dict[str, list[float]](), iter(shards)
    for split, count in recipe.shards.items():
        sums.setdefault(kind_of(split), []).extend(shard["loss_weight"] for shard in islice(receipts, count))
    found = {}
    for kind, written in sums.items():
        facts = plan["loss_weight"][first_packing(kind)]
        found[kind] = {name: facts[name] for name in ("trained", "conversations")} | {"loss_weight": math.fsum(written)}
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


def commit(manifest: Manifest, card: FileFacts, corpus: Path, published: Path) -> None:
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


# -- the dataset card -------------------------------------------------------------------------------------------------


def dataset_card(manifest: Manifest) -> bytes:
    """Return the README.md of a corpus, its dataset card.

    Its header is for tools, and its Markdown (card.md.jinja) for people; `datasets.load_dataset(folder)` finds the
    splits in the header. It depends only on the manifest, without the manifest's entry for the card. Names that come
    from files are escaped.
    """
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True, width=1000)
    environment = Environment(
        filters={"n": "{:,}".format, "code": _code, "counted": counted},
        undefined_behavior="strict",
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    body = environment.render_str(Path(__file__).with_name("card.md.jinja").read_text("utf-8"), **_values(manifest))
    return f"---\n{header}---\n\n{body}".encode()


def _header(manifest: Manifest) -> dict[str, Any]:
    licenses, languages = (manifest.config.get(name) or [] for name in ("license", "language"))
    files: dict[str, list[dict[str, str]]] = {}  # by config: for `datasets`, each length of rows is a separate type
    for split, facts in manifest.splits.items():
        if facts.rows:
            length = facts.sequence_length
            name = "default" if length is None else str(length)
            listed = split_name(split if length is None else kind_of(split))
            # The pattern does not match other splits that begin with the name of this split.
            pattern = re.sub(r"-\d{5}-of-", "-?????-of-", facts.shards[0].path)
            files.setdefault(name, []).append({"split": listed, "path": pattern})
    names = sorted(files or ["default"], key=lambda name: int(name) if name.isdecimal() else 0)
    return {
        "pretty_name": manifest.name,
        **({"license": licenses[0] if len(licenses) == 1 else licenses} if licenses else {}),
        **({"language": languages} if languages else {}),
        "task_categories": ["text-generation"],
        "size_categories": [size_category(sum(split.rows for split in manifest.splits.values()))],
        "tags": ["packcorpus", "conversational", "sft", *["packed"] * manifest.packing_metadata.enabled],
        "configs": [{"config_name": name, "data_files": files.get(name, [])} for name in names],
    }


def split_name(split: str) -> str:
    """Replace all characters but letters, digits, and underscores, for `datasets`."""
    return re.sub(r"\W", "_", split)


def size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows, such as 10K<n<100K."""
    edges = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for place, edge in enumerate(edges):
        if rows < 1000 * 10**place:
            return f"{edges[place - 1]}<n<{edge}" if place else "n<1K"
    return f"n>{edges[-1]}"


def _values(manifest: Manifest) -> dict[str, Any]:
    packing, lengths = manifest.packing_metadata, manifest.row_lengths
    conversations, tokens = manifest.ledger.conversations, manifest.ledger.tokens
    filled = {name: split for name, split in manifest.splits.items() if split.rows}
    form, of_tokens = counted(packing.rows, "row"), lengths_in_words(lengths)
    if packing.enabled:
        places = f"up to {manifest.sequence_length:,}" if manifest.row_layout.padding == "none" else of_tokens
        form += f" of {places} tokens ({packing.packing_efficiency:.2f} % full)"
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in conversations.dropped.items() if count)
    balance = manifest.config.get("balance")
    return {
        "manifest": manifest,
        "packing": packing,
        "conversations": conversations,
        "tokens": tokens,
        "samples": manifest.ledger.samples,
        "form": form,
        "lengths": of_tokens,
        "places": " or ".join(map(str, lengths)),
        "config": f', "{lengths[-1]}"' if len(lengths) > 1 else "",
        "trained_on": TRAINED_TURNS[manifest.train_on]
        + ", including its stop token" * (manifest.train_on != "all")
        + explain_sections(sections_of_config(manifest.config)),
        "trained_percent": f"{100 * tokens.trained / max(tokens.packed, 1):.1f}",
        "rejected": sum(conversations.rejected.values()),
        "dropped": f"{sum(conversations.dropped.values()):,} dropped" + (f" ({reasons})" if reasons else ""),
        "licenses": ", ".join(map(_code, manifest.config.get("license") or [])) or "not specified; see the sources",
        "splits": [
            (split_name(name), split.rows, len(split.shards), sum(shard.bytes for shard in split.shards))
            for name, split in filled.items()
        ],
        "first": split_name(kind_of(next(iter(filled), "train"))),
        "eos": manifest.tokenizer.eos_token_id,
        "pad": manifest.tokenizer.pad_token_id,
        "weighted": manifest.row_layout.is_weighted,
        "trees": f"{counted(tokens.shared or 0, 'token')} fewer" if manifest.row_layout.is_shared else "",
        "ranks": balance and balance["ranks"],
        "shuffle": "False" if balance else "True",
        "repacked": [
            name for name in dict.fromkeys(map(kind_of, manifest.splits)) if name.startswith(TRAIN_EPOCH_PREFIX)
        ],
        "mixture": mixture_table(manifest.mixture, manifest.config.get("weighting")),
        "most": 50,  # sources to list
    }


def _code(text: str) -> str:
    """Format text as code within a table, so that no markup in it is interpreted."""
    shown = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"
