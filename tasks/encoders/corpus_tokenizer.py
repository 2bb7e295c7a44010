"""Open the tokenizer that a corpus folder contains."""

from __future__ import annotations

from pathlib import Path

from tasks.core.errors import DataError
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import TokenizerFiles, is_like_transformers, open_encoder
from tasks.storage.corpus_folder import check_listed, find_listed
from tasks.storage.manifest import Manifest


def find_tokenizer_files(manifest: Manifest, folder: Path) -> TokenizerFiles:
    """Find the corpus's copy of its tokenizer, and verify its checksums.

    Raises DataError or InputMissing with the name of the file.
    """
    listed = [file for file in manifest.files if file.path.startswith("tokenizer/")]
    files = tuple(find_listed(folder, file.path, file.bytes) for file in listed)
    for file in listed:
        check_listed(folder, file)
    main = folder / manifest.tokenizer.path
    if main not in files:
        raise DataError("unreadable_file", f"{main}: the manifest does not list this tokenizer")
    return TokenizerFiles(main, files, like_transformers=is_like_transformers(manifest.tokenizer.digest))


def load_as_of(manifest: Manifest) -> str:
    """Return how the config of a corpus loads a tokenizer, as in find_tokenizer."""
    named = manifest.config.get("tokenizer")
    return str(named["as"]) if isinstance(named, dict) else "transformers"


def open_tokenizer(manifest: Manifest, folder: Path) -> Encoder:
    """Open the tokenizer in a corpus folder.

    Raises the errors of find_tokenizer_files and open_encoder.
    """
    return open_found(manifest, find_tokenizer_files(manifest, folder))


def open_found(manifest: Manifest, files: TokenizerFiles) -> Encoder:
    """Open the tokenizer whose files find_tokenizer_files has found."""
    config = manifest.config
    return open_encoder(files, config.get("eos_token"), config.get("pad_token"), config.get("content_tokens") or ())
