"""Prepare a record for encoding.

    record ─┬─PlainRecords──▶ roles, contents ─Frames──▶ Prepared                    nearly every record, 2 µs
            └─read_record──▶ Conversation ─template──▶ samples ─▶ Prepared of each    any record, 20 µs

The second way defines what a record means. The first one gives the same, or nothing: a property test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tasks.conversations.formats import role_names
from tasks.conversations.model import Conversation, PlainRecord, content_digest, whole_text
from tasks.conversations.openai import tools_json, turns_json
from tasks.core.errors import PackError, Reject
from tasks.encoders.encoder import Encoder
from tasks.recipe import Recipe
from tasks.sources.model import SourceFile
from tasks.templates.spans import Sample, Span, Template, TrainOn, trained_turns, up_to
from tasks.tokenization.frames import Frames, Prepared, shape_of_sample
from tasks.tokenization.plain_records import PlainRecords, as_dict
from tasks.tokenization.segments import segments_of

# Of the conversations that are filled into what a Jinja template writes around placeholders, one in so many is rendered
# as well and compared. Their digests decide which, so that the result does not depend on parts or workers.
COMPARED = 256


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

    def prepare(self, record: object) -> list[Prepared]:
        """Return what is encoded of a record, one for each of its samples.

        Raises Reject, and PackError if the run cannot continue.
        """
        plain = record if isinstance(record, PlainRecord) else self._plain.of(record)
        if plain:
            names, contents = plain.turns()
            filling = self._frames[names]
            if filling and (found := filling.fill(contents)):
                if filling.unusual and found[0].digest % COMPARED == 0:
                    self._compare(found, self._file.conversation(as_dict(record)))
                return found
        return self._prepare_with_care(as_dict(record))

    def _prepare_with_care(self, record: object) -> list[Prepared]:
        conversation = self._file.conversation(record)
        trained = trained_turns(conversation, self._train_on)
        if not any(trained):
            raise Reject("no_trained_tokens", _why_untrained(conversation, self._train_on))
        if self._packing:
            found, is_compared = self._frames.filled(conversation, trained)
            if found:
                if is_compared and found[0].digest % COMPARED == 0:
                    self._compare(found, conversation)
                return found
        return self._render(conversation, trained)

    def _compare(self, filled: list[Prepared], conversation: Conversation) -> None:
        """Check that a template writes a conversation as it was filled in."""
        rendered = self._render(conversation, trained_turns(conversation, self._train_on))
        if list(map(comparable, filled)) != list(map(comparable, rendered)):
            texts = [[sample.texts for sample in samples] for samples in (filled, rendered)]
            raise AssertionError(f"template {self._template.name}: {texts[0]} is rendered as {texts[1]}")

    def _render(self, conversation: Conversation, trained: list[bool]) -> list[Prepared]:
        found = [self._prepare_sample(conversation, sample) for sample in self._template.samples(conversation, trained)]
        found = [prepared for prepared in found if prepared.shape.trained.any()]
        if not found:
            raise Reject("no_trained_tokens", "the template writes none of its answers")
        return found

    def _prepare_sample(self, conversation: Conversation, sample: Sample) -> Prepared:
        prepared = prepare_spans(conversation, sample.spans, self._encoder, sample.turn)
        if not self._packing:
            text = "".join(span.text for span in sample.spans)
            shown = conversation if sample.turn is None else up_to(conversation, sample.turn)[0]
            prepared.row = (turns_json(shown), tools_json(shown), text)
        return prepared


def comparable(sample: Prepared) -> tuple[object, ...]:
    """Return everything of a sample that ends up in a token file."""
    shape = sample.shape
    return sample.texts, sample.digest, shape.turn, shape.tokens.tolist(), shape.trained.tolist(), shape.separator


def _why_untrained(conversation: Conversation, train_on: TrainOn) -> str:
    why = f"none of its turns is trained on (train_on: {train_on})"
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if any(not message.weight for message in answers):
        return f"{why}: weight, train, or training leaves answers out"
    if not answers and conversation.messages[0].role != "text":
        return f"{why}: the assistant says nothing"
    empty = "its last answer is" if train_on == "last" else "its answers are" if answers else "its text is"
    return f"{why}: {empty} empty"


def prepare_spans(conversation: Conversation, spans: list[Span], encoder: Encoder, turn: int | None = None) -> Prepared:
    """Prepare a sample that a template has rendered. Raises Reject if there is no span."""
    segments = segments_of(spans, encoder)
    shape = shape_of_sample(segments, conversation, turn)
    whole = whole_text(conversation)
    characters = sum(map(len, segments.texts)) + len(segments.texts) - 1
    return Prepared(shape, segments.texts, characters, whole.split("\0"), content_digest(whole.encode()))


def texts_of(records: Iterable[object], file: SourceFile, recipe: Recipe) -> list[str]:
    """Return the texts that are encoded of records of a file; none of those that cannot be used."""
    preparer = Preparer(file, recipe.template, recipe.encoder, recipe.config.train_on)
    texts = []
    for record in records:
        with suppress(Reject, PackError):
            texts += [text for sample in preparer.prepare(record) for text in sample.texts]
    return texts
