"""Prepare a record for encoding.

    record ─┬─PlainRecords──▶ roles, contents ─Frames──▶ Prepared         nearly every record, 2 µs
            └─read_record──▶ Conversation ─template──▶ spans ─▶ Prepared   any record, 20 µs

The second way defines what a record means. The first one gives the same, or nothing: a property test compares them.
"""

from __future__ import annotations

import numpy as np

from tasks.conversations.formats import role_names
from tasks.conversations.model import Conversation, PlainRecord, content_digest, turns_of, usual_order, whole_text
from tasks.conversations.openai import tools_json, turns_json
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.sources.model import SourceFile
from tasks.templates.spans import Span, Template, TrainOn, trained_turns
from tasks.tokenization.frames import Frames, Prepared, Shape, fill
from tasks.tokenization.plain_records import PlainRecords, as_dict
from tasks.tokenization.segments import segments_of


class Preparer:
    """Prepare the records of one source file for one encoder and template.

    Without `packing`, a row is one conversation, with its messages and text.
    """

    def __init__(self, file: SourceFile, template: Template, encoder: Encoder, train_on: TrainOn, packing: bool = True):
        self._file = file
        self._template, self._encoder, self._train_on, self._packing = template, encoder, train_on, packing
        self._frames = Frames(template, encoder, train_on, role_names(file.format, dict(file.roles)))
        # Without frames, plain records would only be converted back. With other keys, none is plain.
        self._plain = PlainRecords(file.format if packing and self._frames.known and not file.columns else "")
        self.decode = self._plain.decode  # for the reader of the file

    def prepare(self, record: object) -> Prepared:
        """Return what is encoded of a record. Raises Reject, and PackError if the run cannot continue."""
        plain = record if isinstance(record, PlainRecord) else self._plain.of(record)
        if plain:
            names, contents = plain.turns()
            frame = self._frames[names]
            if frame and (prepared := fill(frame, contents)):
                return prepared
        return self._prepare_with_care(as_dict(record))

    def _prepare_with_care(self, record: object) -> Prepared:
        conversation = self._file.conversation(record)
        trained = trained_turns(conversation, self._train_on)
        if not any(trained):
            raise Reject("no_trained_tokens", f"none of its turns is trained on (train_on: {self._train_on})")
        if self._packing and (frame := self._frames.of_conversation(conversation, trained)):
            prepared = fill(frame, [message.content for message in conversation.messages])
            if prepared:
                return prepared
        spans = self._template.spans(conversation, trained)
        prepared = prepare_spans(conversation, spans, self._encoder)
        if not prepared.shape.trained.any():
            raise Reject("no_trained_tokens", "the template writes none of its answers")
        if not self._packing:
            text = "".join(span.text for span in spans)
            prepared.row = (turns_json(conversation), tools_json(conversation), text)
        return prepared


def prepare_spans(conversation: Conversation, spans: list[Span], encoder: Encoder) -> Prepared:
    """Prepare a conversation that a template has rendered. Raises Reject if there is no span."""
    segments = segments_of(spans, encoder)
    roles = [message.role for message in conversation.messages]
    shape = Shape(
        tokens=np.array(segments.tokens, np.int32),
        trained=np.array(segments.trained, bool),
        separator=segments.separator,
        usual=usual_order(roles),
        turns=turns_of(roles),
    )
    whole = whole_text(conversation)
    characters = sum(map(len, segments.texts)) + len(segments.texts) - 1
    return Prepared(shape, segments.texts, characters, whole.split("\0"), content_digest(whole.encode()))


def texts_of(record: object, file: SourceFile, template: Template, encoder: Encoder, train_on: TrainOn) -> list[str]:
    """Return the texts that are encoded of a record, even if none is trained on. Raises Reject and PackError."""
    conversation = file.conversation(record)
    return segments_of(template.spans(conversation, trained_turns(conversation, train_on)), encoder).texts
