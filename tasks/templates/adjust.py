"""Adjust conversations to the config, and to what a template reads.

    default_system: "Be brief."                        user, assistant ──▶ system, user, assistant
    reasoning: drop                                    answers without their reasoning
    {"content": "4", "reasoning_content": "2+2"}       field: most templates of reasoning models
    {"content": "<think>\\n2+2\\n</think>\\n\\n4"}      inline: templates that search the content for reasoning

This happens before a template writes the conversation. The conversation of the record and its digest do not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from packcorpus.tasks.conversations.model import DEVELOPER, Conversation, Message, is_blank
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import printable
from packcorpus.tasks.storage.layout import TEMPLATE

# The markers around reasoning: <think>, <seed:think>, <mm:think>, [THINK], <|START_THINKING|>, and the like.
OPENS = r"<(?P<tag>[\w:]*think(?:ing)?)>|(?P<mistral>\[THINK\])|(?P<cohere><\|START_THINKING\|>)"
CLOSES = r"</[\w:]*think(?:ing)?>|\[/THINK\]|<\|END_THINKING\|>"
MARKER = re.compile(rf"\s*(?:{OPENS}|{CLOSES})")

INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class ReasoningForm(Enum):
    FIELD = "field"
    INLINE = "inline"
    NONE = "none"


def reasoning_of(message: Message) -> str:
    """Return the reasoning from the field or the start of the content of a message."""
    if message.reasoning:
        return message.reasoning.strip()
    match = INLINE.match(message.content) if message.role == "assistant" else None
    return match[1].strip() if match else ""


def reasoning_texts(message: Message) -> list[str]:
    """Return the texts, except blank ones, that `without_reasoning` removes."""
    inline = INLINE.match(message.content) if message.role == "assistant" else None
    texts = (message.reasoning, inline[1] if inline else "")
    return [text.strip() for text in texts if text.strip()]


def without_reasoning(message: Message) -> Message:
    """Return a message without reasoning in its field and in its content."""
    match = INLINE.match(message.content)
    return replace(message, content=message.content[match.end() :] if match else message.content, reasoning="")


def is_ambiguous(content: str) -> bool:
    """Return whether a content begins with reasoning that may end at several tags."""
    return content.count("</think>") > 1 and bool(INLINE.match(content))


def separated(conversation: Conversation) -> Conversation | None:
    """Return a conversation with its reasoning in the field instead of the content.

    Return None if the reasoning in a content is blank or ambiguous, or if the message also has a context.
    """
    messages = []
    for message in conversation.messages:
        can_have = message.role == "assistant" and not message.reasoning and "<think>" in message.content
        if can_have and (match := INLINE.match(message.content)):
            if message.context or not match[1].strip() or is_ambiguous(message.content):
                return None
            message = replace(message, content=message.content[match.end() :], reasoning=match[1].strip())
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def with_reasoning(message: dict[str, Any], form: ReasoningForm, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Return an OpenAI message with its reasoning in the form that a template reads.

    The reasoning is also in these fields, which are some of REASONING_KEYS.
    """
    content = message.get("content") or ""
    match = INLINE.match(content)
    if form is ReasoningForm.FIELD and match and not message.get("reasoning_content"):
        message = {**message, "content": content[match.end() :], "reasoning_content": match[1].strip()}
    reasoning = message.get("reasoning_content")
    if form is ReasoningForm.INLINE and reasoning:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**message, "content": f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"}
    return {**dict.fromkeys(fields, reasoning), **message} if reasoning else message


# The maximum number of names to list, and of characters of a name.
_MOST_NAMES, _LONGEST_NAME = 8, 60


def knows_developer(source: str) -> bool:
    """Return whether a template has the role developer as a string."""
    return re.search(rf"""(["']){DEVELOPER}\1""", source) is not None


def explain_undefined(undefined: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each template that reads names that nothing defines.

    `undefined` maps the file of a template to these names.
    """
    lines = []
    for file, names in undefined.items():
        listed = [printable(name[:_LONGEST_NAME]) for name in [*names][:_MOST_NAMES]]
        listed += [f"{len(names) - _MOST_NAMES:,} more names"] * (len(names) > _MOST_NAMES)
        *first, last = listed
        joined, are, them = (f"{', '.join(first)} and {last}", "they are", "them") if first else (last, "it is", "it")
        which = "the template" if file == TEMPLATE else f"the template {file}"
        lines.append(
            f"{which} reads {joined}, which neither Transformers nor template_options defines: {are} empty unless a "
            f"record has {them} in chat_template_kwargs"
        )
    return lines


# Variables of a template that packcorpus sets itself.
GIVEN_TO_TEMPLATES = ("messages", "tools", "add_generation_prompt")


class Adjust(NamedTuple):
    """The settings `reasoning` and `default_system`."""

    drop_reasoning: bool = False
    default_system: str | None = None

    def of(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Conversation, Sequence[bool], int]:
        """Return the adjusted conversation, its flags, and the number of added messages.

        Messages are added at the start. Raises Reject if nothing is left to train on.
        """
        messages = conversation.messages
        if messages[0].role == "text":
            return conversation, trained, 0
        if self.drop_reasoning:
            messages = tuple(without_reasoning(m) if m.role == "assistant" else m for m in messages)
            conversation = replace(conversation, messages=messages)
            flags = [flag and not is_blank(message) for message, flag in zip(messages, trained, strict=True)]
            if any(trained) and not any(flags):
                raise Reject(
                    "no_trained_tokens",
                    "its answers contain only reasoning, which the setting `reasoning: drop` removes",
                )
            trained = flags
        if self.default_system is None or messages[0].role == "system":
            return conversation, trained, 0
        system = Message("system", self.default_system, train=False)
        return replace(conversation, messages=(system, *messages)), [False, *trained], 1


NO_CHANGE = Adjust()
