"""Explain in sentences how the settings of a corpus affect its rows."""

from __future__ import annotations

from tasks.core.printable import counted
from tasks.storage.layout import RowLayout
from tasks.storage.manifest import Manifest

COMPANY = {
    "similar": "If conversations of equal length can trade places, each is in a row with others about its topic "
    "(company: similar).",
    "apart": "Near-duplicates do not share a row if there are enough other conversations of their length (company: "
    "apart).",
}

MIX = {
    "tokens": "Steps of all lengths are evenly spread over an epoch (mix: tokens).",
    "blocks": "An epoch starts with all steps of the shortest rows and continues with the steps of the next length "
    "(mix: blocks).",
}


def explain_rows(manifest: Manifest) -> list[str]:
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
    if company := COMPANY.get(str(manifest.config.get("company"))):
        found.append(company)
    return found


def explain_padding(manifest: Manifest, packings: int) -> str:
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
