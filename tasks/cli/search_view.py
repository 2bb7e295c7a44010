"""Lists: the conversations in which a text was found, and those that were rejected.

text ─search─▶ hits ─▶ a line each: where, and what stands around it          rejects.jsonl ─▶ by reason, and each
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tasks.cli.token_text import HEADING_STYLE, print_hanging, styled, text_of
from tasks.core.error_codes import CODES
from tasks.core.printable import counted, printable
from tasks.encoders.corpus_tokenizer import open_tokenizer
from tasks.encoders.encoder import Encoder
from tasks.inspection.lookup import find_row, origin
from tasks.inspection.rows import read_row
from tasks.inspection.search import Hit, find_text, rejects, row_of
from tasks.inspection.token_runs import runs_of
from tasks.storage.corpus_folder import corpus_folder
from tasks.storage.manifest import Manifest, load_manifest

# Tokens that are shown on either side of what was found.
AROUND = 16


def show_found(path: Path, text: str, limit: int, console: Console) -> None:
    """The first `limit` conversations that contain `text`. Raises as `search` does."""
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    encoder = open_tokenizer(manifest, folder) if manifest.format_version == "3.0" else None
    hits = find_text(manifest, folder, text, encoder)
    shown = 0
    for hit, place in islice(hits, limit):
        row = row_of(manifest, hit)
        where = f"  row {row:,} of {hit.split}" + (f"  #{place['number']:,}" if place else "")
        facts = "  trained on" if hit.trained else ""
        console.print(
            Text.assemble(("━━ ", "cyan"), (origin(manifest, place), HEADING_STYLE), (where, "dim"), (facts, "green")),
            soft_wrap=True,
        )
        if encoder:
            print_hanging(console, _excerpt(manifest, folder, hit, encoder, text))
        shown += 1
    more = shown == limit and next(hits, None) is not None
    if not shown:
        console.print(f"no conversation contains {printable(text)!r}")
    elif more:
        console.print(Text(f"the first {limit:,}; more with --limit", "dim"))
    else:
        console.print(Text(f"{counted(shown, 'conversation')}", "dim"))


def _excerpt(manifest: Manifest, folder: Path, hit: Hit, encoder: Encoder, text: str) -> Text:
    """The tokens around what was found, on one line of text."""
    _, shard, at = find_row(manifest, row_of(manifest, hit), hit.split)
    row = read_row(manifest, folder, shard, at)
    positions = row["position_ids"]
    end = hit.last + 1
    while end < len(positions) and positions[end] and end <= hit.last + AROUND and row["attention_mask"][end]:
        end += 1
    begin = max(hit.start, hit.first - AROUND)
    inside = slice(begin, end)
    found = text_of(encoder, runs_of(encoder, row["input_ids"][inside], row["labels"][inside]))
    found.highlight_words([printable(text)], "reverse")
    line = Text(" ⏎ ", "dim").join(found.split("\n"))
    return Text.assemble(
        "… " if begin > hit.start else "", line, " …" if end < len(positions) and positions[end] else ""
    )


def show_rejects(path: Path, limit: int, console: Console) -> None:
    """How many were rejected for what, and the first `limit` of them."""
    manifest = load_manifest(path)
    counts = {reason: n for reason, n in manifest.ledger.conversations.rejected.items() if n}
    if not counts:
        console.print("no conversation was rejected")
        return
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        code = CODES.get(reason)
        meaning = Text.assemble(
            (f"{count:>8,}  ", "bold"), (f"{code.code if code else ''} {printable(reason)}  ", HEADING_STYLE),
            (code.meaning if code else "", "dim"),
        )  # fmt: skip
        console.print(meaning, soft_wrap=True)
    console.print()
    for reject in islice(rejects(path), limit):
        place = f"{reject.get('source')}:{reject.get('line', reject.get('record'))}"
        line = Text.assemble(
            (printable(place), HEADING_STYLE),
            f"  {printable(str(reject.get('code')))} ",
            styled(str(reject.get("message")), ""),
        )
        print_hanging(console, line, 0)
    if (rest := sum(counts.values()) - limit) > 0:
        console.print(Text(f"… {rest:,} more, with --limit or in rejects.jsonl", "dim"))
