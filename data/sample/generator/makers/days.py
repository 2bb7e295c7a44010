"""Makers of questions about dates, calendars, time zones, and plans."""

from __future__ import annotations

from datetime import date, timedelta

from desk import Desk, Dialogue
from writing import DAYS, MONTHS, PEOPLE, asked, clock, count, fenced, full, long, ordinal, table, weekday


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
    """Make a dated plan of several weeks, the long answers of the corpus."""
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
