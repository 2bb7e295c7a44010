"""Encode prepared samples in batches.

    add(number, samples) ──▶ texts, tokens, trained ──encode()──▶ a record batch of a token file

Nearly always, a sample is a whole conversation. Ids, labels, and offsets are computed for a whole batch, from the few
shapes of its conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.core.errors import DataError, Reject
from tasks.encoders.encoder import Encoded, Encoder, TooSlow, Unencodable
from tasks.encoders.texts import SEPARATOR, Texts
from tasks.storage.arrow import offsets_of, to_arrow
from tasks.templates.spans import TEXT
from tasks.tokenization.content_tokens import count_content_tokens, merged
from tasks.tokenization.frames import Prepared, Shape

# Bytes gathered for one encode call: large enough to spread its overhead, small enough to stay in the cache.
BATCH_BYTES = 1 << 21

# Cases that are handled, but that a user may want to know of: conversations with a control string as text,
# conversations with a character that decodes to another character, unknown tokens, conversations whose turns are in an
# unusual order, and conversations with an answer to an empty prompt.
NOTICED = ("control_text_seen", "not_round_trip", "unknown_tokens", "unusual_order", "empty_prompts")
COUNTS = ("accepted", "tokens", *NOTICED)
# Trained answers with reasoning, and those for which the template writes an empty block of reasoning; only if there are
# any. For each, the field of `Shape`.
ANSWERS = {"reasoned_answers": "reasoned", "empty_reasoning": "closed"}

# Further cases, which a receipt has only if they occurred: null fields of structs in a table, calls without a result,
# results without a call, and conversations that call a tool without a definition.
SELDOM = ("null_fields", "calls_without_result", "results_without_call", "undefined_tools")

# What settings left out: messages by role, and conversations with tools.
LEFT_OUT = ("left_out_system", "left_out_tool", "left_out_tools")

# What `turns: apart` would add: samples and tokens. The third count is the prompt tokens that its samples would repeat.
APART = ("apart_samples", "apart_tokens", "apart_repeated")


def noticed_in(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the counts of noticed cases in receipts.

    `content_tokens` and the counts of SELDOM and ANSWERS are left out if there are none.
    """
    counts = merged(receipt.get("content_tokens", {}) for receipt in receipts)
    sums = {name: sum(receipt[name] for receipt in receipts) for name in NOTICED}
    sums |= counts_in(receipts, (*SELDOM, *ANSWERS))
    return sums | ({"content_tokens": counts} if counts else {})


def counts_in(receipts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, int]:
    """Add up counts that not every receipt has, and leave out those that are 0."""
    sums = {name: sum(receipt.get(name, 0) for receipt in receipts) for name in names}
    return {name: count for name, count in sums.items() if count}


class _Shapes:
    """The distinct shapes of a batch.

    `which` is the number of each conversation's shape, int64.
    """

    def __init__(self, shapes: Sequence[Shape]):
        numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
        self.distinct = list(numbers)
        self.which = np.fromiter(map(numbers.__getitem__, shapes), np.int64, len(shapes))

    def of_each(self, name: str, dtype: type) -> np.ndarray:
        """Return a field of each conversation's shape."""
        return np.array([getattr(shape, name) for shape in self.distinct], dtype)[self.which]

    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens, the flags, and the offsets of all segments.

        The offsets divide the segments into conversations.
        """
        begins = offsets_of([len(shape.tokens) for shape in self.distinct])
        ends = offsets_of(np.diff(begins)[self.which])
        places = np.arange(ends[-1]) + np.repeat(begins[self.which] - ends[:-1], np.diff(ends))
        tokens = np.concatenate([shape.tokens for shape in self.distinct])[places]
        return tokens, np.concatenate([shape.trained for shape in self.distinct])[places], ends


class Batch:
    """Samples that are encoded together.

    A batch has either all samples of a conversation or none. `encode` adds its counts (COUNTS) to `receipt`, and adds
    conversations that cannot be encoded to `rejects`. `place_of` returns where a record is.
    """

    def __init__(self, encoder: Encoder, receipt: dict[str, Any], place_of: Callable[[int], str]):
        self.encoder = encoder
        self.receipt = receipt
        self._place_of = place_of
        self._size = 0  # bytes to be encoded
        self.records: list[int] = []
        self.rejects: list[tuple[int, Reject]] = []
        self._conversations: list[Prepared] = []

    @property
    def is_full(self) -> bool:
        return self._size >= BATCH_BYTES

    def add(self, record: int, samples: Sequence[Prepared]) -> None:
        """Add the samples of the conversation of record number `record`."""
        for prepared in samples:
            self.records.append(record)
            self._conversations.append(prepared)
            # Recorded ids have no text, but take memory, too.
            self._size += len(prepared.joined) or prepared.shape.tokens.nbytes

    def encode(self, schema: pa.Schema) -> pa.RecordBatch | None:
        """Return the whole batch as one record batch of the token file.

        Returns None if no conversation can be encoded. Raises DataError if one takes the tokenizer too long.
        """
        while True:
            try:
                shapes, texts, encoded = self._encoded()
                break
            except TooSlow as error:
                pairs = zip(self.records, self._conversations, strict=True)
                record = next(number for number, prepared in pairs if error.text in SEPARATOR.join(prepared.texts))
                raise DataError(error.reason, f"{self._place_of(record)}: {error}") from None
            except Unencodable as error:
                self._reject(error)
                if not self.records:
                    return None
        tokens, trained, segments = shapes.segments()
        values, offsets, counts, ends = _labelled(encoded, tokens, trained, segments)
        records = np.array(self.records, np.int64)
        is_first = np.append(True, records[1:] != records[:-1])  # whether a sample is the first of its conversation
        self._notice(encoded, shapes, texts, is_first, offsets_of(np.diff(offsets_of(tokens == TEXT)[segments])))
        self.receipt["unusual_order"] += int(np.count_nonzero(is_first & ~shapes.of_each("usual", bool)))
        self.receipt["empty_prompts"] += int(np.count_nonzero(is_first & shapes.of_each("empty_prompt", bool)))
        self.receipt["accepted"] += int(np.count_nonzero(is_first))
        for unpaired in [prepared.unpaired for prepared in self._conversations if prepared.unpaired]:
            for name, count in unpaired._asdict().items():
                if count:
                    self.receipt[name] = self.receipt.get(name, 0) + count
        for name, field in ANSWERS.items():
            if count := int(shapes.of_each(field, np.int64).sum()):
                self.receipt[name] = self.receipt.get(name, 0) + count
        self._count_apart(trained, ends, segments, records)
        separators = shapes.of_each("separator", bool)
        self.receipt["tokens"] += len(values) - int(np.count_nonzero(separators))
        columns = [
            to_arrow(records),
            to_arrow(np.array([prepared.digest for prepared in self._conversations], np.uint64)),
            to_arrow(shapes.of_each("turns", np.int32)),
            to_arrow(shapes.of_each("turn", np.int32)),
            to_arrow(counts.astype(np.int32)),
            to_arrow(separators),
            pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values)),
        ]
        if "weights" in schema.names:
            columns += self._weights(ends, segments)
        elif "text" in schema.names:
            rows = [prepared.row for prepared in self._conversations if prepared.row]
            columns += [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
        return pa.record_batch(columns, schema=schema)

    def _count_apart(self, trained: np.ndarray, ends: np.ndarray, segments: np.ndarray, records: np.ndarray) -> None:
        """Count what `turns: apart` would add.

        Each run of trained tokens is a turn, and the tokens before it are its prompt. `trained` has one value per
        segment, `ends` are the offsets of segments in the tokens, and `segments` are the offsets of samples in the
        segments.
        """
        begins = np.zeros(len(trained) + 1, bool)  # where a sample begins
        begins[segments] = True
        runs = trained & (begins[:-1] | ~np.append(False, trained[:-1]))
        stops = trained & (begins[1:] | ~np.append(trained[1:], False))
        first, last = np.flatnonzero(runs), np.flatnonzero(stops) + 1
        sample = np.searchsorted(segments, first, side="right") - 1
        start = ends[segments[sample]]
        prompt, length = ends[first] - start, ends[last] - start
        is_added = sample[1:] == sample[:-1]  # the last run of a sample ends it
        is_later = records[sample[1:]] == records[sample[:-1]]
        counts = (
            np.count_nonzero(is_added),
            length[:-1][is_added].sum(),
            np.minimum(prompt[1:], length[:-1])[is_later].sum(),
        )
        for name, count in zip(APART, counts, strict=True):
            if count:
                self.receipt[name] = self.receipt.get(name, 0) + int(count)

    def _weights(self, ends: np.ndarray, segments: np.ndarray) -> list[pa.Array]:
        """Return the columns weight_ends and weights.

        `ends` are the offsets of segments in the tokens, and `segments` are the offsets of samples in the segments.
        """
        counts = np.array([len(prepared.weights) for prepared in self._conversations])
        runs = [run for prepared in self._conversations for run in prepared.weights]
        # Each run ends where the next run of its sample starts, or where its sample ends.
        starts = np.array([segment for segment, _ in runs]) + np.repeat(segments[:-1], counts)
        last = offsets_of(counts)[1:] - 1
        stops = np.append(starts[1:], 0)
        stops[last] = segments[1:]
        tokens = (ends[stops] - ends[np.repeat(segments[:-1], counts)]).astype(np.int32)
        offsets = to_arrow(offsets_of(counts).astype(np.int32))
        values = np.array([weight for _, weight in runs], np.float32)
        return [pa.ListArray.from_arrays(offsets, to_arrow(each)) for each in (tokens, values)]

    def _encoded(self) -> tuple[_Shapes, Texts, Encoded]:
        shapes, texts = _Shapes([prepared.shape for prepared in self._conversations]), self._texts()
        if any(shape.turn >= 0 for shape in shapes.distinct):
            return shapes, texts, encode_repeated(self.encoder, texts.strings)
        return shapes, texts, self.encoder.encode(texts)

    def _texts(self) -> Texts:
        if any(prepared.separate is not None for prepared in self._conversations):
            return Texts.of([text for prepared in self._conversations for text in prepared.texts])
        return Texts(SEPARATOR.encode().join([prepared.joined for prepared in self._conversations]))

    def _reject(self, error: Unencodable) -> None:
        """Remove the conversations with texts that cannot be encoded."""
        problems: dict[int, str] = {}  # by record: all samples of a conversation are removed
        for record, prepared in zip(self.records, self._conversations, strict=True):
            for text in prepared.texts:
                if problem := error.problems.get(text):
                    problems.setdefault(record, problem)
        self.rejects += [(record, Reject(error.reason, problem)) for record, problem in problems.items()]
        kept = [n for n, record in enumerate(self.records) if record not in problems]
        self.records = [self.records[n] for n in kept]
        self._conversations = [self._conversations[n] for n in kept]

    def _notice(
        self, encoded: Encoded, shapes: _Shapes, texts: Texts, is_first: np.ndarray, offsets: np.ndarray
    ) -> None:
        """Count the cases that a user may want to know of.

        `is_first` marks the first sample of each conversation. `offsets` are the offsets of the samples in `texts`.
        """
        receipt, encoder = self.receipt, self.encoder
        if encoder.unk_id is not None:
            receipt["unknown_tokens"] += int(np.count_nonzero(encoded.ids == encoder.unk_id))
        if encoder.underline_is_space:
            samples = np.searchsorted(offsets, texts.with_underline, "right") - 1
            receipt["not_round_trip"] += len({self.records[n] for n in samples.tolist()})
        # Only the strings of the conversation count, because a marker that the template writes as text is intended. If
        # the texts contain all strings, the shape has their layout. All samples of a conversation have its strings.
        has_all = np.array([bool(shape.layout) for shape in shapes.distinct])[shapes.which]
        others = np.flatnonzero(is_first & ~has_all).tolist()
        found = {others[n] for n in encoder.holding([SEPARATOR.join(self._conversations[n].strings) for n in others])}
        if has_all.any():
            samples = np.searchsorted(offsets, encoder.holding(texts), "right") - 1
            found |= set(samples[has_all[samples]].tolist())
        receipt["control_text_seen"] += sum(encoder.count_controls(self._conversations[n].strings) > 0 for n in found)
        if encoder.content_tokens:
            places = encoder.places_of_content_tokens(encoded.ids)
            owners = np.searchsorted(encoded.offsets, places, side="right") - 1  # texts
            which = np.unique(np.searchsorted(offsets, owners, side="right") - 1).tolist()
            # By record: each sample has all strings of its conversation, but its text may contain only some of them.
            samples_of: dict[int, list[Prepared]] = {self.records[n]: [] for n in which}
            for record, prepared in zip(self.records, self._conversations, strict=True):
                if record in samples_of:
                    samples_of[record].append(prepared)
            counts = count_content_tokens(encoder, samples_of.values())
            if counts:
                receipt["content_tokens"] = merged([receipt.get("content_tokens", {}), counts])


def encode_repeated(encoder: Encoder, texts: Sequence[str]) -> Encoded:
    """Encode texts, of which many are equal, and encode each distinct text once.

    Equal texts are common because the samples of a conversation repeat its beginning.
    """
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    which = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
    return encoder.encode([*numbers]).at(which)


def _labelled(
    encoded: Encoded, tokens: np.ndarray, trained: np.ndarray, segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens as a token file stores them, with offsets and counts.

    The results are the tokens, the offsets of the samples, their numbers of trained tokens, and the offsets of the
    segments. `tokens` and `trained` have one value per segment. `segments` are the offsets of the samples in the
    segments.
    """
    is_text = tokens == TEXT
    lengths = np.ones(len(tokens), np.int64)
    lengths[is_text] = np.diff(encoded.offsets)
    ends = offsets_of(lengths)
    # Texts are in the order of their segments, so their ids fill the places that control tokens leave.
    of_text = np.ones(ends[-1], bool)
    controls = np.flatnonzero(~is_text)
    of_text[ends[controls]] = False
    values = np.empty(ends[-1], np.int32)
    values[of_text] = encoded.ids
    values[ends[controls]] = tokens[controls]
    # ~id is id ^ -1.
    flips = np.repeat(trained.astype(np.int32) - 1, lengths)
    offsets = ends[segments]
    counts = np.diff(offsets_of(lengths * trained)[segments]) - (flips[offsets[:-1]] == 0)
    flips[offsets[:-1]] = -1
    values ^= flips
    return values, offsets, counts, ends
