"""Makers that sort, parse, and rewrite small texts."""

from __future__ import annotations

import json

from desk import Desk, Dialogue
from writing import GOODS, PEOPLE, PLACES, SURNAMES, asked, clock, count, fenced, long, money, table, weekday, words

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
