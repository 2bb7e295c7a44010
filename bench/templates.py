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
    no reasoning               E418, E243, E417: no place for the reasoning; correct with `reasoning: drop`
    no turn                    E417: the turn does not continue the prompt
    refused                    the template itself raises an error, in transformers, too
    LOST, WRONG, REFUSED       must not occur: a probe word is missing, ids or labels differ, or a conversation is
                               rejected although each turn of it continues its prompt in transformers, with all words
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import datetime
from itertools import count, product
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import in_parts
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.templates.adjust import NO_CHANGE, Adjust, knows_developer
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import trained_turns
from packcorpus.tasks.tokenization.samples import segments_of

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

BLANK = {"content": ""}
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


def calls(count: int = 1) -> list[dict[str, Any]]:
    number = 70009 + 10 * next(NUMBERS)  # a probe word, too
    found = []
    for tool, values in [(TOOL, (f"Near {word()}", number)), (OTHER, (word(),))][:count]:
        function = tool["function"]
        arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
        call = {"id": f"call{next(NUMBERS):05}", "type": "function"}
        found.append(call | {"function": {"name": function["name"], "arguments": arguments}})
    return found


def task(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a question, and turns with the results of their calls."""
    found = [say("user")]
    for turn in turns:
        found.append(turn)
        for call in turn["tool_calls"]:
            place = {"name": call["function"]["name"], "tool_call_id": call["id"]}
            found.append({"role": "tool", **place, "content": json.dumps({word(): f"It is {word()}."})})
    return found


def reasoned(count: int) -> list[dict[str, Any]]:
    """Return a task with reasoning before each of some calls, and the answer."""
    return [*task(*(think(tool_calls=calls()) | BLANK for _ in range(count))), think()]


KINDS: dict[str, list[dict[str, Any]]] = {
    "single": [say("user"), say("assistant")],
    "multi-turn": [say("user"), say("assistant"), say("user"), say("assistant")],
    "system": [say("system"), say("user"), say("assistant")],
    "system, developer": [say("system"), say("developer"), say("user"), say("assistant")],
    "tools": [*task(*(say("assistant", tool_calls=calls()) | BLANK for _ in range(2))), say("assistant")],
    "tools, no call": [say("user"), say("assistant")],
    "parallel calls": [*task(say("assistant", tool_calls=calls(2)) | BLANK), say("assistant")],
    "content, calls": [*task(think(tool_calls=calls())), think()],
    "reasoning": [say("user"), think()],
    "reasoning, turns": [say("user"), think(), say("user"), think()],
    "reasoning, tasks": [*reasoned(2), *reasoned(2)],
    "inline reasoning": [say("user"), say("assistant") | {"content": f"<think>\n{word()}\n</think>\n\n{word()}."}],
}
TOOLS = {kind: [TOOL, OTHER] for kind in ("tools", "parallel calls", "content, calls", "reasoning, tasks")}
TOOLS["tools, no call"] = [TOOL, NESTED]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a byte-level tokenizer")
    parser.add_argument("--write", type=Path, help="CSV file for the table")
    given = parser.parse_args()
    table = [["template", *KINDS]]
    counts: Counter[str] = Counter()
    for path in sorted(given.folder.glob("*.jinja")):
        source = source_of(path)
        with tempfile.TemporaryDirectory() as name:
            encoder, library = tokenizers_of(source, given.tokenizer, Path(name))
            outcomes = [outcome(source, kind, encoder, library) for kind in KINDS]
        counts.update(found.partition(":")[0] for found in outcomes)
        table.append([path.stem, *(found.partition(":")[0] for found in outcomes)])
        for kind, found in zip(KINDS, outcomes, strict=True):
            if ":" in found:
                print(f"{path.stem}, {kind}: {found}", flush=True)
    if given.write:
        with given.write.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
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
    reasoning = inline + message.get("reasoning_content", "")
    return {*PROBE.findall(json.dumps(message.get("tool_calls")) + content)}, {*PROBE.findall(reasoning)}


def needed(messages: list[dict[str, Any]], tools: Any) -> set[str]:
    """Return the probe words of a prompt."""
    return {*PROBE.findall(json.dumps(tools))}.union(*(words(message)[0] for message in messages))


def rendered(source: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> tuple[str, list[Any] | None]:
    """Return a rendering of transformers, and its generation blocks if it has any."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_generation_prompt": prompt}
    marks = "endgeneration" in source
    [text], blocks = render_jinja_template(
        [messages], tools=tools, chat_template=source, return_assistant_tokens_mask=marks, **names
    )
    return text, blocks[0] if marks else None


def is_trainable(source: str, messages: list[dict[str, Any]], tools: Any) -> bool:
    """Return whether each turn continues its prompt in transformers, with all words.

    A {% generation %} block must begin with the turn. Each form in which templates read messages is tried.
    """

    def has(forms: list[dict[str, Any]], k: int) -> bool:
        prompt, _ = rendered(source, forms[:k], tools, True)
        alone, blocks = rendered(source, forms[: k + 1], tools, False)
        first = len(alone) - len(alone[len(prompt) :].lstrip())
        is_marked = blocks is None or any(start <= first < stop for start, stop in blocks)
        whole = all(word in alone for word in needed(messages[:k], tools).union(*words(messages[k])))
        return is_marked and whole and alone.startswith(prompt) and "{'type': 'text'" not in alone

    role = "developer" if knows_developer(source) else "system"
    for null, text, parts in product((False, True), repeat=3):
        forms = [in_form(message, role, null, text, parts) for message in messages]
        with suppress(Exception):  # any error of a template
            if all(has(forms, k) for k in answers_of(messages)):
                return True
    return False


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    return [k for k, message in enumerate(messages) if message["role"] == "assistant"]


def in_form(message: dict[str, Any], role: str, null: bool, text: bool, parts: bool) -> dict[str, Any]:
    """Return a message in a form that some templates read.

    Null instead of an empty content, arguments as JSON text, contents as lists of parts. A developer message has this
    role.
    """
    found = json.loads(json.dumps(message)) | ({"role": role} if message["role"] == "developer" else {})
    if "reasoning_content" in found:
        found["thinking"] = found["reasoning_content"]
    if null and not found["content"]:
        found["content"] = None
    for each in found.get("tool_calls", ()) if text else ():
        each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
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
            written.append(rendered(source, KINDS[kind], TOOLS.get(kind), False)[0])
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
    template = JinjaTemplate("the.jinja", source, encoder, "assistant", TODAY, adjust=adjust)
    conversation = read_record({"messages": messages, "tools": tools}, "messages")
    samples = template.samples(conversation, trained_turns(conversation, "assistant"))
    # Make transformers use our fixed date instead of today's.
    _compile_jinja_template(source).environment.globals["strftime_now"] = datetime.fromisoformat(TODAY).strftime
    seen = adjust.of(conversation, [False] * len(messages))[0].messages
    forms = template._checks_for(conversation).forms
    said = [in_parts(m) if forms.reads_parts else m for m in map(forms.expected, seen)]
    answers, endless = answers_of(messages), ""
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
        prompt, _ = rendered(source, said[:k], tools, True)
        if ids[:start] != library.encode(prompt, add_special_tokens=False):
            return f"WRONG: ids before messages[{k}] are not those of the prompt"
        before, answer = encoder.decode(ids[:start]), encoder.decode(ids[start:stop])
        own = words(messages[k])
        wanted = own[0] if adjust.drop_reasoning else own[0] | own[1]
        lost = {word for word in needed(messages[:k], tools) if word not in before}
        lost |= {word for word in wanted if word not in answer}
        if lost:
            return f"LOST: {', '.join(sorted(lost))} of messages[:{k + 1}] and tools"
        if ids[stop - 1] not in encoder.control_strings:
            endless = endless or f"no end: messages[{k}] has no end token in the history: {answer!r}"
    return endless or ("together" if samples[0].turn is None else "apart")


if __name__ == "__main__":
    main()
