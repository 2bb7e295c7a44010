"""Makers of long listings."""

from __future__ import annotations

from fractions import Fraction

from desk import Desk, Dialogue
from makers.units import DIMENSIONS, convert
from writing import asked, count, digits, table


def collatz(d: Desk) -> Dialogue:
    n = d.pick([7, 9, 11, 14, 18, 19, 25, 33, 39, 43, 54])
    lines, x = [], n
    while x != 1:
        lines.append(f"{x} ÷ 2 = {x // 2}" if x % 2 == 0 else f"{x} × 3 + 1 = {x * 3 + 1}")
        x = x // 2 if x % 2 == 0 else x * 3 + 1
    ask = f"Start with {n}. Halve even numbers, triple odd ones and add one. Write down every step until you reach 1."
    answer = "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1)) + f"\n\nThat took {len(lines)} steps."
    return Dialogue([(ask, answer)], f"{len(lines)} steps.")


def times_tables(d: Desk) -> Dialogue:
    first = d.between(3, 11)
    many = d.between(2, 4)
    heads = list(range(first, first + many))
    ask = d.pick(
        [
            f"Write out the times tables of {heads[0]} to {heads[-1]} for my daughter.",
            f"I need the multiplication tables from {heads[0]} to {heads[-1]}, each up to ten.",
        ]
    )
    answer = "\n\n".join(
        f"**Table of {h}**\n\n" + "\n".join(f"{i} × {h} = {i * h}" for i in range(1, 11)) for h in heads
    )
    return Dialogue([(asked(d, ask), answer)], ", ".join(str(i * heads[0]) for i in range(1, 11)) + ", and so on.")


def bubble_sort(d: Desk) -> Dialogue:
    numbers = [d.between(1, 99) for _ in range(d.between(6, 9))]
    ask = d.pick(
        [f"Show every swap that bubble sort makes on {numbers}.", f"Trace bubble sort on the list {numbers}, please."]
    )
    work, out, swaps = list(numbers), [], 0
    for end in range(len(work) - 1, 0, -1):
        done: list[str] = []
        for i in range(end):
            if work[i] > work[i + 1]:
                work[i], work[i + 1] = work[i + 1], work[i]
                swaps += 1
                done.append(f"- {work[i + 1]} and {work[i]} are in the wrong order → {work}")
        if not done:
            out.append("Pass without a swap: the list is in order and the algorithm stops.")
            break
        out.append(f"Pass {len(numbers) - end}\n" + "\n".join(done))
    answer = "\n\n".join(out) + f"\n\nSorted after {count(swaps, 'swap')}: {work}"
    return Dialogue([(ask, answer)], f"{work}, after {count(swaps, 'swap')}.")


def conversion_table(d: Desk) -> Dialogue:
    _, units = d.deal("dimension", DIMENSIONS)
    a, b = d.some([name for name, _ in units], 2)
    step, rows = d.pick([1, 2, 5, 10, 25]), d.between(8, 24)
    ask = d.pick(
        [
            f"Give me a table of {a} in {b}, in steps of {step}.",
            f"Print a conversion table from {a} to {b} ({rows} rows, step {step}).",
        ]
    )
    body = [(step * i, digits(convert(Fraction(step * i), a, b), 3)) for i in range(1, rows + 1)]
    return Dialogue(
        [(asked(d, ask), table((a, b), body) + "\n\nValues are rounded to three decimals.")], table((a, b), body[:3])
    )
