"""Check the conversations that published chat templates can train on.

    python bench/templates.py FOLDER --tokenizer FOLDER [--write FILE]

FOLDER has Jinja files. Each file is tried with seven kinds of conversation and compared with transformers. The ids
before each trained turn must be equal to `apply_chat_template(messages[:k], add_generation_prompt=True)`. The trained
text must hold the answer (its content, its reasoning, its calls) and end with a control token. Some collections indent
the lines of a template for readability; the lines of such a file are joined first.

    together, apart    correct, as one sample or as several samples
    no reasoning       E418 or E417: the template has no place for the reasoning; correct with `reasoning: drop`
    no calls           E238: the template does not write tool calls
    no turn            E417: the turn does not continue the prompt
    no end             correct, but the template writes an earlier turn without any end token
    refused            the template itself raises an error, in transformers, too
    WRONG              must not occur
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from contextlib import suppress
from datetime import datetime
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
from tasks.templates.adjust import Adjust
from tasks.templates.jinja.template import JinjaTemplate
from tasks.templates.spans import trained_turns
from tasks.tokenization.segments import segments_of

TODAY = "2026-01-01"
LOST = ("turn_not_located", "reasoning_not_written")  # reasons that concern a turn or its reasoning
MARKERS = re.compile(
    r"<[|｜][^<>|｜\n'\"{}]{1,40}[|｜]>|</?s>|<(?:start|end)_of_\w+>|\[/?[A-Z_]{2,30}\]|\[e~\[|\]~[!b]\[?"
)
# Markers that content may contain: markers of reasoning and tools are ordinary vocabulary.
ORDINARY = re.compile(r"think|tool|TOOL|THINK|function|parameter|arg_")
# Markers of Gemma 4, all of which are special tokens.
ONE_SIDED = re.compile(r'<\|[a-z_]+>|<[a-z_]+\|>|<\|"\|>')

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ONE, TWO = user("Alpha question?"), user("Gamma question?")
KINDS: dict[str, list[dict[str, Any]]] = {
    "single": [ONE, answer("Beta answer.")],
    "multi-turn": [ONE, answer("Beta answer."), TWO, answer("Delta answer.")],
    "system": [{"role": "system", "content": "Sigma rules."}, ONE, answer("Beta answer.")],
    "tools": [
        user("Weather in Oslo?"),
        answer("", tool_calls=[CALL]),
        {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"t": 3}'},
        answer("It is 3 degrees."),
    ],
    "reasoning": [ONE, answer("Beta answer.", reasoning_content="Kappa thought.")],
    "reasoning, turns": [
        ONE,
        answer("Beta answer.", reasoning_content="Kappa thought."),
        TWO,
        answer("Delta answer.", reasoning_content="Lambda thought."),
    ],
    "inline reasoning": [ONE, answer("<think>\nKappa thought.\n</think>\n\nBeta answer.")],
}


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
            outcomes = [outcome(source, messages, encoder, library) for messages in KINDS.values()]
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


def outcome(source: str, messages: list[dict[str, Any]], encoder: Encoder, library: Any) -> str:
    tools = [TOOL] if any("tool_calls" in message for message in messages) else None
    try:
        return check(source, messages, tools, encoder, library, Adjust())
    except DataError as error:
        return f"refused: {error}"
    except Reject as reject:
        if reject.reason == "calls_not_written":
            return f"no calls: {reject}"
        if reject.reason not in LOST:
            return f"refused: {reject}"
        if "Kappa" in str(messages):
            again = check(source, messages, tools, encoder, library, Adjust(drop_reasoning=True), reject)
            return f"no reasoning: {reject}" if again in ("together", "apart") else again
        return f"no turn: {reject}"


def tokenizers_of(source: str, tokenizer: Path, folder: Path) -> tuple[Encoder, Any]:
    """Return our encoder and the tokenizer of transformers.

    The markers of the template are special tokens of both.
    """
    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    # Some templates concatenate their markers, so search their output, too.
    written = [source]
    for messages in (KINDS["multi-turn"], KINDS["tools"]):
        with suppress(Exception):
            written += render_jinja_template([messages], tools=[TOOL], chat_template=source)[0]
    found = {marker for text in written for marker in MARKERS.findall(text)}
    markers = {marker for marker in found if not ORDINARY.search(marker)} | {"<s>", "</s>", "<pad>"}
    markers |= {marker for text in written for marker in ONE_SIDED.findall(text)}
    model.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in sorted(markers)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_encoder(find_tokenizer(folder)), PreTrainedTokenizerFast.from_pretrained(str(folder))


def check(
    source: str,
    messages: list[dict[str, Any]],
    tools: Any,
    encoder: Encoder,
    library: Any,
    adjust: Adjust,
    error: Exception | None = None,
) -> str:
    template = JinjaTemplate("template", source, encoder, "assistant", TODAY, adjust=adjust)
    conversation = read_record({"messages": messages, "tools": tools}, "messages")
    try:
        samples = template.samples(conversation, trained_turns(conversation, "assistant"))
    except Reject as reject:
        if error is not None and reject.reason in LOST:
            return f"no turn: {error}"
        raise
    # Make transformers use our fixed date instead of today's.
    _compile_jinja_template(source).environment.globals["strftime_now"] = datetime.fromisoformat(TODAY).strftime
    seen = adjust.of(conversation, [False] * len(messages))[0].messages
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    for number, k in enumerate(answers):
        sample = next((s for s in samples if s.turn in (None, k)), None)
        if sample is None:
            return f"WRONG: no sample for messages[{k}]"
        tokens, trained, texts, _ = segments_of(sample.spans, encoder)
        ids, flags, queue = [], [], iter(texts)
        for token, flag in zip(tokens, trained, strict=True):
            part = [token] if token >= 0 else encoder.encode([next(queue)]).ids.tolist()
            ids += part
            flags += [flag] * len(part)
        starts = [i for i, flag in enumerate(flags) if flag and (i == 0 or not flags[i - 1])]
        start = starts[number if sample.turn is None else 0]
        stop = next((i for i in range(start, len(flags)) if not flags[i]), len(flags))
        forms = template._reading(conversation).forms
        said = [forms.expected(message) for message in seen[:k]]
        said = [in_parts(message) for message in said] if forms.reads_parts else said
        rendered, _ = render_jinja_template(
            [said],
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            bos_token="<s>",  # noqa: S106
            eos_token="</s>",  # noqa: S106
            pad_token="<pad>",  # noqa: S106
        )
        prompt = library.encode(rendered[0], add_special_tokens=False)
        if ids[:start] != prompt:
            return f"WRONG: ids before messages[{k}] are not those of the prompt"
        text = encoder.decode(ids[start:stop])
        message = seen[k]
        wanted = [message.content.rpartition("</think>")[2], message.reasoning, *(c.name for c in message.tool_calls)]
        if any("".join(want.split()) not in "".join(text.split()) for want in wanted):
            return f"WRONG: messages[{k}] is trained on as {text!r}"
        if ids[stop - 1] not in encoder.control_strings:
            return f"no end: messages[{k}] has no end token in the history: {text!r}"
    return "together" if samples[0].turn is None else "apart"


if __name__ == "__main__":
    main()
