"""Turn rendered samples into texts to be encoded.

    "<|im_start|>user\\n" "2+2?" <|im_end|> "\\n" …  ─segments_of─▶  tokens   [TEXT,  7,     TEXT, …]
    spans                                                            trained  [False, False, False, …]
                                                                     texts    ["<|im_start|>user\\n2+2?", "\\n…", …]

Each segment is one control token, or one text that is encoded separately. Adjacent spans of text are one text if both
are trained on, or neither is, unless the second one is `alone`. Samples that differ only in their texts have the same
TokenLayout. Recorded token ids are packed as they are: one segment for each id, and no text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from packcorpus.tasks.conversations.answers import Unpaired
from packcorpus.tasks.conversations.model import (
    NEXT_ANSWER,
    ROLES,
    Conversation,
    RecordedTokens,
    content_digest,
    prompt_text,
    turns_of,
    usual_order,
    whole_text,
)
from packcorpus.tasks.conversations.tokens import other_tokenizer
from packcorpus.tasks.conversations.turn_weights import LOSS_WEIGHT
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.encoder import Encoder, LeadingSpace, is_blank
from packcorpus.tasks.encoders.texts import SEPARATOR
from packcorpus.tasks.templates.markers import UnknownMarkers
from packcorpus.tasks.templates.spans import TEXT, Sample, Span, start_of_last_round


@dataclass(frozen=True, slots=True, eq=False)
class TokenLayout:
    """The token layout of a sample: S segments, fixed tokens and gaps for texts.

    Samples that differ only in their texts share it.
    """

    tokens: np.ndarray  # int32[S], TEXT for a text
    trained: np.ndarray  # bool[S]
    separator: bool  # the last segment is an EOS that was added after the template's tokens
    usual: bool  # the turns are in the usual order
    turns: int  # messages that are not system messages
    reasoned: int = 0  # these are as in `Sample`
    closed: int = 0
    unlike: int = 0
    changed: int = 0
    unreasoned: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    turn: int = -1  # index of the message that ends the sample; -1 if the sample is the whole conversation
    after: int = -1  # index of the message that ends the sample before, or -1; later messages are trained on
    conversation: str = ""  # the layout of the conversation if the texts contain all its strings
    empty_prompt: bool = False  # the conversation has an answer to an empty prompt
    markers: tuple[str, ...] = ()  # markers in the texts that the tokenizer lacks and that templates write
    in_last_round: bool = True  # it ends after the last user message that has an answer
    long_round: bool = False  # several answers follow this message
    ends_answer: bool = False  # it is the last sample of one of several answers to a prompt


class Prepared(Struct, gc=False):
    """A sample, nearly always a whole conversation, that is ready to be encoded."""

    layout: TokenLayout
    joined: bytes  # the texts to be encoded, in the order of their segments, separated by NUL
    strings: Sequence[str]  # all strings of the conversation, after its layout unless the TokenLayout has it
    digest: int  # its content_digest
    row: tuple[str, str | None, str] | None = None  # messages, tools, text: further columns of format 2.0
    weights: Sequence[tuple[int, float]] = ()  # weights of the data, each with its first segment
    unpaired: Unpaired | None = None  # calls and results without a partner, on the first sample of a conversation
    reasoning: Sequence[Sequence[str]] = ()  # the texts of each answer that are in no sample, on the first sample
    unwritten: Sequence[str] = ()  # reasoning of trained answers that the sample lacks
    separate: list[str] | None = None  # the texts, if `joined` cannot be split into them: if one contains NUL, or none
    prompt: int = 0  # its prompt_digest
    group: int | None = None  # the hash of the value that `validation_by` names, or None if there is none

    @property
    def texts(self) -> list[str]:
        return self.joined.decode().split(SEPARATOR) if self.separate is None else self.separate


def prompt_digest(conversation: Conversation, trained: Sequence[bool], digest: int) -> int:
    """Return the 64-bit hash of `prompt_text`; without a prompt, it is `digest`."""
    text = prompt_text(conversation, trained)
    return content_digest(text.encode()) if text else digest


def strings_of(conversation: Conversation) -> tuple[list[str], int]:
    """Return all strings of a conversation, after its layout, and their digest."""
    whole = whole_text(conversation)
    return whole.split(SEPARATOR), content_digest(whole.encode())


def prepare_spans(
    conversation: Conversation,
    sample: Sample,
    encoder: Encoder,
    strings: tuple[list[str], int] | None = None,
    empty_prompt: bool = False,
    unknown: UnknownMarkers = UnknownMarkers(),  # noqa: B008 - immutable
) -> Prepared:
    """Prepare a sample that a template has rendered.

    `empty_prompt` is that of `TokenLayout`, and `unknown` are the markers that the tokenizer lacks. Raises Reject if
    there are no spans.
    """
    segments = segments_of(sample.spans, encoder)
    layout, texts = layout_of_tokens(segments, conversation, sample, "", empty_prompt, unknown), segments.texts
    separate = texts if not texts or any(SEPARATOR in text for text in texts) else None
    return Prepared(layout, SEPARATOR.join(texts).encode(), *(strings or strings_of(conversation)), separate=separate)


def prepare_recorded(conversation: Conversation, recorded: RecordedTokens, encoder: Encoder) -> Prepared:
    """Return the sample of a record with ids.

    EOS closes a sample in a row. If the last id is another one, EOS is added, and is not trained on, because the model
    did not write it. A turn is a run of ids that are trained on, or of ids that are not. Raises Reject if the ids are
    of another tokenizer, or if none of them is trained on.
    """
    if recorded.tokenizer and (problem := other_tokenizer(recorded.tokenizer, encoder.digests())):
        raise Reject("bad_ids", problem)
    highest = max(recorded.ids)
    if highest >= encoder.vocab_size:
        place = recorded.ids.index(highest)
        raise Reject(
            "bad_ids",
            f"id {highest:,} at place {place:,} is not in the vocabulary of {encoder.vocab_size:,} ids; was another "
            "tokenizer used?",
        )
    if not any(recorded.trained[1:]):
        raise Reject("no_trained_tokens", "its mask has no id to train on after the first one")
    separator = recorded.ids[-1] != encoder.eos_id
    layout = TokenLayout(
        tokens=np.array([*recorded.ids, *[encoder.eos_id] * separator], np.int32),
        trained=np.array([*recorded.trained, *[False] * separator], bool),
        separator=separator,
        usual=True,
        turns=1 + int(np.count_nonzero(np.diff(np.array(recorded.trained, np.int8)))),
    )
    weight = conversation.messages[0].loss_weight
    if weight == 0.0:
        raise Reject("no_trained_tokens", f"none of its ids is trained on: {LOSS_WEIGHT} is 0")
    weights = [(0, weight)] if isinstance(weight, float) else []
    digest = content_digest(whole_text(conversation).encode())
    prompt = prompt_digest(conversation, recorded.trained, digest)
    return Prepared(layout, b"", (), digest, weights=weights, separate=[], prompt=prompt)


# -- segments -----------------------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The segments of a sample; `texts` has one item per segment that is a text."""

    tokens: list[int]  # TEXT for a text
    trained: list[bool]
    texts: list[str]
    separator: bool  # the last segment is an EOS that was added after the template's tokens


def layout_of_tokens(
    segments: Segments,
    conversation: Conversation,
    sample: Sample,
    layout: str,
    empty_prompt: bool,
    unknown: UnknownMarkers,
) -> TokenLayout:
    """Return the token layout of a sample; `layout` and others are as in TokenLayout."""
    roles = tuple([message.role for message in conversation.messages])
    (usual, turns), start = _order_of(roles), start_of_last_round(roles)
    return TokenLayout(
        tokens=np.array(segments.tokens, np.int32),
        trained=np.array(segments.trained, bool),
        separator=segments.separator,
        usual=usual,
        turns=turns,
        reasoned=sample.reasoned,
        closed=sample.closed,
        unlike=sample.unlike,
        changed=sample.changed,
        unreasoned=sample.unreasoned,
        absent=sample.absent,
        turn=-1 if sample.turn is None else sample.turn,
        after=sample.after,
        conversation=layout,
        empty_prompt=empty_prompt,
        markers=unknown.within(segments.texts),
        in_last_round=sample.turn is None or sample.turn >= start,
        long_round=roles[start:].count("assistant") > 1,
    )


@lru_cache(256)
def layout_of_answer(
    layout: TokenLayout, turn: int, turns: int, usual: bool, empty_prompt: bool, ends_answer: bool
) -> TokenLayout:
    """Return the token layout of a sample of one of several answers.

    The values are those of `TokenLayout`.
    """
    return replace(
        layout,
        turn=turn,
        turns=turns,
        usual=usual,
        empty_prompt=empty_prompt,
        ends_answer=ends_answer,
        conversation="",
    )


@lru_cache(1024)
def _order_of(roles: tuple[str, ...]) -> tuple[bool, int]:
    return usual_order(roles), turns_of(roles)


def segments_of(spans: Sequence[Span], encoder: Encoder) -> Segments:
    """Return the segments of spans; raises Reject if there are no spans."""
    if not spans:
        raise Reject("no_trained_tokens", "the template does not write any of its answers")
    unjoined = _unjoined(spans) if encoder.leading_space == "none" else None
    tokens, flags, texts = unjoined or _joined(spans, encoder)
    # EOS is added unless it already ends the sample, perhaps before white space.
    closing = next((span for span in reversed(spans) if span.token != TEXT or span.text.strip()), spans[-1])
    separator = closing.token != encoder.eos_id
    if separator:
        tokens.append(encoder.eos_id)
        flags.append(closing.trained)
    return Segments(tokens, flags, texts, separator)


def _unjoined(spans: Sequence[Span]) -> tuple[list[int], list[bool], list[str]] | None:
    """Return tokens, flags, and texts, or None if spans have to be joined."""
    strings, tokens, flags, *_ = zip(*spans, strict=True)
    are_texts = bytes(map(TEXT.__eq__, tokens))
    if b"\1\1" in are_texts:
        kinds = bytes([flag if is_text else 2 for is_text, flag in zip(are_texts, flags, strict=True)])
        if b"\0\0" in kinds or b"\1\1" in kinds:
            return None
    return [*tokens], [*flags], [*compress(strings, are_texts)]


def _joined(spans: Sequence[Span], encoder: Encoder) -> tuple[list[int], list[bool], list[str]]:
    """Return the tokens, flags, and texts of spans, with adjacent texts joined."""
    tokens: list[int] = []
    flags: list[bool] = []
    texts: list[str] = []
    pending: list[str] = []  # the texts of the spans in the last segment
    after = "start"
    leading = False

    def close() -> None:
        text = "".join(pending)
        texts.append(encoder.with_leading_space(text) if leading else text)
        pending.clear()

    for span in spans:
        if span.token == TEXT and pending and flags[-1] == span.trained and not span.alone:
            pending.append(span.text)
            continue
        if pending:
            close()
            after = "control" if texts[-1].endswith(encoder.space_follows) else "text"
        if span.token == TEXT:
            pending.append(span.text)
            leading = _has_leading_space(encoder.leading_space, after, span.start)
        else:
            after = "control"
        tokens.append(span.token)
        flags.append(span.trained)
    if pending:
        close()
    return tokens, flags, texts


def _has_leading_space(rule: LeadingSpace, after: str, start: bool) -> bool:
    if after == "start":
        return rule != "none"
    return after == "control" and (rule == "each" or (rule == "template" and start))


def unknown_markers_in(samples: Sequence[Prepared]) -> list[str]:
    """Return the markers without a token that the template wrote into a conversation.

    A marker that is also in a text of the conversation may be content, so it is left out.
    """
    markers = dict.fromkeys(marker for sample in samples for marker in sample.layout.markers)
    return [marker for marker in markers if not any(marker in string for string in samples[0].strings)]


# -- content tokens -----------------------------------------------------------------------------------------------

# Counts of content tokens, by token and by the role of the message.
ByRole = dict[str, dict[str, int]]


def count_content_tokens(encoder: Encoder, conversations: Iterable[Sequence[Prepared]]) -> ByRole:
    """Count the content tokens that conversations become, by the role of the message.

        {"<think>": {"assistant": 12}, "<tool_call>": {"assistant": 3, "user": 1}}

    Each conversation is given by all its samples. The template's own text and white space are not counted, and neither
    is text that a template leaves out of a conversation, such as the reasoning of earlier turns.
    """
    texts: list[str] = []
    roles: list[str] = []
    conversations = list(conversations)
    joined = [SEPARATOR.join(samples[0].strings) for samples in conversations]  # each sample has all strings
    for number in encoder.holding_content_tokens(joined):
        samples = conversations[number]
        layout, strings = samples[0].layout.conversation, samples[0].strings
        if layout:  # the texts contain every string
            texts += strings
            roles += roles_of(layout, len(strings))
            continue
        layout, strings = strings[0], strings[1:]
        written = SEPARATOR.join(sample.joined.decode() for sample in samples)
        bare = "" if all(text in written for text in strings) else _bare(written)
        for text, role in zip(strings, roles_of(layout, len(strings)), strict=True):
            parts = [text] if text in written else _written_tokens(text, bare, encoder)
            texts += parts
            roles += [role] * len(parts)
    return _by_token(Counter((token, roles[index]) for index, token in encoder.count_content_tokens(texts)))


def _written_tokens(text: str, written: str, encoder: Encoder) -> list[str]:
    """Return the content tokens of a string that are written in the same context.

    White space is ignored, because a template may strip a content, write its reasoning elsewhere, or format the JSON of
    a call. A control string next to them may be one that the template writes, which is not in the text.
    """
    plain, cut = (_in_context(_bare(each), encoder) for each in (text, encoder.control_pattern.sub(SEPARATOR, text)))
    if len(plain) != len(cut):  # a token holds a control string
        cut = plain
    pairs = zip(plain, cut, strict=True)
    return [token for (token, context), (_, other) in pairs if context in written or other in written]


def _in_context(bare: str, encoder: Encoder) -> list[tuple[str, str]]:
    """Return each content token of a text without white space, with its context."""
    spans = (match.span() for match in _content_pattern(encoder).finditer(bare))
    return [(bare[start:end], bare[max(0, start - 24) : end + 24]) for start, end in spans]


@lru_cache(maxsize=2)
def _content_pattern(encoder: Encoder) -> re.Pattern[str]:
    names = [_bare(name) for name in encoder.content_tokens if not is_blank(name)]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _bare(text: str) -> str:
    return "".join(text.split())


def roles_of(layout: str, count: int) -> list[str]:
    """Return the role of each of `count` strings that `layout_of` describes.

    The role of tool schemas is "tools", and that of template options "options".
    """
    roles: list[str] = []
    role = ""
    for mark in layout:
        if ord(mark) <= len(ROLES):
            role = ROLES[ord(mark) - 1]
        elif mark in "\x10\x13":
            role = "tools" if mark == "\x10" else "options"
        roles += [role] * {"\x0e": 2, "\x0f": 3, NEXT_ANSWER: 0}.get(mark, 1)  # these are not for one string
    return roles + [role] * (count - len(roles))


def merged(counts_of_all: Iterable[Mapping[str, Mapping[str, int]]]) -> ByRole:
    """Add up counts of content tokens by role.

    The order of the result does not depend on the order of the counts.
    """
    sums: Counter[tuple[str, str]] = Counter()
    for counts in counts_of_all:
        for token, by_role in counts.items():
            sums.update({(token, role): count for role, count in by_role.items()})
    return _by_token(sums)


def _by_token(sums: Mapping[tuple[str, str], int]) -> ByRole:
    result: ByRole = {}
    for token, role in sorted(sums):
        result.setdefault(token, {})[role] = sums[token, role]
    return result
