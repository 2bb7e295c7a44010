"""Show a diagnosis: a table for a terminal or a document, and a picture.

Diagnosis ─cells─▶ rows of texts ─┬─table────▶ aligned lines
                                  └─markdown─▶ diagnosis.md
          └─picture──────────────────────────▶ diagnosis.svg
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

from rich.table import Table
from rich.text import Text

from train.diagnose.compare import Outcome, Speedup

HEADS = (
    "trial", "runs", "trained tokens/s", "rows/s", "speed", "MFU", "memory", "data", "forward", "backward", "optimizer",
    "Δ loss", "Δ gradient",
)  # fmt: skip

LABEL = 40  # most characters in a line of a bar's label


def cells(
    outcome: Outcome, speed: Speedup | None, runs: int, trained_share: float, off: tuple[float, float] | None
) -> list[str]:
    """Return the texts of one row.

    `speed` is None for the baseline, which has run `runs` times. `off` are the relative differences of loss and
    gradient norm to the reference.
    """
    if outcome.reason:
        return [outcome.trial.name, outcome.reason]
    phases = outcome.phases or {}
    return [
        outcome.trial.name,
        str(speed.runs if speed else runs),
        f"{outcome.tokens_per_second * trained_share:,.0f}",
        f"{outcome.rows_per_second:,.2f}",
        str(speed) if speed else "1",
        f"{100 * outcome.mfu:.1f} %" if outcome.mfu is not None else "–",
        f"{outcome.peak_memory_bytes / 1e9:.2f} GB",
        f"{100 * (phases['data'] + phases['copy']):.2f} %",
        *(f"{100 * phases[name]:.1f} %" for name in ("forward", "backward", "optimizer")),
        *(("–", "–") if off is None else (f"{value:.0e}" if value else "0" for value in off)),
    ]


def table(rows: list[list[str]]) -> Table:
    """Return an aligned table of the trials that have figures."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(HEADS):
        found.add_column(head, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        if len(row) == len(HEADS):
            found.add_row(*map(Text, row))
    return found


def markdown(rows: list[list[str]]) -> str:
    """Return the table as Markdown."""
    lines = [f"| {' | '.join(HEADS)} |", f"|---|{'---:|' * (len(HEADS) - 1)}"]
    for row in rows:
        escaped = [text.replace("|", "\\|") for text in row]
        lines.append(f"| {' | '.join(escaped)} |{' |' * (len(HEADS) - len(row))}")
    return "\n".join(lines) + "\n"


def picture(bars: list[tuple[str, Speedup, bool]], title: str) -> bytes:
    """Return an SVG plot of the speed of each trial, relative to the current settings.

    A bar is (name, speed, whether it trains the same). It is drawn with the error of the speed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.4 * len(bars)), layout="constrained")
        for place, (_, speed, same) in enumerate(reversed(bars)):
            color: Any = "#9a9a9a" if not speed.differs else "#1f5fa8" if same else "#e8a871"
            axes.barh(place, speed.ratio - 1, left=1, xerr=speed.error, color=color, height=0.6, ecolor="#333333")
        axes.set_yticks(range(len(bars)), [textwrap.fill(name, LABEL) for name, _, _ in reversed(bars)])
        axes.axvline(1, color="#333333", linewidth=0.8)
        axes.set_xlabel(
            "speed, 1 = current settings; blue: trains the same, orange: something else, gray: no difference"
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_title(title)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()
