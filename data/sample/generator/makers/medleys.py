"""Makers of conversations about several subjects."""

from __future__ import annotations

from desk import Desk, Dialogue, Maker, Turns
from makers.arithmetic import column_sum, division, euclid, fractions, percentage, prime_factors, product
from makers.calculations import binary, interest, journey, recipe, shopping, square_root, statistics
from makers.days import day_of_week, days_between, leap_year, month_page, plan, time_zones
from makers.explanations import concept
from makers.languages import foreign, translation
from makers.listings import bubble_sort, collatz, conversion_table, times_tables
from makers.programs import code
from makers.texts import anagrams, csv_to_table, emoji, extract_contact, log_lines, sort_people
from makers.units import conversion, temperature
from writing import without_greeting

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
    """Make a long conversation that changes the subject several times."""
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
    """Make a few conversations that are longer than a row of 1,024 tokens."""
    return medley(d, 26)
