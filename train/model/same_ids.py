"""Compare the tokenizer of a corpus with AutoTokenizer, on texts of its rows."""

from __future__ import annotations

from pathlib import Path

from tasks.core.errors import DataError
from tasks.encoders.as_transformers.compare import Comparison, compare, texts_in
from tasks.encoders.corpus_tokenizer import find_tokenizer_files, load_as_of, open_found
from tasks.storage.manifest import Manifest
from tasks.storage.shards import open_shard

ROWS = 64  # rows to take texts from


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
