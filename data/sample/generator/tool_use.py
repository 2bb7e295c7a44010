"""Records of conversations that use tools."""

from __future__ import annotations

import json
from datetime import timedelta
from fractions import Fraction
from typing import NamedTuple

from desk import Desk, Record
from makers.units import DIMENSIONS, convert
from record_formats import message
from writing import PEOPLE, SYSTEMS, asked, digits, full, long, weekday

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
    """One turn with tools: a question, the calls with their results, and the answer."""

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
