"""Compare the tokens and the prompts of a server with those of training.

    texts of rows, prompts ─AutoTokenizer of base and merged folder─▶ the same ids
    messages of prompts ─apply_chat_template, vLLM, minijinja─▶ the text and the ids that training had before an answer

Transformers and vLLM render with Jinja2. llama.cpp and other servers have engines of their own, and minijinja is
one of them: it differs from Jinja2 in the same kinds of values, such as floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import minijinja
from transformers import AutoTokenizer

from packcorpus.tasks.core.printable import counted, shown
from packcorpus.tasks.encoders.auto_tokenizer import Comparison, compare
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer_files, open_found
from packcorpus.tasks.storage.files import read_json
from packcorpus.tasks.templates.jinja.environment import to_json
from packcorpus.train.certify.finding import Finding, Of, Subject
from packcorpus.train.certify.prompts import Prompt
from packcorpus.train.model import base_model

TEMPLATE = "chat_template.jinja"
FUEL = 10**8  # of minijinja, for one rendering; it bounds loops and memory
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# The modules in which releases of vLLM have `get_tokenizer`.
_VLLM = ("vllm.tokenizers", "vllm.transformers_utils.tokenizer")

Render = Callable[[str, Prompt, dict[str, Any]], str]  # source of the template, prompt, options


def check_ids(subject: Subject) -> Iterator[Finding]:
    """Compare the ids of texts of the corpus with AutoTokenizer of each folder."""
    facts, corpus = subject.facts, subject.corpus_folder
    for of, folder in subject.folders.items():
        if facts is None or corpus is None:
            yield Finding("ids", of, "skipped", "the corpus is missing")
        elif not base_model.has_tokenizer(folder):
            missing = "has no tokenizer; copy that of the corpus into it"
            yield Finding("ids", of, "FAULT" if of == "merged" else "note", f"{folder}: {missing}")
        else:
            yield _ids(subject, of, folder)


def _ids(subject: Subject, of: Of, folder: Path) -> Finding:
    assert subject.facts is not None
    assert subject.corpus_folder is not None
    manifest, corpus = subject.facts.manifest, subject.corpus_folder
    if manifest.packing_metadata.enabled:
        found = base_model.compare_rows(manifest, corpus, folder)
    else:
        encoder = open_found(manifest, find_tokenizer_files(manifest, corpus))
        texts = [str(message["content"]) for prompt in subject.prompts[0] for message in prompt.messages]
        found = compare(encoder, folder, dict.fromkeys(texts))
    if found == Comparison():
        return Finding("ids", of, "skipped", "the corpus has no texts to compare")
    if not (found.difference or found.failure):
        return Finding("ids", of, "ok", f"{counted(found.texts, 'text')} of the corpus have the tokens of training")
    text = f"{folder}: {found.difference or found.failure}"
    if found.difference and base_model.is_as_it_is(manifest, corpus):
        return Finding("ids", of, "FAULT", f"{text}; serve with the file of the corpus ({corpus}) as it is")
    return Finding("ids", of, "FAULT", f"{text}; copy the tokenizer of {corpus} into it, or pack with this one")


# -- chat templates ----------------------------------------------------------------------------------------------------


def check_template(subject: Subject) -> Iterator[Finding]:
    """Compare the prompts that the chat template of each folder renders."""
    prompts, what = subject.prompts
    for of, folder in subject.folders.items():
        if not base_model.has_tokenizer(folder):
            continue
        yield from _two_templates(of, folder)
        if not prompts:
            yield Finding("template", of, "skipped", f"there are no prompts: {what}")
            continue
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # `check_ids` reports it
            yield Finding("template", of, "skipped", _reason(error))
            continue
        yield from _template(subject, of, folder, tokenizer, prompts, what)
    if find_spec("vllm") is None:
        yield Finding("vLLM", [*subject.folders][-1], "skipped", "vLLM is not installed")


def _two_templates(of: Of, folder: Path) -> Iterator[Finding]:
    file, config = folder / TEMPLATE, folder / "tokenizer_config.json"
    values = read_json(config) if config.is_file() else {}
    inner = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(inner, list):
        inner = next((each.get("template") for each in inner if each.get("name") == "default"), None)
    if isinstance(inner, str) and file.is_file() and inner.strip() != file.read_text(encoding="utf-8").strip():
        yield Finding(
            "template",
            of,
            "FAULT",
            f"{folder}: {TEMPLATE} and chat_template in tokenizer_config.json differ, and programs read one or the "
            "other; remove chat_template from tokenizer_config.json",
        )


def _template(
    subject: Subject, of: Of, folder: Path, tokenizer: Any, prompts: Sequence[Prompt], what: str
) -> Iterator[Finding]:
    assert subject.facts is not None
    manifest = subject.facts.manifest
    if not tokenizer.chat_template:
        if manifest.template_files:
            text = f"{folder}: has no chat template; copy template.jinja of the corpus into it as {TEMPLATE}"
            yield Finding("template", of, "FAULT", text)
        else:
            text = f"{folder}: has no chat template; write prompts in the form of {manifest.template.name}"
            yield Finding("template", of, "note", text)
        return

    transformers = _renderer(tokenizer)
    if problem := _compare(transformers, tokenizer, prompts, with_ids=True):
        yield Finding("template", of, "FAULT", f"{folder}: apply_chat_template of Transformers {problem}")
        return
    yield Finding("template", of, "ok", f"Transformers renders and encodes {what} as in training")
    if any(prompt.options for prompt in prompts) and _compare(
        transformers, tokenizer, [replace(prompt, options={}) for prompt in prompts]
    ):
        options = json.dumps(next(prompt.options for prompt in prompts if prompt.options))
        yield Finding("template", of, "note", f"requests must send chat_template_kwargs: {options}")
    yield from _other_engines(of, folder, tokenizer, prompts)


def _renderer(tokenizer: Any) -> Render:
    """Return a function that renders as a tokenizer of Transformers does."""

    def render(source: str, prompt: Prompt, options: dict[str, Any]) -> str:
        rendered = tokenizer.apply_chat_template(
            prompt.messages, tools=prompt.tools, tokenize=False, add_generation_prompt=True, **options
        )
        return str(rendered)

    return render


def _other_engines(of: Of, folder: Path, tokenizer: Any, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Compare the renderings of vLLM and of minijinja."""
    if find_spec("vllm") is not None:
        try:
            theirs = _vllm_tokenizer(folder)
        except Exception as error:  # a release that is not known here, or a file that it cannot load
            yield Finding("vLLM", of, "skipped", f"vLLM cannot load the tokenizer: {_reason(error)}")
        else:
            yield _of_engine("vLLM", of, _compare(_renderer(theirs), theirs, prompts, with_ids=True), len(prompts))
    try:
        render = _minijinja(tokenizer)
    except Exception as error:  # the template uses what minijinja does not have
        yield Finding("minijinja", of, "skipped", f"minijinja cannot compile the template: {_reason(error)}")
        return
    yield _of_engine("minijinja", of, _compare(render, tokenizer, prompts), len(prompts))


def _of_engine(name: str, of: Of, problem: str, count: int) -> Finding:
    if problem:
        fix = "; serve with Transformers, or change the template" if name == "minijinja" else ""
        servers = " (for llama.cpp)" if name == "minijinja" else ""
        return Finding(name, of, "FAULT", f"{name}{servers} {problem}{fix}")
    return Finding(name, of, "ok", f"{name} renders {counted(count, 'prompt')} as in training")


def _vllm_tokenizer(folder: Path) -> Any:
    for name in _VLLM:
        try:
            return import_module(name).get_tokenizer(str(folder), trust_remote_code=False)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"neither {' nor '.join(_VLLM)} has get_tokenizer")


def _minijinja(tokenizer: Any) -> Render:
    """Return a function that renders with minijinja."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    def render(source: str, prompt: Prompt, options: dict[str, Any]) -> str:
        environment: Any = minijinja.Environment()
        environment.trim_blocks = environment.lstrip_blocks = environment.pycompat = True
        environment.undefined_behavior = "lenient"
        environment.fuel = FUEL
        environment.add_global("raise_exception", refuse)
        environment.add_global("strftime_now", datetime.now().strftime)
        environment.add_filter("tojson", to_json)
        environment.add_test("iterable", lambda value: hasattr(value, "__iter__"))
        marked = _GENERATION.sub(lambda found: found[1] + ("endif" if found[2] else "if true") + found[3], source)
        environment.add_template("chat", marked)
        names = tokenizer.special_tokens_map | options
        return str(
            environment.render_template(
                "chat",
                messages=prompt.messages,
                tools=prompt.tools,
                documents=None,
                add_generation_prompt=True,
                **names,
            )
        )

    minijinja.Environment().add_template("chat", _GENERATION.sub("", tokenizer.get_chat_template()))
    return render


def _compare(render: Render, tokenizer: Any, prompts: Sequence[Prompt], with_ids: bool = False) -> str:
    """Return how the first prompt differs from that of training, or ""."""
    bos = tokenizer.bos_token or ""
    for prompt in prompts:
        source = tokenizer.get_chat_template(tools=prompt.tools)
        try:
            theirs = render(source, prompt, prompt.options)
        except Exception as error:  # any class, depending on the engine
            return f"refuses a prompt that was trained on: {_reason(error)}"
        # Some encoders add BOS themselves, and the ids show whether it is there once.
        text, added = prompt.text.removeprefix(bos), len(prompt.text) - len(prompt.text.removeprefix(bos))
        mine, starts = theirs.removeprefix(bos), [start - added for start in prompt.text_starts]
        if not text.startswith(mine):
            return f"differs from training: {_difference(mine, text)}"
        if starts and len(mine) not in starts:
            nearest = min(starts, key=lambda start: abs(start - len(mine)))
            if nearest > len(mine):
                return f"ends before {shown(text[len(mine) : nearest])}, which training had in the prompt"
            return f"adds {shown(mine[nearest:])} to the prompt, which the model was trained to write itself"
        if with_ids:
            ids = list(tokenizer(theirs, add_special_tokens=False)["input_ids"])
            if ids != prompt.ids[: len(ids)] or (prompt.id_starts and len(ids) not in prompt.id_starts):
                pairs = enumerate(zip(ids, prompt.ids, strict=False))
                first = next((n for n, (one, other) in pairs if one != other), len(ids))
                around = slice(max(0, first - 3), first + 4)
                one, other = (
                    " ".join(map(str, tokenizer.convert_ids_to_tokens(some[around]))) for some in (ids, prompt.ids)
                )
                return f"renders the text of training, but its tokens are {shown(one)} instead of {shown(other)}"
    return ""


def _difference(theirs: str, ours: str) -> str:
    pairs = enumerate(zip(theirs, ours, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(theirs), len(ours)))
    start = max(0, place - 20)
    return f"{shown(theirs[start : place + 30])} instead of {shown(ours[start : place + 30])}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
