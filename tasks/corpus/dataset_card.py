"""Write the dataset card, the README.md of a corpus folder.

`datasets.load_dataset(folder)` finds the splits in its header.

    manifest ─dataset_card─▶ YAML header for tools: files of each split, size, language, license, tags
                             Markdown for people: contents, how to load it, how to train on it without leaks, sources

The Markdown is in card.md.jinja. The card depends only on the manifest, without the manifest's entry for the card.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from minijinja import Environment

from tasks.core.printable import counted, lengths_in_words, printable
from tasks.corpus.summary import mixture_table
from tasks.storage.layout import TRAIN_EPOCH_PREFIX, kind_of
from tasks.storage.manifest import Manifest
from tasks.templates.sections import explain_sections, sections_of_config

CARD = "README.md"

SHOWN_SOURCES = 50

TRAINED_ON = {
    "assistant": "every assistant turn, including its stop token",
    "last": "the last assistant turn, including its stop token",
    "rounds": "every assistant turn after the last user message, including its stop token",
    "all": "every turn",
}


def dataset_card(manifest: Manifest) -> bytes:
    """Return the README.md of a corpus.

    Names that come from files are escaped.
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
            files.setdefault(name, []).append({"split": listed, "path": _pattern(facts.shards[0].path)})
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


def _pattern(shard: str) -> str:
    """Return a pattern that matches the shards of one split.

    The pattern does not match other splits that begin with the name of this split.
    """
    return re.sub(r"-\d{5}-of-", "-?????-of-", shard)


def size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows, such as 10K<n<100K."""
    edges = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for place, edge in enumerate(edges):
        if rows < 1000 * 10**place:
            return f"{edges[place - 1]}<n<{edge}" if place else "n<1K"
    return f"n>{edges[-1]}"


def _values(manifest: Manifest) -> dict[str, Any]:
    """Return the values of the template."""
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
        "trained_on": TRAINED_ON[manifest.train_on] + explain_sections(sections_of_config(manifest.config)),
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
        "ranks": balance and balance["ranks"],
        "shuffle": "False" if balance else "True",
        "repacked": [
            name for name in dict.fromkeys(map(kind_of, manifest.splits)) if name.startswith(TRAIN_EPOCH_PREFIX)
        ],
        "mixture": mixture_table(manifest.mixture, manifest.config.get("weighting")),
        "most": SHOWN_SOURCES,
    }


def _code(text: str) -> str:
    """Format text as code within a table, so that no markup in it is interpreted."""
    shown = printable(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"
