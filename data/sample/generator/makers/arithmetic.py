"""Make exercises in arithmetic, with answers that show each step."""

from __future__ import annotations

from fractions import Fraction
from math import gcd, prod

from desk import Desk, Dialogue, Turns
from writing import PEOPLE, asked, digits, fenced, money, plain, result


def follow_up(d: Desk, value: int) -> tuple[str, str, int]:
    """Return a question about the last result, its answer, and the new result."""
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
