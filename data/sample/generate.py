"""Writes the sample corpus: 300 conversations made for packcorpus, in every record format and container it reads.

    Desk (seed 42) → makers → Dialogue → record format → file

A maker invents one small task and works out its answer, so that every sum, date, conversion and program in the corpus
is computed here and can be checked again (tests/test_sample.py does). A `Dialogue` knows nothing of formats; the
functions below `# Record formats` turn it into records.

    python data/sample/generate.py [FOLDER]        # default: the folder of this script

The output is a function of this file alone: no clock, no network, no set order. `Random.random` is the only method of
the generator in use, because it is the only one whose sequence Python promises to keep between versions. Parquet and
Arrow files name the pyarrow that wrote them, and gzip and zstd output depends on the version of zlib and zstd; the
records inside do not.

Conventions that the test relies on: an arithmetic sign between two numbers belongs to a claim that holds, `=` means
equal and `≈` rounded; a day is written "14 March 2026 is a Saturday" or "Saturday, 14 March 2026"; code blocks run.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from fractions import Fraction
from math import gcd, prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

T = TypeVar("T")
Record = dict[str, Any]
Turns = list[tuple[str, str]]


class Desk:
    """The one source of chance. `deal` goes through a list in a shuffled order before it repeats anything."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random
        self._decks: dict[str, list[int]] = {}

    def between(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self._random() < share

    def pick(self, items: Sequence[T]) -> T:
        return items[self.between(0, len(items) - 1)]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.between(0, i)
            out[i], out[j] = out[j], out[i]
        return out

    def some(self, items: Sequence[T], n: int) -> list[T]:
        return self.shuffled(items)[:n]

    def deal(self, name: str, items: Sequence[T]) -> T:
        if not self._decks.get(name):
            self._decks[name] = self.shuffled(range(len(items)))
        return items[self._decks[name].pop()]

    def day(self, first: int = 1950, last: int = 2060) -> date:
        return date(first, 1, 1) + timedelta(self.between(0, (date(last, 12, 31) - date(first, 1, 1)).days))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Pairs of question and answer. `brief` answers the first question correctly in as few words as possible."""

    turns: Turns
    brief: str
    lang: str = "en"


Maker = Callable[[Desk], Dialogue]


# Writing numbers and dates


def digits(value: Fraction | int, places: int = 4) -> str:
    """Decimal notation, rounded half to even at `places`, without trailing zeros."""
    scaled = round(Fraction(value) * 10**places)
    whole, rest = divmod(abs(scaled), 10**places)
    tail = f"{rest:0{places}d}".rstrip("0") if places else ""
    return ("−" if scaled < 0 else "") + str(whole) + (f".{tail}" if tail else "")


def result(value: Fraction | int, places: int = 4) -> str:
    """`= 2.5` where `places` decimals hold the value, `≈ 0.3333` where they do not."""
    exact = (Fraction(value) * 10**places).denominator == 1
    return f"{'=' if exact else '≈'} {digits(value, places)}"


def money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


def plain(ratio: Fraction) -> str:
    return str(ratio.numerator) if ratio.denominator == 1 else f"{ratio.numerator}/{ratio.denominator}"


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MONTHS = words("January February March April May June July August September October November December")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def long(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def weekday(day: date) -> str:
    return DAYS[day.weekday()]


def full(day: date) -> str:
    return f"{weekday(day)}, {long(day)}"


def clock(minutes: int) -> str:
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def ordinal(n: int) -> str:
    return f"{n}{'th' if 10 <= n % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


# Words to vary with

PEOPLE = words(
    "Amira Bruno Chidi Dalia Emre Freya Goran Hana Imran Jolanta Kwame Leila Mateo Nadia Oskar Priya Quentin Rosa "
    "Samir Tove Ulrich Valeria Wanja Xenia Yusuf Zofia Anselm Beatriz Cormac Desta"
)
SURNAMES = words(
    "Abara Bergman Castillo Dvorak Eriksen Fontaine Greco Haddad Iversen Jansen Kowalski Lindqvist Moreau Nakamura "
    "Okafor Petrov Quispe Rossi Schneider Tanaka Umar Varga Weiss Yilmaz Zeller"
)
GOODS = (
    ("notebook", 245), ("pencil", 60), ("loaf of bread", 320), ("jar of honey", 590), ("light bulb", 415),
    ("bag of rice", 279), ("bicycle tube", 780), ("candle", 135), ("tin of beans", 95), ("tea towel", 450),
    ("litre of milk", 119), ("packet of seeds", 189), ("battery", 130), ("umbrella", 1290), ("postcard", 85),
    ("bar of soap", 210), ("flower pot", 365), ("paint brush", 549), ("bottle of ink", 675), ("ball of wool", 525),
)  # fmt: skip
PLACES = (
    "the harbour", "the old mill", "the station", "the botanical garden", "the ridge", "the ferry pier", "the library",
    "the covered market", "the observatory", "the east gate", "the weather station", "the lighthouse",
)  # fmt: skip
ASKS_BEFORE = ("", "", "", "", "Hi! ", "Hello, ", "Quick question: ", "Could you help me? ", "Good morning. ", "Hey – ")
ASKS_AFTER = ("", "", "", "", "", " Thanks!", " Thank you in advance.", " I am curious.")
SYSTEMS = (
    "You are a patient tutor. Show each step and finish with the result on a line of its own.",
    "You are a helpful assistant for a small workshop. Answer briefly and give units.",
    "Answer in plain English. If a number is rounded, say so.",
    "You help travellers with times, distances and money.",
    "You are a careful assistant. Check your arithmetic before you answer.",
    "You write Python for beginners: short functions, clear names, one example.",
    "You answer in the language in which you are asked.",
    "You are the help desk of a public library. Be friendly and precise.",
    "You are a study partner. Explain first, then ask nothing back.",
    "Use tables where they make the answer easier to read.",
    "You are an assistant for people who plan things: dates, lists, budgets.",
    "Reply with facts you can derive, and name the rule you used.",
)


def without_greeting(ask: str) -> str:
    for before in filter(None, ASKS_BEFORE):
        if ask.startswith(before):
            ask = ask.removeprefix(before)
            return ask[0].upper() + ask[1:]
    return ask


def asked(d: Desk, text: str) -> str:
    before = d.pick(ASKS_BEFORE)
    if before.endswith((", ", "– ")):
        text = text[0].lower() + text[1:] if not text.startswith("I ") and text.split(" ")[0] not in PEOPLE else text
    return before + text + d.pick(ASKS_AFTER)


# Arithmetic


def follow_up(d: Desk, value: int) -> tuple[str, str, int]:
    """A question about the number that the last answer ended with, its answer, and the new number."""
    n, k = d.between(11, 480), d.between(3, 12)
    kind = d.between(0, 5)
    if kind == 0:
        ask = d.pick(["Add {} to that.", "And with {} more?", "Now put {} on top.", "What if {} are added?"])
        return ask.format(n), f"{value} + {n} = {value + n}.", value + n
    if kind == 1 and value > n:
        ask = d.pick(["Take {} away.", "Minus {}?", "And if {} of them get lost?", "Subtract {} from the result."])
        return ask.format(n), f"That leaves {value} − {n} = {value - n}.", value - n
    if kind == 2 and value < 200_000:
        ask = d.pick(["{} times as much?", "Multiply that by {}.", "And for {} of those?"])
        return ask.format(k), f"{value} × {k} = {value * k}.", value * k
    if kind == 3:
        ask = d.pick(
            ["Share it among {} people.", "Divide that by {}, with the remainder.", "How often does {} fit in?"]
        )
        q, r = divmod(value, k)
        rest = "Nothing is left over." if r == 0 else f"The quotient is {q} and the remainder is {r}."
        return ask.format(k), f"{value} = {k} × {q} + {r}. {rest}", q
    if kind == 4:
        even = value % 2 == 0
        half = f"{value} ÷ 2 {result(Fraction(value, 2))}"
        return (
            d.pick(["Is it even?", "Can I halve that evenly?"]),
            (f"Yes: {half}." if even else f"No. {half}, which is not a whole number."),
            value,
        )
    p = d.pick([5, 10, 15, 20, 25, 40])
    part = Fraction(value * p, 100)
    return (
        d.pick([f"What is {p} percent of that?", f"And {p} % of it?"]),
        (
            f"One percent is {value} ÷ 100 {result(Fraction(value, 100))}; {p} times that makes "
            f"{digits(Fraction(value, 100))} × {p} = {digits(part)}."
        ),
        value,
    )


def with_follow_ups(d: Desk, turns: Turns, value: int, most: int = 3) -> Turns:
    for _ in range(d.between(0, most)):
        ask, answer, value = follow_up(d, value)
        turns.append((ask, answer))
    return turns


def product(d: Desk) -> Dialogue:
    a, b = d.between(13, 98), d.between(13, 98)
    c = a * b
    who = d.pick(PEOPLE)
    ask = d.pick(
        [
            f"What is {a} times {b}?",
            f"Work out {a} × {b} without a calculator.",
            f"How much is {a} multiplied by {b}?",
            f"{who} lays tiles in {a} rows of {b}. How many tiles are there?",
            f"Multiply {a} by {b} and explain the trick.",
            f"I have {a} boxes with {b} screws each. How many screws do I have?",
            f"A hall has {a} rows of {b} seats. How many people can sit down?",
        ]
    )
    tens, ones = b // 10 * 10, b % 10
    up = 10 - ones
    if ones >= 7:
        answer = (
            f"{b} is close to {b + up}, so multiply by that first and correct afterwards.\n\n"
            f"{a} × {b + up} = {a * (b + up)}\n{a} × {up} = {a * up}\n{a * (b + up)} − {a * up} = {c}\n\nThe result "
            f"is {c}."
        )
    elif ones and d.chance(0.5):
        answer = (
            f"Split {b} into {tens} and {ones}.\n\n1. {a} × {tens} = {a * tens}\n2. {a} × {ones} = {a * ones}\n"
            f"3. {a * tens} + {a * ones} = {c}\n\nSo {a} × {b} = {c}."
        )
    else:
        ta, oa = a // 10 * 10, a % 10
        answer = (
            f"Take {a} apart instead: {ta} × {b} = {ta * b} and {oa} × {b} = {oa * b}. "
            f"Together {ta * b} + {oa * b} = {c}."
        )
    return Dialogue(with_follow_ups(d, [(asked(d, ask), answer)], c), f"{c}.")


def column_sum(d: Desk) -> Dialogue:
    numbers = [d.between(100, 9999) for _ in range(d.between(3, 6))]
    total, lines, running = sum(numbers), [], numbers[0]
    for n in numbers[1:]:
        lines.append(f"{running} + {n} = {running + n}")
        running += n
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    ask = d.pick(
        [
            f"Add up {listed}.",
            f"What do {listed} come to?",
            f"My meter showed {listed} units over the months. Total?",
            f"Please give me the sum of {listed}, with subtotals.",
        ]
    )
    answer = d.pick(["One number after the other:", "Adding from left to right:", "With subtotals:"])
    answer += "\n\n" + "\n".join(lines) + f"\n\n**{total}**"
    return Dialogue(with_follow_ups(d, [(asked(d, ask), answer)], total, 2), f"{total}.")


def division(d: Desk) -> Dialogue:
    b, q = d.between(6, 36), d.between(21, 340)
    r = d.between(0, b - 1)
    n = b * q + r
    who, thing = d.pick(PEOPLE), d.pick(["eggs", "tickets", "marbles", "pages", "bricks", "apples"])
    ask = d.pick(
        [
            f"{who} packs {n} {thing} into boxes of {b}. How many full boxes, and how many are left?",
            f"Divide {n} by {b} and give the remainder.",
            f"How many times does {b} go into {n}?",
        ]
    )
    lines, rest, shown = [], n, []
    for power in (100, 10, 1):
        step = rest // (b * power) * power
        if step:
            lines.append(
                f"- {step} times: {b} × {step} = {b * step}, and {rest} − {b * step} = {rest - b * step} remains"
            )
            rest -= b * step
            shown.append(step)
    tally = f" ({' + '.join(map(str, shown))} = {q})" if len(shown) > 1 else ""
    answer = (
        "Take away the divisor in big bites.\n\n"
        + "\n".join(lines)
        + f"\n\nThe quotient is {q}{tally}, the remainder {r}."
    )
    answer += f" Check: {b} × {q} + {r} = {n}."
    return Dialogue([(asked(d, ask), answer)], f"{q}, remainder {r}.")


def percentage(d: Desk) -> Dialogue:
    cents, off = d.between(20, 400) * 100, d.pick([5, 10, 15, 20, 25, 30, 35, 40])
    cut = cents * off // 100
    what = d.pick(["coat", "desk lamp", "train pass", "tent", "radio", "pair of boots", "violin case", "bookcase"])
    ask = d.pick(
        [
            f"A {what} costs {money(cents)} euros and is reduced by {off} %. What do I pay?",
            f"There is {off} percent off a {what} priced at {money(cents)}. New price?",
            f"How much do I save on a {what} of {money(cents)} euros with a {off} % voucher, and what is left to pay?",
        ]
    )
    answer = (
        f"{off} % is {digits(Fraction(off, 100))} of the price.\n\n"
        f"- Saving: {money(cents)} × {digits(Fraction(off, 100))} = {money(cut)}\n"
        f"- To pay: {money(cents)} − {money(cut)} = {money(cents - cut)} euros"
    )
    turns = [(asked(d, ask), answer)]
    if d.chance(0.6):
        new = cents - cut
        back = Fraction(cut * 100, new)
        turns.append(
            (
                d.pick(
                    [
                        "So if it goes up by the same percentage again, am I back where I started?",
                        "Does +" + str(off) + " % undo it?",
                    ]
                ),
                f"No, because the percentage is now taken of a smaller price. To come back from {money(new)} to "
                f"{money(cents)}, "
                f"the price must rise by {money(cut)}, and {money(cut)} × 100 ÷ {money(new)} {result(back, 1)} "
                f"percent.",
            )
        )
    return Dialogue(turns, f"{money(cents - cut)} euros.")


def fractions(d: Desk) -> Dialogue:
    x, y = Fraction(d.between(1, 7), d.between(3, 9)), Fraction(d.between(1, 9), d.between(4, 12))
    common = x.denominator * y.denominator // gcd(x.denominator, y.denominator)
    xn, yn = x.numerator * common // x.denominator, y.numerator * common // y.denominator
    total = x + y
    ask = d.pick(
        [
            f"What is {plain(x)} + {plain(y)}?",
            f"Add the fractions {plain(x)} and {plain(y)}.",
            f"I ate {plain(x)} of one cake and {plain(y)} of another. How much cake is that?",
        ]
    )
    answer = (
        f"The smallest common denominator is {common}. Written that way, {plain(x)} becomes {xn}/{common} and "
        f"{plain(y)} "
        f"becomes {yn}/{common}, so\n\n{xn}/{common} + {yn}/{common} = {xn + yn}/{common}"
    )
    if total.denominator != common:
        answer += f"\n\nDivide both by {common // total.denominator}: {plain(total)}."
    turns = [(asked(d, ask), answer)]
    if d.chance(0.6):
        turns.append(
            (
                d.pick(["And as a decimal?", "What is that in decimals?"]),
                f"{total.numerator} ÷ {total.denominator} {result(total)}.",
            )
        )
    if d.chance(0.4):
        turns.append(
            (
                f"And {plain(x)} times {plain(y)}?",
                f"Multiply the tops and the bottoms, then reduce: {plain(x)} × {plain(y)} = {plain(x * y)}.",
            )
        )
    return Dialogue(turns, f"{plain(total)}.")


def euclid(d: Desk) -> Dialogue:
    g = d.between(2, 24)
    a, b = g * d.between(20, 90), g * d.between(7, 40)
    a, b = max(a, b), min(a, b)
    lines, x, y = [], a, b
    while y:
        lines.append(f"{x} = {y} × {x // y} + {x % y}")
        x, y = y, x % y
    ask = d.pick(
        [
            f"Find the greatest common divisor of {a} and {b}.",
            f"Use Euclid's algorithm on {a} and {b}.",
            f"Two planks are {a} cm and {b} cm long. What is the longest piece into which both can be cut evenly?",
        ]
    )
    answer = (
        "Divide the larger by the smaller, then go on with the divisor and the remainder until nothing remains:\n\n"
        + fenced("\n".join(lines))
        + f"\n\nThe last divisor is {x}, so that is the greatest common divisor."
    )
    turns = [(asked(d, ask), answer)]
    if d.chance(0.5):
        turns.append(
            (
                "And the least common multiple?",
                f"Divide one of them by the common divisor and multiply by the other: {a} ÷ {x} = {a // x}, and "
                f"{a // x} × {b} = {a // x * b}.",
            )
        )
    return Dialogue(turns, f"{x}.")


def factors_of(n: int) -> list[int]:
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return out


def prime_factors(d: Desk) -> Dialogue:
    n = prod(d.pick([2, 2, 2, 3, 3, 5, 7, 11, 13]) for _ in range(d.between(3, 6)))
    parts = factors_of(n)
    steps, rest = [], n
    for p in parts[:-1]:
        steps.append(f"{rest} ÷ {p} = {rest // p}")
        rest //= p
    ask = d.pick([f"Write {n} as a product of primes.", f"What are the prime factors of {n}?", f"Factorise {n}."])
    answer = "Divide by the smallest prime that fits, again and again:\n\n" + "\n".join(steps)
    answer += f"\n\n{rest} is prime itself, so {n} = {' × '.join(map(str, parts))}."
    turns = [(asked(d, ask), answer)]
    if d.chance(0.5):
        powers = [(p, parts.count(p)) for p in sorted(set(parts))]
        factors = " × ".join(str(k + 1) for _, k in powers)
        how = f"{factors} = " if len(powers) > 1 else ""
        divisors = prod(k + 1 for _, k in powers)
        turns.append(
            (
                "How many divisors does it have?",
                "Add one to each exponent and multiply. The exponents are "
                + ", ".join(f"{k} (for {p})" for p, k in powers)
                + f", which gives {how}{divisors} divisors.",
            )
        )
    return Dialogue(turns, " × ".join(map(str, parts)) + ".")


def statistics(d: Desk) -> Dialogue:
    numbers = [d.between(2, 60) for _ in range(d.between(5, 9))]
    what = d.pick(
        ["temperatures", "scores", "waiting times in minutes", "ages", "rainfall readings in mm", "daily parcel counts"]
    )
    ordered, n, total = sorted(numbers), len(numbers), sum(numbers)
    ask = d.pick(
        [
            f"Mean and median of these {what}: {numbers}",
            f"Here are some {what}: {', '.join(map(str, numbers))}. What are the average and the middle value?",
        ]
    )
    median = Fraction(ordered[n // 2]) if n % 2 else Fraction(ordered[n // 2 - 1] + ordered[n // 2], 2)
    middle = (
        f"With {n} values the median is the one in the middle: {digits(median)}."
        if n % 2
        else f"With {n} values the median is halfway between the two in the middle: {digits(median)}."
    )
    answer = (
        f"**Mean.** {' + '.join(map(str, numbers))} = {total}, and {total} ÷ {n} {result(Fraction(total, n), 2)}.\n\n"
        f"**Median.** In order: {', '.join(map(str, ordered))}. {middle}"
    )
    turns = [(ask, answer)]
    if d.chance(0.5):
        turns.append(
            (
                d.pick(["What is the range?", "How far apart are the extremes?"]),
                f"{ordered[-1]} − {ordered[0]} = {ordered[-1] - ordered[0]}.",
            )
        )
    return Dialogue(turns, f"Mean {digits(Fraction(total, n), 2)}, median {digits(median)}.")


def binary(d: Desk) -> Dialogue:
    n = d.between(37, 900)
    rows, rest = [], n
    while rest:
        rows.append((rest, rest // 2, rest % 2))
        rest //= 2
    ask = d.pick(
        [f"Write {n} in binary.", f"Convert {n} to base 2, step by step.", f"How does a computer store the number {n}?"]
    )
    answer = (
        "Halve the number again and again and note the remainders:\n\n"
        + table(("number", "half", "remainder"), rows)
        + f"\n\nRead from the bottom to the top, the remainders are {n:b}."
    )
    turns = [(asked(d, ask), answer)]
    if d.chance(0.6):
        powers = [1 << i for i in range(n.bit_length() - 1, -1, -1) if n >> i & 1]
        check = f" Check: {' + '.join(map(str, powers))} = {n}." if len(powers) > 1 else ""
        turns.append(
            (
                d.pick(["And in hexadecimal?", "Base 16 too, please."]),
                f"Group the bits in fours from the right: {n:x} (or 0x{n:X}).{check}",
            )
        )
    return Dialogue(turns, f"{n:b}.")


def shopping(d: Desk) -> Dialogue:
    bought = [(d.between(1, 6), *good) for good in d.some(GOODS, d.between(2, 5))]
    total = sum(n * price for n, _, price in bought)
    given = (total // 1000 + d.between(1, 2)) * 1000
    who = d.pick(PEOPLE)
    listed = ", ".join(
        f"{n} × {what} at {money(price)}" if n > 1 else f"one {what} at {money(price)}" for n, what, price in bought
    )
    ask = d.pick(
        [
            f"{who} buys: {listed}. How much is it, and what is the change from {money(given)}?",
            f"Here is my shopping: {listed}. I pay with {money(given)}. What do I get back?",
        ]
    )
    sums = " + ".join(money(n * price) for n, _, price in bought)
    answer = (
        table(("item", "sum"), [(what, f"{n} × {money(price)} = {money(n * price)}") for n, what, price in bought])
        + f"\n\nTotal: {sums} = {money(total)}\nChange: {money(given)} − {money(total)} = {money(given - total)}"
    )
    turns = [(ask, answer)]
    if d.chance(0.5):
        k = d.between(2, 4)
        turns.append(
            (
                f"What if {k} of us share the bill?",
                f"{money(total)} ÷ {k} {result(Fraction(total, 100 * k), 2)} for each person"
                + ("." if total % k == 0 else ", rounded to the cent; someone pays the odd cent."),
            )
        )
    return Dialogue(turns, f"{money(total)}; the change is {money(given - total)}.")


RECIPES = (
    ("pancakes", 4, (("flour", 250, "g"), ("milk", 500, "ml"), ("eggs", 2, ""), ("butter", 30, "g"))),
    (
        "lentil soup",
        6,
        (("red lentils", 300, "g"), ("carrots", 3, ""), ("stock", 1500, "ml"), ("cumin", 2, "teaspoons")),
    ),
    ("flatbread", 8, (("flour", 600, "g"), ("yoghurt", 320, "g"), ("yeast", 8, "g"), ("salt", 12, "g"))),
    ("rice pudding", 5, (("rice", 200, "g"), ("milk", 1000, "ml"), ("sugar", 75, "g"), ("cinnamon sticks", 2, ""))),
    (
        "vegetable curry",
        4,
        (("potatoes", 500, "g"), ("chickpeas", 400, "g"), ("coconut milk", 400, "ml"), ("onions", 2, "")),
    ),
    ("oat biscuits", 20, (("oats", 180, "g"), ("sugar", 90, "g"), ("butter", 110, "g"), ("raisins", 60, "g"))),
)


def recipe(d: Desk) -> Dialogue:
    dish, serves, parts = d.deal("recipe", RECIPES)
    people = d.pick([n for n in (2, 3, 5, 6, 9, 10, 12, 15) if n != serves])
    scale = Fraction(people, serves)
    listed = ", ".join(f"{q} {unit} {what}".replace("  ", " ") for what, q, unit in parts)
    ask = f"My recipe for {dish} serves {serves}: {listed}. " + d.pick(
        [f"What do I need for {people}?", f"We are {people}. Scale it, please.", f"Convert it to {people} portions."]
    )
    rows = [(what, f"{q} {unit}".strip(), f"{digits(q * scale, 1)} {unit}".strip()) for what, q, unit in parts]
    answer = (
        f"Every amount is multiplied by {plain(scale)} ({people} portions instead of {serves}).\n\n"
        + table(("ingredient", f"for {serves}", f"for {people}"), rows)
        + "\n\nAmounts are rounded to one decimal."
    )
    return Dialogue([(ask, answer)], f"Multiply every amount by {plain(scale)}.")


def journey(d: Desk) -> Dialogue:
    start, speed = d.between(6 * 60, 17 * 60), d.pick([15, 20, 60, 72, 80, 90, 100, 120])
    minutes = d.between(2, 14) * 15  # the distance then has two decimals at most
    distance = Fraction(speed * minutes, 60)
    what = d.pick(["bicycle courier", "cyclist"]) if speed < 30 else d.pick(["train", "bus", "delivery van"])
    a, b = d.some(PLACES, 2)
    ask = (
        f"A {what} leaves {a} at {clock(start)} and covers the {digits(distance, 2)} km to {b} at {speed} km/h. "
        + d.pick(["When does it arrive?", "What is the time of arrival?", "How long is the trip and when is it over?"])
    )
    answer = (
        f"Time is distance over speed: {digits(distance, 2)} ÷ {speed} {result(Fraction(minutes, 60))} hours, which "
        f"is "
        f"{minutes} minutes. {clock(start)} plus {minutes} minutes is {clock(start + minutes)}."
    )
    turns = [(ask, answer)]
    if d.chance(0.6):
        late = d.between(3, 40)
        turns.append(
            (
                d.pick([f"And with a stop of {late} minutes on the way?", f"It is {late} minutes late. When then?"]),
                f"Then it arrives at {clock(start + minutes + late)}.",
            )
        )
    if d.chance(0.4):
        turns.append(
            ("How far is that in metres?", f"{digits(distance, 2)} × 1000 = {digits(distance * 1000)} metres.")
        )
    return Dialogue(turns, f"At {clock(start + minutes)}.")


def interest(d: Desk) -> Dialogue:
    cents, rate, years = d.between(5, 60) * 10_000, d.pick([2, 3, 4, 5, 6]), d.between(4, 12)
    factor = 1 + Fraction(rate, 100)
    rows, now = [], cents
    for year in range(1, years + 1):
        exact = now * factor
        new = round(exact)
        sign = "=" if exact.denominator == 1 else "≈"
        rows.append((year, f"{money(now)} × {digits(factor)} {sign} {money(new)}"))
        now = new
    ask = d.pick(
        [
            f"I put {money(cents)} aside at {rate} % a year. What is it worth after {years} years?",
            f"Show how {money(cents)} euros grow in {years} years at {rate} percent compound interest.",
        ]
    )
    answer = (
        f"Every year the balance is multiplied by {digits(factor)} and rounded to the cent.\n\n"
        + table(("year", "balance at the end"), rows)
        + f"\n\nAfter {years} years there are {money(now)}."
    )
    turns = [(asked(d, ask), answer)]
    if d.chance(0.5):
        simple = cents * rate * years // 100
        turns.append(
            (
                "What would simple interest have given?",
                f"The same {money(cents * rate // 100)} every year, so {money(cents * rate // 100)} × {years} = "
                f"{money(simple)} "
                f"of interest and {money(cents)} + {money(simple)} = {money(cents + simple)} in all.",
            )
        )
    return Dialogue(turns, f"{money(now)}.")


def square_root(d: Desk) -> Dialogue:
    n = d.pick([k for k in range(5, 200) if int(k**0.5) ** 2 != k])
    x = Fraction(int(n**0.5) + 1)
    lines = [f"start: {digits(x)}"]
    for i in range(1, 4):
        x = Fraction(round((x + n / x) / 2 * 10**6), 10**6)
        lines.append(f"step {i}: {digits(x, 6)}")
    ask = d.pick(
        [
            f"Approximate the square root of {n} by hand.",
            f"How can I find √{n} with only plus and divide?",
            f"A square garden has an area of {n} m². How long is a side?",
        ]
    )
    answer = (
        f"Guess a root, divide {n} by the guess, and take the average of guess and quotient as the next guess.\n\n"
        + fenced("\n".join(lines))
        + f"\n\nThree steps give {digits(x, 4)}. Check: {digits(x, 3)} × {digits(x, 3)} "
        f"{result(Fraction(digits(x, 3)) ** 2, 3)}."
    )
    return Dialogue([(asked(d, ask), answer)], f"About {digits(x, 3)}.")


# Units

DIMENSIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("metres", (("kilometres", "1000"), ("miles", "1609.344"), ("feet", "0.3048"), ("yards", "0.9144"),
                ("nautical miles", "1852"))),
    ("grams", (("kilograms", "1000"), ("pounds", "453.59237"), ("ounces", "28.349523125"), ("stones", "6350.29318"))),
    ("litres", (("millilitres", "0.001"), ("US gallons", "3.785411784"), ("imperial pints", "0.56826125"),
                ("cubic metres", "1000"))),
    ("square metres", (("hectares", "10000"), ("acres", "4046.8564224"), ("square feet", "0.09290304"),
                       ("square kilometres", "1000000"))),
    ("joules", (("kilowatt hours", "3600000"), ("kilojoules", "1000"), ("kilocalories", "4184"))),
    ("bytes", (("megabytes", "1000000"), ("mebibytes", "1048576"), ("kibibytes", "1024"), ("gigabytes", "1000000000"))),
    ("metres per second", (("knots", "0.514444"), ("feet per second", "0.3048"), ("miles per hour", "0.44704"))),
    ("seconds", (("minutes", "60"), ("hours", "3600"), ("days", "86400"), ("weeks", "604800"))),
)  # fmt: skip


def convert(value: Fraction, source: str, target: str) -> Fraction:
    """`value` in another unit of the same dimension."""
    for base, units in DIMENSIONS:
        sizes = {base: Fraction(1), **{name: Fraction(size) for name, size in units}}
        if source in sizes and target in sizes:
            return value * sizes[source] / sizes[target]
    raise ValueError(f"{source} and {target} do not measure the same thing")


def conversion(d: Desk) -> Dialogue:
    base, units = d.deal("dimension", DIMENSIONS)
    (source, size), *targets = d.shuffled(units)
    value = Fraction(d.between(3, 900), d.pick([1, 1, 2, 10]))
    in_base = value * Fraction(size)
    intro = f"The factor from {source} to {base} is {digits(Fraction(size), 9)}"
    turns: Turns = []
    for target, target_size in targets[: d.between(1, len(targets))]:
        out = in_base / Fraction(target_size)
        step = f"{digits(in_base, 9)} ÷ {digits(Fraction(target_size), 9)} {result(out, 3)} {target}"
        if not turns:
            ask = d.pick(
                [
                    f"Convert {digits(value)} {source} to {target}.",
                    f"How many {target} are {digits(value)} {source}?",
                    f"What is {digits(value)} {source} in {target}?",
                    f'I read "{digits(value)} {source}". In {target}?',
                ]
            )
            brief = f"{result(out, 3)[2:]} {target}."
            turns.append(
                (
                    asked(d, ask),
                    d.pick(
                        [
                            f"{intro}, so first go to {base}: {digits(value)} × "
                            f"{digits(Fraction(size), 9)} = {digits(in_base, 9)}.\n"
                            f"Then to the unit you asked for: {step}.",
                            f"Via {base}:\n\n- {digits(value)} × {digits(Fraction(size), 9)} = {digits(in_base, 9)} "
                            f"{base}\n- {step}",
                        ]
                    ),
                )
            )
        else:
            turns.append(
                (
                    d.pick([f"And in {target}?", f"In {target}, please.", f"What about {target}?", f"…and {target}?"]),
                    d.pick([f"{step}.", f"Starting again from the {base}: {step}."]),
                )
            )
    if d.chance(0.4):
        turns.append((f"And in {base}?", f"{digits(in_base, 9)} {base}, the number in the middle of the calculation."))
    return Dialogue(turns, brief)


def temperature(d: Desk) -> Dialogue:
    if d.chance(0.5):
        f = d.between(-20, 220)
        c = Fraction((f - 32) * 5, 9)
        ask = d.pick(
            [
                f"What is {digits(f)} °F in Celsius?",
                f"The forecast says {digits(f)} degrees Fahrenheit. Is that warm?",
                f"Convert {digits(f)} Fahrenheit to Celsius.",
            ]
        )
        feel = (
            "below freezing"
            if c < 0
            else "cool"
            if c < 15
            else "pleasant"
            if c < 26
            else "hot"
            if c < 45
            else "far too hot for weather"
        )
        answer = (
            f"Subtract 32, multiply by 5 and divide by 9: {digits(f)} less 32 is {digits(f - 32)}, five times that is "
            f"{digits((f - 32) * 5)}, and a ninth of it is {digits(c, 1)}. So {digits(f)} °F is {digits(c, 1)} °C, "
            f"{feel}."
        )
        return Dialogue([(asked(d, ask), answer)], f"{digits(c, 1)} °C.")
    c2 = d.between(-30, 110)
    f2 = Fraction(c2 * 9, 5) + 32
    ask = d.pick(
        [
            f"What is {digits(c2)} °C in Fahrenheit?",
            f"My oven book says {digits(c2)} °C, my dial shows Fahrenheit. What do I set?",
            f"{digits(c2)} degrees Celsius to Fahrenheit?",
        ]
    )
    answer = (
        f"Multiply by 9, divide by 5, add 32: nine times {digits(c2)} is {digits(c2 * 9)}, a fifth of that is "
        f"{digits(Fraction(c2 * 9, 5))}, and with 32 added it is {digits(f2, 1)} °F."
    )
    turns = [(asked(d, ask), answer)]
    if d.chance(0.5):
        turns.append(
            (
                "And in kelvin?",
                f"Kelvin starts at absolute zero, 273.15 below 0 °C: {digits(c2 + Fraction('273.15'), 2)} K.",
            )
        )
    return Dialogue(turns, f"{digits(f2, 1)} °F.")


# Dates


def day_of_week(d: Desk) -> Dialogue:
    day = d.day()
    new_year = date(day.year, 1, 1)
    passed = (day - new_year).days
    ask = d.pick(
        [
            f"What day of the week is {long(day)}?",
            f"Which weekday falls on {long(day)}?",
            f"Tell me the weekday of {day.isoformat()}.",
            f"My calendar has no weekdays. What is {long(day)}?",
        ]
    )
    if d.chance(0.6) and passed:
        answer = (
            f"Count from New Year. {long(new_year)} is a {weekday(new_year)}, and {long(day)} comes "
            f"{count(passed, 'day')} later. "
            f"{passed} = 7 × {passed // 7} + {passed % 7}, so the weekday moves on by {passed % 7}: "
            f"{long(day)} is a {weekday(day)}."
        )
    else:
        answer = d.pick([f"{long(day)} is a {weekday(day)}.", f"That is {full(day)}.", f"A {weekday(day)}."])
    turns, brief = [(asked(d, ask), answer)], f"A {weekday(day)}."
    for _ in range(d.between(0, 2)):
        n = d.between(2, 400)
        later = day + timedelta(n)
        turns.append(
            (
                d.pick([f"And {n} days later?", f"{n} days after that?", f"What comes {n} days on?"]),
                d.pick(
                    [
                        f"{full(later)}.",
                        f"{n} days later is {full(later)}.",
                        f"That would be {long(later)}, a {weekday(later)}.",
                    ]
                ),
            )
        )
        day = later
    return Dialogue(turns, brief)


def days_between(d: Desk) -> Dialogue:
    a = d.day(1990, 2040)
    b = a + timedelta(d.between(20, 900))
    n = (b - a).days
    why = d.pick(["How many days are there", "How many nights lie", "Count the days"])
    ask = f"{why} between {long(a)} and {long(b)}" + ("." if why.startswith("Count") else "?")
    months: list[tuple[str, int]] = []
    at = a
    while True:
        nxt = date(at.year + at.month // 12, at.month % 12 + 1, 1)
        if nxt > b or len(months) > 40:
            break
        months.append((f"{long(at)} to {long(nxt)}", (nxt - at).days))
        at = nxt
    if at < b:
        months.append((f"{long(at)} to {long(b)}", (b - at).days))
    if len(months) > 8:
        weeks = f"{n} = 7 × {n // 7} + {n % 7}"
        answer = f"There are {n} days. In weeks: {weeks}, that is {count(n // 7, 'week')} and {count(n % 7, 'day')}."
    else:
        answer = "Month by month:\n\n" + table(("stretch", "days"), months) + f"\n\nTogether {count(n, 'day')}."
    turns = [(asked(d, ask), answer)]
    if d.chance(0.5):
        turns.append(("Which weekdays are these?", f"{full(a)} and {full(b)}."))
    return Dialogue(turns, f"{n} days.")


def leap_year(d: Desk) -> Dialogue:
    year = d.pick([1900, 2000, 2100, 2400, *range(1904, 2060, 4), *range(1903, 2060, 7)])
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if year % 4:
        why = f"{year} leaves a remainder of {year % 4} when divided by 4, so it is a common year with 365 days."
    elif year % 100:
        why = f"{year} is divisible by 4 and not by 100, so it is a leap year and February has 29 days."
    elif year % 400:
        why = f"{year} is divisible by 100 but not by 400; such centuries are common years, so February has 28 days."
    else:
        why = f"{year} is divisible by 400, the exception to the exception: it is a leap year."
    ask = d.pick(
        [
            f"Is {year} a leap year?",
            f"How many days does the year {year} have?",
            f"Did or will {year} have a 29 February?",
        ]
    )
    turns = [(asked(d, ask), f"{'Yes' if leap else 'No'}. {why}" if not ask.startswith("How") else why)]
    nxt = next(y for y in range(year + 1, year + 9) if y % 4 == 0 and (y % 100 != 0 or y % 400 == 0))
    turns.append(
        (
            "When is the next one after that?" if leap else "When is the next leap year, then?",
            f"In {nxt}. {long(date(nxt, 2, 29))} is a {weekday(date(nxt, 2, 29))}.",
        )
    )
    return Dialogue(turns, "366 days." if leap else "365 days.")


def month_grid(day: date) -> str:
    first = date(day.year, day.month, 1)
    last = (date(first.year + first.month // 12, first.month % 12 + 1, 1) - timedelta(1)).day
    cells = ["  "] * first.weekday() + [f"{n:2d}" for n in range(1, last + 1)]
    weeks = [" ".join(cells[i : i + 7]) for i in range(0, len(cells), 7)]
    return "\n".join(["Mo Tu We Th Fr Sa Su", *weeks])


def month_page(d: Desk) -> Dialogue:
    day = d.day(2020, 2035)
    name = f"{MONTHS[day.month - 1]} {day.year}"
    ask = d.pick(
        [
            f"Draw me a calendar page for {name}.",
            f"Print {name} as a small calendar, weeks starting on Monday.",
            f"What does {name} look like?",
        ]
    )
    which = d.between(0, 6)
    dates = [
        x
        for x in (date(day.year, day.month, 1) + timedelta(i) for i in range(31))
        if x.month == day.month and x.weekday() == which
    ]
    turns = [
        (asked(d, ask), f"**{name}**\n\n{fenced(month_grid(day))}"),
        (f"How many {DAYS[which]}s are in it?", f"{len(dates)}: on the {', '.join(ordinal(x.day) for x in dates)}."),
    ]
    if d.chance(0.5):
        turns.append((f"When is the last {DAYS[which]}?", f"{full(dates[-1])}."))
    return Dialogue(turns, fenced(month_grid(day)))


def time_zones(d: Desk) -> Dialogue:
    here, there = d.some([-8, -5, -3, 0, 1, 2, 3, 5, 8, 9, 10], 2)
    at, a, b = d.between(0, 95) * 15, *d.some(PEOPLE, 2)
    other = at + (there - here) * 60
    shift = there - here
    day = {-1: " on the day before", 0: " on the same day", 1: " on the next day"}[other // 1440]

    def utc(h: int) -> str:
        return f"UTC{'+' if h >= 0 else '−'}{abs(h)}"

    ask = f"{a} is in {utc(here)}, {b} in {utc(there)}. " + d.pick(
        [
            f"It is {clock(at)} for {a}. What time is it for {b}?",
            f"They want to talk at {clock(at)} of {a}'s time. When is that for {b}?",
        ]
    )
    answer = (
        f"{b}'s clock is {count(abs(shift), 'hour')} {'ahead' if shift > 0 else 'behind'}, so it "
        f"shows {clock(other)}{day}."
    )
    return Dialogue([(ask, answer)], f"{clock(other)}.")


PLANS: tuple[tuple[str, str, tuple[tuple[int, str, int], ...]], ...] = (
    (
        "running",
        "km",
        ((1, "easy run on flat ground", 4), (3, "run with four short sprints", 5), (5, "slow long run", 7)),
    ),
    (
        "reading",
        "pages",
        ((0, "after breakfast", 18), (2, "in the evening", 24), (4, "on the train", 15), (6, "on the sofa", 36)),
    ),
    (
        "guitar practice",
        "minutes",
        ((0, "scales and chord changes", 20), (2, "one new song, slowly", 30), (5, "play along with a recording", 45)),
    ),
    (
        "vocabulary",
        "words",
        (
            (0, "new words with pictures", 12),
            (1, "repeat yesterday's cards", 12),
            (3, "new words in sentences", 15),
            (5, "write a short letter", 10),
        ),
    ),
    ("swimming", "lengths", ((1, "warm-up and technique", 16), (4, "steady pace with pauses", 24))),
)


def plan(d: Desk) -> Dialogue:
    """A dated plan of several weeks: the long answers of the corpus."""
    what, unit, slots = d.deal("plan", PLANS)
    start = d.day(2024, 2030)
    start -= timedelta(start.weekday())
    weeks, grow = d.between(4, 12), d.between(1, 3)
    ask = d.pick(
        [
            f"Make me a {what} plan for {weeks} weeks, beginning on {long(start)}.",
            f"I want to get into {what}. Write a plan for {weeks} weeks with dates. The first day is {long(start)}.",
            f"Please plan {weeks} weeks of {what} from {long(start)} on, a little more every week.",
        ]
    )
    out, totals = [], []
    for week in range(weeks):
        amounts = [amount + grow * week for _, _, amount in slots]
        out.append(f"**Week {week + 1}**")
        for (offset, how, _), amount in zip(slots, amounts, strict=True):
            out.append(f"- {full(start + timedelta(7 * week + offset))}: {amount} {unit}, {how}")
        totals.append(sum(amounts))
        out.append(f"\nThis week: {' + '.join(map(str, amounts))} = {totals[-1]} {unit}\n")
    answer = (
        f"{weeks} weeks, {count(len(slots), 'session')} a week, {grow} {unit} more in each session every week.\n\n"
        + "\n".join(out)
        + f"\nOver the whole plan: {' + '.join(map(str, totals))} = {sum(totals)} {unit}."
    )
    turns = [(ask, answer)]
    end = start + timedelta(7 * weeks - 1)
    turns.append(
        (d.pick(["On which day does it end?", "When is the last week over?"]), f"The last week ends on {full(end)}.")
    )
    if d.chance(0.5):
        turns.append(
            (
                "I will be ill for a week in the middle. What then?",
                f"Repeat the week before the gap and move everything after it by seven days; the plan then ends on "
                f"{full(end + timedelta(7))}.",
            )
        )
    return Dialogue(turns, f"{sum(totals)} {unit} over {weeks} weeks.")


# Long listings


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


# Sorting, parsing, JSON

WORDS = words(
    "listen silent enlist stone notes onset tones late tale teal least steal slate angel glean angle night thing "
    "brush "
    "shrub study dusty elbow below cider cried state taste earth heart hater"
)


def sort_people(d: Desk) -> Dialogue:
    people = [(f"{d.pick(PEOPLE)} {s}", d.between(1950, 2010)) for s in d.some(SURNAMES, d.between(4, 8))]
    by_year = d.chance(0.5)
    listed = d.pick(["; ", "\n"]).join(f"{name}, born {year}" for name, year in people)
    key = "year of birth, oldest first" if by_year else "surname"
    ask = d.pick([f"Sort these people by {key}:\n\n{listed}", f"Put this list in order of {key}.\n{listed}"])
    done = sorted(people, key=(lambda p: (p[1], p[0])) if by_year else (lambda p: (p[0].split()[1], p[1])))
    answer = "\n".join(f"{i}. {name} ({year})" for i, (name, year) in enumerate(done, 1))
    turns = [(ask, answer)]
    if d.chance(0.6):
        turns.append(
            (
                d.pick(["As JSON, please.", "Can I have that as JSON?"]),
                fenced(json.dumps([{"name": n, "born": y} for n, y in done], indent=2), "json"),
            )
        )
    if d.chance(0.4):
        oldest = min(done, key=lambda p: p[1])
        turns.append(("Who is the oldest?", f"{oldest[0]}, born in {oldest[1]}."))
    return Dialogue(turns, "; ".join(name for name, _ in done) + ".")


def extract_contact(d: Desk) -> Dialogue:
    who, family, place = d.pick(PEOPLE), d.pick(SURNAMES), d.pick(PLACES)
    mail = f"{who}.{family}@example.org".lower()
    phone = f"555-01{d.between(10, 99)}"
    day, at, n = d.day(2024, 2030), d.between(32, 76) * 15, d.between(2, 40)
    text = d.pick(
        [
            f"Hello, this is {who} {family}. We would like to visit {place} on {long(day)} at {clock(at)} with {n} "
            f"people. "
            f"You can reach me at {mail} or on {phone}.",
            f"Booking note: {place}, {long(day)}, {clock(at)}, party of {n}. Contact {who} {family}, phone {phone}, "
            f"mail {mail}.",
            f"{who} {family} ({mail}, {phone}) called. They come to {place} with {n} guests on {long(day)}; please be "
            f"there at {clock(at)}.",
        ]
    )
    fields = {
        "name": f"{who} {family}",
        "email": mail,
        "phone": phone,
        "date": day.isoformat(),
        "time": clock(at),
        "people": n,
    }
    ask = d.pick(
        [
            "Extract the contact details as JSON.",
            "Turn this message into a JSON object.",
            "Which facts are in this note? Answer in JSON.",
        ]
    )
    turns = [(f"{ask}\n\n{text}", fenced(json.dumps(fields, indent=2), "json"))]
    if d.chance(0.5):
        turns.append(("Which weekday is that?", f"{long(day)} is a {weekday(day)}."))
    return Dialogue(turns, fenced(json.dumps(fields), "json"))


def log_lines(d: Desk) -> Dialogue:
    kinds = {"INFO": ("ok", "restarted"), "WARN": ("slow", "second try"), "ERROR": ("no answer", "stuck", "too hot")}
    parts = ("door", "pump", "sensor", "heater", "valve")
    start = d.between(0, 1300)
    rows = [(clock(start + 3 * i), d.pick(tuple(kinds)), d.pick(parts)) for i in range(d.between(6, 14))]
    log = "\n".join(f"{t} {k:<5} {p}: {d.pick(kinds[k])}" for t, k, p in rows)
    counts = {k: sum(1 for row in rows if row[1] == k) for k in kinds}
    ask = d.pick(["Count the lines per level in this log.", "Summarise this log: how many lines of each level?"])
    answer = (
        table(("level", "lines"), counts.items())
        + f"\n\nAll together {' + '.join(map(str, counts.values()))} = {len(rows)}."
    )
    turns = [(f"{ask}\n\n{fenced(log)}", answer)]
    errors = [t for t, k, _ in rows if k == "ERROR"]
    turns.append(
        ("When did the errors happen?", f"At {', '.join(errors)}." if errors else "There are no errors in this log.")
    )
    return Dialogue(turns, ", ".join(f"{k} {v}" for k, v in counts.items()) + ".")


def anagrams(d: Desk) -> Dialogue:
    given = d.some(WORDS, d.between(8, 14))
    groups: dict[str, list[str]] = {}
    for word in given:
        groups.setdefault("".join(sorted(word)), []).append(word)
    ask = d.pick(
        [
            f"Group these words by anagram: {' '.join(given)}.",
            f"Which of these words have the same letters? {', '.join(given)}",
        ]
    )
    found = [g for g in groups.values() if len(g) > 1]
    single = [g[0] for g in groups.values() if len(g) == 1]
    answer = "\n".join(f"- {', '.join(g)}" for g in found) or "No two of them have the same letters."
    if single:
        answer += f"\n\nOn their own: {', '.join(single)}."
    return Dialogue([(asked(d, ask), answer)], "; ".join(", ".join(g) for g in found) or "None.")


def csv_to_table(d: Desk) -> Dialogue:
    rows = [(what, d.between(1, 30), price) for what, price in d.some(GOODS, d.between(3, 7))]
    text = "item,stock,price\n" + "\n".join(f"{w},{n},{money(p)}" for w, n, p in rows)
    value = sum(n * p for _, n, p in rows)
    ask = d.pick(
        [
            "Show this CSV as a table and add a column with the value of the stock.",
            "Make a Markdown table of this, with stock times price as the last column.",
        ]
    )
    answer = table(("item", "stock", "price", "value"), [(w, n, money(p), money(n * p)) for w, n, p in rows])
    turns = [(f"{ask}\n\n{fenced(text, 'csv')}", answer + f"\n\nThe whole stock is worth {money(value)}.")]
    if d.chance(0.5):
        top = max(rows, key=lambda r: r[1] * r[2])
        turns.append(
            (
                "Which item ties up the most money?",
                f"The {top[0]}: {top[1]} × {money(top[2])} = {money(top[1] * top[2])}.",
            )
        )
    return Dialogue(turns, f"{money(value)} in all.")


def emoji(d: Desk) -> Dialogue:
    fruit, other = d.some(["🍎", "🍌", "🍇", "🥝", "🍓", "🍋"], 2)
    x, y = d.between(2, 19), d.between(2, 19)
    puzzle = (
        f"{fruit} + {fruit} = {2 * x}\n{fruit} + {other} = "
        f"{x + y}\n{d.pick(['What is', 'How much is', 'Solve for'])} {other}? 🤔",
        f"Two {fruit} make {2 * x}, so one {fruit} is {2 * x} ÷ 2 = {x}. Then {other} is {x + y} − {x} = {y}. ✅",
    )
    symbol = d.pick(["👍🏽", "👩‍👩‍👧", "🇨🇭", "❤️", "👨‍🚀", "🏳️‍🌈", "é", "한"])
    points = " ".join(f"U+{ord(ch):04X}" for ch in symbol)
    unicode = (
        d.pick([f"How many code points are in {symbol}?", f'Why does len("{symbol}") surprise people?']),
        f"It looks like one character. In Unicode it is {count(len(symbol), 'code point')} ({points}), "
        f"and in UTF-8 it takes {len(symbol.encode())} bytes.",
    )
    sky = d.some(
        [("☀️", "sunny"), ("🌧️", "rainy"), ("⛅", "partly cloudy"), ("❄️", "snowy"), ("🌫️", "foggy"), ("⛈️", "stormy")], 3
    )
    weather = (
        "Read this forecast aloud: " + " ".join(s for s, _ in sky),
        "First " + ", then ".join(w for _, w in sky) + ". 🙂",
    )
    turns = d.some([puzzle, unicode, weather], d.between(1, 3))
    return Dialogue(turns, "🤷 " + turns[0][1])


# Python


class Task(NamedTuple):
    """A function to write. `calls` are run to get the results that the answer shows; `cost` answers a follow-up."""

    ask: str
    source: str
    calls: tuple[str, ...]
    note: str
    cost: str


TASKS = (
    Task("counts the vowels in a string",
         "def count_vowels(text):\n    return sum(ch in 'aeiou' for ch in text.lower())\n",
         ("count_vowels('Onomatopoeia')", "count_vowels('rhythm')"),
         "`True` counts as 1 in a sum, so no counter is needed.",
         "It looks at each character once, so the time grows with the length of the text."),
    Task("reverses the words of a sentence but not their letters",
         "def reverse_words(sentence):\n    return ' '.join(reversed(sentence.split()))\n",
         ("reverse_words('the quick answer is no')", "reverse_words('one')"),
         "`split()` without an argument also swallows repeated spaces.",
         "Splitting, reversing and joining each touch every word once: linear."),
    Task("tells whether a text is a palindrome, ignoring case and punctuation",
         "def is_palindrome(text):\n    letters = [ch for ch in text.lower() if ch.isalnum()]\n    return letters == "
         "letters[::-1]\n",
         ("is_palindrome('Was it a car or a cat I saw?')", "is_palindrome('almost')"),
         "The list keeps letters and digits only; comparing it with its mirror image does the rest.",
         "Linear in time, and it keeps two copies of the letters in memory."),
    Task("returns the n-th Fibonacci number",
         "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
         ("fibonacci(10)", "[fibonacci(i) for i in range(8)]"),
         "The pair slides along the sequence, so nothing is computed twice.",
         "It makes n additions. The naive recursive version makes about 1.6 to the power of n calls."),
    Task("finds all primes below a limit",
         "def primes_below(limit):\n    sieve = [True] * limit\n    sieve[:2] = [False] * min(2, limit)\n    for n in "
         "range(2, int(limit ** 0.5) + 1):\n"
         "        if sieve[n]:\n            for multiple in range(n * n, limit, n):\n                sieve[multiple] "
         "= False\n"
         "    return [n for n, prime in enumerate(sieve) if prime]\n",
         ("primes_below(30)", "len(primes_below(1000))"),
         "This is the sieve of Eratosthenes: cross out the multiples of each prime and keep what is left.",
         "Roughly limit times the logarithm of the logarithm of the limit, which is close to linear."),
    Task("merges two sorted lists into one sorted list",
         "def merge(left, right):\n    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if "
         "left[i] <= right[j]:\n"
         "            out.append(left[i])\n            i += 1\n        else:\n            out.append(right[j])\n      "
         "      j += 1\n    return out + left[i:] + right[j:]\n",
         ("merge([1, 4, 9], [2, 3, 10, 11])", "merge([], [5])"),
         "At each step the smaller of the two front items moves over. `<=` keeps equal items in their old order.",
         "Each item is moved once, so the time is the sum of both lengths."),
    Task("does a binary search and returns the position or -1",
         "def find(items, wanted):\n    low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low "
         "+ high) // 2\n        if items[middle] == wanted:\n"
         "            return middle\n        if items[middle] < wanted:\n            low = middle + 1\n        "
         "else:\n            high = middle - 1\n    return -1\n",
         ("find([2, 3, 5, 7, 11, 13], 11)", "find([2, 3, 5, 7, 11, 13], 4)"),
         "The list has to be sorted. Every comparison throws away half of what is left.",
         "About log2(n) comparisons: 20 for a million items."),
    Task("counts how often each word occurs",
         "from collections import Counter\n\n\ndef word_counts(text):\n    return "
         "dict(Counter(text.lower().split()))\n",
         ("word_counts('the cat and the hat and the bat')",),
         "`Counter` is a dictionary that starts every key at zero.",
         "One dictionary update per word, which is constant time on average."),
    Task("flattens a list of lists of any depth",
         "def flatten(value):\n    if not isinstance(value, list):\n        return [value]\n    return [leaf for item "
         "in value for leaf in flatten(item)]\n",
         ("flatten([1, [2, [3, 4], []], 5])", "flatten([])"),
         "The function calls itself on every item, and an item that is not a list is its own flat list.",
         "Each leaf is copied once per level, so deep nesting makes it slower; a generator would avoid that."),
    Task("turns a number into Roman numerals",
         "def roman(n):\n    marks = [(1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'),\n"
         "             (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')]\n    out = ''\n    "
         "for value, mark in marks:\n"
         "        out += mark * (n // value)\n        n %= value\n    return out\n",
         ("roman(2026)", "roman(944)", "roman(39)"),
         "Writing 4, 9, 40 and so on as marks of their own removes every special case.",
         "The table has 13 rows, so the loop runs 13 times whatever the number is."),
    Task("encrypts a text with the Caesar cipher",
         "def caesar(text, shift):\n    out = []\n    for ch in text:\n        if ch.isascii() and ch.isalpha():\n    "
         "        base = ord('A') if ch.isupper() else ord('a')\n"
         "            ch = chr((ord(ch) - base + shift) % 26 + base)\n        out.append(ch)\n    return "
         "''.join(out)\n",
         ("caesar('Meet me at noon', 3)", "caesar(caesar('Meet me at noon', 3), -3)"),
         "The remainder by 26 makes the alphabet wrap round, for negative shifts as well.",
         "One step per character. As a cipher it is a toy: there are only 25 keys to try."),
    Task("checks whether brackets are balanced",
         "def balanced(text):\n    pairs = {')': '(', ']': '[', '}': '{'}\n    stack = []\n    for ch in text:\n      "
         "  if ch in '([{':\n            stack.append(ch)\n"
         "        elif ch in pairs and (not stack or stack.pop() != pairs[ch]):\n            return False\n    return "
         "not stack\n",
         ("balanced('a[i] = (b + c) * {d}')", "balanced('(]')", "balanced('((')"),
         "Opening brackets go on a stack; a closing one must match the one on top.",
         "Linear in the text; the stack is never larger than the deepest nesting."),
    Task("groups a list of words by their first letter",
         "def by_initial(words):\n    groups = {}\n    for word in words:\n        groups.setdefault(word[0], "
         "[]).append(word)\n    return groups\n",
         ("by_initial(['apple', 'bean', 'avocado', 'beet', 'carrot'])",),
         "`setdefault` returns the list that is there or puts an empty one in first.",
         "One dictionary look-up per word."),
    Task("transposes a matrix given as a list of rows",
         "def transpose(rows):\n    return [list(column) for column in zip(*rows)]\n",
         ("transpose([[1, 2, 3], [4, 5, 6]])",),
         "`zip(*rows)` takes the first item of every row, then the second, and so on.",
         "Every cell is copied once."),
    Task("removes duplicates from a list and keeps the order",
         "def unique(items):\n    return list(dict.fromkeys(items))\n",
         ("unique([3, 1, 3, 2, 1])", "unique('mississippi')"),
         "Dictionaries remember the order in which keys arrived, and a key can be there only once.",
         "Linear on average; the items must be hashable."),
    Task("formats a number of seconds as hours, minutes and seconds",
         "def hms(seconds):\n    minutes, seconds = divmod(seconds, 60)\n    hours, minutes = divmod(minutes, 60)\n   "
         " return f'{hours}:{minutes:02d}:{seconds:02d}'\n",
         ("hms(3725)", "hms(59)"),
         "`divmod` gives quotient and remainder in one go.",
         "A fixed number of steps, whatever the input."),
    Task("computes the Hamming distance of two strings",
         "def hamming(a, b):\n    if len(a) != len(b):\n        raise ValueError('the strings differ in length')\n    "
         "return sum(x != y for x, y in zip(a, b))\n",
         ("hamming('karolin', 'kathrin')", "hamming('1011101', '1001001')"),
         "Strings of different lengths have no Hamming distance, so that case is an error and not a guess.",
         "One comparison per position."),
    Task("splits a list into chunks of a given size",
         "def chunks(items, size):\n    return [items[i:i + size] for i in range(0, len(items), size)]\n",
         ("chunks([1, 2, 3, 4, 5, 6, 7], 3)", "chunks('abcdef', 2)"),
         "A slice that runs past the end is simply shorter, so the last chunk needs no special case.",
         "Every item is copied once."),
    Task("run-length encodes a string",
         "from itertools import groupby\n\n\ndef run_lengths(text):\n    return [(ch, len(list(run))) for ch, run in "
         "groupby(text)]\n",
         ("run_lengths('aaabccdd')", "run_lengths('')"),
         "`groupby` starts a new group whenever the character changes.",
         "Linear: each character is looked at once."),
    Task("evaluates an expression in reverse Polish notation",
         "def rpn(expression):\n    stack = []\n    for token in expression.split():\n        if token in '+-*/':\n   "
         "         b, a = stack.pop(), stack.pop()\n"
         "            stack.append({'+': a + b, '-': a - b, '*': a * b, '/': a / b if b else None}[token])\n        "
         "else:\n            stack.append(float(token))\n    return stack.pop()\n",
         ("rpn('3 4 + 2 *')", "rpn('10 2 8 * + 3 -')"),
         "Numbers wait on a stack and an operator takes the two on top. Mind the order: the right operand comes off "
         "first.",
         "One push or pop per token."),
    Task("finds the longest word in a sentence",
         "def longest(sentence):\n    return max(sentence.split(), key=len)\n",
         ("longest('a small boat crossed the wide estuary')",),
         "`max` with `key=len` returns the first of the longest words if several are equally long.",
         "It measures each word once."),
    Task("parses a query string such as `a=1&b=2` into a dictionary",
         "def parse_query(text):\n    return dict(pair.split('=', 1) for pair in text.split('&') if '=' in pair)\n",
         ("parse_query('page=2&sort=name&empty=')", "parse_query('')"),
         "The `1` in `split('=', 1)` keeps further equals signs inside the value. For real URLs use `urllib.parse`, "
         "which also decodes %20 and friends.",
         "Linear in the length of the text."),
)  # fmt: skip


def session(task: Task, calls: Iterable[str]) -> str:
    scope: dict[str, object] = {}
    exec(task.source, scope)  # noqa: S102 - the programs stand in TASKS
    return "\n".join(f">>> {call}\n{eval(call, scope)!r}" for call in calls)  # noqa: S307 - as above


def code(d: Desk) -> Dialogue:
    task = d.deal("task", TASKS)
    ask = d.pick(
        [
            "Write a Python function that {}.",
            "I need a function in Python that {}. How would you do it?",
            "Show me Python code that {}.",
            "How do I write a function that {}?",
            "Is there a short way in Python to write something that {}?",
        ]
    )
    intro = d.pick(["Here it is:", "A short version:", "This does it:", "For example:", "One way:"])
    answer = f"{intro}\n\n{fenced(task.source, 'python')}\n\n{task.note}\n\n" + fenced(
        session(task, task.calls[:1]), "python"
    )
    turns = [(asked(d, ask.format(task.ask)), answer)]
    if len(task.calls) > 1:
        turns.append(
            (
                d.pick(["Another example?", "Can you run it on something else?", "Show one more call, please."]),
                fenced(session(task, task.calls[1:]), "python"),
            )
        )
    if d.chance(0.7):
        turns.append((d.pick(["How fast is it?", "What is the running time?", "Does it scale?"]), task.cost))
    return Dialogue(turns, fenced(task.source, "python"))


# Explanations


class Concept(NamedTuple):
    topic: str
    gist: str
    text: str
    ask: str
    answer: str


CONCEPTS = (
    Concept("why the sea has tides",
            "The Moon pulls harder on the near side of the Earth than on the far side, and the water follows.",
            "The Moon pulls on every part of the Earth, but a little more on the side that faces it and a little less "
            "on the side that faces away. "
            "The difference stretches the oceans into two shallow bulges. The Earth turns underneath them, so a "
            "harbour passes through high water about twice a day. "
            "Because the Moon moves on in the meantime, the times slip by some fifty minutes from one day to the "
            "next. Coasts and sea beds shape the rest: a funnel-shaped bay can raise the water by several metres, a "
            "closed sea hardly at all.",
            "Does the Sun play a part too?",
            "Yes, a bit less than half as strongly. At new and full moon Sun and Moon pull along one line and the "
            "tides are large; at half moon they work against each other and the tides are small."),
    Concept("how a hash table finds things so fast",
            "It computes from the key where the value must lie, instead of searching for it.",
            "A hash table keeps its entries in numbered slots. A hash function turns each key into a number, and the "
            "number picks the slot. To look something up, compute the same number again and go straight there; the "
            "size of the table does not matter. "
            "Two keys may want the same slot. Then the table keeps both, in a short list or in the next free slot, "
            "and compares the keys themselves. As long as there is room to spare such collisions are rare, so tables "
            "grow before they are full.",
            "What makes a hash function good?",
            "It spreads keys evenly over the slots, it is quick to compute, and small changes of the key change the "
            "result thoroughly. If outsiders choose the keys, it should also be seeded secretly, so that nobody can "
            "make everything collide on purpose."),
    Concept("what compound interest is",
            "Interest that earns interest itself, because it stays in the account.",
            "With simple interest, only the first deposit earns anything, and the balance climbs by the same amount "
            "every year. With compound interest, each year's interest is added to the balance and earns interest from "
            "then on. "
            "At first the two look alike. The difference is that one grows in a straight line and the other along a "
            "curve that gets steeper. A handy rule: divide 72 by the rate in percent, and you have roughly the number "
            "of years in which the money doubles.",
            "How good is the rule with 72?",
            "Quite good for rates between about 4 and 12 percent. At 6 percent it says 12 years; the exact figure is "
            "about 11.9."),
    Concept("why the sky is blue",
            "Air scatters short, blue waves of sunlight much more than long, red ones.",
            "Sunlight contains all colours. On its way through the air it meets molecules far smaller than its "
            "wavelength, and these scatter light of short wavelength much more strongly: halve the wavelength and "
            "sixteen times as much is scattered. "
            "So blue light reaches the eye from every direction of the sky, while the other colours mostly pass "
            "straight through. Near sunset the light has crossed so much air that the blue has been scattered out of "
            "the beam, and what arrives is orange and red.",
            "Then why is the sky not violet?",
            "Violet is scattered even more, but there is less of it in sunlight, some is absorbed high up, and our "
            "eyes are less sensitive to it. The mixture that remains looks blue."),
    Concept("what a prime number is",
            "A whole number above one that only one and itself divide evenly.",
            "Some numbers can be laid out as a rectangle of stones with more than one row: twelve stones make three "
            "rows of four. Others cannot; seven stones make only a single line. Numbers of this second kind are "
            "called primes. "
            "Every whole number above one is a product of primes in exactly one way, apart from the order, so the "
            "primes are the building blocks of multiplication. There is no largest: multiply any list of primes, add "
            "one, and the result has a prime factor that is not in the list.",
            "Why does 1 not count?",
            "Because the factorisation would no longer be unique. If 1 were prime, six could be written with no ones, "
            "with one of them or with a thousand, and every theorem would need an exception."),
    Concept("how vaccination protects us",
            "It shows the immune system a harmless likeness of a germ, so that the defence is ready before the germ "
            "comes.",
            "When a germ enters the body for the first time, the immune system needs days to find cells that fit it "
            "and to multiply them. A vaccine brings only a marker of the germ, or a germ that is dead or weakened, so "
            "the search happens without the illness. "
            "Some of the selected cells stay for years as a memory. When the real germ turns up, they answer within "
            "hours, often before anything is felt. If enough people are protected, the germ runs out of hosts, which "
            "shelters those who cannot be vaccinated.",
            "Why do some need a booster?",
            "Memory fades at different speeds, and some germs change their surface. A booster renews the memory or "
            "updates it."),
    Concept("what version control is good for",
            "It remembers every state of a project, who changed what, and why.",
            "Version control records a project as a chain of snapshots. Each one has an author, a date and a message, "
            "and can be compared with any other. You can try something out on a branch and throw it away, find the "
            "change that broke a test by halving the history, or work on the same file as a colleague and merge both "
            "versions. "
            "It works best when each snapshot holds one idea and its message says why it was needed, because the "
            "difference itself shows only what was done.",
            "What should not go into it?",
            "Passwords and keys, because history keeps them for ever; large files that can be rebuilt; and anything "
            "that only makes sense on your own machine."),
    Concept("how bread rises",
            "Yeast eats sugar and gives off gas, and the stretchy dough holds the bubbles.",
            "Flour and water make gluten, a net of proteins that kneading stretches and lines up. Yeast feeds on "
            "sugars that enzymes release from the starch and gives off carbon dioxide. The net catches the gas in "
            "many small bubbles, and the dough swells. "
            "Warmth speeds everything up; a night in the cold slows it down and leaves time for flavour. In the oven "
            "the bubbles expand once more, the yeast dies at about 60 °C, and the net sets firm.",
            "Can one let it rise too long?",
            "Yes. The net becomes too thin to hold the gas, the dough collapses, and the loaf comes out flat and "
            "dense."),
    Concept("the difference between weather and climate",
            "Weather is what happens today; climate is what usually happens, over decades.",
            "Weather is the state of the air at one place and time: the shower this afternoon, the frost tonight. "
            "Climate is the statistics of weather over a long period, by convention thirty years: how warm July "
            "usually is, how often it snows, how far it strays from the usual. "
            "A single cold day says nothing about climate, just as one throw says nothing about a die. But if sixes "
            "keep getting more frequent over hundreds of throws, the die has changed.",
            "Why can we forecast climate if not next month's weather?",
            "Because they are different questions. Nobody knows which throws will be sixes, but the share of sixes "
            "follows from the shape of the die; in the same way averages follow from sunlight, air and oceans even "
            "though single days stay unpredictable."),
    Concept("what recursion means in programming",
            "A function solves a problem by calling itself on a smaller piece of it.",
            "A recursive function has two parts: a case so simple that the answer is known, and a rule that reduces "
            "every other case to a simpler one. To count the files in a folder, count those that lie in it directly "
            "and add, for every folder inside, the answer of the same function. "
            "Each call waits until the calls it made have returned, and the computer keeps the waiting ones on a "
            "stack. If the simple case is never reached, the stack runs full and the program stops with an error.",
            "When is a loop better?",
            "When the problem is a plain sequence, or the depth may be large. Recursion shines where the data "
            "branches: trees, nested lists, grammars."),
    Concept("how a lever works",
            "A long path with little force does the same work as a short path with much force.",
            "A lever is a rigid bar that turns about a fixed point. Push the far end down and the near end rises, "
            "less far but with more force. The rule is that force times distance from the pivot is the same on both "
            "sides: three times the distance, a third of the force. "
            "Nothing is gained for free. The hand that pushes with a third of the force has to move three times as "
            "far. Scissors, wheelbarrows, oars and door handles are all levers; they differ only in where the pivot "
            "sits.",
            "Where is the pivot of a wheelbarrow?",
            "At the axle of the wheel. The load lies between the pivot and your hands, so your hands always carry "
            "less than the full weight."),
    Concept("what inflation is",
            "A general rise of prices, so that the same money buys less.",
            "Prices change all the time: tomatoes get cheaper in summer, computers from year to year. Inflation means "
            "that prices rise on the whole. To measure it, statisticians price a basket of things that households "
            "typically buy and see how much more the same basket costs a year later. "
            "Slow inflation is easy to live with, because wages and contracts adapt. Fast inflation makes saving "
            "pointless and planning hard. Falling prices are no blessing either: who expects them puts off buying, "
            "and shops and workshops stand idle.",
            "Who gains from inflation?",
            "People with debts at a fixed rate, because they pay back money that is worth less. Savers and those on "
            "fixed incomes lose."),
    Concept("why we have time zones",
            "So that noon is near the middle of the day everywhere, although the Earth turns.",
            "The Sun stands highest at different moments in different places; every degree to the west delays noon by "
            "four minutes. As long as people travelled on foot, each town kept its own time. Railways made that "
            "unbearable: a timetable would have needed a column for every station. "
            "So the globe was cut into strips, roughly fifteen degrees wide, that share a clock and differ from their "
            "neighbours by an hour. In practice the borders follow those of countries, and some use half or quarter "
            "hours.",
            "What happens at the date line?",
            "The date changes. Crossing it to the west you skip a day, crossing it to the east you live the same day "
            "twice; the time of day hardly changes."),
    Concept("what an algorithm is",
            "A recipe precise enough that a machine can follow it and sure to come to an end.",
            "An algorithm is a finite list of clear steps that turns an input into an output. A cooking recipe nearly "
            "is one, but \"season to taste\" leaves a choice to the cook, and an algorithm must not. Long division, "
            "looking up a name in a sorted list and finding the shortest way through a city can all be written down "
            "in this manner. "
            "Two algorithms for the same problem may differ hugely in effort. That is why people measure how the "
            "number of steps grows with the size of the input and not how long one run took.",
            "Is every problem solvable that way?",
            "No. There is, for example, no algorithm that can tell for every program whether it will ever stop. That "
            "was proved before electronic computers existed."),
    Concept("how soap cleans",
            "Its molecules hold on to grease with one end and to water with the other.",
            "Water alone runs off grease, because the two do not mix. A soap molecule has a long tail that mixes with "
            "fat and a head that mixes with water. Many of them surround a droplet of grease with their tails inside "
            "and their heads outside. "
            "To the water the droplet now looks like something it can carry, and rinsing takes it away. Rubbing helps "
            "to break the grease into droplets; warm water makes it softer.",
            "Why does soap foam less in hard water?",
            "Hard water contains calcium and magnesium, which bind to the soap as a grey scum. Only what is left over "
            "can clean and foam."),
    Concept("the difference between mean and median",
            "The mean shares everything out evenly; the median is the value in the middle.",
            "Ten people sit in a café and earn about the same. The mean income and the median are then close "
            "together. Now a billionaire walks in. The mean leaps to many millions, though nobody got richer; the "
            "median hardly moves, since it only asks who sits in the middle of the row. "
            "That is why house prices and incomes are usually described by the median. The mean is better when the "
            "total matters: who wants to know how much bread to buy needs the average appetite.",
            "Can the two be equal?",
            "Yes, whenever the values lie evenly on both sides of the middle, for example in 2, 4, 6."),
    Concept("how a battery stores energy",
            "Two materials that want to exchange electrons are kept apart until a wire lets them.",
            "Inside a battery are two different materials with a liquid or paste between them. One gives up electrons "
            "easily, the other is glad to take them. The paste lets charged atoms through but no electrons, so these "
            "have to take the way outside, through the lamp or the motor. "
            "When one of the materials is used up, the battery is flat. In a rechargeable one the reaction can be "
            "driven backwards by pushing electrons the other way.",
            "Why do they get weak in the cold?",
            "The reactions and the movement of the charged atoms slow down, so less current can flow. Most of the "
            "energy is still there and comes back with the warmth."),
    Concept("what a checksum is",
            "A short number computed from data, which shows when the data has changed.",
            "Whoever sends data adds a small number that was computed from all of it. The receiver computes it again "
            "and compares. If one bit was flipped on the way, the numbers differ. The last digit of many account and "
            "book numbers works like that and catches most typing errors. "
            "Simple checksums find accidents. Against somebody who changes the data on purpose one needs a "
            "cryptographic digest, for which nobody knows how to find two inputs with the same result.",
            "If the checksum fits, is the data certainly right?",
            "No, only very probably. There are more possible files than checksums, so different files must share "
            "some. With 256 bits an accident is out of the question in practice."),
    Concept("why leaves turn yellow in autumn",
            "The green is taken down, and yellow that was there all along becomes visible.",
            "Leaves are green because of chlorophyll, which catches light. Making it costs the tree nitrogen. When "
            "days get short, the tree dismantles the chlorophyll and stores what is valuable in its wood. The yellow "
            "pigments, which had been hidden by the green, stay behind. "
            "Red is different: some trees make it anew in autumn, probably as a sunshade that protects the leaf while "
            "it is being emptied. At last a layer of cork closes off the stalk, and the wind does the rest.",
            "Why do needles stay green?",
            "They are narrow and waxed, lose little water, and contain substances that lower their freezing point. So "
            "most conifers can afford to keep them for years."),
    Concept("what an API is",
            "An agreement on how one program may ask another for something.",
            "A restaurant guest does not walk into the kitchen; there is a menu, and there are waiters. An API is the "
            "menu of a program: which requests there are, what they need and what comes back. As long as the menu "
            "stays the same, the kitchen can be rebuilt without any guest noticing. "
            "A good one is small, consistent, and hard to use wrongly. Changing it is expensive, because others "
            "depend on it; hence versions, and hence the advice to promise little at the start.",
            "What does REST have to do with it?",
            "REST is a style for APIs on the web: things have addresses, and a few verbs such as GET and DELETE act "
            "on them."),
    Concept("how the seasons come about",
            "The axis of the Earth is tilted, so each half leans towards the Sun for part of the year.",
            "Many people think that summer comes when the Earth is closest to the Sun. In fact it is closest in early "
            "January. What matters is the tilt of the axis, about 23 degrees, which keeps its direction in space all "
            "year round. "
            "In June the northern half leans towards the Sun: days are long, and light falls steeply, so each square "
            "metre receives more of it. Half a year later it is the other way round. Near the equator the tilt "
            "changes little, and the year is divided by rain and not by warmth.",
            "Why is the hottest time not on the longest day?",
            "Land and sea need time to warm up, like a pot on the stove. As long as more heat comes in than goes out, "
            "it still gets warmer, and that lasts some weeks past the longest day."),
    Concept("how noise-cancelling headphones work",
            "They play the opposite of the outside noise, and the two waves cancel out.",
            "Sound is a rhythm of higher and lower pressure. A microphone on the headphone hears the noise from "
            "outside, and a small computer plays the same wave upside down: low pressure where the noise has high. "
            "Both meet at the ear and nearly cancel. "
            "That works well for steady, deep sounds such as engines, which are easy to foresee. For voices and "
            "clatter the computer is too slow by a fraction of a millisecond, and there the padding has to do the "
            "work.",
            "Is the sound energy lost?",
            "No. It is spread differently: quiet at your ear, a little louder elsewhere, and the loudspeaker spends "
            "energy to do it."),
    Concept("what a budget is for",
            "It decides in advance where the money should go, so that surprises do not decide it.",
            "A budget lists what comes in and what goes out during a month. Fixed costs come first: rent, insurance, "
            "tickets. Then come those that vary, such as food, and finally what happens once a year and is forgotten "
            "for eleven months. Divide yearly bills by twelve and put that much aside each month. "
            "The point is not thrift as such. Who knows what is already spoken for can spend the rest without a bad "
            "conscience.",
            "How large should the reserve be?",
            "A common rule is three months of fixed costs. Start with one; the first broken washing machine will show "
            "what it is good for."),
    Concept("the water cycle",
            "The Sun lifts water into the air, and gravity brings it back through rain and rivers.",
            "Sunlight warms the sea, and water evaporates; the salt stays behind. The vapour rises with warm air, "
            "cools, and condenses on specks of dust into droplets that we see as clouds. When these grow heavy they "
            "fall as rain or snow. "
            "Part of it runs off in rivers, part seeps into the ground and comes out of springs years later, and a "
            "good deal is drunk by plants and breathed out through their leaves. In the end it reaches the sea again.",
            "How long does a drop stay in the air?",
            "About nine days on average. In the deep sea it is more like thousands of years."),
    Concept("how to read a box plot",
            "The box holds the middle half of the values, the line in it is the median.",
            "A box plot shows a whole set of numbers in one small drawing. The box reaches from the lower to the "
            "upper quartile, so half of all values lie inside it. The line across the box is the median. The whiskers "
            "reach to the farthest values that still count as ordinary; single dots beyond them are outliers. "
            "Put several side by side and you see at once which group is higher and which is more spread out. What it "
            "hides is the shape: two humps look the same as one.",
            "When do values count as outliers?",
            "By the usual convention, when they are more than one and a half box lengths away from the box. That is a "
            "rule for drawing and no proof of an error."),
    Concept("why ice floats",
            "Water takes up more room when it freezes, so ice is lighter than the water around it.",
            "Most substances shrink when they become solid. In ice, however, each water molecule holds four "
            "neighbours at a fixed distance, and the lattice that results has wide gaps. Liquid water is packed more "
            "tightly. Ice therefore weighs about a twelfth less than the same volume of water and floats with most of "
            "its body below the surface. "
            "This matters for every pond. Ice stays on top and keeps the cold out, and the densest water, at 4 °C, "
            "lies at the bottom, where fish get through the winter.",
            "Does melting sea ice raise the sea?",
            "Hardly, because floating ice already displaces its own weight. Ice on land is another matter: when it "
            "melts, water is added."),
)  # fmt: skip


def concept(d: Desk) -> Dialogue:
    c = d.deal("concept", CONCEPTS)
    ask = d.pick(
        [
            "Explain {}.",
            "Can you explain {}?",
            "I would like to understand {}.",
            "In simple words: {}.",
            "My son asks about this: {}. What do I tell him?",
            "Write a paragraph on {}.",
            "Tell me about this, please: {}.",
        ]
    )
    turns = [(asked(d, ask.format(c.topic)), c.text), (c.ask, c.answer)]
    if d.chance(0.3):
        turns.append(
            (d.pick(["Sum it up in one sentence.", "One sentence for my notes?", "And the short version?"]), c.gist)
        )
    return Dialogue(turns, c.gist)


# Other languages


class Language(NamedTuple):
    """How to ask in one language. Pairs are question and answer; `small` are pairs without anything to compute."""

    days: str
    months: str
    date: str
    weekday: tuple[str, str]
    product: tuple[str, str]
    minutes: tuple[str, str]
    then: str
    small: tuple[tuple[str, str], ...]


LANGUAGES = {
    "de": Language(
        "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "{d}. {m} {y}",
        ("Welcher Wochentag ist der {date}?", "Der {date} ist ein {day}."),
        (
            "Was ist {a} mal {b}?",
            "Ich zerlege {b} in {t} und {o}: {a} × {t} = {at}, {a} × {o} = {ao}. Zusammen ergibt das {at} + {ao} = "
            "{c}.",
        ),
        (
            "Wie viele Minuten sind {h} Stunden und {n} Minuten?",
            "Eine Stunde hat 60 Minuten: {h} × 60 = {hm}, und {hm} + {n} = {all}. Es sind {all} Minuten.",
        ),
        "Und {n} Tage später?",
        (
            (
                "Was ist der Unterschied zwischen „seit“ und „seid“?",
                "„Seit“ bezeichnet eine Zeit: Ich wohne seit März hier. „Seid“ ist eine Form von „sein“: Ihr seid "
                "pünktlich. Merkhilfe: seit mit t wie Zeit.",
            ),
            (
                "Schreib mir bitte eine kurze Absage für eine Einladung zum Abendessen.",
                "Liebe Jolanta, vielen Dank für die Einladung! Leider bin ich am Freitag schon verabredet. Ich würde "
                "mich freuen, wenn wir das Essen bald nachholen. Herzliche Grüße",
            ),
            (
                "Wie halte ich Basilikum am Leben?",
                "Stell ihn hell, aber nicht in die Mittagssonne, gieße von unten, sobald die Erde oben trocken ist, "
                "und schneide ganze Triebe über einem Blattpaar ab, statt einzelne Blätter zu zupfen. Dann treibt er "
                "neu aus.",
            ),
        ),
    ),
    "fr": Language(
        "lundi mardi mercredi jeudi vendredi samedi dimanche",
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
        "{d} {m} {y}",
        ("Quel jour de la semaine est le {date} ?", "Le {date} est un {day}."),
        (
            "Combien font {a} fois {b} ?",
            "On décompose {b} en {t} et {o} : {a} × {t} = {at} et {a} × {o} = {ao}. En tout, {at} + {ao} = {c}.",
        ),
        (
            "Combien de minutes y a-t-il dans {h} heures et {n} minutes ?",
            "Une heure compte 60 minutes : {h} × 60 = {hm}, puis {hm} + {n} = {all}. Cela fait {all} minutes.",
        ),
        "Et {n} jours plus tard ?",
        (
            (
                "Quelle est la différence entre « an » et « année » ?",
                "« An » compte les unités : elle a dix ans. « Année » insiste sur la durée ou le contenu : une année "
                "difficile, toute l'année.",
            ),
            (
                "Pourquoi faut-il rincer le riz avant de le cuire ?",
                "Le rinçage enlève l'amidon resté à la surface des grains. Le riz colle moins et l'eau de cuisson "
                "reste plus claire. Pour un risotto, au contraire, on garde cet amidon, car il lie la sauce.",
            ),
            (
                "Rédige un petit mot pour prévenir mes voisins d'une fête.",
                "Chers voisins, samedi soir je fête mon anniversaire. Il y aura un peu de musique jusqu'à minuit. Si "
                "le bruit vous gêne, sonnez chez moi, ou mieux : venez prendre un verre !",
            ),
        ),
    ),
    "es": Language(
        "lunes martes miércoles jueves viernes sábado domingo",
        "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
        "{d} de {m} de {y}",
        ("¿Qué día de la semana es el {date}?", "El {date} es {day}."),
        (
            "¿Cuánto es {a} por {b}?",
            "Separamos {b} en {t} y {o}: {a} × {t} = {at} y {a} × {o} = {ao}. Sumamos: {at} + {ao} = {c}.",
        ),
        (
            "¿Cuántos minutos son {h} horas y {n} minutos?",
            "Una hora tiene 60 minutos: {h} × 60 = {hm}, y {hm} + {n} = {all}. Son {all} minutos.",
        ),
        "¿Y {n} días después?",
        (
            (
                "¿Cuándo se usa «por» y cuándo «para»?",
                "«Para» señala la meta: este libro es para ti, salgo para Lima. «Por» señala la causa o el camino: "
                "gracias por venir, paseamos por el parque.",
            ),
            (
                "¿Cómo sé si un huevo está fresco?",
                "Ponlo en un vaso de agua. Si se queda acostado en el fondo, es fresco; si se levanta un poco, tiene "
                "una o dos semanas; si flota, mejor no lo comas. Con el tiempo entra aire por la cáscara.",
            ),
            (
                "Dame tres ideas para una tarde de lluvia.",
                "1. Cocinar algo que nunca hemos probado.\n2. Ordenar las fotos del último viaje y elegir diez.\n3. "
                "Escribir una carta a mano a alguien que no la espera.",
            ),
        ),
    ),
    "zh": Language(
        "星期一 星期二 星期三 星期四 星期五 星期六 星期日",
        " ".join(str(i) for i in range(1, 13)),
        "{y}年{m}月{d}日",
        ("{date}是星期几？", "{date}是{day}。"),
        ("{a}乘以{b}等于多少？", "把{b}拆成{t}和{o}：{a} × {t} = {at}，{a} × {o} = {ao}。相加得 {at} + {ao} = {c}。"),
        ("{h}小时{n}分钟一共是多少分钟？", "一小时有六十分钟：{h} × 60 = {hm}，{hm} + {n} = {all}。一共{all}分钟。"),
        "再过{n}天呢？",
        (
            (
                "“的”“得”“地”有什么区别？",
                "“的”放在名词前：红色的花。“地”放在动词前：慢慢地走。“得”放在动词后，说明程度：跑得很快。",
            ),
            (
                "怎样泡一杯好喝的绿茶？",
                "水温不要太高，八十度左右就好。先用热水温一下杯子，放入三克茶叶，加水，等两分钟。水太热，茶会变苦。",
            ),
            (
                "用一句话解释什么是回收利用。",
                "回收利用就是把用过的材料收集起来，加工以后再做成新的东西，这样可以节约资源，也可以减少垃圾。",
            ),
        ),
    ),
    "ja": Language(
        "月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日",
        " ".join(str(i) for i in range(1, 13)),
        "{y}年{m}月{d}日",
        ("{date}は何曜日ですか。", "{date}は{day}です。"),
        (
            "{a}かける{b}はいくつですか。",
            "{b}を{t}と{o}に分けます。{a} × {t} = {at}、{a} × {o} = {ao}です。合わせて {at} + {ao} = {c} になります。",
        ),
        ("{h}時間{n}分は何分ですか。", "一時間は六十分です。{h} × 60 = {hm}、{hm} + {n} = {all} なので、{all}分です。"),
        "その{n}日後は？",
        (
            (
                "「は」と「が」の違いを簡単に教えてください。",
                "「は」は話題を示します。「私は学生です」では、私について話しています。「が」は新しい情報を示します。「誰が来ましたか」「田中さんが来ました」のように使います。",
            ),
            (
                "雨の日に家でできることを三つ教えてください。",
                "一つ目は、読みかけの本を最後まで読むことです。二つ目は、古い写真を整理することです。三つ目は、時間のかかる料理を作ることです。",
            ),
            (
                "友達に遅れることを伝える短い文を書いてください。",
                "ごめん、電車が遅れていて、十五分ぐらい遅くなりそうです。先にお店に入っていてください。",
            ),
        ),
    ),
    "ar": Language(
        "الاثنين الثلاثاء الأربعاء الخميس الجمعة السبت الأحد",
        "يناير فبراير مارس أبريل مايو يونيو يوليو أغسطس سبتمبر أكتوبر نوفمبر ديسمبر",
        "{d} {m} {y}",
        ("ما هو يوم الأسبوع الموافق {date}؟", "{date} هو يوم {day}."),
        (
            "كم يساوي {a} ضرب {b}؟",
            "نقسم {b} إلى {t} و {o}: {a} × {t} = {at} ثم {a} × {o} = {ao}. المجموع: {at} + {ao} = {c}.",
        ),
        (
            "كم دقيقة في {h} ساعات و {n} دقيقة؟",
            "في الساعة 60 دقيقة: {h} × 60 = {hm} ثم {hm} + {n} = {all}. الجواب بالدقائق: {all}.",
        ),
        "وماذا بعد {n} يومًا؟",
        (
            (
                "كيف أحفظ الخبز طازجًا؟",
                "ضعه في كيس من القماش في مكان جاف بعيدًا عن الشمس. إذا أردت حفظه أكثر من يومين فقطعه وضعه في المجمد.",
            ),
            (
                "اكتب لي رسالة شكر قصيرة لمعلمتي.",
                "معلمتي العزيزة، شكرًا لك على صبرك وتشجيعك هذا العام. تعلمت منك الكثير، وسأتذكر دروسك دائمًا.",
            ),
            (
                "لماذا ننام؟",
                "في النوم يرتاح الجسم ويصلح نفسه، ويرتب الدماغ ما تعلمناه خلال النهار. من لا ينام جيدًا يصعب عليه "
                "التركيز والتذكر.",
            ),
        ),
    ),
    "ru": Language(
        "понедельник вторник среда четверг пятница суббота воскресенье",
        "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
        "{d} {m} {y} года",
        ("Какой день недели — {date}?", "{date} — это {day}."),
        (
            "Сколько будет {a} умножить на {b}?",
            "Разложим {b} на {t} и {o}: {a} × {t} = {at}, {a} × {o} = {ao}. Вместе {at} + {ao} = {c}.",
        ),
        (
            "Перевести в минуты: {h} ч {n} мин.",
            "В одном часе 60 минут: {h} × 60 = {hm}, затем {hm} + {n} = {all}. Ответ: {all} мин.",
        ),
        "А через {n} дн.?",
        (
            (
                "Чем отличаются слова «одеть» и «надеть»?",
                "Одевают кого-то: одеть ребёнка. Надевают что-то: надеть пальто. Можно запомнить так: одеть Надежду, "
                "надеть одежду.",
            ),
            (
                "Как сварить гречку, чтобы она была рассыпчатой?",
                "На один стакан крупы нужно два стакана воды. Промойте крупу, доведите до кипения, убавьте огонь, "
                "накройте крышкой и не мешайте. Через пятнадцать минут снимите с огня и дайте постоять.",
            ),
            (
                "Напиши короткое объявление о пропавшей кошке.",
                "Пропала серая кошка с белыми лапами, зовут Муся. В последний раз её видели у старой мельницы. Если "
                "вы её встретите, позвоните, пожалуйста: 555-0142.",
            ),
        ),
    ),
}


def foreign(d: Desk) -> Dialogue:
    lang = d.deal("lang", tuple(LANGUAGES))
    how = LANGUAGES[lang]
    names, months = words(how.days), words(how.months)

    def written(day: date) -> str:
        return how.date.format(d=day.day, m=months[day.month - 1], y=day.year)

    turns: Turns = []
    for kind in d.some(["day", "product", "minutes", "small"], d.between(1, 3)):
        if kind == "day":
            day = d.day().replace(day=d.between(2, 28))
            turns.append(
                (
                    how.weekday[0].format(date=written(day)),
                    how.weekday[1].format(date=written(day), day=names[day.weekday()]),
                )
            )
            if d.chance(0.5):
                n = d.between(11, 99)
                day += timedelta(n)
                if day.day > 1:
                    turns.append(
                        (how.then.format(n=n), how.weekday[1].format(date=written(day), day=names[day.weekday()]))
                    )
        elif kind == "product":
            a, t, o = d.between(12, 79), d.between(1, 8) * 10, d.between(2, 9)
            b = t + o
            turns.append(
                (
                    how.product[0].format(a=a, b=b),
                    how.product[1].format(a=a, b=b, t=t, o=o, at=a * t, ao=a * o, c=a * b),
                )
            )
        elif kind == "minutes":
            h, n = d.between(3, 9), d.between(11, 58)
            turns.append((how.minutes[0].format(h=h, n=n), how.minutes[1].format(h=h, n=n, hm=h * 60, all=h * 60 + n)))
        else:
            turns.append(d.deal(f"small {lang}", how.small))
    return Dialogue(turns, turns[0][1], lang)


def translation(d: Desk) -> Dialogue:
    day = d.day(2020, 2040).replace(day=d.between(2, 28))
    codes = d.some(("de", "fr", "es", "ru"), 2)
    english = {"de": "German", "fr": "French", "es": "Spanish", "ru": "Russian"}
    turns: Turns = []
    for lang in codes:
        how = LANGUAGES[lang]
        there = how.date.format(d=day.day, m=words(how.months)[day.month - 1], y=day.year)
        line = how.weekday[1].format(date=there, day=words(how.days)[day.weekday()])
        turns.append(
            (
                f'Translate into {english[lang]}: "{long(day)} is a {weekday(day)}."'
                if not turns
                else d.pick([f"And in {english[lang]}?", f"{english[lang]} too, please."]),
                line,
            )
        )
    return Dialogue(turns, turns[0][1])


# Several subjects in one conversation

SHORT: tuple[Maker, ...] = (
    product,
    column_sum,
    division,
    percentage,
    fractions,
    euclid,
    prime_factors,
    statistics,
    binary,
    shopping,
    recipe,
    journey,
    square_root,
    conversion,
    temperature,
    day_of_week,
    days_between,
    leap_year,
    time_zones,
    sort_people,
    extract_contact,
    anagrams,
    emoji,
    translation,
)
LONG: tuple[Maker, ...] = (
    plan,
    collatz,
    times_tables,
    bubble_sort,
    conversion_table,
    interest,
    month_page,
    log_lines,
    csv_to_table,
)
BRIDGES = ("Something else: ", "Another thing. ", "Next question. ", "Now for something different. ", "", "One more. ")


def medley(d: Desk, most: int = 8) -> Dialogue:
    """A long conversation that changes the subject several times."""
    turns: Turns = []
    first = None
    for _ in range(d.between(most // 2, most)):
        part = (d.deal("medley", (*SHORT, concept, code, foreign)))(d)
        first = first or part
        ask, answer = part.turns[0]
        if turns and part.lang == "en":
            ask = d.pick(BRIDGES) + without_greeting(ask)
        turns.append((ask, answer))
        turns += part.turns[1:]
    assert first is not None
    return Dialogue(turns, first.brief)


def marathon(d: Desk) -> Dialogue:
    """A few conversations that no row of 1,024 tokens holds."""
    return medley(d, 26)


# Record formats


def message(role: str, content: str | None, **more: object) -> Record:
    return {"role": role, "content": content, **more}


def chat_record(d: Desk, talk: Dialogue) -> Record:
    """OpenAI `messages`: some with a system prompt, some with names, some with an answer that is not to be learned."""
    messages = [message("system", d.pick(SYSTEMS))] if talk.lang == "en" and d.chance(0.4) else []
    names = d.some(PEOPLE, 2) if d.chance(0.15) else []
    draft = not names and d.chance(0.2)
    for i, (ask, answer) in enumerate(talk.turns):
        more = {"name": names[i % 2]} if names else {}
        messages.append(message("user", ask, **more))
        if draft and i == 0 and talk.lang == "en":
            messages.append(message("assistant", talk.brief, weight=0))
            messages.append(
                message(
                    "user",
                    d.pick(["Can you write that out in full?", "A bit more detail, please.", "Please elaborate."]),
                )
            )
            messages.append(message("assistant", answer, weight=1))
        else:
            messages.append(message("assistant", answer))
    return {"messages": messages}


def sharegpt_record(d: Desk, talk: Dialogue) -> Record:
    turns = [{"from": "system", "value": d.pick(SYSTEMS)}] if talk.lang == "en" and d.chance(0.3) else []
    for ask, answer in talk.turns:
        turns += [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]
    return {"conversations": turns}


def alpaca_record(d: Desk, talk: Dialogue) -> Record:
    """The last turn is instruction and output, the ones before it are `history`; a quoted block becomes `input`."""
    *before, (ask, answer) = talk.turns if d.chance(0.4) else talk.turns[:1]
    instruction, _, given = ask.partition("\n\n")
    record: Record = {"instruction": instruction, "input": given, "output": answer}
    if d.chance(0.25) and talk.lang == "en":
        record["system"] = d.pick(SYSTEMS)
    if before:
        record["history"] = [list(pair) for pair in before]
    return record


def inventory(d: Desk) -> Record:
    """Dolly: a question that the context answers."""
    stock = [(what, d.between(3, 60), price) for what, price in d.some(GOODS, d.between(3, 5))]
    (first, n, price), (second, m, _) = stock[:2]
    lines = ". ".join(f"{what.capitalize()}: {k} on the shelf, {money(p)} each" for what, k, p in stock)
    context = f"Stock list of the shop at {d.pick(PLACES)}, taken on {full(d.day(2020, 2030))}. {lines}."
    ask, response = d.pick(
        [
            (f"How much is the whole stock of this item worth: {first}?", f"{n} × {money(price)} = {money(n * price)}"),
            (
                f"Which is there more of, {first} or {second}?",
                f"There are as many of both, {n}."
                if n == m
                else f"More of {first if n > m else second}: {max(n, m)} against {min(n, m)}.",
            ),
            (
                "List the goods in alphabetical order.",
                "\n".join(f"- {what}" for what in sorted(w for w, _, _ in stock)),
            ),
            (
                "How many pieces are on the shelf in total?",
                f"{' + '.join(str(k) for _, k, _ in stock)} = {sum(k for _, k, _ in stock)}",
            ),
        ]
    )
    return {"instruction": ask, "context": context, "response": response, "category": "closed_qa"}


KINDS = (
    ("vegetable", ("carrot", "leek", "spinach", "turnip", "cabbage")),
    ("tool", ("hammer", "saw", "chisel", "pliers", "spanner")),
    ("instrument", ("violin", "oboe", "drum", "harp", "trumpet")),
    ("bird", ("heron", "wren", "stork", "owl", "magpie")),
    ("metal", ("copper", "zinc", "tin", "nickel", "silver")),
    ("fabric", ("linen", "velvet", "denim", "felt", "silk")),
)


def dolly_record(d: Desk, category: str) -> Record:
    if category == "closed_qa":
        return inventory(d)
    if category == "classification":
        (a, first), (b, second) = d.some(KINDS, 2)
        mixed = d.shuffled([(w, a) for w in d.some(first, 3)] + [(w, b) for w in d.some(second, 3)])
        ask = f"Sort these words into {a}s and {b}s: {', '.join(w for w, _ in mixed)}."
        response = "\n".join(f"{kind.capitalize()}s: {', '.join(w for w, k in mixed if k == kind)}" for kind in (a, b))
        return {"instruction": ask, "context": "", "response": response, "category": category}
    if category == "summarization":
        c = d.deal("concept", CONCEPTS)
        ask = d.pick(
            [
                "Summarise the passage in one sentence.",
                "What is the main point of this text?",
                "Give the gist in a single sentence.",
            ]
        )
        return {"instruction": ask, "context": c.text, "response": c.gist, "category": category}
    if category == "information_extraction":
        talk = extract_contact(d)
        ask, _, context = talk.turns[0][0].partition("\n\n")
        return {"instruction": ask, "context": context, "response": talk.turns[0][1], "category": category}
    talk = d.deal("open", (concept, day_of_week, code, journey, foreign))(d)
    return {"instruction": talk.turns[0][0], "context": "", "response": talk.turns[0][1], "category": category}


def oasst_record(d: Desk, talk: Dialogue, number: int) -> Record:
    """A message tree. Where a prompt has several replies the full one has rank 0; any of them may come first."""
    made = 0

    def node(text: str, role: str, replies: list[Record], rank: int | None = None) -> Record:
        nonlocal made
        made += 1
        out: Record = {
            "message_id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"packcorpus sample {number} {made}")),
            "text": text,
            "role": role,
            "lang": talk.lang,
            "replies": replies,
        }
        return out if rank is None else {**out, "rank": rank}

    def grow(i: int) -> Record:
        ask, answer = talk.turns[i]
        replies = [node(answer, "assistant", [grow(i + 1)] if i + 1 < len(talk.turns) else [], 0)]
        if i == 0 and talk.brief != answer:
            replies.append(node(talk.brief, "assistant", [], 1))
            if d.chance(0.3):
                replies.append(
                    node(
                        d.pick(
                            [
                                "I am not sure what you mean. Could you say it differently?",
                                "Good question! Let me think about it.",
                            ]
                        ),
                        "assistant",
                        [],
                        2,
                    )
                )
        return node(ask, "prompter", d.shuffled(replies))

    prompt = grow(0)
    return {"message_tree_id": prompt["message_id"], "tree_state": "ready_for_export", "prompt": prompt}


# Tool use

NUMBER, TEXT = {"type": "number"}, {"type": "string"}


def schema(name: str, about: str, **properties: Record) -> Record:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = {
    "calculate": schema("calculate", "Evaluates an arithmetic expression with + - * / and brackets.", expression=TEXT),
    "convert": schema("convert", "Converts a quantity to another unit.", value=NUMBER, source=TEXT, target=TEXT),
    "weekday": schema(
        "weekday", "Says on which day of the week a date falls.", date={"type": "string", "format": "date"}
    ),
    "add_days": schema(
        "add_days",
        "Adds a number of days to a date.",
        date={"type": "string", "format": "date"},
        days={"type": "integer"},
    ),
}


class Step(NamedTuple):
    """One turn with tools: a question, the calls with what they return, and the answer."""

    ask: str
    calls: list[tuple[str, Record, Record]]
    answer: str


def tool_step(d: Desk) -> Step:
    kind = d.deal("step", ("sum", "sum", "convert", "convert", "weekday", "days", "two", "zero", "chat"))
    if kind == "sum":
        a, b, c = d.between(112, 989), d.between(13, 97), d.between(10, 9999)
        what = d.pick(
            [
                (f"{a} crates of {b} bottles and {c} single ones: how many bottles?", "bottles"),
                (f"Compute {a} times {b} plus {c}.", ""),
                (f"We print {a} booklets of {b} pages and {c} leaflets of one page. Pages in all?", "pages"),
            ]
        )
        value = a * b + c
        return Step(
            what[0],
            [("calculate", {"expression": f"{a} * {b} + {c}"}, {"result": value})],
            f"{a} × {b} + {c} = {value}" + (f", so {value} {what[1]}." if what[1] else "."),
        )
    if kind == "convert":
        base, units = d.deal("dimension", DIMENSIONS)
        source, target = d.some([base, *(name for name, _ in units)], 2)
        value = d.between(2, 500)
        shown = digits(convert(Fraction(value), source, target))
        out = json.loads(shown)
        ask = d.pick(
            [
                f"How many {target} are {value} {source}?",
                f"{value} {source} in {target}?",
                f"Please convert {value} {source} into {target}.",
            ]
        )
        return Step(
            ask,
            [("convert", {"value": value, "source": source, "target": target}, {"value": out, "unit": target})],
            d.pick([f"{value} {source} are {shown} {target}.", f"That is {shown} {target}."]),
        )
    if kind == "weekday":
        day = d.day()
        ask = d.pick(
            [
                f"Which day of the week is {long(day)}?",
                f"Is {long(day)} on a weekend?",
                f"I was told to come on {long(day)}. What weekday is that?",
            ]
        )
        verdict = ("Yes: " if day.weekday() > 4 else "No: ") if ask.startswith("Is") else ""
        return Step(
            ask,
            [("weekday", {"date": day.isoformat()}, {"weekday": weekday(day)})],
            f"{verdict}{long(day)} is a {weekday(day)}.",
        )
    if kind == "days":
        day, n = d.day(2020, 2035), d.between(20, 400)
        later = day + timedelta(n)
        why = d.pick(
            ["The guarantee runs for", "The visa is valid for", "The cheese has to ripen for", "The seeds keep for"]
        )
        return Step(
            f"{why} {n} days from {long(day)}. What is the last day?",
            [
                (
                    "add_days",
                    {"date": day.isoformat(), "days": n},
                    {"date": later.isoformat(), "weekday": weekday(later)},
                )
            ],
            f"{n} days after {long(day)} is {full(later)}.",
        )
    if kind == "two":
        one, two = d.day(last=2020), d.day(last=2020)
        who, other = d.some(PEOPLE, 2)
        return Step(
            f"{who} was born on {long(one)}, {other} on {long(two)}. Which weekdays were these?",
            [("weekday", {"date": x.isoformat()}, {"weekday": weekday(x)}) for x in (one, two)],
            f"{long(one)} was a {weekday(one)} and {long(two)} was a {weekday(two)}.",
        )
    if kind == "zero":
        a, b = d.between(10, 900), d.between(5, 60)
        return Step(
            f"What is {a} divided by {b} minus {b}, the difference first?",
            [("calculate", {"expression": f"{a} / ({b} - {b})"}, {"error": "division by zero"})],
            f"There is no result: {b} − {b} = 0, and nothing can be divided by zero.",
        )
    ask, answer = d.pick(
        [
            ("Which tools do you have?", "I can calculate, convert units, look up weekdays and add days to a date."),
            ("Thanks, that helps.", "You are welcome. Ask again whenever there is something to work out."),
            ("Do you need a tool to add 2 and 2?", "No. 2 + 2 = 4, that one I know by heart."),
        ]
    )
    return Step(ask, [], answer)


def tool_steps(d: Desk) -> tuple[list[Step], list[Record]]:
    steps = [tool_step(d) for _ in range(d.between(1, 4))]
    used = {name for step in steps for name, _, _ in step.calls}
    return steps, [TOOLS[name] for name in TOOLS if name in used or d.chance(0.5)] or [TOOLS["calculate"]]


def tools_record(d: Desk) -> Record:
    steps, tools = tool_steps(d)
    messages = [message("system", d.pick(SYSTEMS))] if d.chance(0.3) else []
    ids = 0
    for step in steps:
        messages.append(message("user", asked(d, step.ask) if step.calls else step.ask))
        if step.calls:
            calls, results = [], []
            for name, arguments, returned in step.calls:
                ids += 1
                calls.append(
                    {
                        "id": f"call_{ids}",
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                )
                results.append(message("tool", json.dumps(returned), tool_call_id=f"call_{ids}", name=name))
            messages += [message("assistant", None, tool_calls=calls), *results]
        messages.append(message("assistant", step.answer))
    return {"messages": messages, "tools": tools}


def sharegpt_tools_record(d: Desk) -> Record:
    steps, tools = tool_steps(d)
    turns = []
    for step in steps:
        turns.append({"from": "human", "value": asked(d, step.ask) if step.calls else step.ask})
        for name, arguments, returned in step.calls:
            turns.append({"from": "function_call", "value": json.dumps({"name": name, "arguments": arguments})})
            turns.append({"from": "observation", "value": json.dumps(returned)})
        turns.append({"from": "gpt", "value": step.answer})
    return {"conversations": turns, "tools": json.dumps([tool["function"] for tool in tools])}


# Plain text

NOTES = (
    "The ferry to the island runs on a cable. Two people can turn the wheel, but one is enough when the river is low. "
    "In spring, when snow melts upstream, the crossing takes twice as long and the operator asks cyclists to sit "
    "down. There is no timetable. A bell hangs on each bank, and whoever wants to cross rings it once.",
    "Our kiln holds sixty mugs or nine large bowls. It needs eight hours to reach the temperature of the glaze and "
    "nearly a whole day to cool. Opening it early is the mistake that everyone makes exactly once: the cold air comes "
    "in, and the bowls crack with a sound like knuckles.",
    "Field notes, north slope. The lower meadow was mown last week and smells of tea. Above the wall the grass is "
    "still standing and full of grasshoppers. Counted eleven kinds of flowers in a square of one metre by one metre; "
    "last year it was nine. The spring under the larch has moved two steps downhill.",
    "A good bicycle lock is heavy, and that is the whole problem. The light one gets carried and used; the heavy one "
    "stays at home on its hook. We therefore recommend two: a light one for the baker's, and a heavy one that lives "
    "at the station, locked to the rail, where it weighs nothing.",
    "How the library sorts its returns: picture books to the left, everything with a number on its back to the right, "
    "and in the middle the things that do not belong to us. Since January the middle has received one umbrella, four "
    "letters used as bookmarks, a pressed fern and a ticket for the opera, unused.",
    "The clock on the town hall has only an hour hand. It was built when nobody needed minutes, and when the council "
    "offered to add a second hand the town voted against it. You learn to read it: halfway between two marks means "
    "half past, and a little before a mark means that you should hurry.",
    "Instructions for the greenhouse. Open the roof when the upper thermometer passes 25 degrees and close it before "
    "the lamp in the yard comes on. Water in the morning, at the root, never on the leaves. Tomatoes lose their side "
    "shoots on Fridays. Leave the spider above the door alone; she was here first.",
    "The choir rehearses in a former swimming pool. The tiles throw every consonant back half a second later, so the "
    "conductor has them sing slowly and end each word together. Visitors say it sounds like a much larger choir. The "
    "singers say it sounds like a much wetter one.",
    "To fold the map so that it opens at the right place, begin with the long side and fold it in half, then in half "
    "again, like a letter. Then turn it and make an accordion of six. The legend should lie on top. If it does not, "
    "the map is inside out, which happens to surveyors as well.",
    "Every boat in the harbour has a rope that is too short. It is kept because it might do for something, and it "
    "gets tied to another rope that is too short, and in this manner, says the harbour master, the long ropes of the "
    "world come about. He has a drawer of labels for them and no two are alike.",
    "Report on the new oven. The left half is hotter than the right by about fifteen degrees, so trays are turned "
    "after ten minutes. Rolls need eighteen minutes, rye loaves fifty. The first batch of the day always comes out "
    "pale, because the stones are still cold inside whatever the display says.",
    "When fog comes in, the lighthouse keeper's daughter counts the seconds between the horn and its echo from the "
    "cliff. Six seconds mean that the air is dry behind the fog and it will lift by noon. Five mean nothing. She has "
    "kept a list for three years and is right more often than the radio.",
)  # fmt: skip


def note(d: Desk, number: int) -> str:
    if number < len(NOTES):
        return NOTES[number]
    day, place = d.day(2020, 2030), d.pick(PLACES)
    low, width, rain = d.between(-4, 14), d.between(3, 15), d.between(0, 30)
    sold, price = d.between(20, 140), d.pick([80, 120, 150, 250])
    return d.pick(
        [
            f"Weather diary, {place}. {full(day)}: low {digits(low)} °C, high {digits(low + width)} °C, a difference "
            f"of {width} degrees. "
            + (f"Rain: {rain} mm, which is {rain} litres on every square metre." if rain else "No rain.")
            + f" The wind turned {d.pick(['north', 'south-west', 'east'])} after {clock(d.between(40, 80) * 15)}.",
            f"Market day at {place}, {full(day)}. Sold {sold} rolls at {money(price)}: {sold} × {money(price)} = "
            f"{money(sold * price)}. "
            f"{d.pick(PEOPLE)} brought {d.between(3, 9)} crates of pears, and by {clock(d.between(40, 56) * 15)} they "
            f"were gone.",
        ]
    )


# Files


def jsonl(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def json_array(records: Iterable[Record]) -> bytes:
    return ("[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n]\n").encode()


def gzipped(data: bytes) -> bytes:
    """A header without name and time."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=out, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def csv_bytes(records: Sequence[Record]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def parquet_bytes(records: list[Record]) -> bytes:
    """Several row groups, because packcorpus cuts Parquet files there."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), out, row_group_size=12, compression="snappy", version="2.6")
    return out.getvalue()


def arrow_bytes(records: list[Record]) -> bytes:
    out = io.BytesIO()
    rows = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)
    return out.getvalue()


CATEGORIES = (
    "closed_qa",
    "closed_qa",
    "summarization",
    "classification",
    "information_extraction",
    "open_qa",
    "open_qa",
)


def records(d: Desk) -> dict[str, list[Record]]:
    """All records, file by file."""

    def talks(n: int, name: str, *makers: Maker) -> list[Dialogue]:
        return [d.deal(name, makers)(d) for _ in range(n)]

    def pair(talk: Dialogue, ask: str, answer: str) -> Record:
        return dict(zip((ask, answer), talk.turns[0], strict=True))

    def as_messages(talk: Dialogue) -> Record:
        *before, (ask, answer) = talk.turns
        history = [
            message(role, text) for pair in before for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        return {
            "prompt": [message("system", d.pick(SYSTEMS)), *history, message("user", ask)],
            "completion": [message("assistant", answer)],
        }

    chats = (
        talks(17, "chat", *SHORT, concept)
        + talks(7, "abroad", foreign)
        + talks(14, "long chat", *LONG)
        + talks(10, "chat+", concept, code, foreign)
    )
    gpts = talks(19, "gpt", *SHORT, concept, code, foreign) + talks(5, "gpt+", *LONG) + talks(6, "gpt++", medley)
    return {
        "chat.jsonl": [
            chat_record(d, t) for t in d.shuffled(chats + talks(12, "medley+", medley) + talks(4, "marathon", marathon))
        ],
        "tools.jsonl": [tools_record(d) for _ in range(30)],
        "sharegpt.json": d.shuffled(
            [sharegpt_record(d, t) for t in gpts] + [sharegpt_tools_record(d) for _ in range(8)]
        ),
        "alpaca.json": [
            alpaca_record(d, t)
            for t in talks(
                44,
                "alpaca",
                *SHORT,
                *LONG,
                log_lines,
                csv_to_table,
                extract_contact,
                sort_people,
                concept,
                code,
                code,
                foreign,
                foreign,
            )
        ],
        "dolly.parquet": [dolly_record(d, CATEGORIES[i % len(CATEGORIES)]) for i in range(30)],
        "oasst.jsonl.gz": [
            oasst_record(d, t, i)
            for i, t in enumerate(talks(20, "oasst", *SHORT[:6], concept, concept, code, foreign, foreign, plan))
        ],
        "questions.csv": [pair(t, "question", "answer") for t in talks(26, "questions", *SHORT, *LONG)],
        "prompts.jsonl.zst": [
            pair(t, "prompt", "completion") for t in talks(24, "prompts", *SHORT, code, code, code, foreign)
        ],
        "prompts_as_messages.jsonl": [
            as_messages(t) for t in talks(6, "as messages", conversion, concept, day_of_week, code)
        ],
        "notes.arrow": [{"text": note(d, i)} for i in range(18)],
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in records(Desk(42)).items():
        if name.endswith(".json"):
            data = json_array(rows)
        elif name.endswith(".csv"):
            data = csv_bytes(rows)
        elif name.endswith(".parquet"):
            data = parquet_bytes(rows)
        elif name.endswith(".arrow"):
            data = arrow_bytes(rows)
        else:
            data = jsonl(rows)
        if name.endswith(".gz"):
            data = gzipped(data)
        if name.endswith(".zst"):
            data = zstandard.ZstdCompressor(level=19).compress(data)
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
