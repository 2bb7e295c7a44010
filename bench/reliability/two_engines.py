"""Compare the renderings of minijinja with those of Jinja2.

    python bench/reliability/two_engines.py FOLDER --tokenizer FOLDER [--count N] [--seed S]

FOLDER has published Jinja templates. For each template, N random conversations are prepared as for a corpus: with all
roles, reasoning, calls, results, tools, text parts, training flags, and settings. Many of their strings are unusual:
control characters, white space of all kinds, markers, Jinja statements, numbers, other scripts. Text, turns, samples,
and marks of the two engines must be equal. One in 16 conversations is also converted to spans with either engine
alone, and spans or errors must be equal. Prints the number of conversations that were:

    equal          rendered by both engines, with equal results
    refused        refused by both engines
    Jinja2 alone   refused by minijinja and rendered by Jinja2
    left           left to Jinja2, because of what they contain
    unread         rejected before they are rendered
    spans          of all these: also converted to spans, with equal results or equal errors
    DIFFERENT      must not occur
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from templates import TODAY, source_of, tokenizers_of

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import DataError, PackError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.jinja import engines
from packcorpus.tasks.templates.jinja.template import JinjaTemplate, _Case
from packcorpus.tasks.templates.spans import trained_turns

engines.COMPARED = 1 << 33  # minijinja is not judged here, except by this script

# Conversations with the same settings, and how often one of them is also converted to spans.
ROUND, WHOLE = 250, 16
# Conversations with such texts are left to Jinja2, so they are rare.
RARE = ("\x1cfs\x1c", "\x1f", "a\x1d\n", "1e5", "[1.0]", '{"a":1e-7}', '"content":null')
TEXTS = (
    "", "a", " ", "\n", "  lead", "trail  ", "\tx\n", "é", "e\u0301", "日本語", "🙂",
    "\U0001f468\u200d\U0001f469", "ß", "İstanbul", "ΑΣ", "ﬁ", "ǆ", "\u200b", "\ufeff", "\u2028line",
    "\u2029", "\x85next", "\xa0hard\xa0", "\u180e", "\u3000wide\u3000", "\u2003", "\r\nline\r", "\x01",
    "\x08", "x\x0bv", "\x0cpage\x0c", "\x1b[0m", "\x7f", "\ue000", "\U0010fffd", "\ufffe", "<", "&amp;",
    "it's", '"q"', "'\"", "\\n", "\\", "\\u003c", "{{ x }}", "{%", "{% raw %}", "{% endfor %}", "{#", "#}",
    "{{", "None", "True", "null", "nan", "0", "1", "-1", "1.5", "0x1f", "١", "²", "½", "[]", "{}",
    '{"a": "b"}', "[1, 2]", "{'a': None}", "a,b", "a.b", "a: b", "A" * 50, "word " * 9, "</think>",
    "<think>", "<think>\nr\n</think>\n\ns", "a</think>b</think>c", "<think></think>", "[THINK]a[/THINK]",
    "<|channel|>analysis", "<|channel>thought\na<channel|>", "<tool_call>", "</tool_call>",
    "<tool_response>a</tool_response>", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "[INST]",
    "[/INST]", "<|eot_id|>", "<start_of_turn>", "/no_think", "/think", "system", "assistant", "tool",
    "2026-01-01",
)  # fmt: skip
NUMBERS = (0, 1, -1, 5, 10**12, -(2**63), 2**64 - 1, 0.1, 2.5, -0.25, 123456.789, 0.0001)
RARE_NUMBERS = (1.0, -0.0, 1e22, 1e-7, 1e300, 5e-324, 1e16, 10**25, 1 / 3, 0.1 + 0.2, 1e15 + 0.25)
TYPES: tuple[Any, ...] = (
    "string", "integer", "number", "boolean", "array", "object", ["string", "null"], ["integer", "string"],
)  # fmt: skip
# Options that published templates read.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False), "thinking": (True, False), "preserve_thinking": (True, False),
    "clear_thinking": (True, False), "reasoning_effort": ("low", "high"), "builtin_tools": (["browser", "python"],),
    "date_string": ("1 Jan 2026",), "custom_tools": (None,), "tools_in_user_message": (True, False),
    "add_bos_token": (True, False),
}  # fmt: skip


class Draw:
    """Draw random records of the format `messages`."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def record(self) -> dict[str, Any]:
        rng = self._rng
        self._odd = rng.choice([0.05, 0.3, 0.9])
        self._rare = 0.02 if rng.random() < 0.1 else 0.0
        self._reasons, self._calls, self._named = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.2
        messages = [*self._messages()]
        if rng.random() < 0.1:
            rng.choice(messages)["content"] = rng.choice(["", " ", "\n", "\u3000"])
        if rng.random() < 0.1:
            part = rng.choice(messages)
            if part["content"]:
                part["content"] = [{"type": "text", "text": part["content"]}, {"type": "text", "text": self.text()}]
        if rng.random() < 0.1:
            for message in messages:
                message["train"] = rng.choice([True, None, None, False])
        return {"messages": messages} | ({"tools": [*self._tools()]} if self._calls else {})

    def text(self) -> str:
        rng = self._rng
        if self._rare and rng.random() < self._rare:
            return rng.choice(RARE)
        if rng.random() > self._odd:
            return rng.choice(("yes", "no", "2+2?", "It is 4.", "Hello there,\nhow are you?"))
        return "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))

    def value(self, depth: int = 0) -> Any:
        rng = self._rng
        kind = rng.random()
        if kind < 0.4 or depth > 2:
            return self.text()
        if kind < 0.6:
            if rng.random() < 0.5:
                return round(rng.uniform(-1000, 1000), rng.randint(1, 11))
            return rng.choice(RARE_NUMBERS if rng.random() < self._rare else NUMBERS)
        if kind < 0.7:
            return rng.choice([True, False, None])
        if kind < 0.85:
            return [self.value(depth + 1) for _ in range(rng.randint(0, 3))]
        return {self.text(): self.value(depth + 1) for _ in range(rng.randint(0, 3))}

    def _messages(self) -> Iterator[dict[str, Any]]:
        rng = self._rng
        if rng.random() < 0.4:
            yield self._message(rng.choice(["system", "system", "developer"]))
        if rng.random() < 0.05:
            yield self._message("assistant")
        for _ in range(rng.randint(1, 3)):
            yield self._message("user")
            if rng.random() < 0.05:
                yield self._message(rng.choice(["user", "system"]))
            while self._calls and rng.random() < 0.5:
                calls = [self._call(number) for number in range(rng.choice([1, 1, 2, 3]))]
                said = rng.choice(["", "", None, self.text()])
                yield {**self._answer(), "content": said, "tool_calls": calls}
                for call in calls:
                    named = {"name": call["function"]["name"]} if rng.random() < 0.5 else {}
                    result = self.text() if rng.random() < 0.5 else json.dumps(self.value())
                    yield {"role": "tool", "tool_call_id": call["id"], "content": result, **named}
            if rng.random() < 0.97:
                yield self._answer()

    def _message(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self.text()} | ({"name": self.text()} if self._named else {})

    def _answer(self) -> dict[str, Any]:
        answer = self._message("assistant")
        if self._reasons and self._rng.random() < 0.6:
            if self._rng.random() < 0.6:
                answer["reasoning_content"] = self.text()
            else:
                answer["content"] = f"<think>\n{self.text()}\n</think>\n\n{answer['content']}"
        return answer

    def _call(self, number: int) -> dict[str, Any]:
        rng = self._rng
        arguments: Any = {rng.choice(["a", "city", self.text()]): self.value() for _ in range(rng.randint(0, 3))}
        if rng.random() < 0.2:
            arguments = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
        function = {"name": rng.choice(["f", "get_weather", "a.b", self.text()]), "arguments": arguments}
        return {"id": f"call{number:05d}", "type": "function", "function": function}

    def _tools(self) -> Iterator[dict[str, Any]]:
        for number in range(self._rng.randint(1, 3)):
            function = {"name": f"f{number}", "description": self.text(), "parameters": self._schema()}
            if self._rng.random() < 0.1:
                function["return"] = {"type": "string", "description": self.text()}
            yield {"type": "function", "function": function}

    def _schema(self, depth: int = 0) -> dict[str, Any]:
        rng = self._rng
        properties = {}
        for _ in range(rng.randint(0, 3)):
            kind = rng.choice(TYPES)
            one: dict[str, Any] = {"type": kind, "description": self.text()}
            if kind == "object" and depth < 2:
                one |= self._schema(depth + 1)
            if kind == "array":
                one["items"] = {"type": rng.choice(TYPES)}
            for key in ("enum", "default", "nullable", "title"):
                if rng.random() < 0.15:
                    one[key] = [self.value(2), self.value(2)] if key == "enum" else self.value(1)
            properties[rng.choice(["a", "city", "long name", self.text()])] = one
        required = [name for name in properties if rng.random() < 0.5]
        return {"type": "object", "properties": properties} | ({"required": required} if rng.random() < 0.8 else {})


def check(path: Path, tokenizer: Path, count: int, seed: int) -> Counter[str]:
    """Count the conversations of one template by their outcome."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        source = source_of(path)
        encoder, _ = tokenizers_of(source, tokenizer, Path(name))
    for first in range(0, count, ROUND):
        rng = random.Random(f"{seed} {path.stem} {first}")
        try:
            counts.update(check_round(source, encoder, rng, min(ROUND, count - first)))
        except DataError as error:
            return Counter({f"unusable ({error.reason})": 1})
    return counts


def check_round(source: str, encoder: Encoder, rng: random.Random, count: int) -> Iterator[str]:
    """Yield the outcome of each conversation, all with the same settings."""
    train_on, turns = rng.choice(["assistant", "assistant", "all"]), rng.choice(["auto", "auto", "apart", "together"])
    options = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < 0.3}
    adjust = Adjust(rng.random() < 0.2, rng.choice([None, None, "Be  kind.\n"]))
    fast, judge = (
        JinjaTemplate("t", source, encoder, train_on, TODAY, turns, options, adjust)  # type: ignore[arg-type]
        for _ in range(2)
    )
    judge.engines.use_jinja2()
    if fast.engines._fast is None:
        yield from ["not by minijinja"] * count
        return
    draw = Draw(rng)
    cases = list[tuple[dict[str, Any], Any, Any]]()
    for number in range(count):
        record = draw.record()
        try:
            conversation = read_record(record, "messages")
        except Reject:
            yield "unread"
            continue
        trained = trained_turns(conversation, train_on)  # type: ignore[arg-type]
        case = fast._case(conversation, trained)
        if not isinstance(case, _Case):
            yield "unread"
        elif case.job.engine == "jinja2":
            yield "left"
        else:
            cases.append((record, case.job, fast.engines._fast_rendering(case.job)))
            if number % WHOLE == 0:
                one, other = (_samples(template, conversation, trained) for template in (fast, judge))
                yield "spans" if one == other else _different(record, one, other)
    for (record, _, found), judged in zip(cases, judge._renderer.render_all([job for _, job, _ in cases]), strict=True):
        if found is None:
            yield "Jinja2 alone" if isinstance(judged, engines.Rendering) else "refused"
        else:
            yield "equal" if found == judged else _different(record, found, judged)
    assert fast.engines.differs is None
    for template in (fast, judge):
        template._renderer.close()


def _samples(template: JinjaTemplate, *pair: Any) -> Any:
    """Return the samples of a conversation, or its error."""
    try:
        return template.samples(*pair)
    except (Reject, PackError) as error:
        return error.reason, str(error)


def _different(record: Any, one: Any, other: Any) -> str:
    text = engines._difference(one, other) if isinstance(one, engines.Rendering) else f"{one} instead of {other}"
    print(f"{text[:1000]}\n  {json.dumps(record)}", flush=True)
    return "DIFFERENT"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--count", type=int, default=2000, help="conversations for each template")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        paths = sorted(given.folder.glob("*.jinja"))
        found = [pool.submit(check, path, given.tokenizer, given.count, given.seed) for path in paths]
        for path, counts in zip(paths, found, strict=True):
            print(f"{path.stem}: {_listed(counts.result())}", flush=True)
            total += counts.result()
    print(f"all: {_listed(total)}")


if __name__ == "__main__":
    main()
