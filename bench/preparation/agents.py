"""Compare the samples of agent conversations with one sample for each turn.

    python bench/preparation/agents.py FOLDER --tokenizer FOLDER [--count N] [--check N] [--turns] [--write FILE]
        [--without-reasoning SHARE] [--products N]

FOLDER has published Jinja templates. N agent conversations are generated: one to five tasks of 5 to 40 calls, each with
reasoning and a result; every conversation has tools of its own. Each template prepares and encodes them with
`turns: auto` and with `turns: apart`, in one process. The table has the samples of a conversation, the tokens, and the
CPU seconds, including the sandbox.

`--check` compares N of the conversations with transformers: the ids before each trained turn must be equal to
`apply_chat_template(messages[:k], add_generation_prompt=True)`, each turn must be trained exactly once, and the trained
text must have its content, its reasoning, and the names of its calls. `--turns` measures conversations of one task and
of 10 to 200 turns instead. `--write` only writes the conversations, for benchmarks of whole commands. With
`--products`, they are about N products, each with a system prompt of 1,100 words and ten tools, and have two to five
tasks of up to four calls.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import orjson
from calls import AT_ONCE, FILE, Record, cpu_seconds, tool, value, words
from templates import TODAY, source_of, tokenizers_of
from transformers.utils.chat_template_utils import _compile_jinja_template

from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Turns
from packcorpus.tasks.tokenization.prepare import Preparer
from packcorpus.tasks.tokenization.samples import Prepared

TURNS = (10, 25, 50, 100, 200)
OPTIONS = {"enable_thinking": True}  # Gemma 4 leaves reasoning out otherwise; it is the default of the others


def called(rng: random.Random, tools: list[Record], number: int) -> Record:
    function = rng.choice(tools)["function"]
    fields, needed = function["parameters"]["properties"], function["parameters"]["required"]
    given = {name: value(rng, fields[name]) for name in fields if name in needed or rng.random() < 0.5}
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": function["name"], "arguments": given},
    }


def about(rng: random.Random, number: int, least: int, most: int, tools: int) -> tuple[str, list[Record]]:
    """Return a system prompt of `least` to `most` words, and tools."""
    defined = [tool(rng, 9 * number + n) for n in range(tools)]
    return words(rng, least, most).capitalize() + ".", defined


def conversation(
    rng: random.Random,
    number: int,
    tasks: int,
    least: int,
    most: int,
    without_reasoning: float = 0.0,
    product: tuple[str, list[Record]] | None = None,
) -> Record:
    """Return a conversation of tasks with `least` to `most` calls each.

    `without_reasoning` is the share of calls that have a content instead of reasoning. `product` is the system prompt
    and the tools.
    """
    system, tools = product or about(rng, number, 20, 80, rng.randint(2, 6))
    messages: list[Record] = [{"role": "system", "content": system}]
    count = 0
    for _ in range(tasks):
        messages.append({"role": "user", "content": words(rng, 10, 60).capitalize() + "?"})
        for _ in range(rng.randint(least, most)):
            calls = [called(rng, tools, count)]
            count += 1
            if rng.random() < without_reasoning:  # some templates refuse a call with both
                said = {"content": words(rng, 5, 12).capitalize() + "."}
            else:
                said = {"content": "", "reasoning_content": words(rng, 10, 60).capitalize() + "."}
            messages.append({"role": "assistant", **said, "tool_calls": calls})
            for call in calls:
                result = {name: words(rng, 1, 12) for name in rng.sample(words(rng, 9, 9).split(), rng.randint(1, 5))}
                named = {"name": call["function"]["name"], "tool_call_id": call["id"]}
                messages.append({"role": "tool", **named, "content": json.dumps(result)})
        thought, said_last = (words(rng, *sizes).capitalize() + "." for sizes in ((10, 40), (15, 90)))
        messages.append({"role": "assistant", "content": said_last, "reasoning_content": thought})
    return {"messages": messages, "tools": tools}


def generated(count: int, without_reasoning: float, products: int = 0) -> list[Record]:
    rng = random.Random(11)
    if products:
        of_products = [about(rng, 2 * number, 1100, 1100, 10) for number in range(products)]
        return [
            conversation(rng, number, rng.randint(2, 5), 0, 4, without_reasoning, rng.choice(of_products))
            for number in range(count)
        ]
    return [conversation(rng, number, rng.randint(1, 5), 5, 40, without_reasoning) for number in range(count)]


def prepared(source: str, encoder: Encoder, records: list[Record], turns: Turns) -> list[list[Prepared]]:
    """Return the samples of records.

    Raises the error of the first record that cannot be used.
    """
    template = JinjaTemplate("t", source, encoder, "assistant", TODAY, turns, options=OPTIONS)
    preparer = Preparer(FILE, template, encoder, "assistant")
    found: list[list[Prepared]] = []
    for first in range(0, len(records), AT_ONCE):
        for each in preparer.prepare_all(records[first : first + AT_ONCE]):
            if not isinstance(each, list):
                raise each
            found.append(each)
    template._renderer.close()
    return found


def ids_of(sample: Prepared, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a sample, and whether each is trained on."""
    encoded = encoder.encode(sample.texts)
    texts = iter(np.split(encoded.ids, encoded.offsets[1:-1]) if len(sample.texts) else [])
    parts = [next(texts) if token < 0 else np.array([token]) for token in sample.layout.tokens.tolist()]
    flags = [np.full(len(part), flag) for part, flag in zip(parts, sample.layout.trained.tolist(), strict=True)]
    flags[-1] &= not sample.layout.separator  # which is not part of a turn
    return np.concatenate(parts), np.concatenate(flags)


def tokens_of(samples: list[list[Prepared]], encoder: Encoder) -> int:
    total = 0
    for each in samples:
        texts = [text for sample in each for text in sample.texts]
        total += len(encoder.encode_repeated(texts).ids)
        total += sum(int((sample.layout.tokens >= 0).sum()) for sample in each)
    return total


def difference(source: str, record: Record, samples: list[Prepared], encoder: Encoder, library: Any) -> str | None:
    """Return what is wrong with the samples of a record."""
    _compile_jinja_template(source).environment.globals["strftime_now"] = datetime.fromisoformat(TODAY).strftime
    rows = [ids_of(sample, encoder) for sample in samples]
    messages = record["messages"]
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = library.apply_chat_template(
            messages[:k],
            tools=record["tools"],
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            chat_template=source,
            **OPTIONS,
        )
        size = len(prompt)
        holding = [
            (ids, flags) for ids, flags in rows if ids[:size].tolist() == prompt and flags[size : size + 1].any()
        ]
        if len(holding) != 1:
            return f"messages[{k}] is trained on after its prompt in {len(holding)} samples"
        [(ids, flags)] = holding
        rest = flags[size:]
        stop = size + (int(np.argmin(rest)) if not rest.all() else len(rest))
        text = encoder.decode(ids[size:stop])
        for part in (message["content"], message.get("reasoning_content", "")):
            if part and part not in text and k + 1 == len(messages):
                return f"messages[{k}]: {part!r} is not trained on"
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                return f"messages[{k}]: {call['function']['name']} is not trained on"
    runs = sum(int(np.diff(np.append(0, flags.astype(int))).clip(0).sum()) for _, flags in rows)
    answers = sum(message["role"] == "assistant" for message in messages)
    return None if runs == answers else f"{runs} runs of trained tokens for {answers} answers"


def as_written(record: Record) -> Record:
    """Return a record without reasoning in answers that call no tool.

    Gemma 4 does not write it there.
    """
    plain = [
        {name: value for name, value in message.items() if name != "reasoning_content" or "tool_calls" in message}
        for message in record["messages"]
    ]
    return record | {"messages": plain}


def measure(path: Path, given: argparse.Namespace, records: list[Record]) -> str:
    source = source_of(path)
    with tempfile.TemporaryDirectory() as name:
        encoder, library = tokenizers_of(source, given.tokenizer, Path(name))
        try:
            try:
                prepared(source, encoder, records[:1], "auto")
            except Reject as reject:
                if reject.reason != "reasoning_not_written":
                    raise
                records = [*map(as_written, records)]
                prepared(source, encoder, records[:1], "auto")
            wrong = 0
            checked = records[: given.check]
            for record, samples in zip(checked, prepared(source, encoder, checked, "auto"), strict=True):
                if problem := difference(source, record, samples, encoder, library):
                    wrong += 1
                    print(f"{path.stem}: WRONG: {problem}")
            figures: list[Any] = [f"{wrong} of {len(checked)}" if checked else ""]
            counts = []
            for turns in ("auto", "apart") if not given.turns else ("auto",):
                seconds, found = cpu_seconds(lambda t=turns: prepared(source, encoder, records, t))  # type: ignore[misc]
                encoding, tokens = cpu_seconds(lambda f=found: tokens_of(f, encoder))  # type: ignore[misc]
                counts.append(tokens)
                figures += [f"{sum(map(len, found)) / len(records):.2f}", f"{tokens:,}", f"{seconds + encoding:.2f}"]
            figures.append(f"{counts[-1] / counts[0]:.2f}")
        except Exception as error:  # a template can raise any exception
            return f"| {path.stem} | refused: {str(error)[:100]} |"
    return f"| {path.stem} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--count", type=int, default=200, help="conversations")
    parser.add_argument("--check", type=int, default=0, help="conversations to compare with transformers")
    parser.add_argument("--turns", action="store_true", help="measure conversations of 10 to 200 turns")
    parser.add_argument("--without-reasoning", type=float, default=0.0, help="share of calls with a content instead")
    parser.add_argument("--products", type=int, default=0, help="products that the conversations are about")
    parser.add_argument("--write", type=Path, help="file to write the conversations to, instead of measuring")
    given = parser.parse_args()
    if given.write:
        records = generated(given.count, given.without_reasoning, given.products)
        given.write.write_bytes(b"\n".join(map(orjson.dumps, records)) + b"\n")
        return
    columns = ["wrong", "samples", "tokens", "CPU s", "samples apart", "tokens apart", "CPU s apart", "× tokens"]
    print(f"| template | {' | '.join(columns)} |\n|---|" + "---:|" * len(columns))
    rng = random.Random(5)
    for path in sorted(given.folder.glob("*.jinja")):
        if not given.turns:
            print(measure(path, given, generated(given.count, given.without_reasoning)), flush=True)
            continue
        for turns in TURNS:
            records = [conversation(rng, n, 1, turns - 1, turns - 1) for n in range(max(1, given.count // turns))]
            print(f"{turns} turns, {len(records)} conversations: {measure(path, given, records)}", flush=True)


if __name__ == "__main__":
    main()
