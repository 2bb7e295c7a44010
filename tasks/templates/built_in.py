"""Render a conversation with a built-in template.

    Conversation + which turns are trained on ──BuiltIn.spans──▶ [Span(text, token, trained, role), ...]

A span is text, or a control token that the template writes by ID. Labels are derived from the spans alone. The content
of a message always becomes text. If the tokenizer has no control token for a marker, the marker is written as text and
listed in `markers_as_text`.

SentencePiece adds a space to the start of every string that it encodes, and the strings at inference differ from the
strings here. Encoders therefore add no space. A space is added in two cases only: before a conversation that begins
with text, and after a control token if the template passes `start=True` (llama2, alpaca, and plain, whose text after
BOS is one string) or writes the space (mistral). A Hugging Face tokenizer always follows its own rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.core.errors import Reject, UsageError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import NO_CHANGE, Adjust
from packcorpus.tasks.templates.families import alpaca, chatml, hermes, llama2, llama3, mistral, plain, zephyr
from packcorpus.tasks.templates.markers import find_unknown_markers
from packcorpus.tasks.templates.placeholders import is_plain, with_contexts_joined
from packcorpus.tasks.templates.sections import ALL_SECTIONS, CROSSED, Sections, splits
from packcorpus.tasks.templates.spans import (
    TEXT,
    Outline,
    Sample,
    Span,
    Template,
    TrainOn,
    Turns,
    ends_of_samples,
    has_flagged,
    up_to,
)
from packcorpus.tasks.templates.writer import Family, Writer

# Part of the digest of every built-in template. Raise it if the spans of any built-in template change.
VERSION = 3

FAMILIES: tuple[Family, ...] = (
    chatml.TEMPLATE,
    llama2.TEMPLATE,
    llama3.TEMPLATE,
    zephyr.TEMPLATE,
    alpaca.TEMPLATE,
    plain.TEMPLATE,
    mistral.TEMPLATE,
)
BUILT_IN = {family.name: family for family in FAMILIES}
MARKERS = {family.name: family.markers for family in FAMILIES}


class BuiltIn(Template):
    """A built-in template that is bound to a tokenizer."""

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        train_on: TrainOn,
        turns: Turns = "auto",
        adjust: Adjust = NO_CHANGE,
        sections: Sections = ALL_SECTIONS,
    ):
        """Bind a template to an encoder.

        Raises UsageError if `sections` leaves out reasoning, which no built-in template writes.
        """
        if not (sections.reasoning and sections.empty):
            setting = "train_parts: {reasoning: false}" if sections.empty else "empty_reasoning: mask"
            raise UsageError(
                "bad_setting",
                f"{setting}: the built-in template {name} writes no reasoning, so the setting has no effect; remove "
                "it, or use the model's own template (`template: tokenizer`)",
            )
        self.name, self.encoder, self.adjust, self.sections = name, encoder, adjust, sections
        self.apart, self.together, self.as_rendered = (turns == each for each in ("apart", "together", "as_rendered"))
        self._headers_too = train_on == "all"
        self._family = BUILT_IN[name]
        self.markers_as_text = tuple(m for m in self._family.markers if not encoder.is_token(m))
        self.unknown = find_unknown_markers(" ".join(self._family.markers), encoder, adjust.default_system or "")

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation; `trained` has one flag per message."""
        conversation, trained, added = self.adjust.of(conversation, trained)
        if conversation.messages[0].role == "text":
            return plain_text(conversation, trained, self.encoder)
        for number, message in enumerate(conversation.messages, -added):
            if message.reasoning:
                raise Reject(
                    "reasoning_not_written",
                    f"messages[{number}] has reasoning, but the built-in template {self.name} does not write it; set "
                    "`reasoning: drop`, or use the model's own template (`template: tokenizer`)",
                )
        turns = list(zip(conversation.messages, trained, strict=True))
        writer = Writer(self.encoder, self._headers_too, conversation.tools, self.sections)
        self._family.write(writer, turns if self._family.writes_tools else hermes.with_system(writer, turns))
        for cut in writer.cuts if self.sections != ALL_SECTIONS else ():
            # No token may cross from a content into a call with another label.
            for left, right in pairwise(writer.spans[max(cut - 1, 0) : cut + 1]):
                are_texts = left.token == right.token == TEXT and left.trained != right.trained
                if are_texts and not splits(self.encoder, left.text, right.text):
                    raise Reject("parts_not_separate", CROSSED)
        if self._headers_too or not has_flagged(conversation, trained):
            return writer.spans
        return with_whole_texts(writer.spans, writer.said)

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Return the conversation as one sample, or as a sample for each trained turn.

        Most templates write a turn independently of later turns, so one sample is enough. There are several samples if
        the template writes a turn differently once more turns follow, or if the config requires them.
        """
        is_one = conversation.messages[0].role == "text"
        if is_one or not (self.apart or self._differs_later(conversation, trained)):
            return [Sample(self.spans(conversation, trained))]
        if self.as_rendered:
            spans = self.spans(conversation, trained)
            unlike, changed = self._differences(spans, conversation, trained)
            return [Sample(spans, unlike=unlike, changed=changed)]
        ends = ends_of_samples(conversation, trained)
        return [
            Sample(self.spans(*up_to(conversation, turn, trained, after)), turn, after)
            for after, turn in pairwise([-1, *ends])
        ]

    def _differences(
        self, spans: Sequence[Span], conversation: Conversation, trained: Sequence[bool]
    ) -> tuple[int, int]:
        """Return how many answers have another prompt at inference, or differ.

        See `Sample`.
        """
        whole, unlike, changed = "".join(span.text for span in spans), 0, 0
        runs = ["".join(span.text for span in run) for flag, run in groupby(spans, lambda span: span.trained) if flag]
        turns = [k for k, flag in enumerate(trained) if flag]
        for number, turn in enumerate(turns):
            if conversation.messages[turn].role == "assistant":
                alone = self.spans(*up_to(conversation, turn, trained, turn - 1))
                prompt, answer = (
                    "".join(span.text for span in alone if span.trained is flag) for flag in (False, True)
                )
                unlike += not whole.startswith(prompt)
                changed += len(runs) == len(turns) and runs[number] != answer
        return unlike, changed

    def separate(self, conversation: Conversation) -> Conversation | None:
        if self._family.writes_context:
            return conversation if is_plain(conversation) else None
        joined = with_contexts_joined(conversation)
        return joined if is_plain(joined) else None

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the outline; None if the text around values may depend on them."""
        if self.apart or self.adjust.drop_reasoning:  # reasoning may be in a content
            return None
        if self.sections != ALL_SECTIONS:  # a token may cross from a content into a call
            return None
        if any(message.role == "tool" for message in conversation.messages):  # results may be parsed
            return None
        adjusted, _, _ = self.adjust.of(conversation, trained)
        must_render = self._family.must_render and self._family.must_render([m.role for m in adjusted.messages])
        # If contents with outer white space are rendered, the placeholders of others must have none.
        if must_render and must_render([message.content for message in conversation.messages]):
            bare = [replace(message, content=message.content.strip("\v")) for message in conversation.messages]
            conversation = replace(conversation, messages=tuple(bare))
        return Outline(self.samples(conversation, trained), must_render)

    def _differs_later(self, conversation: Conversation, trained: Sequence[bool]) -> bool:
        """Return whether a trained turn is written differently once more turns follow.

        Raises Reject if it is and the config requires one sample per conversation (`turns: together`).
        """
        if self._family.differs_later is None or self._headers_too:
            return False
        conversation, trained, added = self.adjust.of(conversation, trained)
        turn = self._family.differs_later(list(zip(conversation.messages, trained, strict=True)), conversation.tools)
        if turn is not None and self.together:
            raise Reject(
                "turn_not_located",
                f"template {self.name}: messages[{turn - added}] ({conversation.messages[turn].role}) is written "
                "differently once more turns follow: the system message and the tools are part of the last request, "
                "and calls in the history have ids; set turns: auto",
            )
        return turn is not None


def plain_text(conversation: Conversation, trained: Sequence[bool], encoder: Encoder) -> list[Span]:
    """Return the spans of a conversation of the format `text`: its text alone."""
    writer = Writer(encoder, headers_too=False)
    plain.write(writer, list(zip(conversation.messages, trained, strict=True)))
    return writer.spans


def built_in_sha256(name: str) -> str:
    """Return the digest of a built-in template for content keys."""
    return hashlib.sha256(f"built-in {name} {VERSION}".encode()).hexdigest()


def with_whole_texts(spans: Sequence[Span], said: Sequence[bool]) -> list[Span]:
    """Return spans in which every text that holds a flagged turn is trained on.

        <|im_start|> user\\n ▓What is 6 × 7?▓ <|im_end|>   ──▶   <|im_start|> ▓user\\nWhat is 6 × 7?<|im_end|>▓

    A label within a text would cut the text in two, and the tokens would differ from those of the prompt that the model
    reads at inference. So the text between two control tokens is trained on as a whole, with the second one. A trained
    answer ends it, too. (`flagged_ranges` does the same for Jinja templates.) `said` is true for spans of the content
    of a message. Raises Reject if such a text holds another message.
    """

    def is_answer(place: int) -> bool:
        return said[place] and spans[place].role == "assistant"

    labeled: list[Span] = []
    top = 0
    while top < len(spans):
        end = top
        while end < len(spans) and spans[end].token == TEXT and not (is_answer(end) and spans[end].trained):
            end += 1
        text = spans[top:end]
        if not any(span.trained for span in text):
            labeled += spans[top : end + 1]
        else:
            others = [span for is_said, span in zip(said[top:end], text, strict=True) if is_said and not span.trained]
            if any(span.text.strip() for span in others):
                role = next(span.role for span in text if span.trained)
                raise Reject(
                    "flag_not_followed",
                    f"a {role} message has a flag that adds it to the trained turns, but the template writes it in one "
                    f"text with a message of the role {others[0].role}",
                )
            labeled += [text[0]._replace(trained=True, alone=True), *(span._replace(trained=True) for span in text[1:])]
            for span in spans[end : end + 1]:
                labeled.append(span._replace(alone=True) if is_answer(end) else span._replace(trained=True))
        top = end + 1
    return labeled
