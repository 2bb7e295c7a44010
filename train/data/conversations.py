"""Tokenize format 2.0 (one conversation per row) for TRL's SFTTrainer.

Tokens and labels are the same as in format 3.0.

    <corpus>/train-….arrow ─digest─▶ messages, tools, text ─rebuild─▶ Conversation ─template─▶ spans
        ─encoder─▶ tokens, with the lengths recorded in index.arrow ─cut─▶ Dataset(input_ids, labels)

    dataset, counts = sft_dataset(corpus, "train")
    SFTTrainer(model, SFTConfig(**SFT_SETTINGS, …), train_dataset=dataset, processing_class=padding_tokenizer(corpus))

SFTTrainer would otherwise render and tokenize with the tokenizer's chat template. It would match control strings in
text that people wrote, and label only the tokens that the template marks. It therefore receives finished tokens and
labels. Its collator keeps the labels and pads them with -100.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer_files, joined_sha256, open_tokenizer
from packcorpus.tasks.packing.pieces import cut_conversation
from packcorpus.tasks.storage.corpus_folder import check_listed
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import IGNORED, TOKENS_SCHEMA
from packcorpus.tasks.storage.shards import open_index, open_shard, shard_schema
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.built_in import BUILT_IN, BuiltIn, built_in_sha256
from packcorpus.tasks.templates.jinja.template import open_jinja
from packcorpus.tasks.templates.sections import sections_of_config
from packcorpus.tasks.templates.spans import Sample, Template, Turns, trained_turns
from packcorpus.tasks.tokenization.samples import prepare_spans
from packcorpus.tasks.tokenization.tokenize_part import COUNTS, Batch
from packcorpus.train.data.corpus import Corpus, Shard, open_corpus

_ROWS = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
_OTHER_VERSIONS = "different versions of packcorpus, tokenizers, or transformers are installed; pack the corpus again"

# Arguments of SFTConfig that turn off its preparation, because the rows are already tokenized and cut.
SFT_SETTINGS: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}


@dataclass(slots=True)
class Counts:
    """Conversation and token counts of a split.

    The EOS that closes a conversation counts as a token. read = rows + dropped; tokens + tokens_truncated +
    tokens_dropped = tokens of the index + truncated, because an additional EOS closes each truncated conversation.
    """

    read: int = 0
    rows: int = 0
    truncated: int = 0  # rows that were cut at sequence_length
    dropped: int = 0  # conversations with no trained token within sequence_length
    tokens: int = 0
    trained: int = 0
    tokens_truncated: int = 0
    tokens_dropped: int = 0


def sft_dataset(given: Corpus | str | os.PathLike[str], split: str = "train") -> tuple[Dataset, Counts]:
    """Return the conversations of a split, in the order of the shards.

    `given` names a corpus of format 2.0 (`packing: false`). The columns are input_ids and labels, lists of int32. A
    conversation longer than sequence_length is cut and closed by an untrained EOS. Raises DataError or InputMissing if
    a shard, the tokenizer, or the template does not match the manifest, or if the number of tokens differs from the
    index.

        dataset, counts = packcorpus.sft_dataset("whole")
        print(len(dataset), counts.trained)
    """
    corpus = given if isinstance(given, Corpus) else open_corpus(given)
    manifest, folder = _manifest(corpus), corpus.folder
    encoder = open_tokenizer(manifest, folder)
    templates = [open_template(manifest, folder, encoder)]
    if manifest.ledger.samples is not None and "turns" not in manifest.config:  # some rows are samples of one turn
        templates.append(open_template(manifest, folder, encoder, "apart"))
    with open_index(manifest, folder, verified=True) as reader:
        index = reader.read_all()
    index = index.filter(pc.equal(index["split"].cast(pa.string()), split)).sort_by("row")  # row of the shard
    counts = Counts()
    batches = []
    for number, shard in enumerate(corpus.splits.get(split, [])):
        sizes = index.filter(pc.equal(index["shard"], number))
        conversations = _tokenize(corpus, shard, manifest, encoder, templates, sizes)
        batches.append(_cut_all(conversations, manifest, encoder, counts))
    table = pa.Table.from_batches(batches, _ROWS) if batches else _ROWS.empty_table()
    return Dataset(table), counts


# -- from a shard to tokens --------------------------------------------------------------------------------------------


def _tokenize(
    corpus: Corpus, shard: Shard, manifest: Manifest, encoder: Encoder, templates: Sequence[Template], sizes: pa.Table
) -> list[np.ndarray]:
    """Return the tokens of the conversations of a shard, encoded as in a token file."""
    # `sizes` are the index rows of the shard, which have the same numbers of tokens.
    path = corpus.folder / shard.path
    with open_shard(manifest, corpus.folder, shard, verified=True) as record_batches:
        rows = pa.Table.from_batches(record_batches, shard_schema(manifest))
    conversations: list[np.ndarray] = []
    trained: list[int] = []
    batch: Batch | None = None
    records = (row for part in rows.to_batches(max_chunksize=1024) for row in part.to_pylist())
    for number, row in enumerate(records):
        batch = batch or Batch(encoder, dict.fromkeys(COUNTS, 0), lambda number: f"{path}: row {number}")
        try:
            conversation, sample = _sample(row, manifest, encoder, templates)
        except Reject as reject:
            text = f"{path}: row {number}: {reject.message}: {_OTHER_VERSIONS}"
            raise DataError("other_versions", text) from None
        batch.add(number, [prepare_spans(conversation, Sample(sample.spans), encoder)])
        if batch.is_full or number + 1 == rows.num_rows:
            encoded, batch = batch.encode(TOKENS_SCHEMA), None
            if encoded is not None:  # otherwise, the counts below reveal missing conversations
                conversations.extend(tokens.values.to_numpy() for tokens in encoded.column("tokens"))
                trained.extend(encoded.column("trained").to_pylist())
    if len(conversations) != len(sizes):
        text = f"{path}: has {len(conversations):,} conversations, but index.arrow lists {len(sizes):,}"
        raise DataError("wrong_count", text)
    expected = zip(sizes["length"].to_pylist(), sizes["trained"].to_pylist(), strict=True)
    for number, (tokens, count, (length, wanted)) in enumerate(zip(conversations, trained, expected, strict=True)):
        if (len(tokens), count) != (length, wanted):
            raise DataError(
                "other_versions",
                f"{path}: row {number} yields {len(tokens):,} tokens, {count:,} of them trained on, but the index "
                f"records {length:,} and {wanted:,}: {_OTHER_VERSIONS}",
            )
    return conversations


def _sample(
    row: dict[str, Any], manifest: Manifest, encoder: Encoder, templates: Sequence[Template]
) -> tuple[Conversation, Sample]:
    """Return the conversation of a row, and the sample that renders to its text."""
    # If a conversation has several samples, the messages of a row end with the turn that is trained on.
    for conversation in _rebuilt(row, manifest, encoder):
        trained = trained_turns(conversation, manifest.train_on)
        for template in templates:
            with suppress(Reject, DataError):  # it may refuse a row that is a sample of one turn
                for sample in template.samples(conversation, trained):
                    if "".join(span.text for span in sample.spans) == row["text"]:
                        return conversation, sample
    raise Reject("other_text", f"template {manifest.template.name} does not render the text of the row")


def _rebuilt(row: dict[str, Any], manifest: Manifest, encoder: Encoder) -> Iterator[Conversation]:
    """Yield candidates for the conversation of a row; one renders to its text."""
    # A row stores the content and the context of a message as one string, but the template `alpaca` renders the context
    # separately, so every position at which the two strings can have been joined is tried. Only the last request of a
    # record has a context.
    if row["messages"] is None:
        bos = encoder.control_strings.get(encoder.bos_id, "") if encoder.adds_bos and encoder.bos_id is not None else ""
        yield read_record({"text": row["text"].removeprefix(bos)}, "text")
        return
    whole = read_record(row, "messages")
    yield whole
    last = max((i for i, message in enumerate(whole.messages) if message.role == "user"), default=None)
    if manifest.template.name != "alpaca" or last is None:
        return
    text = whole.messages[last].content
    joints = [(0, 0), *((at, at + 2) for at in range(len(text)) if text.startswith("\n\n", at))]
    for left, right in joints:
        message = replace(whole.messages[last], content=text[:left], context=text[right:])
        yield replace(whole, messages=(*whole.messages[:last], message, *whole.messages[last + 1 :]))


def _cut_all(
    conversations: Sequence[np.ndarray], manifest: Manifest, encoder: Encoder, counts: Counts
) -> pa.RecordBatch:
    """Cut the conversations of one shard to sequence_length, and count them."""
    kept: list[np.ndarray] = [np.empty(0, np.int32)]
    for conversation in conversations:
        cut = cut_conversation(conversation, manifest.sequence_length, split=False)[0]
        counts.read += 1
        if not cut.trained:
            counts.dropped += 1
            counts.tokens_dropped += len(conversation)
            continue
        if cut.closed:
            counts.truncated += 1
            counts.tokens_truncated += len(conversation) - cut.taken
            conversation = np.append(conversation[: cut.taken], np.int32(~encoder.eos_id))
        kept.append(conversation)
        counts.trained += cut.trained
    flat = np.concatenate(kept)
    counts.rows += len(kept) - 1
    counts.tokens += len(flat)
    ends = pa.array(np.cumsum([len(row) for row in kept]).astype(np.int32))
    ids, labels = flat ^ (flat >> 31), np.where(flat >= 0, flat, np.int32(IGNORED))
    columns = [pa.ListArray.from_arrays(ends, pa.array(column)) for column in (ids, labels)]
    return pa.record_batch(columns, schema=_ROWS)


# -- files next to the shards ------------------------------------------------------------------------------------------


def _manifest(corpus: Corpus) -> Manifest:
    if corpus.manifest is None:
        raise DataError(
            "not_trainable",
            f"{corpus.folder}: format 2.0 needs its manifest, which names the template and the tokenizer; pack the "
            "corpus again",
        )
    return corpus.manifest


def open_template(manifest: Manifest, folder: Path, encoder: Encoder, turns: Turns = "auto") -> Template:
    """Open the template named by the manifest; `turns` replaces `turns: auto`."""
    name, sha256 = manifest.template.name, manifest.template.sha256
    turns = manifest.config.get("turns", turns)
    adjust = Adjust(manifest.config.get("reasoning") == "drop", manifest.config.get("default_system"))
    sections = sections_of_config(manifest.config)
    if name in BUILT_IN:
        if built_in_sha256(name) != sha256:
            raise DataError(
                "other_versions", f"template {name}: differs from the one that made the corpus: {_OTHER_VERSIONS}"
            )
        return BuiltIn(name, encoder, manifest.train_on, turns, adjust, sections)
    listed = manifest.template_files
    if not listed or joined_sha256((file.path, file.sha256) for file in listed) != sha256:
        raise DataError(
            "unreadable_file", f"{folder}: lacks the template.jinja of the manifest; delete the folder and pack again"
        )
    for file in listed:
        check_listed(folder, file)
    sources = [(folder / file.path).read_text(encoding="utf-8") for file in listed]
    today, options = str(manifest.config["template_date"]), manifest.config.get("template_options")
    return open_jinja(name, sources, encoder, manifest.train_on, today, turns, options, adjust, sections)


# -- the tokenizer of SFTTrainer ---------------------------------------------------------------------------------------


class PaddingTokenizer(PreTrainedTokenizerFast):
    """Tokenizer that SFTTrainer uses for padding and saves with every checkpoint.

    It has the special tokens and their IDs, cannot encode text, and saves the files of the corpus's own tokenizer.
    transformers could load these files, but it converts a SentencePiece model to a tokenizer that encodes runs of
    spaces differently, and would save the converted tokenizer.
    """

    files: tuple[Path, ...] = ()

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> tuple[str, ...]:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        return tuple(str(shutil.copyfile(file, Path(save_directory) / file.name)) for file in self.files)


def padding_tokenizer(given: Corpus | str | os.PathLike[str]) -> PaddingTokenizer:
    """Return the `processing_class` for SFTTrainer, for the corpus of `sft_dataset`.

    Raises DataError or InputMissing if the manifest or the tokenizer is missing or does not match.

        tokenizer = packcorpus.padding_tokenizer("whole")
        print(tokenizer.pad_token_id)
    """
    from tokenizers import Tokenizer, models

    corpus = given if isinstance(given, Corpus) else open_corpus(given)
    manifest = _manifest(corpus)
    encoder = open_tokenizer(manifest, corpus.folder)
    ids = {"bos_token": encoder.bos_id, "eos_token": encoder.eos_id, "pad_token": encoder.pad_id}
    named = {name: encoder.control_strings[token] for name, token in ids.items() if token is not None}
    vocabulary = {string: encoder.controls[string] for string in named.values()}
    padding = PaddingTokenizer(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, named["eos_token"])), **named)
    padding.files = find_tokenizer_files(manifest, corpus.folder).files
    return padding
