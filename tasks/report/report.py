"""Write the report of a corpus as one HTML file to share.

    manifest, index, rejects ─figures, plots─┐
    20 rows, chosen by the key ─rows─────────┴─▶ report.html.jinja + report.css ─▶ NAME-KEY.html

The file runs no script and requests nothing. It has at most MOST_BYTES, unless the figures alone take more. Equal
corpora give equal bytes. Text from files is escaped twice: control characters here (`printable`), and HTML by Jinja.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import yaml

from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.core.printable import common_folder, counted, lengths_in_words, printable
from packcorpus.tasks.corpus import summary
from packcorpus.tasks.corpus.summary import mixture_table
from packcorpus.tasks.inspection.lookup import read_rejects
from packcorpus.tasks.inspection.manifests import waiting_of
from packcorpus.tasks.report import plots
from packcorpus.tasks.report.figures import Figures, Histogram, read_figures
from packcorpus.tasks.report.rows import HUES, choose, samples
from packcorpus.tasks.storage.corpus_folder import changed_files, checked_folder, default_report_path, raise_all
from packcorpus.tasks.storage.facts import MixtureFacts, SourceFacts
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.storage.layout import TRAIN_EPOCH_PREFIX, kind_of
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.stores.urls import refuse_url

MOST_BYTES = 500_000
ROWS = 20
# Bytes of each sampled row. If the page is too large, the next smaller budget is used.
BUDGETS = (15_000, 6_000, 2_000)
SHOWN = 40  # maximum number of sources, and of shards, to show
EXAMPLES = 3  # rejects to show per reason
LONGEST = 300  # characters of a name or message
LONGEST_CONFIG = 12_000
QUANTILES = {"shortest": 0, "median": 0.5, "nine": 0.9, "most": 0.99, "longest": 1}


def write_report(path: Path, output: Path | None) -> tuple[Path, int]:
    """Write the report of a corpus and return its path and size.

    By default, `output` is next to the corpus folder. Raises DataError or InputMissing if a file of the corpus differs
    from its record, and StorageError if the report cannot be written.
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
    rows = sum(split.rows for split in manifest.splits.values())
    figures = read_figures(manifest, folder, choose(manifest.key, rows, ROWS))
    values, render, page = _values(manifest, folder, figures), _template(), b""
    for budget in (*BUDGETS, 0):  # the last page has no text of the rows
        shown = list(samples(manifest, folder, figures.drawn, budget)) if budget else []
        page = render(samples=shown, **values).encode()
        if len(page) <= MOST_BYTES:
            break
    return output, write_bytes(output, page)["bytes"]


@cache
def _template() -> Callable[..., str]:
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
    lengths = figures.lengths
    mixture = mixture_table(manifest.mixture, manifest.config.get("weighting"))
    is_mixed = bool(mixture or manifest.ledger.has_copies)  # these change the tokens of a source
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
        "quantiles": dict(zip(QUANTILES, lengths.quantiles([*QUANTILES.values()]), strict=False)),
        "accepted": len(lengths),
        "longer": lengths.above(manifest.sequence_length),
        "shared_by": figures.conversations.mean(),
        "settings": [(name, _shown(value)) for name, value in manifest.config.items() if name != "sources"],
        "config": _config(manifest),
        "waiting": summary.waiting_line(waiting_of(manifest, folder), manifest.config.get("balance")),
        "common": common_folder([source.path for source in manifest.sources]),
    }
    return values | {"plots": _plots(manifest, figures, values)}


def _shown(value: Any) -> str:
    if value in (None, []):
        return "not set"
    return value if isinstance(value, str) else orjson.dumps(value).decode()


class Step(NamedTuple):
    """The number that is left after a step, and the removals, as (reason, count)."""

    name: str
    left: int
    gone: list[tuple[str, int]]


# Steps between accepted and packed, in order, with their reasons in the ledger.
DROPPING = (
    ("after decontamination", ("contaminated",)),
    ("after filters", ("min_tokens", "max_tokens", "min_turns", "max_turns")),
    ("after deduplication", ("duplicate", "near_duplicate")),
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
    name = "encoded, with separators" + (" and repeated tokens" if tokens.repeated else "")
    of_them = f", {tokens.trained_truncated:,} of them trained" if tokens.trained_truncated else ""
    gone = [(f"truncated{of_them}", tokens.truncated), ("dropped", tokens.dropped)]
    gone += [("shared by samples of a tree, which store them once", tokens.shared or 0)]
    accepted = tokens.encoded + tokens.separators + tokens.repeated
    steps = [Step(name, accepted + tokens.rejected, [])]
    if tokens.rejected:
        steps.append(Step("accepted", accepted, [("in rejected conversations", tokens.rejected)]))
    untrained = [("context, not trained", tokens.packed - tokens.trained)]
    return [*steps, Step("packed", tokens.packed, gone), Step("trained", tokens.trained, untrained)]


def _places(manifest: Manifest) -> list[tuple[str, int]]:
    """Return the contents of all rows, as (name, tokens)."""
    tokens = manifest.ledger.tokens
    padding = [("padding", tokens.padding)]
    if (alignment := tokens.alignment) is not None:
        padding = [("padding that aligns conversations", alignment), ("other padding", tokens.padding - alignment)]
    if manifest.row_layout.padding == "none":  # these rows have no other padding
        padding.pop()
    return [("trained", tokens.trained), ("context, not trained", tokens.packed - tokens.trained), *padding]


def _config(manifest: Manifest) -> str:
    """Return the config as YAML, or "" if it is too long for the page."""

    def given(settings: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if value not in (None, [], {})}

    values = given(manifest.config)
    values["sources"] = [given(source) for source in values["sources"]]
    written = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=100)
    return written if len(written) <= LONGEST_CONFIG else ""


def _rejects(manifest: Manifest, folder: Path) -> list[dict[str, Any]]:
    """Return the reasons for rejects, the most frequent first, with examples."""
    counts = {reason: count for reason, count in manifest.ledger.conversations.rejected.items() if count}
    examples: dict[str, list[str]] = {reason: [] for reason in counts}
    for reject in read_rejects(manifest, folder) if counts else ():
        of_reason = examples.setdefault(reject["reason"], [])
        if len(of_reason) < EXAMPLES:
            of_reason.append(f"{reject['source']}:{reject.get('line', reject.get('record'))}: {reject['message']}")
    return [
        {"reason": reason, "count": counts[reason], "code": CODES.get(reason), "examples": examples[reason]}
        for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))
    ]


# -- plots -------------------------------------------------------------------------------------------------------------


def _plots(manifest: Manifest, figures: Figures, values: dict[str, Any]) -> dict[str, Any]:
    from markupsafe import Markup

    shown: Sequence[MixtureFacts | SourceFacts] = manifest.mixture if values["by_entry"] else manifest.sources
    common = common_folder([source.path for source in shown])
    by_tokens = sorted(shown, key=lambda source: -source.tokens)
    sources = [(_text(s.path.removeprefix(common)), s.tokens, s.trained_tokens) for s in by_tokens]
    drawn = {
        "conversations": plots.funnel([step[:2] for step in values["conversation_steps"]]),
        "tokens": plots.funnel([step[:2] for step in values["token_steps"]]),
        "sources": plots.sources(sources),
        "lengths": plots.lengths(figures.lengths, manifest.sequence_length, manifest.packing_metadata.enabled),
    }
    if manifest.packing_metadata.enabled:
        unused = "unused tokens" if manifest.row_layout.padding == "none" else "padding"
        noun = "samples" if manifest.ledger.samples else "conversations"
        drawn["fill"] = plots.bars(pad_groups(figures.padding), f"{unused} per row")
        drawn["row"] = plots.bars(count_groups(figures.conversations), f"{noun} per row")
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - made by plots, which escapes


def pad_groups(pads: Histogram) -> list[tuple[str, int]]:
    """Group rows by padding: 0, 1, 2–3, 4–7, and so on."""
    exponents = np.where(pads.values > 0, np.floor(np.log2(np.maximum(pads.values, 1))).astype(np.int64) + 1, 0)
    counts = np.bincount(exponents, pads.counts, 1).astype(np.int64).tolist()
    names = ["0", "1", *(f"{1 << e}–{(2 << e) - 1}" for e in range(1, len(counts)))]
    return list(zip(names, counts, strict=False))


def count_groups(conversations: Histogram, most: int = 30) -> list[tuple[str, int]]:
    """Group rows by number of conversations, in at most `most` groups of equal width."""
    if not len(conversations):
        return []
    low, high = int(conversations.values[0]), int(conversations.values[-1])
    width = -(-(high - low + 1) // most)
    counts = np.bincount((conversations.values - low) // width, conversations.counts).astype(np.int64).tolist()
    firsts = [low + number * width for number in range(len(counts))]
    names = [str(first) if width == 1 else f"{first}–{first + width - 1}" for first in firsts]
    return list(zip(names, counts, strict=True))
