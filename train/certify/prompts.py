"""Take prompts from the sources of a corpus, as training rendered them.

    sources of the config ─conversations_of─▶ conversations, or examples if the sources are gone
    conversation ─template of the corpus, with today's date─▶ spans ─encoder─▶ Prompt: messages, text, ids

A prompt is everything before the last answer that is trained on. The date of the template is today's, because a server
renders with today's date.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall, as_openai
from packcorpus.tasks.conversations.several_answers import each_answer
from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.inspection.sources import records_of
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.locate import find_paths
from packcorpus.tasks.sources.source_files import identify_file
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.stores.urls import is_url
from packcorpus.tasks.templates.jinja.template import ByTools, JinjaTemplate
from packcorpus.tasks.templates.spans import Sample, Template, trained_turns
from packcorpus.tasks.tokenization.samples import prepare_spans
from packcorpus.tasks.tokenization.tokenize_part import COUNTS, Batch
from packcorpus.tasks.verification.rebuild import config_for
from packcorpus.train.data.conversations import open_template
from packcorpus.train.merge.other_files import EXAMPLE

MOST = 300  # prompts
_TOOL = orjson.dumps(
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
).decode()
_CALL = ToolCall("add", '{"a": 1, "b": 2.5}', "call00001")
EXAMPLES = (
    EXAMPLE,
    replace(EXAMPLE, messages=(Message("system", "Be brief."), *EXAMPLE.messages)),
    Conversation(
        (
            Message("user", "1 + 2.5?"),
            Message("assistant", "", tool_calls=(_CALL,)),
            Message("tool", "3.5", name="add", tool_call_id="call00001"),
            Message("assistant", "3.5"),
        ),
        (_TOOL,),
    ),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages before an answer, and the sample of training that has this answer.

    `text` and `ids` are those of the whole sample. An answer starts at each of `text_starts` and `id_starts`, or
    anywhere if they are empty, because everything is trained on.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    options: dict[str, Any]  # of the conversation, over those of the config
    text: str
    text_starts: tuple[int, ...]
    ids: list[int]
    id_starts: tuple[int, ...]


def conversations_of(manifest: Manifest, corpus: Path, root: Path) -> list[Conversation]:
    """Return conversations of each source that is here; [] if none is."""
    found: list[list[Conversation]] = []
    with suppress(PackError):
        config, folder = config_for(manifest, corpus, None)
        for source in config.sources:
            if is_url(source.path):
                continue
            with suppress(PackError, OSError):
                cache = DigestCache(Layout(root).digests(), only_read=True)
                for file in find_paths(source.path, folder):
                    records = records_of(identify_file(file.path, file.name, source, file.identity, cache))
                    some = (record for _, record in islice(records, MOST) if isinstance(record, Conversation))
                    branches = (branch for record in some for _, branch in each_answer(record))
                    found.append([one for one in branches if not one.recorded and one.messages[0].role != "text"])
    each = -(-MOST // max(1, len(found)))
    return [conversation for some in found for conversation in some[:each]][:MOST]


def prompts_of(manifest: Manifest, corpus: Path, encoder: Encoder, root: Path) -> tuple[list[Prompt], str]:
    """Return prompts of a corpus, and what they are."""
    config = manifest.config | {"template_date": date.today().isoformat()}
    template = open_template(manifest.model_copy(update={"config": config}), corpus, encoder)
    kind = "of the corpus"
    prompts = _prompts(conversations_of(manifest, corpus, root), manifest, template, encoder)
    if not prompts:
        kind = "made here, because the sources are gone"
        prompts = _prompts([*EXAMPLES], manifest, template, encoder)
    return prompts, f"{counted(len(prompts), 'prompt')} {kind}"


def _prompts(
    conversations: list[Conversation], manifest: Manifest, template: Template, encoder: Encoder
) -> list[Prompt]:
    batch = Batch(encoder, dict.fromkeys(COUNTS, 0), str)
    prepared: list[tuple[list[dict[str, Any]], Conversation, Sample]] = []
    for conversation in conversations:
        with suppress(Reject, PackError):
            number, case = len(prepared), _case(conversation, manifest, template)
            if case is not None and not encoder.holding([*_strings(case[0]), *conversation.tools]):
                batch.add(number, [prepare_spans(conversation, Sample(case[2].spans), encoder)])
                prepared.append(case)
    encoded = batch.encode(TOKENS_SCHEMA) if prepared else None
    if encoded is None:
        return []
    found = []
    for number, tokens in zip(encoded.column("record").to_pylist(), encoded.column("tokens").to_pylist(), strict=True):
        messages, conversation, sample = prepared[number]
        text, starts, before = "", [], False
        for span in sample.spans:
            starts += [len(text)] * (span.trained and not before)
            text, before = text + span.text, span.trained
        tools = [orjson.loads(tool) for tool in conversation.tools] or None
        options = dict(manifest.config.get("template_options") or {}) | dict(conversation.template_options or {})
        flags = [token >= 0 for token in tokens]
        ids = [token if flag else ~token for token, flag in zip(tokens, flags, strict=True)]
        at = tuple(n for n, flag in enumerate(flags) if flag and (n == 0 or not flags[n - 1]))
        if manifest.train_on == "all":
            starts, at = [], ()
        found.append(Prompt(messages, tools, options, text, tuple(starts), ids, at))
    return found


def _case(
    conversation: Conversation, manifest: Manifest, template: Template
) -> tuple[list[dict[str, Any]], Conversation, Sample] | None:
    """Return the messages before the last trained answer, and the sample with it."""
    whole = trained_turns(conversation, manifest.train_on)
    sample = template.samples(conversation, whole)[-1]
    adjusted, trained, _ = template.adjust.of(conversation, whole)
    answers = [k for k, flag in enumerate(trained) if flag and adjusted.messages[k].role == "assistant"]
    if not answers or not answers[-1]:
        return None
    one = template.of(conversation) if isinstance(template, ByTools) else template
    if isinstance(one, JinjaTemplate):
        messages = one.expected_messages(adjusted)
    else:
        messages = [as_openai(message) for message in adjusted.messages]
    return messages[: answers[-1]], conversation, sample


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
