"""Compare the tokenizer of a corpus with that of a model.

    files of a corpus's tokenizer ─┐
                                   ├─differences─▶ [] if every text becomes the same tokens, else the differences
    files of a model's tokenizer ──┘

    texts of the rows ─┬─ tokenizer of the corpus ─▶ ids ─┐
                       └─ AutoTokenizer ───────────▶ ids ─┴─▶ the first difference

The files are compared in the parts that decide which tokens a text becomes: vocabulary, merges or scores, added
tokens, normalizer, pre-tokenizer, settings of the model, and the names of BOS and EOS. Chat template, padding,
truncation, decoder, and the layout of the files do not matter, so a tokenizer stays equal if a library saves it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import orjson

from tasks.core.errors import DataError
from tasks.core.printable import shown
from tasks.encoders.auto_tokenizer import Comparison, compare, texts_in
from tasks.encoders.encoder import token_name
from tasks.encoders.native import read_spec, tokenizer_of
from tasks.encoders.sentencepiece_encoder import read_model
from tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer_files, forget_loaded, load_as_of, open_found
from tasks.storage.manifest import Manifest
from tasks.storage.shards import open_shard

# Parts of a tokenizer by their names in messages: tables with an entry per token, or single values.
Parts = dict[str, Any]

ROWS = 64  # rows to take texts from

_SINGLE = ("normalizer", "pre-tokenizer")


def differences(corpus: TokenizerFiles, model: TokenizerFiles, compare_eos: bool = True) -> list[str]:
    """Describe each part that differs, with its first difference.

    Returns [] if the tokenizers are equal. The names of BOS and EOS are compared if the settings of both tokenizers
    have them. Raises DataError with the name of the file if a tokenizer cannot be read.
    """
    if _is_json(corpus) != _is_json(model):
        made, used = map(_kind, (corpus, model))
        return [f"the corpus has {made}, but the model has {used}, and a conversion may change tokens"]
    ours, theirs = _read(corpus), _read(model)
    found = [_named(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]
    mine, yours = corpus.settings(), model.settings()
    for key in ("bos_token", "eos_token") if compare_eos else ("bos_token",):
        one, other = token_name(mine.get(key)), token_name(yours.get(key))
        if one and other and one != other:
            found.append(f"{key} ({shown(one)} in the corpus, {shown(other)} in the model)")
    return found


def _is_json(files: TokenizerFiles) -> bool:
    """Return whether a tokenizer is, or becomes, a tokenizer.json."""
    return files.like_transformers or files.main.suffix == ".json"


def _kind(files: TokenizerFiles) -> str:
    if files.main.suffix == ".json":
        return "a tokenizer.json"
    return "a SentencePiece model" + " that AutoTokenizer converts" * files.like_transformers


def _read(files: TokenizerFiles) -> Parts:
    if not _is_json(files):
        return _read_sentencepiece(files.main)
    if not files.like_transformers:
        return _read_json(files.main, read_spec(files.main))
    try:
        return _read_json(files.main, files.loaded().spec)
    finally:
        forget_loaded()


def _read_json(path: Path, spec: Mapping[str, Any]) -> Parts:
    """Return the parts of a tokenizer.json, which was read from the file at `path`.

    The library reads and writes it, so the version that wrote the file does not matter.
    """
    spec = orjson.loads(tokenizer_of(spec, path).to_str())
    model = spec["model"]
    vocabulary = model.pop("vocab")
    # The vocabulary of a Unigram model is a list of pieces with scores.
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
    return {
        "vocabulary": pieces,
        "scores": {} if isinstance(vocabulary, dict) else dict(vocabulary),
        "merges": model.pop("merges", []),
        "added tokens": {token.pop("content"): token for token in spec["added_tokens"]},
        "normalizer": spec["normalizer"],
        "pre-tokenizer": spec["pre_tokenizer"],
        "model settings": model,
    }


def _read_sentencepiece(path: Path) -> Parts:
    """Return the parts of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    read = read_model(path)
    pieces = [(piece.piece, piece.score, piece.type) for piece in read.pieces]
    trainer, normalizer = read.trainer_spec, read.normalizer_spec
    settings = ("model_type", "byte_fallback", "treat_whitespace_as_suffix", "unk_piece", "bos_piece", "eos_piece")
    rules = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    return {
        "vocabulary": {piece: number for number, (piece, _, _) in enumerate(pieces)},
        "scores": {piece: score for piece, score, _ in pieces},
        "types of pieces": {piece: proto.ModelProto.SentencePiece.Type.Name(kind) for piece, _, kind in pieces},
        "normalizer": {rule: getattr(normalizer, rule) for rule in rules},
        "model settings": {name: getattr(trainer, name) for name in settings},
    }


def _named(name: str, ours: Any, theirs: Any) -> str:
    """Describe a part that differs, with its first difference.

    A part that is a single value is only named.
    """
    if name in _SINGLE:
        return name
    pairs = list(_pairs(ours, theirs))
    key, one, other = pairs[0]
    more = f", and {len(pairs) - 1:,} more" if len(pairs) > 1 else ""
    return f"{name} ({key}: {_value(one)} in the corpus, {_value(other)} in the model{more})"


def _pairs(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of two tables that differ, in the order of the first table."""
    if isinstance(ours, Mapping):
        for key in dict.fromkeys((*ours, *theirs)):
            one, other = ours.get(key), theirs.get(key)
            if one != other:
                yield shown(key), one, other
        return
    for number, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            yield f"number {number:,}", one, other


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):  # an added token: its id and the flags that are set
        flags = [name for name, flag in value.items() if flag is True]
        return " ".join([str(value.get("id")), *flags])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return shown(" ".join(map(str, value)))
    return shown(value) if isinstance(value, str) else str(value)


# -- texts of the rows -------------------------------------------------------------------------------------------


def compare_rows(manifest: Manifest, corpus: Path, tokenizer: Path) -> Comparison:
    """Compare the tokenizer of a corpus folder with AutoTokenizer of a folder.

    Nothing is compared if the corpus has no tokens. Raises the errors of find_tokenizer_files and open_shard.
    """
    shard = next((shard for split in manifest.splits.values() for shard in split.shards if shard.rows), None)
    if shard is None or not manifest.packing_metadata.enabled:
        return Comparison()
    encoder = open_found(manifest, find_tokenizer_files(manifest, corpus))
    with open_shard(manifest, corpus, shard) as batches:
        rows = next(iter(batches)).column("input_ids").slice(0, ROWS).to_pylist()
    return compare(encoder, tokenizer, texts_in(encoder, rows))


def check_rows(manifest: Manifest, corpus: Path, tokenizer: Path) -> str:
    """Return a note about the comparison.

    Raises DataError if a text differs, unless the corpus was made with a single file or with `as: files`: then the note
    says so.
    """
    found = compare_rows(manifest, corpus, tokenizer)
    if found.difference and not is_as_it_is(manifest, corpus):
        raise DataError(
            "other_tokenizer",
            f"{found.difference} ({tokenizer}); pack the corpus with that tokenizer or, if inference uses its file as "
            "it is, with `tokenizer: {path: FOLDER, as: files}`",
        )
    return described(found)


def is_as_it_is(manifest: Manifest, corpus: Path) -> bool:
    """Return whether a corpus uses the file of its tokenizer as it is."""
    return load_as_of(manifest) == "files" or len(find_tokenizer_files(manifest, corpus).files) == 1


def described(found: Comparison) -> str:
    problem = found.difference or found.failure
    return f"tokenizer: {problem}" if problem else f"tokenizer: {found.texts:,} texts have the tokens of AutoTokenizer"
