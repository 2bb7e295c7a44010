"""Numbers, dates, and tables as text, and words to vary questions with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from fractions import Fraction

from desk import Desk


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
