"""Compare conversations filled into a rendering of placeholders with renderings.

    python bench/reliability/filled.py FOLDER --tokenizer FOLDER [--count N] [--seed S]

FOLDER has published Jinja templates. For each template, N random conversations with system messages, names, reasoning
in its field or in the content, calls, results, tools, and training flags are prepared. Strings are short
words, and in half of the conversations also markers, control strings, white space, and other scripts. No conversation
may differ. Prints the number of conversations that were:

    filled      filled into a rendering of placeholders
    rendered    rendered, because the template does not treat all values in the same way
    refused     refused by the template, or because of reasoning or calls
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from templates import TODAY, source_of, tokenizers_of

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import trained_turns
from packcorpus.tasks.tokenization.prepare import Pending, Preparer, comparable

CLEAN = ("yes", "no", "2+2?", "It is 4.", "é")
ODD = (
    "</think>", "<think>", "<think>a</think>b", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end|>", "</s>",
    "[INST]", " b ", "\nb", "b\n", "b\n\n", "\tb", '"\\{', "漢字🙂", "\u2028", "a" * 300, "{}", "[1]", '{"a": "b"}',
)  # fmt: skip
FILE = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", "messages", (), 0, "", 0)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return a random record of the format `messages`."""
    odd = rng.random() < 0.5
    reasons, calls_tools = rng.random() < 0.5, rng.random() < 0.5

    def text() -> str:
        return rng.choice(ODD) if odd and rng.random() < 0.3 else rng.choice(CLEAN)

    def value(depth: int = 0) -> Any:
        kinds = [text, text, lambda: rng.choice([1, 2.5, True, None, 10**12])]
        if depth < 2:
            kinds += [lambda: [value(depth + 1)], lambda: {text(): value(depth + 1)}]
        return rng.choice(kinds)()

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        if calls_tools and rng.random() < 0.7:
            calls: list[dict[str, Any]] = []
            for number in range(rng.randint(1, 2)):
                arguments: Any = {rng.choice(["a", "city", text()]): value() for _ in range(rng.randint(0, 2))}
                if rng.random() < 0.3:
                    arguments = json.dumps(arguments)
                function = {"name": rng.choice(["f", "get_weather", text()]), "arguments": arguments}
                calls.append({"id": f"call{number:05d}", "type": "function", "function": function})
            said = {"content": rng.choice(["", "", "Let me see."]), "tool_calls": calls}
            thought = {"reasoning_content": text()} if reasons and rng.random() < 0.5 else {}
            messages.append({"role": "assistant", **said, **thought})
            for call in calls:
                named = {"name": call["function"]["name"]} if rng.random() < 0.5 else {}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text(), **named})
        answer = {"role": "assistant", "content": text()}
        if reasons and rng.random() < 0.5:
            answer["reasoning_content"] = text()
        elif reasons and rng.random() < 0.5:
            answer["content"] = f"<think>\n{text()}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    if rng.random() < 0.3:
        for message in messages:
            message["train"] = rng.choice([True, None, None, False])
    function = {"name": rng.choice(["f", "get_weather"]), "description": text(), "parameters": PARAMETERS}
    return {"messages": messages} | ({"tools": [{"type": "function", "function": function}]} if calls_tools else {})


class Counting(Preparer):
    """Preparer that notes how a conversation was prepared."""

    way = "filled"

    def prepared(self, pending: Pending, samples: Any) -> Any:
        self.way = "rendered"
        return super().prepared(pending, samples)


def check(source: str, tokenizer: Path, records: list[dict[str, Any]], drop: bool, turns: Any) -> Counter[str]:
    """Count the filled, rendered, refused, and DIFFERENT conversations."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        encoder, _ = tokenizers_of(source, tokenizer, Path(name))
        try:
            template, plain = (
                JinjaTemplate("t", source, encoder, "assistant", TODAY, turns, adjust=Adjust(drop)) for _ in range(2)
            )
        except DataError:
            return Counter(unusable=1)
        preparer = Counting(FILE, template, encoder, "assistant")
        for record in records:
            preparer.way = "filled"
            filled, error = [], ""
            try:
                filled = preparer.prepare(record)
            except (Reject, DataError) as found:
                error = str(found)
            if preparer.way == "rendered":
                counts["refused" if error else "rendered"] += 1
                continue
            try:
                conversation = read_record(record, "messages")
                trained = trained_turns(conversation, "assistant")
                if not any(trained):
                    raise Reject("no_trained_tokens", error)
                rendered = preparer.prepared(Pending(conversation, trained), plain.samples(conversation, trained))
                if not isinstance(rendered, list):
                    raise rendered
                same = [comparable(sample) for sample in filled] == [comparable(sample) for sample in rendered]
            except (Reject, DataError) as found:
                same = error == str(found)
            counts["filled" if same else "DIFFERENT"] += 1
            if not same:
                print(json.dumps(record, ensure_ascii=False))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--count", type=int, default=200, help="conversations for each template")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    total: Counter[str] = Counter()
    for path in sorted(given.folder.glob("*.jinja")):
        rng = random.Random(f"{given.seed} {path.stem}")
        records = [conversation(rng) for _ in range(given.count)]
        counts = check(source_of(path), given.tokenizer, records, rng.random() < 0.3, rng.choice(["auto", "apart"]))
        print(f"{path.stem}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())), flush=True)
        total.update(counts)
    print("all: " + ", ".join(f"{name} {count:,}" for name, count in sorted(total.items())))


if __name__ == "__main__":
    main()
