"""Format 2.0, one conversation a row, as TRL's SFTTrainer takes it: tokenised here, by the rules of format 3.0.

    <corpus>/train-….arrow ─digest─▶ messages, tools, text ─rebuild─▶ Conversation ─template─▶ spans
        ─encoder─▶ tokens, equal in number to what index.arrow has ─cut─▶ Dataset(input_ids, labels)

    dataset, counts = sft_dataset(corpus, "train")
    SFTTrainer(model, SFTConfig(**SFT_SETTINGS, …), train_dataset=dataset, processing_class=padding_tokenizer(corpus))

SFTTrainer would render and tokenise by itself, with the tokenizer's own chat template, its matching of control strings
in what people wrote, and labels only where that template marks them. So it is given tokens and labels: those that the
same conversation has in a corpus of format 3.0. Its collator takes labels as they are and pads them with -100.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from tasks.conversations.formats import read_record
from tasks.conversations.model import Conversation
from tasks.core.errors import DataError, Reject
from tasks.encoders.corpus_tokenizer import find_tokenizer_files, open_tokenizer
from tasks.encoders.encoder import Encoder
from tasks.packing.pieces import cut_conversation
from tasks.storage.corpus_folder import check_listed, reading
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import IGNORED, INDEX_SCHEMA, SCHEMA, conversation_schema
from tasks.templates.built_in import BUILT_IN, BuiltIn, built_in_sha256
from tasks.templates.jinja_template import JinjaTemplate
from tasks.templates.spans import Span, Template, trained_turns
from tasks.tokenization.prepare import prepare_spans
from tasks.tokenization.token_batch import COUNTS, Batch
from train.data.corpus import Corpus, Shard, read_verified

# What SFTConfig must be told beside the settings of the run: the rows are tokens already, and cut.
SFT_SETTINGS: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}


@dataclass(slots=True)
class Counts:
    """Where the conversations and tokens of a split went; the EOS that closes a conversation is counted as a token.

    read = rows + dropped; tokens + tokens_truncated + tokens_dropped = those of the index + truncated, since what is
    cut off is closed by an EOS of its own.
    """

    read: int = 0
    rows: int = 0
    truncated: int = 0  # rows, cut off at sequence_length
    dropped: int = 0  # conversations with no trained token within sequence_length
    tokens: int = 0
    trained: int = 0
    tokens_truncated: int = 0
    tokens_dropped: int = 0


def sft_dataset(corpus: Corpus, split: str = "train") -> tuple[Dataset, Counts]:
    """The conversations of a split as input_ids and labels (lists of int32), in the order of the shards.

    A conversation longer than sequence_length is cut as in format 3.0: an untrained EOS closes it. Raises DataError or
    InputMissing where a shard, the tokenizer or the template is not that of the manifest, or gives other tokens.
    """
    manifest, folder = _manifest(corpus), corpus.folder
    encoder = open_tokenizer(manifest, folder)
    template = _open_template(manifest, folder, encoder)
    index = _read_index(corpus, manifest, split)
    counts = Counts()
    batches = []
    for number, shard in enumerate(corpus.splits.get(split, [])):
        sizes = index.filter(pc.equal(index["shard"], number))
        values, offsets = _tokenize(corpus, shard, manifest, encoder, template, sizes)
        batches.append(_cut_all(values, offsets, manifest, encoder, counts))
    table = pa.Table.from_batches(batches, _ROWS) if batches else _ROWS.empty_table()
    return Dataset(table), counts


_ROWS = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


# -- from a shard to tokens --------------------------------------------------------------------------------------------


def _tokenize(
    corpus: Corpus, shard: Shard, manifest: Manifest, encoder: Encoder, template: Template, sizes: pa.Table
) -> tuple[np.ndarray, np.ndarray]:
    """The conversations of a shard as they stand in a token file: int32[tokens] and int64[conversations + 1].

    `sizes` is what the index says of them; they must give as many tokens and trained tokens as when it was written.
    """
    path = corpus.folder / shard.path
    rows = _read_stream(corpus, shard, conversation_schema(manifest.sequence_length, manifest.key))
    values, lengths, trained = [np.empty(0, np.int32)], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for batch in _batches(path, rows, manifest, encoder, template):
        encoded = batch.encode(SCHEMA)
        tokens = encoded.column("tokens")
        values.append(tokens.flatten().to_numpy())
        lengths.append(pc.list_value_length(tokens).to_numpy())
        trained.append(encoded.column("trained").to_numpy())
    found = np.concatenate(lengths), np.concatenate(trained)
    expected = sizes["length"].to_numpy(), sizes["trained"].to_numpy()
    if len(found[0]) != len(expected[0]):
        raise DataError(
            "wrong_count", f"{path}: holds {len(found[0]):,} conversations, index.arrow {len(expected[0]):,}"
        )
    other = np.flatnonzero((found[0] != expected[0]) | (found[1] != expected[1]))
    if other.size:
        row = int(other[0])
        raise DataError(
            "other_versions",
            f"{path}: row {row} gives {found[0][row]:,} tokens, {found[1][row]:,} trained on; {expected[0][row]:,} and "
            f"{expected[1][row]:,} were counted when the corpus was made: {_OTHER_VERSIONS}",
        )
    return np.concatenate(values), np.concatenate([[0], np.cumsum(found[0])])


_OTHER_VERSIONS = "other versions of packcorpus, tokenizers or transformers are installed now; make the corpus again"


def _batches(path: Path, rows: pa.Table, manifest: Manifest, encoder: Encoder, template: Template) -> Iterator[Batch]:
    batch = Batch(encoder, dict.fromkeys(COUNTS, 0))
    number = 0
    for found in rows.to_batches(max_chunksize=1024):
        for row in found.to_pylist():
            try:
                conversation, spans = _spans(row, manifest, encoder, template)
            except Reject as reject:
                raise DataError(
                    "other_versions", f"{path}: row {number}: {reject.message}: {_OTHER_VERSIONS}"
                ) from None
            batch.add(number, prepare_spans(conversation, spans, encoder))
            number += 1
            if batch.is_full:
                yield batch
                batch = Batch(encoder, dict.fromkeys(COUNTS, 0))
    if batch.records:
        yield batch


def _spans(
    row: dict[str, Any], manifest: Manifest, encoder: Encoder, template: Template
) -> tuple[Conversation, list[Span]]:
    """The conversation of a row, and its spans, which must be the text of the row. Raises Reject."""
    for conversation in _rebuilt(row, manifest, encoder):
        spans = template.spans(conversation, trained_turns(conversation, manifest.train_on))
        if "".join(span.text for span in spans) == row["text"]:
            return conversation, spans
    raise Reject("other_text", f"template {manifest.template.name} does not give the text of the row")


def _rebuilt(row: dict[str, Any], manifest: Manifest, encoder: Encoder) -> Iterator[Conversation]:
    """The conversation that a row was made of: the first whose text is that of the row.

    A row has content and context of a message in one. The template alpaca sets the context apart, so there every place
    where the two can have been joined is tried; only the last request of a record has a context.
    """
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
    values: np.ndarray, offsets: np.ndarray, manifest: Manifest, encoder: Encoder, counts: Counts
) -> pa.RecordBatch:
    """Rows of one shard; what is cut off or dropped is counted."""
    kept: list[np.ndarray] = [np.empty(0, np.int32)]
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        conversation = values[start:stop]
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


# -- what lies beside the shards ---------------------------------------------------------------------------------------


def _manifest(corpus: Corpus) -> Manifest:
    if corpus.manifest is None:
        raise DataError(
            "not_trainable",
            f"{corpus.folder}: format 2.0 needs its manifest, which names the template and the tokenizer; "
            "make the corpus again",
        )
    return corpus.manifest


def _read_stream(corpus: Corpus, shard: Shard, schema: pa.Schema) -> pa.Table:
    """An Arrow stream of the corpus, its digest and its schema checked."""
    path = corpus.folder / shard.path
    data = read_verified(corpus, shard)
    with reading(path):
        table = pa.ipc.open_stream(data).read_all()
    if not table.schema.equals(schema, check_metadata=True):
        raise DataError(
            "foreign_shard", f"{path}: belongs to another corpus (its schema or its key differ); make the corpus again"
        )
    return table


def _read_index(corpus: Corpus, manifest: Manifest, split: str) -> pa.Table:
    """What index.arrow says of the conversations of a split, by row within the shard."""
    facts = next((file for file in manifest.files if file.path == "index.arrow"), None)
    if facts is None:
        raise DataError("bad_index", f"{corpus.folder}: its manifest names no index.arrow; make the corpus again")
    index = _read_stream(corpus, Shard(facts.path, 0, facts.bytes, facts.sha256), INDEX_SCHEMA)
    return index.filter(pc.equal(index["split"].cast(pa.string()), split)).sort_by("row")


def _open_template(manifest: Manifest, folder: Path, encoder: Encoder) -> Template:
    """The template that the manifest names. Raises DataError or InputMissing where it is not to be had as it was."""
    name, sha256 = manifest.template.name, manifest.template.sha256
    if name in BUILT_IN:
        if built_in_sha256(name) != sha256:
            raise DataError(
                "other_versions", f"template {name}: is another than the corpus was made with: {_OTHER_VERSIONS}"
            )
        return BuiltIn(name, encoder, manifest.train_on)
    listed = next((file for file in manifest.files if file.path == "template.jinja"), None)
    if listed is None or listed.sha256 != sha256:
        raise DataError(
            "unreadable_file", f"{folder}: has no template.jinja of the manifest; delete the folder and pack again"
        )
    check_listed(folder, listed)
    source = (folder / listed.path).read_text(encoding="utf-8")
    return JinjaTemplate(name, source, encoder, manifest.train_on, str(manifest.config["template_date"]))


# -- what SFTTrainer asks for ------------------------------------------------------------------------------------------


class PaddingTokenizer(PreTrainedTokenizerFast):
    """What SFTTrainer takes for a tokenizer: it pads with it, and saves it beside every checkpoint.

    It knows the special tokens and their ids, encodes nothing, and saves the files of the corpus's own tokenizer.
    transformers could load these files, but reads a SentencePiece model as one that gives other tokens for runs of
    spaces, and would save that.
    """

    files: tuple[Path, ...] = ()

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> tuple[str, ...]:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        return tuple(str(shutil.copy(file, save_directory)) for file in self.files)


def padding_tokenizer(corpus: Corpus) -> PaddingTokenizer:
    """The `processing_class` for SFTTrainer. Raises DataError or InputMissing as `sft_dataset` does."""
    from tokenizers import Tokenizer, models

    manifest = _manifest(corpus)
    encoder = open_tokenizer(manifest, corpus.folder)
    ids = {"bos_token": encoder.bos_id, "eos_token": encoder.eos_id, "pad_token": encoder.pad_id}
    named = {name: encoder.control_strings[token] for name, token in ids.items() if token is not None}
    vocabulary = {string: encoder.controls[string] for string in named.values()}
    found = PaddingTokenizer(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, named["eos_token"])), **named)
    found.files = find_tokenizer_files(manifest, corpus.folder).files
    return found
