"""Draw the plots of a report as inline SVG.

    matplotlib ─▶ SVG ─colors to classes, styles to attributes─▶ inline SVG

The page has light and dark colors, and its content security policy allows only its style sheet. So each element that
matplotlib draws in one of COLORS gets a class that the style sheet colors, and no element keeps a style. Text stays
text, so it is small, searchable, readable aloud, and scales with the page. Equal figures give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tasks.report.figures import Histogram

# Elements in these colors get classes such as "fill-ink".
COLORS = {"#111111": "ink", "#222222": "one", "#333333": "two", "#444444": "faint"}
INK, ONE, TWO, FAINT = COLORS
WIDTH = 4.2  # inches, about the width of a phone, so text keeps its size there
# Inches per bar with its label above; the bar's height and the label's offset, as shares of these inches.
BAR_INCHES, BAR, LABEL = 0.4, 0.42, 0.28
# Points: the least width of the axis below bars, a character of its labels in the widest common font, and a gap.
AXIS, CHARACTER, BETWEEN = 235, 5.1, 6
SHOWN_SOURCES = 12
LONGEST_NAME = 36

SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.parse_math": False,  # file names may contain dollar signs
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.color": INK,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def funnel(unit: str, steps: Sequence[tuple[str, int]]) -> str:
    """Draw the count of a unit after each step as bars, the first step at the top."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        most = max((count for _, count in steps), default=0) or 1
        for place, (name, count) in enumerate(steps):
            axes.barh(place, count, color=ONE, height=BAR)
            share = "" if place == 0 else f" · {100 * (count / (steps[0][1] or 1)):.1f} %"
            axes.text(0, place - LABEL, f"{name} · {count:,}{share}")
        axes.set_yticks([])
        axes.set_ylim(len(steps) - 0.7, -0.9)
        axes.set_xlim(0, most)
        axes.set_xticks([])
        axes.spines[["bottom", "left"]].set_visible(False)

    return _svg(f"funnel-{unit}", 0.2 + BAR_INCHES * len(steps), draw)


def sources(rows: Sequence[tuple[str, int, int]]) -> str:
    """Draw the tokens of each source, with trained tokens hatched.

    `rows` are (name, tokens, trained tokens).
    """
    shown = list(rows[:SHOWN_SOURCES])
    if rest := rows[SHOWN_SOURCES:]:
        shown.append((f"{len(rest):,} more", sum(row[1] for row in rest), sum(row[2] for row in rest)))

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        places = range(len(shown))
        trained = [row[2] for row in shown]
        for place, (name, tokens, _) in enumerate(shown):
            axes.text(0, place - LABEL, f"{_shortened(name)} · {tokens:,}")
        axes.barh(places, trained, color=TWO, height=BAR, hatch="////", edgecolor=INK, linewidth=0, label="trained")
        others = [row[1] - row[2] for row in shown]
        axes.barh(places, others, left=trained, color=ONE, height=BAR, label="not trained")
        axes.set_yticks([])
        axes.set_ylim(len(shown) - 0.7, -0.9)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(_thousands)
        axes.locator_params(axis="x", nbins=4)
        axes.set_xlabel("tokens")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)

    return _svg("sources", 0.9 + BAR_INCHES * len(shown), draw)


def lengths(found: Histogram, sequence_length: int, packed: bool) -> str:
    """Draw conversation lengths on a logarithmic scale, with the length of a row."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        low, high = (int(found.values[0]), int(found.values[-1])) if len(found) else (1, 1)
        edges = np.unique(np.geomspace(max(low, 1), high + 1, 40).round().astype(np.int64))
        edges = edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])
        counts, _ = np.histogram(found.values, edges, weights=found.counts)
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=ONE, linewidth=0)
        axes.axvline(sequence_length, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
        axes.set_xscale("log", base=2)
        left, right = min(edges[0], sequence_length) / 1.1, max(edges[-1], sequence_length) * 1.1
        axes.set_xlim(left, right)
        is_left = np.log(sequence_length / left) < np.log(right / left) / 2
        name = f" row: {sequence_length:,} " if packed else f" cut at {sequence_length:,} "
        axes.text(sequence_length, 1.0, name, ha="left" if is_left else "right", va="bottom",
                  transform=axes.get_xaxis_transform())  # fmt: skip
        ticks = 2 ** np.arange(np.ceil(np.log2(left)), np.floor(np.log2(right)) + 1)
        axes.set_xticks(ticks[:: max(1, -(-len(ticks) // 7))])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(_thousands)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(_thousands)
        axes.set_xlabel("tokens per conversation")
        axes.set_ylabel("conversations")

    return _svg("lengths", 2.7, draw)


def bars(name: str, groups: Sequence[tuple[str, int]], xlabel: str) -> str:
    """Draw the number of rows in each group."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.bar(range(len(groups)), [count for _, count in groups], width=0.8, color=ONE, linewidth=0)
        ticks = range(0, len(groups), labelled([group for group, _ in groups]))
        axes.set_xticks(ticks, [groups[place][0] for place in ticks], fontsize=8)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(_thousands)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("rows")

    return _svg(name, 2.5, draw)


def labelled(names: Sequence[str]) -> int:
    """Return n so that labels of every n-th group do not touch each other."""
    longest = max(map(len, names), default=0) * CHARACTER + BETWEEN
    return max(1, math.ceil(longest * len(names) / AXIS))


def _shortened(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2 - 1]}…{name[-LONGEST_NAME // 2 :]}"


def _thousands(value: float, _place: object = None) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divisor = 1e3 if unit == "k" else size
            return f"{value / divisor:g} {unit}"
    return f"{value:,.0f}"


# -- from matplotlib to the page --------------------------------------------------------------------------------------


def _svg(name: str, height: float, draw: Callable[[Any], None]) -> str:
    """Draw a figure of `height` inches.

    The matplotlib settings of this machine have no effect.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font here may lack a glyph that the reader's fonts have
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS | {"svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _for_page(out.getvalue().decode(), name)


def _for_page(svg: str, name: str) -> str:
    root = ElementTree.fromstring(svg)  # noqa: S314 - written by matplotlib a moment ago
    box = str(root.get("viewBox"))
    used = set(re.findall(r'(?:fill: url\(|href=")#([^")]+)', svg))
    for element in list(root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        _as_attributes(element, used, name)
    while bare := [(above, one) for above in root.iter() for one in above if one.tag in DROPPED or _is_bare(one)]:
        for above, one in bare:
            above.remove(one)
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "aria-hidden": "true"}
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


DROPPED = ("metadata", "style", "clipPath")  # nothing is drawn outside the clipped area
KEPT = {"d", "x", "y", "x1", "x2", "y1", "y2", "width", "height", "points", "transform"}
STYLES = {"fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "text-anchor", "font-size"}
OTHERS = {"fill-opacity", "opacity", "patternUnits", "viewBox", "preserveAspectRatio"}


def _is_bare(element: ElementTree.Element) -> bool:
    return element.tag in ("g", "defs") and not len(element)


def _as_attributes(element: ElementTree.Element, used: set[str], name: str) -> None:
    """Turn styles into attributes, or into classes for COLORS, and remove unused ids."""
    given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    element.attrib.clear()
    for pair in given.pop("style", "").split(";"):
        key, _, value = pair.partition(":")
        given[key.strip()] = value.strip()
    if font := given.pop("font", ""):
        given["font-size"] = font.partition("px")[0].split()[-1]
    classes = []
    for key, value in given.items():
        if key == "id" and value in used:
            element.set("id", f"{name}-{value}")
        elif key == "href":
            element.set("href", f"#{name}-{value[1:]}")
        elif value in COLORS and key in STYLES:
            classes.append(f"{key}-{COLORS[value]}")
        elif value.startswith("url(#") and key in STYLES:
            element.set(key, f"url(#{name}-{value[5:]}")
        elif key in KEPT:
            # A precision of 0.01 points is enough.
            if (short := re.sub(r"(\.\d\d)\d+", r"\1", value).strip()) and not short.startswith("rotate(-0 "):
                element.set(key, short)
        elif key in STYLES or key in OTHERS:
            element.set(key, value)
    if classes:
        element.set("class", " ".join(classes))
