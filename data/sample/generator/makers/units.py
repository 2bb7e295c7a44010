"""Makers of conversions between units."""

from __future__ import annotations

from fractions import Fraction

from desk import Desk, Dialogue, Turns
from writing import asked, digits, result

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
