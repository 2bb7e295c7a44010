"""Check that published chat templates lose nothing of a conversation.

    python bench/templates.py FOLDER --tokenizer FOLDER [--write FILE]

FOLDER has Jinja files. Each file is tried with twelve kinds of conversation. Every content, reasoning, name, argument,
schema, and result has a probe word of its own. For each trained turn, the row must have

    before the turn    the ids of `apply_chat_template(messages[:k], add_generation_prompt=True)` of transformers, and
                       every probe word of the tools and of the messages before (reasoning may be left out)
    in the turn        every probe word of the answer, and a control token at the end

Otherwise, the conversation must be rejected. Some collections indent the lines of a template for readability; the lines
of such a file are joined first.

    together, apart            correct, as one sample or as several samples
    no end                     correct, but the template writes an earlier turn without any end token
    no message, tools, calls   E245, E246, E238: the template does not write them
    no reasoning               E418, E243, E417: the template does not write the reasoning; correct with `reasoning: drop`
    no turn                    E417: the turn does not continue the prompt
    refused                    the template itself raises an error, in transformers, too
    LOST, WRONG, REFUSED       must not occur: a probe word is missing, ids or labels differ, or a conversation is
                               rejected although each turn of it continues its prompt in transformers, with all words
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import datetime
from itertools import chain, count, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from tasks.conversations.formats import read_record
from tasks.conversations.openai import in_parts
from tasks.core.errors import DataError, Reject
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from tasks.templates.adjust import NO_CHANGE, Adjust
from tasks.templates.jinja.template import JinjaTemplate
from tasks.templates.spans import trained_turns
from tasks.tokenization.segments import segments_of

TODAY = "2026-01-01"
RIGHT = ("together", "apart", "no end")
NAMES = {
    "message_not_written": "no message",
    "tools_not_written": "no tools",
    "calls_not_written": "no calls",
    "turn_not_located": "no turn",
    "reasoning_not_written": "no reasoning",
    "reasoning_left_out": "no reasoning",
}
OF_REASONING = ("turn_not_located", "reasoning_not_written", "reasoning_left_out")
MARKERS = re.compile(
    r"<[|｜][^<>|｜\n'\"{}]{1,40}[|｜]>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z_]{2,30}\]|\[e~\[|\]~[!b]\[?"
)
# Markers that content may contain: markers of reasoning and tools are ordinary vocabulary.
ORDINARY = re.compile(r"think|tool|TOOL|THINK|function|parameter|arg_")
# Markers of Gemma 4, all of which are special tokens.
ONE_SIDED = re.compile(r'<\|[a-z_]+>|<[a-z_]+\|>|<\|"\|>')

NUMBERS = count(10)
PROBE = re.compile(r"w\d+rd|7\d{3}9")


def word() -> str:
    return f"w{next(NUMBERS)}rd"


def field(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": f"The {word()}.", **more}


def tool(fields: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": fields, "required": [*fields][:1]}
    function = {"name": f"get_{word()}", "description": f"Find {word()}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOL = tool({word(): field("string"), word(): field("integer")})
OTHER = tool({word(): field("string", enum=[word(), word()])})
OPTIONS = field("object", properties={word(): field("array", items=field("string"))})
NESTED = tool({word(): OPTIONS, word(): field("boolean")})


def say(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"About {word()} now.", **more}


def think(**more: Any) -> dict[str, Any]:
    return say("assistant", reasoning_content=f"Perhaps {word()} first.", **more)


def call(tool: dict[str, Any], *values: Any) -> dict[str, Any]:
    function = tool["function"]
    arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
    return {
        "id": f"call{next(NUMBERS):05}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def calls(count: int = 1) -> list[dict[str, Any]]:
    number = 70009 + 10 * next(NUMBERS)  # a probe word, too
    return [call(TOOL, f"Near {word()}", number), call(OTHER, word())][:count]


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "name": call["function"]["name"],
            "tool_call_id": call["id"],
            "content": json.dumps({word(): f"It is {word()}."}),
        }
        for call in message["tool_calls"]
    ]


def task(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a question, turns with the results of their calls, and an answer."""
    return [say("user"), *chain(*([turn, *results(turn)] for turn in turns))]


def blank(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **more}


KINDS: dict[str, list[dict[str, Any]]] = {
    "single": [say("user"), say("assistant")],
    "multi-turn": [say("user"), say("assistant"), say("user"), say("assistant")],
    "system": [say("system"), say("user"), say("assistant")],
    "system, developer": [say("system"), say("developer"), say("user"), say("assistant")],
    "tools": [*task(blank(tool_calls=calls()), blank(tool_calls=calls())), say("assistant")],
    "tools, no call": [say("user"), say("assistant")],
    "parallel calls": [*task(blank(tool_calls=calls(2))), say("assistant")],
    "content, calls": [*task(think(tool_calls=calls())), think()],
    "reasoning": [say("user"), think()],
    "reasoning, turns": [say("user"), think(), say("user"), think()],
    "reasoning, tasks": [
        part
        for _ in range(2)
        for part in (*task(*(think(tool_calls=calls()) | {"content": ""} for _ in range(2))), think())
    ],
    "inline reasoning": [
        say("user"),
        say("assistant") | {"content": f"<think>\n{word()}\n</think>\n\nIt is {word()}."},
    ],
}
TOOLS = {kind: [TOOL, OTHER] for kind in ("tools", "parallel calls", "content, calls", "reasoning, tasks")}
TOOLS["tools, no call"] = [TOOL, NESTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    given = parser.parse_args()
    lines = [f"| template | {' | '.join(KINDS)} |", "|---|" + "---|" * len(KINDS)]
    counts: Counter[str] = Counter()
    for path in sorted(given.folder.glob("*.jinja")):
        source = source_of(path)
        with tempfile.TemporaryDirectory() as name:
            encoder, library = tokenizers_of(source, given.tokenizer, Path(name))
            outcomes = [outcome(source, kind, encoder, library) for kind in KINDS]
        counts.update(found.partition(":")[0] for found in outcomes)
        lines.append(f"| {path.stem} | {' | '.join(found.partition(':')[0] for found in outcomes)} |")
        for kind, found in zip(KINDS, outcomes, strict=True):
            if ":" in found:
                print(f"{path.stem}, {kind}: {found}")
    text = "\n".join(lines) + "\n"
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    total = sum(counts.values())
    print(f"{total} cases: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


def source_of(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    if re.search(r"^    \{", source, re.M) and "{%-" not in source:
        source = source.replace("    ", "").replace("\n", "")
    return source


def outcome(source: str, kind: str, encoder: Encoder, library: Any, adjust: Adjust = NO_CHANGE) -> str:
    messages, tools = KINDS[kind], TOOLS.get(kind)
    try:
        return check(source, messages, tools, encoder, library, adjust)
    except DataError as error:
        return f"stopped: {error}"
    except Reject as reject:
        if is_trainable(source, messages, tools):
            return f"REFUSED: {reject}"
        again = ""
        if not adjust.drop_reasoning and reject.reason in OF_REASONING and any(words(m)[1] for m in messages):
            again = outcome(source, kind, encoder, library, Adjust(drop_reasoning=True))
        if again.partition(":")[0] in RIGHT:
            return f"no reasoning: {reject}"
        return again or f"{NAMES.get(reject.reason, 'refused')}: {reject}"


def words(message: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the probe words of a message, and those of its reasoning."""
    inline, _, content = (message.get("content") or "").rpartition("</think>")
    others = {key: value for key, value in message.items() if key in ("role", "name", "tool_calls")}
    reasoning = inline + message.get("reasoning_content", "")
    return {*PROBE.findall(json.dumps(others) + content)}, {*PROBE.findall(reasoning)}


def rendered(source: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    found, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **names
    )
    return str(found[0])


def is_trainable(source: str, messages: list[dict[str, Any]], tools: Any) -> bool:
    """Return whether each turn continues its prompt in transformers, with all probe words.

    Each form in which templates read messages is tried.
    """
    of_tools = {*PROBE.findall(json.dumps(tools))}
    for null, text, parts in product((False, True), repeat=3):
        forms = [in_form(message, null, text, parts) for message in messages]
        with suppress(Exception):  # any error of a template
            for k in (k for k, message in enumerate(messages) if message["role"] == "assistant"):
                needed = of_tools.union(*(words(message)[0] for message in messages[:k]), *words(messages[k]))
                prompt, alone = rendered(source, forms[:k], tools, True), rendered(source, forms[: k + 1], tools, False)
                if not alone.startswith(prompt) or any(word not in alone for word in needed):
                    break
            else:
                return True
    return False


def in_form(message: dict[str, Any], null: bool, text: bool, parts: bool) -> dict[str, Any]:
    found = json.loads(json.dumps(message))
    if "reasoning_content" in found:
        found["thinking"] = found["reasoning_content"]
    if null and not found["content"]:
        found["content"] = None
    for called in found.get("tool_calls", ()):
        function = called["function"]
        function["arguments"] = json.dumps(function["arguments"]) if text else function["arguments"]
    return in_parts(found) if parts else found


def tokenizers_of(source: str, tokenizer: Path, folder: Path) -> tuple[Encoder, Any]:
    """Return our encoder and the tokenizer of transformers.

    The markers of the template are special tokens of both.
    """
    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    # Some templates concatenate their markers, so search their output, too.
    written = [source]
    for kind in ("multi-turn", "tools"):
        with suppress(Exception):
            written.append(rendered(source, KINDS[kind], TOOLS.get(kind), False))
    found = {marker for text in written for marker in MARKERS.findall(text)}
    markers = {marker for marker in found if not ORDINARY.search(marker)} | {"<s>", "</s>", "<pad>"}
    markers |= {marker for text in written for marker in ONE_SIDED.findall(text)}
    model.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in sorted(markers)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_encoder(find_tokenizer(folder)), PreTrainedTokenizerFast.from_pretrained(str(folder))


def check(
    source: str, messages: list[dict[str, Any]], tools: Any, encoder: Encoder, library: Any, adjust: Adjust
) -> str:
    template = JinjaTemplate("template", source, encoder, "assistant", TODAY, adjust=adjust)
    conversation = read_record({"messages": messages, "tools": tools}, "messages")
    samples = template.samples(conversation, trained_turns(conversation, "assistant"))
    # Make transformers use our fixed date instead of today's.
    _compile_jinja_template(source).environment.globals["strftime_now"] = datetime.fromisoformat(TODAY).strftime
    seen = adjust.of(conversation, [False] * len(messages))[0].messages
    forms = template._reading(conversation).forms
    said = [in_parts(m) if forms.reads_parts else m for m in map(forms.expected, seen)]
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    endless = ""
    for k in answers:
        sample = next((s for s in samples if s.turn is None or s.after < k <= s.turn), None)
        if sample is None:
            return f"WRONG: no sample for messages[{k}]"
        tokens, trained, texts, _ = segments_of(sample.spans, encoder)
        ids, flags, queue = [], [], iter(texts)
        for token, flag in zip(tokens, trained, strict=True):
            part = [token] if token >= 0 else encoder.encode([next(queue)]).ids.tolist()
            ids += part
            flags += [flag] * len(part)
        starts = [i for i, flag in enumerate(flags) if flag and (i == 0 or not flags[i - 1])]
        start = starts[sum(sample.after < other < k for other in answers)]
        stop = next((i for i in range(start, len(flags)) if not flags[i]), len(flags))
        if ids[:start] != library.encode(rendered(source, said[:k], tools, True), add_special_tokens=False):
            return f"WRONG: ids before messages[{k}] are not those of the prompt"
        before, answer = encoder.decode(ids[:start]), encoder.decode(ids[start:stop])
        needed = {*PROBE.findall(json.dumps(tools))}.union(*(words(message)[0] for message in messages[:k]))
        own, reasoning = words(messages[k])
        own |= set() if adjust.drop_reasoning else reasoning
        lost = sorted(each for each in needed if each not in before) + sorted(
            each for each in own if each not in answer
        )
        if lost:
            return f"LOST: {', '.join(lost)} of messages[:{k + 1}] and tools"
        if ids[stop - 1] not in encoder.control_strings:
            endless = endless or f"no end: messages[{k}] has no end token in the history: {answer!r}"
    return endless or ("together" if samples[0].turn is None else "apart")


if __name__ == "__main__":
    main()
