"""Prepare a record for encoding.

    record ─┬─PlainRecords──▶ roles, contents ─Skeletons──▶ Prepared                 nearly every record, 2 µs
            └─read_record──▶ Conversation ─template──▶ samples ─▶ Prepared of each    any record, 20 µs

The second way defines the meaning of a record. The first way returns the same result, or none; a property test compares
them. The first way is for records that contain only turns. msgspec checks a record against the type that its format
declares (`Format.plain`) while decoding it:

    b'{"messages": [{"role": "user", "content": "2+2?"}]}'    a line ─decode─▶ Messages([Turn("user", "2+2?")])
    {"prompt": "6 × 7?", "completion": "42", "system": None}  a row  ─of─────▶ PlainPromptCompletion("6 × 7?", "42")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import DecodeError, ValidationError, convert, defstruct, to_builtins
from msgspec.json import Decoder, encode
from orjson import OPT_SORT_KEYS, dumps

from packcorpus.tasks.conversations.answers import sum_unpaired, unpaired_in
from packcorpus.tasks.conversations.formats import FORMAT_OF, role_names
from packcorpus.tasks.conversations.model import (
    Conversation,
    Message,
    PlainRecord,
    content_digest,
    is_blank,
    tools_json,
    turns_json,
)
from packcorpus.tasks.conversations.several_answers import each_answer
from packcorpus.tasks.conversations.turn_weights import LOSS_WEIGHT, with_loss_weights
from packcorpus.tasks.conversations.unused_keys import UnusedKeys
from packcorpus.tasks.core.errors import PackError, Reject, UsageError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.readers.strict_json import as_array, decode_block, same_strings
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.adjust import reasoning_of, reasoning_texts
from packcorpus.tasks.templates.markers import explain_unknown
from packcorpus.tasks.templates.sections import explain_sections
from packcorpus.tasks.templates.spans import Sample, Template, TrainOn, has_empty_prompt, trained_turns, up_to
from packcorpus.tasks.tokenization.samples import (
    Prepared,
    TokenLayout,
    layout_of_answer,
    prepare_recorded,
    prepare_spans,
    prompt_digest,
    strings_of,
    unknown_markers_in,
)
from packcorpus.tasks.tokenization.skeletons import skeletons_of

TEXT_CELLS = ("csv", "tsv")  # containers whose numbers are text

# Keys that are common in published data and that no format uses. Strings under these keys are decoded and ignored.
IGNORED = ("id", "source", "category")


class Pending(NamedTuple):
    """A conversation to be rendered, and then compared with `filled` if given.

    Another sample counts what is in the messages before index `start`.
    """

    conversation: Conversation
    trained: list[bool]
    filled: list[Prepared] | None = None
    start: int = 0


class Answered(NamedTuple):
    """One of several answers, and its samples.

    `place` is its place in the record, and `first` the index of its first message in the whole conversation.
    `conversation` is the prompt and this answer, and `trained` has a flag for each of their messages.
    """

    place: str
    first: int
    conversation: Conversation
    trained: list[bool]
    samples: list[Prepared] | Pending


class SeveralAnswers(NamedTuple):
    """A conversation with several answers, and those that are trained on."""

    conversation: Conversation
    answers: list[Answered]


class Preparer:
    """Prepare the records of one source file for one encoder and template.

    Without `packing`, a row is one conversation, with its messages and text. If `weighted`, the loss weights of turns
    are read, and no record is treated as plain. With the name of a `tokenizer`, a marker that the template writes
    and that it lacks stops the run.
    """

    def __init__(
        self,
        file: SourceFile,
        template: Template,
        encoder: Encoder,
        train_on: TrainOn,
        packing: bool = True,
        weighted: bool = False,
        tokenizer: str = "",
    ):
        self._file, self._weighted, self._tokenizer = file, weighted, tokenizer
        self.left_out: Counter[str] = Counter()  # messages by role, and conversations with tools
        self._template, self._encoder, self._train_on, self._packing = template, encoder, train_on, packing
        self._skeletons = skeletons_of(template, train_on, role_names(file.format, dict(file.roles)))
        # Without skeletons, plain records would only be converted back. With `columns` or `drop_roles`, none is plain.
        fills = packing and not weighted and self._skeletons.are_used and not file.columns and not file.drop_roles
        self._plain = PlainRecords(file.format if fills else "")
        # Passed to the reader of the file. A plain record may lack the key that `validation_by` names.
        self.decode = decode_block if file.group_key else self._plain.decode

    def prepare(self, record: object) -> list[Prepared]:
        """Return the prepared samples of a record.

        Raises Reject, and PackError if the run cannot continue.
        """
        [result] = self.prepare_all([record])
        if isinstance(result, list):
            return result
        raise result

    def prepare_all(self, records: Iterable[object]) -> list[list[Prepared] | Reject | PackError]:
        """Return the prepared samples of each record, or the error of `prepare`.

        A PackError may be the last result, even if there are more records.
        """
        results: list[list[Prepared] | Pending | SeveralAnswers | Reject | PackError] = []
        groups: list[int | None] = []
        for record in records:
            try:
                if self._file.group_key:
                    groups.append(group_in(record, self._file.group_key))
                results.append(self._fill(record))
            except Reject as reject:
                results.append(reject)
            except PackError as error:
                results.append(error)
                break
        waiting: list[tuple[Conversation, list[bool]]] = []
        for result in results:
            if isinstance(result, Pending):
                waiting.append((result.conversation, result.trained))
            elif isinstance(result, SeveralAnswers):
                waiting += [each.samples[:2] for each in result.answers if isinstance(each.samples, Pending)]
        samples = iter(self._template.all_samples(waiting))
        prepared = [
            self.prepared(result, next(samples))
            if isinstance(result, Pending)
            else self._of_answers(result, samples)
            if isinstance(result, SeveralAnswers)
            else result
            for result in results
        ]
        for result, group in zip(prepared, groups, strict=False):
            for sample in result if isinstance(result, list) else ():
                sample.group = group
        for number, result in enumerate(prepared if self._tokenizer and self._template.unknown.alone else ()):
            if isinstance(result, list) and (markers := unknown_markers_in(result)):
                others = [m for m in self._template.unknown.others for sample in result if m in sample.joined.decode()]
                named = list(dict.fromkeys([*markers, *others]))
                problem = explain_unknown(self._template.name, named, self._tokenizer)
                return [*prepared[:number], UsageError("unknown_marker", problem)]
        return prepared

    def _fill(self, record: object) -> list[Prepared] | Pending | SeveralAnswers:
        """Return the samples of a record, or its conversation if it must be rendered."""
        may_fill = self._packing
        plain = record if isinstance(record, PlainRecord) else self._plain.of(record)
        if plain:
            names, contents = plain.turns()
            skeleton = self._skeletons[names]
            if skeleton and (samples := skeleton.fill(contents)):
                if not skeleton.is_compared(samples):
                    if skeleton.roles_with_results:
                        messages = tuple(map(Message, skeleton.roles_with_results, contents))
                        samples[0].unpaired = unpaired_in(Conversation(messages))
                    return samples
                conversation = self._file.conversation(as_dict(record))
                return Pending(conversation, trained_turns(conversation, self._train_on), samples)
            # If a conversation with only contents cannot be filled in, no other conversation with these turns can.
            # A name that is not of a role may be of a call, whose turn has more than a content.
            may_fill = may_fill and (skeleton is not None or not self._skeletons.has_roles(names))
        return self._fill_with_care(as_dict(record), may_fill)

    def _fill_with_care(self, record: object, may_fill: bool) -> list[Prepared] | Pending | SeveralAnswers:
        conversation = self._file.conversation(record, self.left_out)
        if not self._packing:
            conversation = _as_written(conversation, self._template)
        if self._weighted:
            name = dict(self._file.columns).get(LOSS_WEIGHT, LOSS_WEIGHT)
            conversation = with_loss_weights(conversation, self._file.container in TEXT_CELLS, name)
        if conversation.recorded:
            return [prepare_recorded(conversation, conversation.recorded, self._encoder)]
        if conversation.has_several_answers:
            return self._fill_answers(conversation, may_fill)
        trained = trained_turns(conversation, self._train_on)
        if not any(trained):
            raise Reject("no_trained_tokens", _why_untrained(conversation, self._train_on))
        return self._fill_conversation(conversation, trained, may_fill)

    def _fill_conversation(
        self, conversation: Conversation, trained: list[bool], may_fill: bool, start: int = 0
    ) -> list[Prepared] | Pending:
        filled, skeleton = self._skeletons.filled(conversation, trained) if may_fill else (None, None)
        if filled and skeleton and not skeleton.is_compared(filled):
            self._add_facts(filled, conversation, trained, start)
            return filled
        return Pending(conversation, trained, filled, start)

    def _fill_answers(self, conversation: Conversation, may_fill: bool) -> SeveralAnswers:
        """Return the samples of each answer, after the prompt.

        An answer that the data does not train on is left out. Raises Reject, with the place of the answer.
        """
        prompt, found = conversation.messages[: conversation.answers[0].first], list[Answered]()
        # The reasoning of the prompt counts once, and a skeleton does not separate it from that of the answer.
        fills_later = may_fill and not any(map(reasoning_texts, prompt))
        for answer, (place, branch) in zip(conversation.answers, each_answer(conversation), strict=True):
            trained = trained_turns(branch, self._train_on)
            of_answer = branch.messages[len(prompt) :]
            is_left_out = any(message.train is False and message.role == "assistant" for message in of_answer)
            try:
                if not any(trained[len(prompt) :]) and not is_left_out:
                    raise Reject("no_trained_tokens", _why_untrained(branch, self._train_on))
                if not any(trained):
                    continue
                start = len(prompt) * bool(found)
                samples = self._fill_conversation(branch, trained, fills_later if start else may_fill, start)
            except Reject as reject:
                raise Reject(reject.reason, f"{place}: {reject.message}") from None
            found.append(Answered(place, answer.first, branch, trained, samples))
        if not found:
            raise Reject("no_trained_tokens", _why_untrained(conversation, self._train_on))
        return SeveralAnswers(conversation, found)

    def _of_answers(
        self, several: SeveralAnswers, rendered: Iterator[list[Sample] | Reject | PackError]
    ) -> list[Prepared] | Reject | PackError:
        """Return the samples of all answers as those of one conversation.

        `rendered` yields those that the template has rendered. If an answer cannot be prepared, none is.
        """
        conversation, answers = several
        results = [
            self.prepared(answer.samples, next(rendered)) if isinstance(answer.samples, Pending) else answer.samples
            for answer in answers
        ]
        for answer, result in zip(answers, results, strict=True):
            if isinstance(result, Reject):
                return Reject(result.reason, f"{answer.place}: {result.message}")
            if isinstance(result, PackError):
                return result
        prepared = [result for result in results if isinstance(result, list)]
        strings, digest = strings_of(conversation)
        start = conversation.answers[0].first
        trained = [*answers[0].trained[:start], *[True] * (len(conversation.messages) - start)]
        prompt = prompt_digest(conversation, trained, digest)
        layouts = [sample.layout for samples in prepared for sample in samples]
        turns, usual = max(layout.turns for layout in layouts), all(layout.usual for layout in layouts)
        empty = any(layout.empty_prompt for layout in layouts)
        unpaired = [sample.unpaired for samples in prepared for sample in samples if sample.unpaired]
        reasoning = [texts for samples in prepared for sample in samples for texts in sample.reasoning]
        for answer, samples in zip(answers, prepared, strict=True):
            last = len(answer.conversation.messages) - 1
            for sample in samples:
                # Only the first answer has samples that end within the prompt, and its place stays.
                turn = (sample.layout.turn if sample.layout.turn >= 0 else last) + answer.first - start
                sample.layout = layout_of_answer(sample.layout, turn, turns, usual, empty, sample is samples[-1])
                sample.strings, sample.digest, sample.prompt = strings, digest, prompt
                sample.unpaired, sample.reasoning = None, ()
        first = prepared[0][0]
        first.unpaired, first.reasoning = sum_unpaired(unpaired), reasoning
        if left_out := len(conversation.answers) - len(answers):
            self.left_out["left_out_answers"] += left_out
        return [sample for samples in prepared for sample in samples]

    def _add_facts(
        self, samples: list[Prepared], conversation: Conversation, trained: Sequence[bool], start: int = 0
    ) -> None:
        """Add unpaired calls and the weights of turns to samples.

        Calls before the message at index `start` are not counted. Raises Reject if the weights do not fit the segments
        of a sample.
        """
        if samples:
            samples[0].unpaired = unpaired_in(conversation, start)
        for sample in samples:
            sample.unwritten = [reasoning_of(conversation.messages[k]) for k in sample.layout.unreasoned]
        if not self._weighted:
            return
        of_turns = {k: message.loss_weight for k, message in enumerate(conversation.messages) if trained[k]}
        # A turn that a flag adds may be part of the sample of an answer, and a template may write it elsewhere.
        is_added = self._train_on != "all" and any(conversation.messages[k].role != "assistant" for k in of_turns)
        if is_added and len(set(of_turns.values())) > 1:
            raise Reject(
                "bad_weight",
                f"the turns that are trained on have different weights ({LOSS_WEIGHT}), and a flag adds one that is "
                "not an answer; give them the same weight, or remove the flag",
            )
        for sample in samples:
            absent = sample.layout.absent
            written = {k: weight for k, weight in of_turns.items() if k not in absent} if absent else of_turns
            sample.weights = weights_of_segments(sample.layout, written)

    def _left_out_reasoning(
        self, conversation: Conversation, samples: Sequence[Sample], start: int = 0
    ) -> list[list[str]]:
        """Return the reasoning of each answer that is in no sample, as texts.

        Answers before index `start` are left out.
        """
        messages = conversation.messages[start:]
        if not self._template.adjust.drop_reasoning:
            messages = tuple(conversation.messages[k] for k in samples[0].unwritten if k >= start)
        return [texts for message in messages if message.role == "assistant" and (texts := reasoning_texts(message))]

    def prepared(
        self, pending: Pending, samples: list[Sample] | Reject | PackError
    ) -> list[Prepared] | Reject | PackError:
        """Prepare the samples that the template has rendered."""
        if not isinstance(samples, list):
            return samples
        conversation, trained, filled, start = pending
        rendered = []
        try:
            strings, empty = strings_of(conversation), has_empty_prompt(conversation, trained)
            prompt = prompt_digest(conversation, trained, strings[1])
            for sample in samples:
                prepared = prepare_spans(conversation, sample, self._encoder, strings, empty, self._template.unknown)
                prepared.prompt = prompt
                if not self._packing:
                    written = conversation
                    if sample.turn is not None:
                        written, _ = up_to(conversation, sample.turn, trained, sample.after)
                    written, _, _ = self._template.adjust.of(written, [False] * len(written.messages))
                    text = "".join(span.text for span in sample.spans)
                    prepared.row = (turns_json(written), tools_json(written), text)
                if prepared.layout.trained.any():
                    rendered.append(prepared)
            self._add_facts(rendered, conversation, trained, start)
            if rendered:
                rendered[0].reasoning = self._left_out_reasoning(conversation, samples, start)
        except Reject as reject:
            return reject
        if filled and [*map(comparable, filled)] != [*map(comparable, rendered)]:
            texts = [[sample.texts for sample in each] for each in (filled, rendered)]
            raise AssertionError(f"template {self._template.name}: {texts[0]} is rendered as {texts[1]}")
        if not rendered and (left_out := explain_sections(self._template.sections)):
            return Reject("no_trained_tokens", f"nothing is left of its answers{left_out}")
        return rendered or Reject("no_trained_tokens", "the template does not write any of its answers")


def group_in(record: object, key: str) -> int | None:
    """Return the hash of the value that a key of a record has, or None if it has none.

    A dot leads into an object, unless the key itself has a dot. A number equals its text, so that tables agree with
    JSON. Null and "" do not count.
    """
    value = record
    for name in (key,) if isinstance(record, dict) and key in record else key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else dumps(value, default=str, option=OPT_SORT_KEYS).decode()
    return content_digest(text.encode("utf-8", "surrogatepass"))


def unused_keys_of(file: SourceFile, weighted: bool) -> UnusedKeys:
    """Return a counter of the keys that a Preparer of the file does not use."""
    further, columns = [LOSS_WEIGHT] * weighted, dict(file.columns)
    return UnusedKeys(file.format, columns, file.ignore, further, file.group_keys, file.unread)


def weights_of_segments(layout: TokenLayout, of_turns: dict[int, Any]) -> list[tuple[int, float]]:
    """Return (first segment, weight) for each run of segments with the same weight.

    The first run begins at segment 0. `of_turns` has the weights of the turns that are trained on. Each turn of the
    sample is a run of trained segments; the separator belongs to the last run. Raises Reject if the turns have
    different weights and the template does not separate them like this.
    """
    last = layout.turn if layout.turn >= 0 else max(of_turns)
    weights = [weight for k, weight in of_turns.items() if layout.after < k <= last]
    if len(set(weights)) == 1:
        return [(0, weights[0])]
    trained = layout.trained[:-1] if layout.separator else layout.trained
    starts = np.flatnonzero(trained & ~np.append(False, trained[:-1]))
    if len(starts) != len(weights):
        raise Reject(
            "bad_weight",
            f"the turns that are trained on have different weights ({LOSS_WEIGHT}), but the template writes "
            f"{len(weights)} of them in {counted(len(starts), 'run')} of trained text; give them the same weight",
        )
    return list(zip([0, *starts[1:].tolist()], weights, strict=True))


def comparable(sample: Prepared) -> tuple[object, ...]:
    """Return all values of a sample that are written to a token file, or counted."""
    layout = sample.layout
    tokens, trained = layout.tokens.tolist(), layout.trained.tolist()
    return (
        sample.texts,
        sample.digest,
        sample.prompt,
        layout.turn,
        tokens,
        trained,
        layout.separator,
        layout.empty_prompt,
    )


def _as_written(conversation: Conversation, template: Template) -> Conversation:
    """Return a conversation as a row of format 2.0 holds it.

    Contents are strings, and developer messages are system messages unless the template knows them.
    Raises Reject if it has options for its template.
    """
    if conversation.template_options and template.engines:
        raise Reject(
            "bad_options",
            "chat_template_kwargs: `packing: false` writes messages and tools, and a trainer would render them without "
            "these options; remove them, set `template_options` in the config, or set `packing: true`",
        )
    keeps = template.knows_developer(conversation)
    if not any(message.parts or (message.developer and not keeps) for message in conversation.messages):
        return conversation
    messages = [replace(m, parts=(), developer=m.developer and keeps) for m in conversation.messages]
    return replace(conversation, messages=tuple(messages))


def _why_untrained(conversation: Conversation, train_on: TrainOn) -> str:
    why = f"none of its turns is trained on (train_on: {train_on})"
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if any(message.loss_weight == 0.0 for message in answers):
        return f"{why}: {LOSS_WEIGHT} is 0"
    if any(message.train is False for message in answers):
        return f"{why}: weight, train, or training leaves answers out"
    if train_on == "rounds" and any(message.train is None and not is_blank(message) for message in answers):
        return f"{why}: the answers of its last round are empty"
    if not answers and conversation.messages[0].role != "text":
        return f"{why}: it has no assistant message"
    empty = "its last answer is" if train_on == "last" else "its answers are" if answers else "its text is"
    return f"{why}: {empty} empty"


def texts_of(records: Iterable[object], file: SourceFile, recipe: Recipe) -> list[str]:
    """Return the texts that are encoded for those records that can be used."""
    preparer = Preparer(file, recipe.template, recipe.encoder, recipe.config.train_on)
    prepared = [result for result in preparer.prepare_all(records) if isinstance(result, list)]
    return [text for samples in prepared for sample in samples for text in sample.texts]


# -- plain records ------------------------------------------------------------------------------------------------


class PlainRecords:
    """A decoder for the plain records of a format; for "", no record is plain."""

    def __init__(self, format: str):
        self._plain = FORMAT_OF[format].plain if format else None
        # JSON records may only have declared keys, because msgspec does not check the values of other keys.
        self._decode = self._plain and _decoder(self._plain).decode

    def decode(self, lines: list[bytes]) -> list[Any] | None:
        """Decode JSON records, each as a PlainRecord if it is plain.

        Returns None if a record has to be examined separately.
        """
        if self._decode is None:
            return decode_block(lines)
        records: list[Any] = []
        others: list[int] = []
        decoded = map(self._decode, lines)
        while len(records) < len(lines):
            try:
                records.extend(decoded)  # until a record is not plain; the next call continues after it
            except (DecodeError, UnicodeDecodeError, RecursionError):
                if not records:  # if the first record is not plain, most records are not
                    return decode_block(lines)
                others.append(len(records))
                records.append(None)
        plain, plain_lines = records, lines
        if others:
            plain = [record for record in records if record]
            plain_lines = [line for line, record in zip(lines, records, strict=True) if record]
        # msgspec silently keeps the last of two equal keys.
        if not same_strings(as_array(plain_lines), encode(plain)):
            return decode_block(lines)
        decoded_others = decode_block([lines[number] for number in others])
        if decoded_others is None:
            return None
        for number, record in zip(others, decoded_others, strict=True):
            records[number] = record
        return records

    def of(self, record: object) -> PlainRecord | None:
        """Return a row or decoded record as a PlainRecord; None if it is not plain."""
        if self._plain is None or type(record) is not dict:
            return None
        try:
            return convert(record, self._plain)
        except ValidationError:
            return None


def as_dict(record: object) -> object:
    """Return a PlainRecord as a dict, and any other record unchanged."""
    return to_builtins(record) if isinstance(record, PlainRecord) else record


@lru_cache(maxsize=32)
def _decoder(plain: type[PlainRecord]) -> Decoder[Any]:
    """Return a decoder that accepts no other keys; a process needs it for every part."""
    keys = [(key, str | None, None) for key in IGNORED if key not in plain.__struct_fields__]
    strict = defstruct(plain.__name__, keys, bases=(plain,), forbid_unknown_fields=True, gc=False, omit_defaults=True)
    return Decoder(strict)
