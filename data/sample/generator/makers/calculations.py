"""Make other calculations: means, binary numbers, shopping, journeys, and more."""

from __future__ import annotations

from fractions import Fraction

from desk import Desk, Dialogue
from writing import GOODS, PEOPLE, PLACES, asked, clock, digits, fenced, money, plain, result, table


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
