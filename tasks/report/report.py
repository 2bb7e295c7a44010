"""Write the report of a corpus as one HTML file to share.

    manifest, index, rejects ─figures, plots─┐
    20 rows, chosen by the key ─rows─────────┴─▶ report.html.jinja + report.css ─▶ NAME-KEY.html

The file runs no script and requests nothing. It has at most MOST_BYTES, unless the figures alone take more. Equal
corpora give equal bytes. Text from files is escaped twice: control characters here (`printable`), and HTML by Jinja.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import yaml

from tasks.core.error_codes import CODES
from tasks.core.errors import DataError, PartMissing, StorageError
from tasks.core.printable import common_folder, counted, lengths_in_words, printable
from tasks.corpus import summary
from tasks.corpus.summary import mixture_table
from tasks.inspection.lookup import read_rejects
from tasks.inspection.manifests import waiting_of
from tasks.report.figures import Figures, Histogram, read_figures
from tasks.report.rows import HUES, choose, samples
from tasks.storage.corpus_folder import changed_files, checked_folder, default_report_path, raise_all
from tasks.storage.facts import MixtureFacts, SourceFacts
from tasks.storage.files import write_bytes
from tasks.storage.layout import TRAIN_EPOCH_PREFIX, RowLayout, kind_of
from tasks.storage.manifest import Manifest, load_manifest
from tasks.stores.urls import refuse_url

MOST_BYTES = 500_000
ROWS = 20
# Bytes of each sampled row. If the page is too large, the next smaller budget is used.
BUDGETS = (15_000, 6_000, 2_000)
SHOWN = 40  # maximum number of sources, and of shards, to show
EXAMPLES = 3  # rejects to show per reason
LONGEST = 300  # characters of a name or message
LONGEST_CONFIG = 12_000
NEIGHBORS = {
    "similar": "If conversations of equal length can trade places, each is in a row with others about its topic "
    "(neighbors: similar).",
    "distinct": "Near-duplicates do not share a row if there are enough other conversations of their length "
    "(neighbors: distinct).",
}

MIX = {
    "tokens": "Steps of all lengths are evenly spread over an epoch (mix: tokens).",
    "blocks": "An epoch starts with all steps of the shortest rows and continues with the steps of the next length "
    "(mix: blocks).",
}

QUANTILES = {"shortest": 0, "median": 0.5, "nine": 0.9, "most": 0.99, "longest": 1}


def write_report(path: Path, output: Path | None) -> tuple[Path, int]:
    """Write the report of a corpus and return its path and size.

    By default, `output` is next to the corpus folder. Raises PartMissing without the `report` extra, DataError or
    InputMissing if a file of the corpus is not as recorded, and StorageError if the report cannot be written.
    """
    if output:
        refuse_url(output, "name a file, then copy it", "writes")
    manifest = load_manifest(path)
    folder = checked_folder(manifest, path)
    output = output or default_report_path(folder)
    if output.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            "foreign_file",
            f"{output}: is in the corpus folder, which may only contain files of the corpus; choose another path",
        )
    if not output.parent.is_dir():
        raise StorageError(
            "cannot_write", f"{output}: folder {output.parent} does not exist; create it, or choose another path"
        )
    raise_all(changed_files(folder, manifest.listed()), folder)  # damaged text must not be shown as data
    page = b""
    for page in _pages(manifest, folder):
        if len(page) <= MOST_BYTES:
            break
    return output, write_bytes(output, page)["bytes"]


def _pages(manifest: Manifest, folder: Path) -> Iterator[bytes]:
    """Yield the page repeatedly, each time with less text of the sampled rows.

    The last page has no text of them.
    """
    render = _template()
    rows = sum(split.rows for split in manifest.splits.values())
    figures = read_figures(manifest, folder, choose(manifest.key, rows, ROWS))
    values = _values(manifest, folder, figures)
    for budget in BUDGETS:
        yield render(samples=list(samples(manifest, folder, figures.drawn, budget)), **values).encode()
    yield render(samples=[], **values).encode()


def _template() -> Callable[..., str]:
    missing = [library for library in ("jinja2", "matplotlib") if find_spec(library) is None]
    if missing:
        raise PartMissing(
            "library_missing",
            f"packcorpus report needs {' and '.join(missing)}; install with: pip install 'packcorpus[report]'",
        )
    return _compiled()


@cache
def _compiled() -> Callable[..., str]:
    """Compile the template once per process: it takes a fifth of a report's time."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"text": _text, "share": _share}
    style = (here / "report.css").read_text(encoding="utf-8")
    # The content security policy allows only this style sheet.
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment.globals |= {
        **{"style": style, "style_digest": digest, "words": summary, "hues": range(HUES)},
        **{"counted": counted, "lengths_in_words": lengths_in_words},
    }
    return environment.get_template("report.html.jinja").render


def _text(value: str) -> str:
    """Make text from a file printable, on one line, and short enough to read."""
    shown = printable(value)
    half = LONGEST // 2
    return shown if len(shown) <= LONGEST else f"{shown[:half]} … {shown[-half:]}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


# -- values of the page ------------------------------------------------------------------------------------------------


def _values(manifest: Manifest, folder: Path, figures: Figures) -> dict[str, Any]:
    kinds = dict.fromkeys(kind_of(name) for name, split in manifest.splits.items() if split.rows)
    later = {kind for kind in map(kind_of, manifest.splits) if kind.startswith(TRAIN_EPOCH_PREFIX)}
    mixture = mixture_table(manifest.mixture, manifest.config.get("weighting"))
    is_mixed = bool(mixture or manifest.ledger.tokens.repeated)  # these change the tokens of a source
    steps = {
        name: [summary.steps_of_split(manifest, name, batch) for batch in summary.BATCH_ROWS]
        for name in manifest.splits
        if kind_of(name) != "validation"
    }
    shards = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    values = {
        "manifest": manifest,
        "conversation_steps": _conversation_steps(manifest),
        "token_steps": _token_steps(manifest),
        "packings": 1 + len(later),
        "explained": _explain_rows(manifest),
        "padding_explained": _explain_padding(manifest, 1 + len(later)),
        "steps_of_splits": steps,
        "first_steps": sum(counts[1] for name, counts in steps.items() if kind_of(name) == "train"),
        "first_splits": " and ".join(kind for kind in kinds if kind not in later),
        "mixture": mixture,
        "by_entry": is_mixed,
        "places": _places(manifest),
        "reject_reasons": _rejects(manifest, folder),
        "sources": manifest.sources[:SHOWN],
        "more_sources": len(manifest.sources) - SHOWN,
        "shards": shards[:SHOWN],
        "more_shards": len(shards) - SHOWN,
        "trained_on": summary.setting_facts(manifest.config)[0].text,
        "quantiles": dict(zip(QUANTILES, figures.lengths.quantiles([*QUANTILES.values()]), strict=True))
        if len(figures.lengths)
        else {},
        "accepted": len(figures.lengths),
        "longer": figures.lengths.above(manifest.sequence_length),
        "shared_by": figures.conversations.mean(),
        "settings": [
            (
                name,
                "not set" if value in (None, []) else value if isinstance(value, str) else orjson.dumps(value).decode(),
            )
            for name, value in manifest.config.items()
            if name != "sources"
        ],
        "config": _config(manifest),
        "waiting": summary.waiting_line(waiting_of(manifest, folder), manifest.config.get("balance")),
        "common": common_folder([source.path for source in manifest.sources]),
    }
    return values | {"plots": _plots(manifest, figures, values)}


class Step(NamedTuple):
    """The number that is left after a step, and the removals, as (reason, count)."""

    name: str
    left: int
    gone: list[tuple[str, int]]


# Steps between accepted and packed, in order, with their reasons in the ledger.
DROPPING = (
    ("after filters", ("min_tokens", "max_tokens", "min_turns", "max_turns")),
    ("after deduplication", ("duplicate",)),
    ("after removing overlong conversations", ("too_long",)),
    ("after source limits", ("limit",)),
    ("after weights", ("weight",)),
)


def _conversation_steps(manifest: Manifest) -> list[Step]:
    """Return the steps from read to packed, without steps that removed nothing."""
    ledger = manifest.ledger.conversations
    left = ledger.read - sum(ledger.rejected.values())
    steps = [Step("read", ledger.read, []), Step("accepted", left, [("rejected", ledger.read - left)])]
    known = {reason for _, reasons in DROPPING for reason in reasons}
    for name, reasons in (*DROPPING, ("remaining", tuple(sorted(ledger.dropped.keys() - known)))):
        gone = [(summary.DROPPED.get(reason, reason), ledger.dropped.get(reason, 0)) for reason in reasons]
        if lost := sum(count for _, count in gone):
            left -= lost
            steps.append(Step(name, left, gone))
    last = steps.pop() if len(steps) > 2 else Step("", left, [])
    return [*steps, last._replace(name="packed")]


def _token_steps(manifest: Manifest) -> list[Step]:
    tokens = manifest.ledger.tokens
    name = "encoded, with separators" + (" and copies" if tokens.repeated else "")
    of_them = f", {tokens.trained_truncated:,} of them trained" if tokens.trained_truncated else ""
    gone = [(f"truncated{of_them}", tokens.truncated), ("dropped", tokens.dropped)]
    untrained = [("context, not trained", tokens.packed - tokens.trained)]
    accepted = tokens.encoded + tokens.separators + tokens.repeated
    steps = [Step(name, accepted, [])]
    if tokens.rejected:
        steps = [
            Step(name, accepted + tokens.rejected, []),
            Step("accepted", accepted, [("in rejected conversations", tokens.rejected)]),
        ]
    return [
        *steps,
        Step("packed", tokens.packed, gone),
        Step("trained", tokens.trained, untrained),
    ]


def _places(manifest: Manifest) -> list[tuple[str, int]]:
    """Return the contents of all rows, as (name, tokens)."""
    tokens = manifest.ledger.tokens
    padding = [("padding", tokens.padding)]
    if (alignment := tokens.alignment) is not None:
        padding = [("padding that aligns conversations", alignment), ("other padding", tokens.padding - alignment)]
    if manifest.row_layout.padding == "none":  # these rows have no other padding
        padding.pop()
    return [
        ("trained", tokens.trained),
        ("context, not trained", tokens.packed - tokens.trained),
        *padding,
    ]


def _config(manifest: Manifest) -> str:
    """Return the config as YAML, or "" if it is too long for the page."""
    values = {name: value for name, value in manifest.config.items() if value not in (None, [], {})}
    values["sources"] = [
        {name: value for name, value in source.items() if value not in (None, [], {})} for source in values["sources"]
    ]
    written = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=100)
    return written if len(written) <= LONGEST_CONFIG else ""


def _rejects(manifest: Manifest, folder: Path) -> list[dict[str, Any]]:
    """Return the reasons for rejects, the most frequent first, with examples.

    The examples are the first rejected conversations.
    """
    counts = {reason: count for reason, count in manifest.ledger.conversations.rejected.items() if count}
    if not counts:
        return []
    examples: dict[str, list[str]] = {reason: [] for reason in counts}
    for reject in read_rejects(manifest, folder):
        found = examples.setdefault(reject["reason"], [])
        if len(found) < EXAMPLES:
            found.append(f"{reject['source']}:{reject.get('line', reject.get('record'))}: {reject['message']}")
    return [
        {"reason": reason, "count": counts[reason], "code": CODES.get(reason), "examples": examples[reason]}
        for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))
    ]


# -- sentences about rows ----------------------------------------------------------------------------------------------


def _explain_rows(manifest: Manifest) -> list[str]:
    """Explain each setting that affects the shape, the content, or the order of rows.

    Returns one or two sentences per setting.
    """
    shape, found = manifest.row_layout, list[str]()
    if len(manifest.row_lengths) > 1:
        found.append(
            "Conversations are distributed over the row lengths so that all rows together are as full as possible. The "
            f"rows of each length are in separate splits, such as {next(iter(manifest.splits))}. A step has rows of "
            "one length. It has more rows if they are short, so all steps have about the same number of tokens. "
            f"{MIX.get(shape.mix or '', '')}".rstrip()
        )
    if shape.align > 1:
        found.append(
            f"Conversations start at multiples of {shape.align:,} (align: {shape.align}). The gaps between them are "
            "padding, which is not trained on."
        )
    if shape.padding == "none":
        found.append(f"Rows end {_end(shape)}, so their lengths differ (padding: none).")
    balance = manifest.config.get("balance")
    if balance and manifest.splits["train"].rows >= balance["ranks"] * balance["rows_per_rank"]:
        step = f"{balance['ranks']:,} ranks with {counted(balance['rows_per_rank'], 'row')} each"
        found.append(f"Rows are ordered so that the ranks of a step have about the same work: for {step} (balance).")
    if neighbors := NEIGHBORS.get(str(manifest.config.get("neighbors"))):
        found.append(neighbors)
    return found


def _explain_padding(manifest: Manifest, packings: int) -> str:
    """Explain the figure of padding, after the words "Rows by".

    The training split is packed `packings` times.
    """
    shape, tokens, length = manifest.row_layout, manifest.ledger.tokens, f"{manifest.sequence_length:,}"
    aligning = f"{tokens.alignment or 0:,}"
    if shape.padding == "none":
        stored = f"{aligning} padding tokens, which align conversations" if shape.align > 1 else "no padding"
        return f"unused tokens, that is, the difference from {length}. Rows have {stored}, and end {_end(shape)}."
    every = "In all splits, " if packings > 1 else ""
    of_them = f"; {aligning} of them align conversations" if shape.align > 1 else ""
    return f"padding. {every}{tokens.padding:,} of {manifest.places:,} tokens are padding{of_them}."


def _end(shape: RowLayout) -> str:
    multiple = f", at a multiple of {shape.align:,}" if shape.align > 1 else ""
    return f"after their last conversation{multiple}"


# -- plots -------------------------------------------------------------------------------------------------------------


def _plots(manifest: Manifest, figures: Figures, values: dict[str, Any]) -> dict[str, Any]:
    from markupsafe import Markup

    from tasks.report import plots

    packed = manifest.packing_metadata.enabled
    shown: Sequence[MixtureFacts | SourceFacts] = manifest.mixture if values["by_entry"] else manifest.sources
    common = common_folder([source.path for source in shown])
    by_tokens = sorted(shown, key=lambda source: -source.tokens)
    sources = [(_text(s.path.removeprefix(common)), s.tokens, s.trained_tokens) for s in by_tokens]
    drawn = {
        "conversations": plots.funnel("conversations", [step[:2] for step in values["conversation_steps"]]),
        "tokens": plots.funnel("tokens", [step[:2] for step in values["token_steps"]]),
        "sources": plots.sources(sources),
        "lengths": plots.lengths(figures.lengths, manifest.sequence_length, packed),
    }
    if packed:
        pads = pad_groups(figures.padding)
        unused = "unused tokens per row" if manifest.row_layout.padding == "none" else "padding per row"
        drawn["fill"] = plots.bars("fill", pads, unused)
        groups = count_groups(figures.conversations)
        noun = "samples" if manifest.ledger.samples else "conversations"
        drawn["row"] = plots.bars("row", groups, f"{noun} per row")
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - made by plots, which escapes


def pad_groups(pads: Histogram) -> list[tuple[str, int]]:
    """Group rows by padding: 0, 1, 2–3, 4–7, and so on."""
    exponents = np.where(pads.values > 0, np.floor(np.log2(np.maximum(pads.values, 1))).astype(np.int64) + 1, 0)
    counts = _summed(pads.counts, exponents, at_least=1)
    names = ["0", "1", *(f"{1 << e}–{(2 << e) - 1}" for e in range(1, len(counts)))]
    return list(zip(names, counts, strict=False))


def count_groups(found: Histogram, most: int = 30) -> list[tuple[str, int]]:
    """Group rows by number of conversations, in at most `most` groups of equal width."""
    if not len(found):
        return []
    low, high = int(found.values[0]), int(found.values[-1])
    width = -(-(high - low + 1) // most)
    counts = _summed(found.counts, (found.values - low) // width)
    bounds = [(low + place * width, low + (place + 1) * width - 1) for place in range(len(counts))]
    names = [str(first) if width == 1 else f"{first}–{last}" for first, last in bounds]
    return list(zip(names, counts, strict=True))


def _summed(counts: np.ndarray, groups: np.ndarray, at_least: int = 0) -> list[int]:
    """Return the sum of the counts of each group, in the order of group numbers."""
    found: list[int] = np.bincount(groups, counts, at_least).astype(np.int64).tolist()
    return found
