"""A `Dialogue` as a record of each format."""

from __future__ import annotations

import uuid

from desk import Desk, Dialogue, Record
from makers.calculations import journey
from makers.days import day_of_week
from makers.explanations import CONCEPTS, concept
from makers.languages import foreign
from makers.programs import code
from makers.texts import extract_contact
from writing import GOODS, PEOPLE, PLACES, SYSTEMS, full, money


def message(role: str, content: str | None, **more: object) -> Record:
    return {"role": role, "content": content, **more}


def chat_record(d: Desk, talk: Dialogue) -> Record:
    """Return a record with OpenAI `messages`.

    Some records have a system prompt, some have names, and some have an answer that is not trained on.
    """
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
    """Return a record with the last turn as `instruction` and `output`.

    Earlier turns become `history`, and a quoted block becomes `input`.
    """
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
    """Return a message tree.

    If a prompt has several replies, the complete reply has rank 0. Replies are in any order.
    """
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
