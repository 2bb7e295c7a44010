"""Draw the plots of a report as inline SVG.

The page has light and dark colors, and its content security policy allows only its style sheet. So shapes have classes
instead of colors, and no element has a style. Text stays text, so it is small, searchable, and scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from packcorpus.tasks.report.figures import Histogram

# The unit is about a CSS pixel on a phone, so text keeps its size there.
WIDTH, LEFT, RIGHT, TOP = 302, 6, 288, 16
# Distance of bars with their labels above, and the height of a bar.
PITCH, BAR = 28.5, 12
# The least width of the axis below bars, a character of its labels in the widest common font, and a gap.
AXIS, CHARACTER, BETWEEN = 228, 5.1, 6
SHOWN_SOURCES = 12
LONGEST_NAME = 36

HATCH = (
    '<defs><pattern id="hatch" patternUnits="userSpaceOnUse" width="6" height="6"><rect class="fill-two" width="6" '
    'height="6"/><path class="stroke-ink" stroke-width="0.7" d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/></pattern></defs>'
)
PLAIN, HATCHED, LINE = 'class="fill-one"', 'fill="url(#hatch)"', 'class="stroke-ink" fill="none" stroke-width="0.8"'


def funnel(steps: Sequence[tuple[str, int]]) -> str:
    """Draw the count of a unit after each step as bars, the first step at the top."""
    most, elements = max((count for _, count in steps), default=0) or 1, []
    for number, (name, count) in enumerate(steps):
        share = "" if number == 0 else f" · {100 * (count / (steps[0][1] or 1)):.1f} %"
        elements.append(_text(0, 11 + PITCH * number, f"{name} · {count:,}{share}"))
        elements.append(_bar(0, 16 + PITCH * number, (WIDTH - 3) * count / most, BAR))
    return _svg(6 + PITCH * len(steps), elements)


def sources(rows: Sequence[tuple[str, int, int]]) -> str:
    """Draw the tokens of each source, with trained tokens hatched.

    `rows` are (name, tokens, trained tokens).
    """
    shown = list(rows[:SHOWN_SOURCES])
    if rest := rows[SHOWN_SOURCES:]:
        shown.append((f"{len(rest):,} more", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    most = max((tokens for _, tokens, _ in shown), default=0) or 1
    scale, bottom = (RIGHT - LEFT) / (1.05 * most), 30 + PITCH * len(shown)
    elements = [HATCH, _bar(126, 4, 20, 7, HATCHED), _text(150, 11, "trained")]
    elements += [_bar(210, 4, 20, 7), _text(234, 11, "not trained")]
    for number, (name, tokens, trained) in enumerate(shown):
        top = 38 + PITCH * number
        elements.append(_text(LEFT, top - 4, f"{_shortened(name)} · {tokens:,}"))
        elements.append(_bar(LEFT, top, scale * trained, BAR, HATCHED))
        elements.append(_bar(LEFT + scale * trained, top, scale * (tokens - trained), BAR))
    elements.append(f'<path {LINE} d="M{LEFT} {bottom}H{RIGHT}"/>')
    for tick in _ticks(most, 3):
        elements += _below(LEFT + scale * tick, bottom, _thousands(tick))
    elements.append(_text((LEFT + RIGHT) / 2, bottom + 30, "tokens", "middle"))
    return _svg(bottom + 36, elements)


def lengths(histogram: Histogram, sequence_length: int, packed: bool) -> str:
    """Draw conversation lengths on a logarithmic scale, with the length of a row."""
    low, high = (int(histogram.values[0]), int(histogram.values[-1])) if len(histogram) else (1, 1)
    edges = np.unique(np.geomspace(max(low, 1), high + 1, 40).round().astype(np.int64))
    edges = edges if len(edges) > 1 else np.array([edges[0], edges[0] + 1])
    counts = np.histogram(histogram.values, edges, weights=histogram.counts)[0].astype(np.int64).tolist()
    bottom = 160
    elements, left, scale = _axes(counts, bottom, "tokens per conversation", "conversations")
    first, last = math.log2(min(edges[0], sequence_length) / 1.1), math.log2(max(edges[-1], sequence_length) * 1.1)
    places = left + (RIGHT - left) * (np.log2(edges) - first) / (last - first)
    for place, width, count in zip(places, np.diff(places), counts, strict=False):
        elements.append(_bar(place, bottom - scale * count, width, scale * count))
    exponents = range(math.ceil(first), math.floor(last) + 1)
    for exponent in exponents[:: max(1, -(-len(exponents) // 7))]:
        place = left + (RIGHT - left) * (exponent - first) / (last - first)
        elements += _below(place, bottom, _thousands(2.0**exponent))
    middle, row = (first + last) / 2, math.log2(sequence_length)
    place = left + (RIGHT - left) * (row - first) / (last - first)
    elements.append(f'<path {LINE} stroke-dasharray="5 2.5" d="M{place:.2f} {TOP}V{bottom}"/>')
    name = f"row: {sequence_length:,}" if packed else f"cut at {sequence_length:,}"
    elements.append(_text(place, TOP - 5, name, "start" if row < middle else "end"))
    return _svg(bottom + 36, elements)


def bars(groups: Sequence[tuple[str, int]], xlabel: str) -> str:
    """Draw the number of rows in each group."""
    bottom = 147
    elements, left, scale = _axes([count for _, count in groups], bottom, xlabel, "rows")
    pitch = (RIGHT - left) / max(1, len(groups))
    step = labelled([name for name, _ in groups])
    for number, (name, count) in enumerate(groups):
        elements.append(_bar(left + pitch * (number + 0.1), bottom - scale * count, 0.8 * pitch, scale * count))
        if number % step == 0:
            elements += _below(left + pitch * (number + 0.5), bottom, name, size=8)
    return _svg(bottom + 36, elements)


def labelled(names: Sequence[str]) -> int:
    """Return n so that labels of every n-th group do not touch each other."""
    longest = max(map(len, names), default=0) * CHARACTER + BETWEEN
    return max(1, math.ceil(longest * len(names) / AXIS))


def _shortened(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2 - 1]}…{name[-LONGEST_NAME // 2 :]}"


def _thousands(value: float) -> str:
    for size, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= size:
            return f"{value / divisor:.3g} {unit}"
    return f"{value:,.0f}"


def _ticks(most: int, count: int) -> range:
    """Return round numbers from 0 to `most`, at most `count` of them above 0."""
    steps = (digit * 10**exponent for exponent in range(20) for digit in (1, 2, 5))
    return range(0, most + 1, next(step for step in steps if most // step <= count))


def _axes(counts: Sequence[int], bottom: float, xlabel: str, ylabel: str) -> tuple[list[str], float, float]:
    """Draw the axes of bars.

    Returns them, the left end of the bars, and the height of a count of 1.
    """
    most = max(counts, default=0) or 1
    ticks, scale = _ticks(most, 5), (bottom - TOP) / (1.05 * most)
    left = 22 + 6 * max(len(_thousands(tick)) for tick in ticks)
    middle = (TOP + bottom) / 2
    elements = [
        f'<path {LINE} d="M{left} {TOP}V{bottom}H{RIGHT}"/>',
        _text((left + RIGHT) / 2, bottom + 30, xlabel, "middle"),
    ]
    elements.append(_text(10, middle, ylabel, "middle", f' transform="rotate(-90 10 {middle:.2f})"'))
    for tick in ticks:
        place = bottom - scale * tick
        elements.append(f'<path {LINE} d="M{left - 3.5} {place:.2f}h3.5"/>')
        elements.append(_text(left - 6, place + 3.5, _thousands(tick), "end"))
    return elements, left, scale


def _below(place: float, bottom: float, label: str, size: int = 10) -> list[str]:
    """Draw a tick of the horizontal axis, and its label."""
    tick = f'<path {LINE} d="M{place:.2f} {bottom}v3.5"/>'
    return [tick, _text(place, bottom + 5 + size, label, "middle", size=size)]


def _bar(left: float, top: float, width: float, height: float, paint: str = PLAIN) -> str:
    return f'<path {paint} d="M{left:.2f} {top:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "", size: int = 10) -> str:
    where = f'x="{x:.2f}" y="{y:.2f}" font-size="{size}px" text-anchor="{anchor}"'
    return f'<text class="fill-ink" {where}{more}>{escape(text)}</text>'


def _svg(height: float, elements: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" aria-hidden="true">{"".join(elements)}</svg>'
