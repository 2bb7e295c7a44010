"""Prepare a record for encoding.

    record ─┬─PlainRecords──▶ roles, contents ─Frames──▶ Prepared                    nearly every record, 2 µs
            └─read_record──▶ Conversation ─template──▶ samples ─▶ Prepared of each    any record, 20 µs

The second way defines the meaning of a record. The first way returns the same result, or none; a property test compares
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tasks.conversations.answers import unpaired_in
from tasks.conversations.formats import role_names
from tasks.conversations.model import (
    Conversation,
    Message,
    PlainRecord,
    content_digest,
    is_blank,
    tools_json,
    turns_json,
    whole_text,
)
from tasks.conversations.turn_weights import LOSS_WEIGHT, with_loss_weights
from tasks.conversations.unused_keys import UnusedKeys
from tasks.core.errors import PackError, Reject
from tasks.core.printable import counted
from tasks.encoders.encoder import Encoder
from tasks.encoders.texts import SEPARATOR
from tasks.recipe import Recipe
from tasks.sources.model import SourceFile
from tasks.templates.sections import explain_sections
from tasks.templates.spans import Sample, Template, TrainOn, has_empty_prompt, trained_turns, up_to
from tasks.tokenization.frames import Prepared, Shape, frames_of, shape_of_sample
from tasks.tokenization.plain_records import PlainRecords, as_dict
from tasks.tokenization.recorded import prepare_recorded
from tasks.tokenization.segments import segments_of

TEXT_CELLS = ("csv", "tsv")  # containers whose numbers are text


class Pending(NamedTuple):
    """A conversation to be rendered.

    If it was filled in, `filled` is compared with the result.
    """

    conversation: Conversation
    trained: list[bool]
    filled: list[Prepared] | None = None


class Preparer:
    """Prepare the records of one source file for one encoder and template.

    Without `packing`, a row is one conversation, with its messages and text.
    """

    def __init__(
        self,
        file: SourceFile,
        template: Template,
        encoder: Encoder,
        train_on: TrainOn,
        packing: bool = True,
        weighted: bool = False,
    ):
        """Set up the frames and the decoder for the file.

        If `weighted` is set, the loss weights of turns are read, and no record is treated as plain.
        """
        self._file, self._weighted = file, weighted
        self.left_out: Counter[str] = Counter()  # messages by role, and conversations with tools
        self._template, self._encoder, self._train_on, self._packing = template, encoder, train_on, packing
        self._frames = frames_of(template, train_on, role_names(file.format, dict(file.roles)))
        # Without frames, plain records would only be converted back. With `columns` or `drop_roles`, none is plain.
        fills = packing and not weighted and self._frames.known and not file.columns and not file.drop_roles
        self._plain = PlainRecords(file.format if fills else "")
        self.decode = self._plain.decode  # passed to the reader of the file

    def prepare(self, record: object) -> list[Prepared]:
        """Return the prepared samples of a record.

        Raises Reject, and PackError if the run cannot continue.
        """
        [found] = self.prepare_all([record])
        if isinstance(found, list):
            return found
        raise found

    def prepare_all(self, records: Iterable[object]) -> list[list[Prepared] | Reject | PackError]:
        """Return the prepared samples of each record, or the error of `prepare`.

        A PackError may be the last result, even if there are more records.
        """
        found: list[list[Prepared] | Pending | Reject | PackError] = []
        for record in records:
            try:
                found.append(self._fill(record))
            except Reject as reject:
                found.append(reject)
            except PackError as error:
                found.append(error)
                break
        waiting = [(each.conversation, each.trained) for each in found if isinstance(each, Pending)]
        samples = iter(self._template.all_samples(waiting))
        return [self.prepared(each, next(samples)) if isinstance(each, Pending) else each for each in found]

    def _fill(self, record: object) -> list[Prepared] | Pending:
        """Return the samples of a record, or its conversation if it must be rendered."""
        plain = record if isinstance(record, PlainRecord) else self._plain.of(record)
        if plain:
            names, contents = plain.turns()
            filling = self._frames[names]
            if filling and (found := filling.fill(contents)):
                if not filling.is_compared(found):
                    if filling.roles_with_results:
                        messages = tuple(map(Message, filling.roles_with_results, contents))
                        found[0].unpaired = unpaired_in(Conversation(messages))
                    return found
                conversation = self._file.conversation(as_dict(record))
                return Pending(conversation, trained_turns(conversation, self._train_on), found)
            # If a conversation with only contents cannot be filled in, no other conversation with these turns can.
            # A name that is not of a role may be of a call, whose turn has more than a content.
            may_fill = filling is not None or not self._frames.has_roles(names)
            return self._fill_with_care(as_dict(record), self._packing and may_fill)
        return self._fill_with_care(as_dict(record), self._packing)

    def _fill_with_care(self, record: object, may_fill: bool) -> list[Prepared] | Pending:
        conversation = self._conversation(record)
        if conversation.recorded:
            return [prepare_recorded(conversation, conversation.recorded, self._encoder)]
        trained = trained_turns(conversation, self._train_on)
        if not any(trained):
            raise Reject("no_trained_tokens", _why_untrained(conversation, self._train_on))
        filled, filling = self._frames.filled(conversation, trained) if may_fill else (None, None)
        if filled and filling and not filling.is_compared(filled):
            return self._with_facts(filled, conversation, trained)
        return Pending(conversation, trained, filled)

    def _conversation(self, record: object) -> Conversation:
        """Read a record, with its weights if they are used.

        Raises Reject.
        """
        conversation = self._file.conversation(record, self.left_out)
        if not self._packing:
            conversation = _as_written(conversation, self._template)
        if not self._weighted:
            return conversation
        name, is_text = dict(self._file.columns).get(LOSS_WEIGHT, LOSS_WEIGHT), self._file.container in TEXT_CELLS
        return with_loss_weights(conversation, is_text, name)

    def _with_facts(
        self, samples: list[Prepared], conversation: Conversation, trained: Sequence[bool]
    ) -> list[Prepared]:
        """Add unpaired calls and the weights of turns to samples.

        Raises Reject if the weights do not fit the segments of a sample.
        """
        if samples:
            samples[0].unpaired = unpaired_in(conversation)
        if self._weighted:
            of_turns = {k: message.loss_weight for k, message in enumerate(conversation.messages) if trained[k]}
            self._require_equal_weights(conversation, of_turns)
            for sample in samples:
                sample.weights = weights_of_segments(sample.shape, of_turns)
        return samples

    def _require_equal_weights(self, conversation: Conversation, of_turns: dict[int, Any]) -> None:
        """Raise Reject if a flag adds turns, and the trained turns have different weights.

        Such turns may be part of the sample of an answer, and a template may write them elsewhere.
        """
        is_added = self._train_on != "all" and any(conversation.messages[k].role != "assistant" for k in of_turns)
        if is_added and len(set(of_turns.values())) > 1:
            raise Reject(
                "bad_weight",
                f"the turns that are trained on have different weights ({LOSS_WEIGHT}), and a flag adds one that is "
                "not an answer; give them the same weight, or remove the flag",
            )

    def prepared(
        self, pending: Pending, samples: list[Sample] | Reject | PackError
    ) -> list[Prepared] | Reject | PackError:
        """Prepare the samples that the template has rendered."""
        if not isinstance(samples, list):
            return samples
        try:
            strings = strings_of(pending.conversation)
            empty = has_empty_prompt(pending.conversation, pending.trained)
            found = [self._prepare_sample(pending, sample, strings, empty) for sample in samples]
            found = [prepared for prepared in found if prepared.shape.trained.any()]
            self._with_facts(found, pending.conversation, pending.trained)
        except Reject as reject:
            return reject
        if pending.filled and [*map(comparable, pending.filled)] != [*map(comparable, found)]:
            texts = [[sample.texts for sample in each] for each in (pending.filled, found)]
            raise AssertionError(f"template {self._template.name}: {texts[0]} is rendered as {texts[1]}")
        if not found and (left_out := explain_sections(self._template.sections)):
            return Reject("no_trained_tokens", f"nothing is left of its answers{left_out}")
        return found or Reject("no_trained_tokens", "the template does not write any of its answers")

    def _prepare_sample(self, pending: Pending, sample: Sample, strings: Strings, empty_prompt: bool) -> Prepared:
        conversation = pending.conversation
        prepared = prepare_spans(conversation, sample, self._encoder, strings, empty_prompt)
        if not self._packing:
            text = "".join(span.text for span in sample.spans)
            shown = conversation
            if sample.turn is not None:
                shown, _ = up_to(conversation, sample.turn, pending.trained, sample.after)
            shown, _, _ = self._template.adjust.of(shown, [False] * len(shown.messages))
            prepared.row = (turns_json(shown), tools_json(shown), text)
        return prepared


def unused_keys_of(file: SourceFile, weighted: bool) -> UnusedKeys:
    """Return a counter of the keys that a Preparer of the file does not use."""
    return UnusedKeys(file.format, dict(file.columns), file.ignore, [LOSS_WEIGHT] * weighted)


def weights_of_segments(shape: Shape, of_turns: dict[int, Any]) -> list[tuple[int, float]]:
    """Return (first segment, weight) for each run of segments with the same weight.

    The first run begins at segment 0. `of_turns` has the weights of the turns that are trained on. Each turn of the
    sample is a run of trained segments; the separator belongs to the last run. Raises Reject if the turns have
    different weights and the template does not separate them like this.
    """
    last = shape.turn if shape.turn >= 0 else max(of_turns)
    weights = [weight for k, weight in of_turns.items() if shape.after < k <= last]
    if len(set(weights)) == 1:
        return [(0, weights[0])]
    trained = shape.trained[:-1] if shape.separator else shape.trained
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
    shape = sample.shape
    tokens, trained = shape.tokens.tolist(), shape.trained.tolist()
    return sample.texts, sample.digest, shape.turn, tokens, trained, shape.separator, shape.empty_prompt


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


class Strings(NamedTuple):
    """All strings of a conversation, after its layout, and their digest."""

    strings: list[str]
    digest: int


def strings_of(conversation: Conversation) -> Strings:
    whole = whole_text(conversation)
    return Strings(whole.split("\0"), content_digest(whole.encode()))


def prepare_spans(
    conversation: Conversation,
    sample: Sample,
    encoder: Encoder,
    strings: Strings | None = None,
    empty_prompt: bool = False,
) -> Prepared:
    """Prepare a sample that a template has rendered.

    `empty_prompt` is that of `Shape`. Raises Reject if there are no spans.
    """
    segments = segments_of(sample.spans, encoder)
    shape = shape_of_sample(segments, conversation, sample, empty_prompt=empty_prompt)
    texts = segments.texts
    separate = texts if not texts or any(SEPARATOR in text for text in texts) else None
    known = strings or strings_of(conversation)
    return Prepared(shape, SEPARATOR.join(texts).encode(), *known, separate=separate)


def texts_of(records: Iterable[object], file: SourceFile, recipe: Recipe) -> list[str]:
    """Return the texts that are encoded for records of a file.

    Records that cannot be used are skipped.
    """
    preparer = Preparer(file, recipe.template, recipe.encoder, recipe.config.train_on)
    found = [each for each in preparer.prepare_all(records) if isinstance(each, list)]
    return [text for samples in found for sample in samples for text in sample.texts]
