"""Compare the CPU seconds of preparing tool calls with `apply_chat_template`.

    python bench/preparation/calls.py FOLDER --tokenizer FOLDER [--count N] [--tools N] [--rounds N] [--data FILE]

FOLDER has published Jinja templates. For each template, the same conversations are prepared in three ways, in one
process:

    prepared       records ▶ texts to encode: rendered or filled in, split, trained turns located, all checked
    encoded        like `prepared`, then encoded to token ids
    transformers   apply_chat_template(messages, tools=tools, tokenize=True): token ids, without labels or checks

CPU seconds include the sandbox. A round measures all three ways, and ratios are computed within a round. The table has
medians. Every run starts with a new template and an empty cache. `datasets.map` would take longer than the plain loop
that is measured here.

The conversations are generated: one to three rounds with one or two calls, JSON as results, and answers. With `--tools
N`, each conversation has one to three tools out of N; a tool has one to four parameters of six types. The more tools
there are, the less two conversations have in common; "rendered" is the number of conversations that could not be filled
in. By default, every conversation has its own tools. `--data` reads records of the format `messages` instead. `--write`
only writes the conversations, for benchmarks of whole commands: conversations.jsonl, and text.jsonl with JSON text for
datasets_map.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson
from templates import TODAY, source_of, tokenizers_of

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.tokenization.prepare import Preparer

FILE = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", "messages", (), 0, "", 0)
AT_ONCE = 256  # records that a tokenization step prepares at once
TEXT = (
    "the a of to in and is for with on city weather order price flight hotel room date time number code "
    "email user find list book show cancel convert between currency amount today tomorrow next week "
    "please could you show me about my account status rate recipe music movie ticket near north south "
    "cold warm result total average first second last"
)
WORDS = TEXT.split()
Record = dict[str, Any]


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def tool(rng: random.Random, number: int) -> Record:
    """Return a tool with one to four parameters."""
    names = rng.sample(WORDS, rng.randint(1, 4))
    properties: Record = {}
    for name in names:
        kind = rng.choice(["string", "string", "integer", "number", "boolean", "array", "object"])
        properties[name] = {"type": kind, "description": words(rng, 4, 10)}
        if kind == "array":
            properties[name]["items"] = {"type": "string"}
        if kind == "string" and rng.random() < 0.3:
            properties[name]["enum"] = rng.sample(WORDS, 3)
    needed = names[: rng.randint(1, len(names))]
    function = {
        "name": f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{number}",
        "description": words(rng, 5, 15).capitalize() + ".",
        "parameters": {"type": "object", "properties": properties, "required": needed},
    }
    return {"type": "function", "function": function}


def value(rng: random.Random, field: Record) -> Any:
    """Return an argument of the parameter's type."""
    return {
        "string": lambda: rng.choice(field["enum"]) if "enum" in field else words(rng, 1, 4),
        "integer": lambda: rng.randint(1, 500),
        "number": lambda: round(rng.uniform(0, 1000), 2),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [words(rng, 1, 2) for _ in range(rng.randint(1, 3))],
        "object": lambda: {name: words(rng, 1, 2) for name in rng.sample(WORDS, rng.randint(1, 2))},
    }[field["type"]]()


def conversation(rng: random.Random, tools: list[Record]) -> Record:
    """Return a record of the format `messages` that calls some of these tools."""
    messages: list[Record] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words(rng, 10, 40).capitalize() + "."})
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": words(rng, 8, 40).capitalize() + "?"})
        calls = []
        for number in range(rng.choice([1, 1, 1, 2])):
            function = rng.choice(tools)["function"]
            fields, needed = function["parameters"]["properties"], function["parameters"]["required"]
            given = {name: value(rng, fields[name]) for name in fields if name in needed or rng.random() < 0.5}
            call = {"name": function["name"], "arguments": given}
            calls.append({"id": f"call{len(messages):03d}{number:02d}", "type": "function", "function": call})
        said = words(rng, 5, 12).capitalize() + "." if rng.random() < 0.3 else ""
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        for call in calls:
            result = {name: words(rng, 1, 6) for name in rng.sample(WORDS, rng.randint(1, 5))}
            named = {"name": call["function"]["name"], "tool_call_id": call["id"]}
            messages.append({"role": "tool", **named, "content": json.dumps(result)})
        messages.append({"role": "assistant", "content": words(rng, 15, 70).capitalize() + "."})
    return {"messages": messages, "tools": tools}


def generated(count: int, number: int) -> list[Record]:
    """Return conversations that share `number` tools, or have their own if it is 0."""
    rng = random.Random(7)
    known = [tool(rng, k) for k in range(number)]
    found = []
    for k in range(count):
        some = rng.randint(1, 3)
        found.append(
            conversation(rng, rng.sample(known, some) if known else [tool(rng, 9 * k + n) for n in range(some)])
        )
    return found


class Counting(Preparer):
    """Preparer that counts the conversations that are rendered."""

    rendered = 0

    def prepared(self, *given: Any) -> Any:
        self.rendered += 1
        return super().prepared(*given)


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Run `work`; return its CPU seconds, including children, and its result."""

    def now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    start = now()
    result = work()
    return now() - start, result


def ours(source: str, encoder: Encoder, records: list[Record], encodes: bool) -> tuple[int, int]:
    """Prepare records; return how many were rendered, and how many could not be used."""
    template = JinjaTemplate("t", source, encoder, "assistant", TODAY)
    preparer = Counting(FILE, template, encoder, "assistant")
    unused = 0
    for first in range(0, len(records), AT_ONCE):
        found = list(preparer.prepare_all(records[first : first + AT_ONCE]))
        unused += sum(not isinstance(each, list) for each in found)
        if encodes:
            texts = [text for each in found if isinstance(each, list) for one in each for text in one.texts]
            encoder.encode_repeated(texts)
    template._renderer.close()
    return preparer.rendered, unused


def theirs(source: str, library: Any, records: list[Record]) -> None:
    for record in records:
        library.apply_chat_template(
            record["messages"], tools=record["tools"], tokenize=True, return_dict=False, chat_template=source
        )


def measure(path: Path, tokenizer: Path, records: list[Record], rounds: int) -> str:
    """Return a line of the table for one template."""
    source = source_of(path)
    seconds: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        encoder, library = tokenizers_of(source, tokenizer, Path(name))
        try:
            theirs(source, library, records[:1])
            ours(source, encoder, records[:1], True)
        except Exception as error:  # a template can raise any exception
            return f"| {path.stem} | refused: {str(error)[:60]} |"
        for _ in range(rounds):
            prepared, (rendered, unused) = cpu_seconds(lambda: ours(source, encoder, records, False))
            encoded, _ = cpu_seconds(lambda: ours(source, encoder, records, True))
            other, _ = cpu_seconds(lambda: theirs(source, library, records))
            seconds.append((prepared, encoded, other, other / prepared, other / encoded))
    figures = [statistics.median(column) for column in zip(*seconds, strict=True)]
    shown = " | ".join(f"{figure:.2f}" for figure in figures)
    return f"| {path.stem} | {rendered:,} | {unused:,} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--count", type=int, default=1000, help="conversations")
    parser.add_argument("--tools", type=int, default=0, help="tools of all conversations; 0: each has its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="JSON lines of the format messages, instead of generated ones")
    parser.add_argument("--write", type=Path, help="folder to write the conversations to, instead of measuring")
    given = parser.parse_args()
    if given.data:
        records = [orjson.loads(line) for line in given.data.read_bytes().splitlines()][: given.count]
    else:
        records = generated(given.count, given.tools)
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        texts = [{key: json.dumps(value) for key, value in record.items()} for record in records]
        for name, found in (("conversations", records), ("text", texts)):
            (given.write / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, found)) + b"\n")
        return
    size = len(b"\n".join(map(orjson.dumps, records)))
    print(f"{len(records):,} conversations, {size / 1e6:.1f} MB as JSON lines, {given.rounds} rounds\n")
    columns = "rendered | not used | prepared | encoded | transformers | × prepared | × encoded"
    print(f"| template | {columns} |\n|---|" + "---:|" * 7)
    for path in sorted(given.folder.glob("*.jinja")):
        try:
            print(measure(path, given.tokenizer, records, given.rounds), flush=True)
        except DataError as error:
            print(f"| {path.stem} | {error} |")


if __name__ == "__main__":
    main()
