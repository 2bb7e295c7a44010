"""Tokenize one part of a source file.

    reader ──▶ record ──Preparer──▶ texts and control tokens ──Batch.encode──▶ token file
                          └─ Reject ─────────────────────────────────────────▶ receipt

The token file has the tokens and labels of every conversation. Samples are encoded in batches: ids, labels, and offsets
are computed for a whole batch, from the few token layouts of its samples. Nearly always, a sample is a whole
conversation. The receipt counts conversations, rejects, and cases that a user may want to know of.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.reading import Reporter
from packcorpus.tasks.encoders.encoder import Encoded, Encoder, TooSlow, Unencodable, distinct
from packcorpus.tasks.encoders.texts import SEPARATOR, Texts
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.sources.parts import PartReader, place_of
from packcorpus.tasks.storage.files import atomic_file, write_receipt
from packcorpus.tasks.storage.schemas import offsets_of, to_arrow, tokens_schema
from packcorpus.tasks.templates.spans import TEXT, Template
from packcorpus.tasks.tokenization.decontamination import Evaluation
from packcorpus.tasks.tokenization.prepare import Preparer, unused_keys_of
from packcorpus.tasks.tokenization.samples import Prepared, count_content_tokens, merged, unknown_markers_in
from packcorpus.tasks.tokenization.shared_tokens import shared_tokens

# Bytes gathered for one encode call: large enough to spread its overhead, small enough to stay in the cache.
BATCH_BYTES = 1 << 21

# Cases that are handled, but that a user may want to know of: conversations with a control string as text,
# conversations with a character that decodes to another character, unknown tokens, conversations whose turns are in an
# unusual order, and conversations with an answer to an empty prompt.
NOTICED = ("control_text_seen", "not_round_trip", "unknown_tokens", "unusual_order", "empty_prompts")
COUNTS = ("accepted", "tokens", *NOTICED)
# Trained answers with reasoning, and those for which the template writes an empty block of reasoning; only if there are
# any. For each, the field of `TokenLayout`.
ANSWERS = {"reasoned_answers": "reasoned", "empty_reasoning": "closed"}

# The conversations that overlap with an evaluation set, only with `decontaminate`: the number of the record, and an
# Overlap.
CONTAMINATED = "contaminated"

# Further cases, which a receipt has only if they occurred: null fields of structs in a table, calls without a result,
# results without a call, conversations that call a tool without a definition, and conversations without the key that
# `validation_by` names.
SELDOM = ("null_fields", "calls_without_result", "results_without_call", "undefined_tools", "without_key")

# What settings left out: messages by role, and conversations with tools; and the answers that the data leaves out.
LEFT_OUT = ("left_out_system", "left_out_tool", "left_out_tools", "left_out_answers")

# Reasoning that a setting or the template leaves out of all samples: answers, and tokens of their reasoning.
REASONING = ("reasoning_left_out", "reasoning_tokens_left_out")
# How `turns: as_rendered` differs from inference: trained answers with another prompt, that are written differently,
# and without their reasoning, and the tokens of this reasoning.
AS_RENDERED = ("other_prompts", "other_answers", "without_reasoning", "unwritten_tokens")

# What a conversation of several samples costs: samples and tokens without its last sample, and without those that train
# on its last round; such conversations with several answers in the last round; and the tokens that `share:
# conversation` does not store again, if no tree is cut.
PRICE = ("earlier_samples", "earlier_tokens", "earlier_rounds", "earlier_round_tokens", "long_rounds", "shared_tokens")

# What `turns: apart` would add: samples and tokens. The third count is the prompt tokens that its samples would repeat.
APART = ("apart_samples", "apart_tokens", "apart_repeated")


def tokenize_part(
    part: Part,
    encoder: Encoder,
    template: Template,
    config: Config,
    token_file: Path,
    receipt_file: Path,
    evaluation: Evaluation | None = None,
) -> dict[str, Any]:
    """Write the token file, then its receipt (the commit), and return the receipt.

    Raises PackError if the run must stop: the source changed or is damaged, or labels cannot be located.
    """
    engines = template.engines
    starts_fast = engines is not None and engines.are_fast
    receipt: dict[str, Any] = dict.fromkeys(("conversations", *COUNTS), 0)
    weighted, where = config.reads_loss_weights, partial(place_of, part)
    schema = tokens_schema(config.packing, weighted, bool(part.file.group_key))
    name = config.checked_tokenizer
    preparer = Preparer(part.file, template, encoder, config.train_on, config.packing, weighted, name)
    unused = unused_keys_of(part.file, weighted)
    reader, reporter = PartReader(part, config.max_record_bytes, preparer.decode), Reporter()

    def blocks() -> Iterator[tuple[Sequence[int], Iterable[Any]]]:
        for numbers, records in reader.blocks():
            unused.add(numbers, records, where)
            yield numbers, records
            reporter.report(reader.share)

    # Python searches for cycles after every 700 new objects. A part creates a million objects without a cycle, and the
    # search took a fifth of the time.
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        with atomic_file(token_file, "xxh3") as out:
            with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
                write = writer.write_batch
                rejects = tokenize_records(blocks(), preparer, encoder, schema, write, receipt, where, evaluation)
            for name, count in reader.unread.items():
                unused.add_column(name, count)
            receipt["conversations"] = receipt["accepted"] + len(rejects)
            receipt |= {"records": reader.records, "bytes": out.size, "xxh3": out.digest()}
            receipt |= {"rejects": [*map(list, rejects)], "engine": encoder.engine}
            if starts_fast:
                receipt["rendering"] = "minijinja"
            if engines and engines.differs:
                receipt["rendering_differs"] = engines.differs
            if reader.null_fields:
                receipt["null_fields"] = reader.null_fields
            receipt |= preparer.left_out
            if counts := unused.found():
                receipt["unused_keys"] = counts
    finally:
        gc.set_threshold(*thresholds)
    write_receipt(receipt_file, receipt)
    return receipt


def tokenize_records(
    blocks: Iterable[tuple[Sequence[int], Iterable[Any]]],
    preparer: Preparer,
    encoder: Encoder,
    schema: pa.Schema,
    write: Callable[[pa.RecordBatch], None],
    receipt: dict[str, Any],
    place: Callable[[int], str],
    evaluation: Evaluation | None = None,
) -> list[tuple[int, str, str]]:
    """Tokenize records, and return the number, reason, and message of each reject.

    `blocks` are the numbers and the values of records. The counts of `receipt` are increased, and with `evaluation`, it
    lists the conversations that overlap with its items. Raises PackError, which names the place of the record.
    """
    rejects: list[tuple[int, str, str]] = []
    if evaluation:
        receipt |= {"evaluation": evaluation.counts, CONTAMINATED: []}

    def flush(batch: Batch) -> None:
        if batch.records and (encoded := batch.encode(schema)):
            write(encoded)
        if evaluation and batch.records:
            texts = batch.texts_of_records()
            found, numbers = evaluation.overlaps([*texts.values()]), [*texts]
            receipt[CONTAMINATED] += [[numbers[n], *overlap] for n, overlap in found.items()]
        rejects.extend((number, reject.reason, reject.message) for number, reject in batch.rejects)

    batch = Batch(encoder, receipt, place)
    for numbers, records in blocks:
        for number, result in zip(numbers, preparer.prepare_all(records), strict=False):
            if isinstance(result, list):  # first, because it is nearly always true
                batch.add(number, result)
            elif isinstance(result, Reject):
                rejects.append((number, result.reason, result.message))
            else:
                raise type(result)(result.reason, f"{place(number)}: {result}")
            if batch.is_full:
                flush(batch)
                batch = Batch(encoder, receipt, place)
    flush(batch)
    return sorted(rejects, key=itemgetter(0))  # some rejects were found when their batch was encoded


class Batch:
    """Samples that are encoded together.

    A batch has either all samples of a conversation or none. `encode` adds counts to `receipt`, and conversations that
    cannot be encoded to `rejects`. `place_of` returns where a record is.
    """

    def __init__(self, encoder: Encoder, receipt: dict[str, Any], place_of: Callable[[int], str]):
        self._encoder, self._receipt, self._place_of = encoder, receipt, place_of
        self._size = 0  # bytes to be encoded
        self.records: list[int] = []
        self.rejects: list[tuple[int, Reject]] = []
        self._samples: list[Prepared] = []

    @property
    def is_full(self) -> bool:
        return self._size >= BATCH_BYTES

    def add(self, record: int, samples: Sequence[Prepared]) -> None:
        """Add the samples of the conversation of record number `record`."""
        for prepared in samples:
            self.records.append(record)
            self._samples.append(prepared)
            # Recorded ids have no text, but take memory, too.
            self._size += len(prepared.joined) or prepared.layout.tokens.nbytes

    def texts_of_records(self) -> dict[int, Sequence[str]]:
        """Return all texts of each conversation, by the number of its record."""
        texts: dict[int, Sequence[str]] = {}
        for record, prepared in zip(self.records, self._samples, strict=True):
            if record not in texts:
                strings = prepared.strings if prepared.layout.conversation else prepared.strings[1:]
                # Recorded ids have no texts.
                texts[record] = strings or [self._encoder.decode(prepared.layout.tokens[prepared.layout.tokens >= 0])]
        return texts

    def encode(self, schema: pa.Schema) -> pa.RecordBatch | None:
        """Return the whole batch as one record batch of the token file.

        Returns None if no conversation can be encoded. Raises DataError if one takes the tokenizer too long.
        """
        while True:
            if any(prepared.separate is not None for prepared in self._samples):
                texts = Texts.of([text for prepared in self._samples for text in prepared.texts])
            else:
                texts = Texts(SEPARATOR.encode().join([prepared.joined for prepared in self._samples]))
            try:
                # Samples that end with a turn repeat the texts of the samples before.
                repeats = any(prepared.layout.turn >= 0 for prepared in self._samples)
                encoded = self._encoder.encode_repeated(texts.strings) if repeats else self._encoder.encode(texts)
                break
            except TooSlow as error:
                pairs = zip(self.records, self._samples, strict=True)
                record = next(number for number, prepared in pairs if error.text in SEPARATOR.join(prepared.texts))
                raise DataError(error.reason, f"{self._place_of(record)}: {error}") from None
            except Unencodable as error:
                self._reject(error)
                if not self.records:
                    return None
        layouts, which = distinct([prepared.layout for prepared in self._samples])

        def of_each(field: str, dtype: type) -> np.ndarray:
            return np.array([getattr(layout, field) for layout in layouts], dtype)[which]

        begins = offsets_of([len(layout.tokens) for layout in layouts])
        segments = offsets_of(np.diff(begins)[which])  # the offsets of the samples in all segments
        places = np.arange(segments[-1]) + np.repeat(begins[which] - segments[:-1], np.diff(segments))
        tokens = np.concatenate([layout.tokens for layout in layouts])[places]
        trained = np.concatenate([layout.trained for layout in layouts])[places]
        values, offsets, counts, ends = _labelled(encoded, tokens, trained, segments)
        records = np.array(self.records, np.int64)
        is_first = np.append(True, records[1:] != records[:-1])  # whether a sample is the first of its conversation
        has_all = np.array([bool(layout.conversation) for layout in layouts])[which]
        self._notice(encoded, texts, is_first, has_all, offsets_of(np.diff(offsets_of(tokens == TEXT)[segments])))
        self._count("unusual_order", np.count_nonzero(is_first & ~of_each("usual", bool)))
        self._count("empty_prompts", np.count_nonzero(is_first & of_each("empty_prompt", bool)))
        self._count("accepted", np.count_nonzero(is_first))
        self._count_reasoning()
        if any(layout.markers for layout in layouts):
            self._count_unknown_markers()
        for unpaired in [prepared.unpaired for prepared in self._samples if prepared.unpaired]:
            for name, count in unpaired._asdict().items():
                self._count(name, count)
        for name, field in ANSWERS.items():
            self._count(name, of_each(field, np.int64).sum())
        unwritten = [text for prepared in self._samples for text in prepared.unwritten]
        differs = of_each("unlike", np.int64).sum(), of_each("changed", np.int64).sum()
        tokens = self._tokens_of(unwritten, skip_slow=True)
        for name, number in zip(AS_RENDERED, (*differs, len(unwritten), tokens), strict=True):
            self._count(name, number)
        self._count_apart(trained, ends, segments, records)
        separators = of_each("separator", bool)
        # Whether another sample of the conversation, or of the same answer, follows.
        is_earlier = np.append(~is_first[1:], False) & ~of_each("ends_answer", bool)
        in_rounds = is_earlier & ~of_each("in_last_round", bool)
        is_last = np.append(False, is_earlier[:-1]) & ~is_earlier
        lengths, is_long = np.diff(offsets) - separators, is_last & of_each("long_round", bool)
        shared = shared_tokens(values, offsets, ~is_first)
        counted = (is_earlier, lengths[is_earlier], in_rounds, lengths[in_rounds], is_long, shared)
        for name, each in zip(PRICE, counted, strict=True):
            self._count(name, each.sum())
        self._count("tokens", len(values) - np.count_nonzero(separators))
        columns = [
            to_arrow(records),
            to_arrow(np.array([prepared.digest for prepared in self._samples], np.uint64)),
            to_arrow(np.array([prepared.prompt for prepared in self._samples], np.uint64)),
            to_arrow(of_each("turns", np.int32)),
            to_arrow(of_each("turn", np.int32)),
            to_arrow(counts.astype(np.int32)),
            to_arrow(separators),
            to_arrow(shared),
            pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values)),
        ]
        if "weights" in schema.names:
            columns += self._weights(ends, segments)
        elif "text" in schema.names:
            rows = [prepared.row for prepared in self._samples if prepared.row]
            columns += [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
        if "group" in schema.names:
            lacks = np.array([prepared.group is None for prepared in self._samples])
            self._count("without_key", np.count_nonzero(is_first & lacks))
            groups = [each.digest if each.group is None else each.group for each in self._samples]
            columns += [to_arrow(np.array(groups, np.uint64))]
        return pa.record_batch(columns, schema=schema)

    def _count(self, name: str, number: Any) -> None:
        if number:
            self._receipt[name] = self._receipt.get(name, 0) + int(number)

    def _count_reasoning(self) -> None:
        """Count the answers whose reasoning is left out, and its tokens."""
        held = [(n, texts) for n, prepared in enumerate(self._samples) for texts in prepared.reasoning]
        answers, tokens = REASONING
        self._count(answers, len(held))
        try:
            self._count(tokens, self._tokens_of([text for _, of_answer in held for text in of_answer]))
        except TooSlow as error:
            n = next(n for n, of_answer in held if error.text in of_answer)
            raise DataError(error.reason, f"{self._place_of(self.records[n])}: {error}") from None

    def _count_unknown_markers(self) -> None:
        """Count the conversations with each marker that the tokenizer lacks."""
        by_record: dict[int, list[Prepared]] = {}
        for record, prepared in zip(self.records, self._samples, strict=True):
            by_record.setdefault(record, []).append(prepared)
        counts = Counter(marker for samples in by_record.values() for marker in unknown_markers_in(samples))
        if counts:
            counts.update(self._receipt.get("unknown_markers", {}))
            self._receipt["unknown_markers"] = dict(sorted(counts.items()))

    def _count_apart(self, trained: np.ndarray, ends: np.ndarray, segments: np.ndarray, records: np.ndarray) -> None:
        """Count what `turns: apart` would add.

        Each run of trained tokens is a turn, and the tokens before it are its prompt. `trained` has one value per
        segment, `ends` are the offsets of segments in the tokens, and `segments` are the offsets of samples in the
        segments.
        """
        begins = np.zeros(len(trained) + 1, bool)  # where a sample begins
        begins[segments] = True
        first = np.flatnonzero(trained & (begins[:-1] | ~np.append(False, trained[:-1])))
        last = np.flatnonzero(trained & (begins[1:] | ~np.append(trained[1:], False))) + 1
        sample = np.searchsorted(segments, first, side="right") - 1
        prompt, length = (ends[places] - ends[segments[sample]] for places in (first, last))
        is_added = sample[1:] == sample[:-1]  # the last run of a sample ends it
        is_later = records[sample[1:]] == records[sample[:-1]]
        samples, tokens, repeated = APART
        self._count(samples, np.count_nonzero(is_added))
        self._count(tokens, length[:-1][is_added].sum())
        self._count(repeated, np.minimum(prompt[1:], length[:-1])[is_later].sum())

    def _tokens_of(self, texts: Sequence[str], skip_slow: bool = False) -> int:
        """Return the number of tokens of texts that no sample has.

        Those that cannot be encoded are left out. Raises TooSlow unless such texts are left out, too.
        """
        while texts:
            try:
                return len(self._encoder.encode(texts).ids)
            except Unencodable as error:
                left_out: Collection[str] = error.problems
            except TooSlow as error:
                if not skip_slow:
                    raise
                left_out = (error.text,)
            texts = [text for text in texts if text not in left_out]
        return 0

    def _weights(self, ends: np.ndarray, segments: np.ndarray) -> list[pa.Array]:
        """Return the columns weight_ends and weights; arguments as of `_count_apart`."""
        counts = np.array([len(prepared.weights) for prepared in self._samples])
        runs = [run for prepared in self._samples for run in prepared.weights]
        # Each run ends where the next run of its sample starts, or where its sample ends.
        starts = np.array([segment for segment, _ in runs]) + np.repeat(segments[:-1], counts)
        stops = np.append(starts[1:], 0)
        stops[offsets_of(counts)[1:] - 1] = segments[1:]
        tokens = (ends[stops] - ends[np.repeat(segments[:-1], counts)]).astype(np.int32)
        offsets = to_arrow(offsets_of(counts).astype(np.int32))
        weights = np.array([weight for _, weight in runs], np.float32)
        return [pa.ListArray.from_arrays(offsets, to_arrow(column)) for column in (tokens, weights)]

    def _reject(self, error: Unencodable) -> None:
        """Remove the conversations with texts that cannot be encoded."""
        problems: dict[int, str] = {}  # by record: all samples of a conversation are removed
        for record, prepared in zip(self.records, self._samples, strict=True):
            for text in prepared.texts:
                if problem := error.problems.get(text):
                    problems.setdefault(record, problem)
        self.rejects += [(record, Reject(error.reason, problem)) for record, problem in problems.items()]
        kept = [n for n, record in enumerate(self.records) if record not in problems]
        self.records = [self.records[n] for n in kept]
        self._samples = [self._samples[n] for n in kept]

    def _notice(
        self, encoded: Encoded, texts: Texts, is_first: np.ndarray, has_all: np.ndarray, offsets: np.ndarray
    ) -> None:
        """Count the cases that a user may want to know of.

        `is_first` marks the first sample of each conversation, and `has_all` the samples whose texts have all strings
        of the conversation. `offsets` are the offsets of the samples in `texts`.
        """
        encoder = self._encoder

        def samples_of(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
            return np.searchsorted(offsets, numbers, "right") - 1

        if encoder.unk_id is not None:
            self._count("unknown_tokens", np.count_nonzero(encoded.ids == encoder.unk_id))
        if encoder.underline_is_space:
            self._count("not_round_trip", len({self.records[n] for n in samples_of(texts.with_underline).tolist()}))
        # Only the strings of the conversation count, because a marker that the template writes as text is intended. All
        # samples of a conversation have its strings.
        others = np.flatnonzero(is_first & ~has_all).tolist()
        held = {others[n] for n in encoder.holding([SEPARATOR.join(self._samples[n].strings) for n in others])}
        if has_all.any():
            samples = samples_of(encoder.holding(texts))
            held |= set(samples[has_all[samples]].tolist())
        self._count(
            "control_text_seen", sum(any(map(encoder.control_pattern.search, self._samples[n].strings)) for n in held)
        )
        if encoder.content_tokens:
            places = encoder.places_of_content_tokens(encoded.ids)
            which = np.unique(samples_of(encoded.texts_at(places))).tolist()
            # By record: each sample has all strings of its conversation, but its text may contain only some of them.
            samples_by_record: dict[int, list[Prepared]] = {self.records[n]: [] for n in which}
            for record, prepared in zip(self.records, self._samples, strict=True):
                if record in samples_by_record:
                    samples_by_record[record].append(prepared)
            if counts := count_content_tokens(encoder, samples_by_record.values()):
                self._receipt["content_tokens"] = merged([self._receipt.get("content_tokens", {}), counts])


def _labelled(
    encoded: Encoded, tokens: np.ndarray, trained: np.ndarray, segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens as a token file stores them, and offsets.

    The results are the tokens, the offsets of the samples, their numbers of trained tokens, and the offsets of the
    segments. The arguments are those of `_count_apart`.
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


# -- counts of all parts ------------------------------------------------------------------------------------------


def noticed_in(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the counts of noticed cases in receipts.

    `content_tokens`, `unknown_markers`, and the counts of SELDOM and ANSWERS are left out if there are none.
    """
    counts = merged(receipt.get("content_tokens", {}) for receipt in receipts)
    sums = {name: sum(receipt[name] for receipt in receipts) for name in NOTICED}
    sums |= counts_in(receipts, (*SELDOM, *ANSWERS))
    markers = {marker: {"conversations": count} for marker, count in unknown_markers_of(receipts).items()}
    return sums | ({"content_tokens": counts} if counts else {}) | ({"unknown_markers": markers} if markers else {})


def unknown_markers_of(receipts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of conversations with each marker that the tokenizer lacks."""
    sums: Counter[str] = Counter()
    for receipt in receipts:
        sums.update(receipt.get("unknown_markers", {}))
    return dict(sorted(sums.items()))


def counts_in(receipts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, int]:
    """Add up counts that not every receipt has, and leave out those that are 0."""
    sums = {name: sum(receipt.get(name, 0) for receipt in receipts) for name in names}
    return {name: count for name, count in sums.items() if count}
