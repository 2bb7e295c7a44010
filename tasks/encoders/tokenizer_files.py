"""Find the files of a tokenizer and open its encoder."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.core.printable import closest
from packcorpus.tasks.encoders.auto_classes import NAMES, VERSION, Settings
from packcorpus.tasks.encoders.auto_tokenizer import Loaded, find_class, load
from packcorpus.tasks.encoders.encoder import Encoder, token_name
from packcorpus.tasks.encoders.huggingface_encoder import HuggingFaceEncoder
from packcorpus.tasks.encoders.sentencepiece_encoder import SentencePieceEncoder
from packcorpus.tasks.storage.corpus_folder import check_listed, find_listed
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.stores.urls import is_url, model_named, without_secrets

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip

# Further files of a tokenizer's folder, which decide how AutoTokenizer loads some tokenizers.
DECIDING = ("added_tokens.json", "config.json")

# Begins the digest of a tokenizer that AutoTokenizer loads unlike its file.
_LIKE = "transformers-"

# The folder of a tokenizer with further chat templates, as files NAME.jinja.
MORE_TEMPLATES = "additional_chat_templates"


# What is fetched of a tokenizer on the Hub, and patterns for a command line that cover it.
FETCHED = (*TOKENIZER_FILES, *DECIDING, "*.model", f"{MORE_TEMPLATES}/*.jinja")
DOWNLOADED = ("*.json", "*.jinja", "*.model")

EXPECTED = "expected a tokenizer.json, a SentencePiece .model, a folder with one, or a name on the Hub"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer.

    `main` is a .model file or a tokenizer.json. `files` are all files, including `main`. `templates` are further chat
    templates, which do not change how the tokenizer encodes. If `like_transformers`, the tokenizer is loaded like
    AutoTokenizer loads it.
    """

    main: Path
    files: tuple[Path, ...]
    templates: tuple[Path, ...] = ()
    like_transformers: bool = False

    def sha256(self) -> str:
        return joined_sha256((file.name, sha256_of(file)) for file in self.files)

    def digest(self) -> str:
        """Return the digest of all that decides how the tokenizer encodes."""
        sha256 = self.sha256()
        return f"{_LIKE}{VERSION}:{sha256}" if self.like_transformers and _differs(self, sha256) else sha256

    def loaded(self) -> Loaded:
        """Load the tokenizer like AutoTokenizer.

        The result is kept until `forget_loaded`, because the digest needs it, too. Raises UsageError if its class has
        no rule, and DataError if a file is damaged.
        """
        stats = [file.stat() for file in self.files]
        return _load_once(self, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))

    def _deciding(self) -> Settings:
        names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
        return Settings(*map(self._loaded, names))

    def digests(self) -> frozenset[str]:
        """Return the digests that name it: of all files, as in a manifest, and of main."""
        return frozenset((self.sha256(), sha256_of(self.main)))

    def settings(self) -> dict[str, Any]:
        """Merge tokenizer_config.json over special_tokens_map.json; {} if neither exists."""
        return self._loaded("special_tokens_map.json") | self._loaded("tokenizer_config.json")

    def named_tokens(self) -> dict[str, str]:
        """Return the special tokens that the settings name, by their names.

        Like transformers, special_tokens_map.json replaces names of a tokenizer_config.json without added tokens.
        """
        config, named = self._loaded("tokenizer_config.json"), self._loaded("special_tokens_map.json")
        # Other names are in `extra_special_tokens`, or end with `_token`.
        values = config if "added_tokens_decoder" in config else config | named
        found = {name: value for name, value in values.items() if name in NAMES or name.endswith("_token")}
        for more in ("model_specific_special_tokens", "extra_special_tokens"):
            for settings in (config, values):
                if isinstance(settings.get(more), dict):
                    found |= settings[more]
        return {name: token for name, value in found.items() if (token := token_name(value)) is not None}

    def chat_templates(self) -> dict[str, str]:
        """Return the tokenizer's chat templates by name.

        The only template is `default`. Like in transformers, files replace all templates of the settings.
        """
        named = [("default", file) for file in self.files if file.name == "chat_template.jinja"]
        named += [(file.name.removesuffix(".jinja"), file) for file in self.templates]
        sources = {}
        for name, file in named:
            try:
                sources[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DataError("bad_tokenizer", f"{file}: not valid UTF-8: {error}") from None
        if sources:
            return sources
        setting = self.settings().get("chat_template")
        listed = setting if isinstance(setting, list) else [{"name": "default", "template": setting}]
        pairs = [(item.get("name"), item.get("template")) for item in listed if isinstance(item, dict)]
        return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}

    def chat_template(self) -> str | None:
        """Return the tokenizer's default chat template, or None."""
        return self.chat_templates().get("default")

    def _loaded(self, name: str) -> dict[str, Any]:
        for file in self.files:
            if file.name == name:
                try:
                    loaded = orjson.loads(file.read_bytes())
                except orjson.JSONDecodeError as error:
                    raise DataError("bad_tokenizer", f"{file}: not valid JSON: {error}") from None
                return loaded if isinstance(loaded, dict) else {}
        return {}


@lru_cache(maxsize=1)
def _load_once(files: TokenizerFiles, _: tuple[tuple[int, int], ...]) -> Loaded:
    return load(files.main, files._deciding())


def forget_loaded() -> None:
    """Free the memory of the tokenizer that was loaded last."""
    _load_once.cache_clear()


@lru_cache(maxsize=16)
def _differs(files: TokenizerFiles, sha256: str) -> bool:
    """Return whether AutoTokenizer encodes unlike the main file."""
    try:
        return files.loaded().differs
    except DataError:  # open_encoder reports a damaged file
        return False


def joined_sha256(files: Iterable[tuple[str, str]]) -> str:
    """Return the checksum of files, given as (name, checksum); one is unchanged."""
    named = list(files)
    return named[0][1] if len(named) == 1 else hashlib.sha256(orjson.dumps(named)).hexdigest()


def is_like_transformers(digest: str) -> bool:
    """Return whether the digest is of a tokenizer that AutoTokenizer changes."""
    return digest.startswith(_LIKE)


def locate_tokenizer(named: str, path: Path, commit: str = "") -> tuple[Path, str]:
    """Return the path of a tokenizer and its commit on the Hub, or "" for a local one.

    `path` is the path that the name is, if it is one; a path that exists takes precedence. The files of a tokenizer on
    the Hub are in the cache of the Hub, all of one commit: `commit`, or else the current one of the revision. Raises
    InputMissing if neither can be found, and UsageError for a URL of another kind.
    """
    if os.path.exists(path) and not commit:
        return path, ""
    model = model_named(named)
    if model is None:
        if is_url(named):
            model = model_named(re.sub("^https://huggingface.co/|/tree/main|/$", "", named))
            hint = f"; did you mean {model.name}?" if model else ""
            problem = f"a tokenizer is a path or a name on the Hub, such as Qwen/Qwen3-8B{hint}"
            raise UsageError("url_not_supported", f"{without_secrets(named)}: {problem}")
        raise InputMissing("tokenizer_missing", f"{path}: no such tokenizer{similar_beside(path)}; {EXPECTED}")
    from packcorpus.tasks.stores.hub import fetch_model

    here = (
        ""
        if named.startswith("hf://")
        else f"no such file or folder ({path}){similar_beside(path)}; as a name on the Hub: "
    )
    download = f"run: {model.download_command(DOWNLOADED)}"
    try:
        folder = fetch_model(model, FETCHED, commit)
    except PackError as error:
        if error.reason == "disk_failed":
            raise
        problem = str(error).removeprefix(f"{model.name}: ").removesuffix("; run again")
        if error.reason == "store_denied":
            problem += f"; then {download}"
        elif error.reason != "object_missing":
            problem += f"; the cache (HF_HOME) does not have it; where the Hub can be reached, {download}"
        raise InputMissing("tokenizer_missing", f"{named}: {here}{problem}") from None
    if not any(folder.glob("tokenizer.json")) and not any(folder.glob("*.model")):
        problem = f"{folder} has no tokenizer.json or .model file; if the model has one, {download}"
        raise InputMissing("tokenizer_missing", f"{named}: {here}{problem}")
    return folder, folder.name


def similar_beside(path: Path) -> str:
    """Return "; did you mean X?" for a folder or a model beside a path, or ""."""
    with suppress(OSError):
        found = {
            Path(entry.name).stem: entry.name for entry in os.scandir(path.parent) if entry.name.endswith(".model")
        }
        found |= {entry.name: entry.name for entry in os.scandir(path.parent) if entry.is_dir()}
        if close := closest(path.name.removesuffix(".model"), found):
            return f"; did you mean {found[close[0]]}?"
    return ""


def find_tokenizer(path: Path, load_as: str = "transformers") -> TokenizerFiles:
    """Find the files of the tokenizer at `path`.

    With `load_as` "files", a folder is not loaded like AutoTokenizer. A single file, and a .model file without
    tokenizer_config.json, never are. Raises InputMissing if there is no tokenizer, DataError if the file is empty, and
    UsageError if the file has an unknown extension.
    """
    if os.path.isdir(path):  # not path.is_dir(), which raises if a name is too long
        models = sorted(found.name for found in path.glob("*.model") if found.is_file())
        only = models[0] if len(models) == 1 else "tokenizer.model"
        files = tuple(path / name for name in dict.fromkeys((*TOKENIZER_FILES, only)) if (path / name).is_file())
        for name in ("tokenizer.json", only):
            if path / name in files:
                kept = tuple(f for f in files if f.suffix != ".model" or f.name == name)
                found = TokenizerFiles(path / name, kept, tuple(sorted(path.glob(f"{MORE_TEMPLATES}/*.jinja"))))
                return found if load_as == "files" else _like_transformers(found)
        several = f"; specify one of {', '.join(models)}" if models else ""
        raise InputMissing("tokenizer_missing", f"{path}: contains no tokenizer.json or tokenizer.model{several}")
    if not os.path.isfile(path):
        raise InputMissing("tokenizer_missing", f"{path}: no such tokenizer{similar_beside(path)}; {EXPECTED}")
    if path.stat().st_size == 0:
        raise DataError("bad_tokenizer", f"{path}: empty file; expected a tokenizer")
    if path.suffix not in (".model", ".json"):
        raise UsageError(
            "unknown_tokenizer", f"{path}: not a .model or .json file; specify a tokenizer.json by its folder or file"
        )
    return TokenizerFiles(path, (path,))


def _like_transformers(files: TokenizerFiles) -> TokenizerFiles:
    """Return the files that AutoTokenizer loads, with the files that decide how."""
    folder, main = files.main.parent, files.main
    config = files._loaded("tokenizer_config.json")
    if main.suffix == ".model" and (main.name != "tokenizer.model" or not config):
        return files
    more = [folder / name for name in DECIDING if (folder / name).is_file()]
    whole = replace(files, files=(*files.files, *more), like_transformers=True)
    decide = {"added_tokens.json": "added_tokens_decoder" not in config}
    settings = whole._deciding()
    decide["config.json"] = find_class(main, settings) != find_class(main, settings._replace(model={}))
    return replace(whole, files=tuple(file for file in whole.files if decide.get(file.name, True)))


def open_encoder(
    files: TokenizerFiles,
    eos_token: str | None = None,
    pad_token: str | None = None,
    content_tokens: Sequence[str] = (),
) -> Encoder:
    """Load the reference encoder of a tokenizer.

    `content_tokens` changes which added tokens a text may become. Raises DataError or UsageError.
    """
    settings, named = files.settings(), files.named_tokens()
    spec = None
    encoder: Encoder
    if files.like_transformers:
        spec, named, _ = files.loaded()
        forget_loaded()  # the encoder changes it
        settings |= named
    if files.main.suffix == ".json" or spec:
        encoder = HuggingFaceEncoder(files.main, settings, eos_token, pad_token, content_tokens, spec)
    else:
        encoder = SentencePieceEncoder(
            files.main,
            eos_token or token_name(settings.get("eos_token")),
            pad_token or token_name(settings.get("pad_token")),
            content_tokens,
        )
    encoder.digests = files.digests
    encoder.named_tokens = named
    return encoder


# -- in a corpus ----------------------------------------------------------------------------------------------------


def find_tokenizer_files(manifest: Manifest, folder: Path) -> TokenizerFiles:
    """Find the corpus's copy of its tokenizer, and verify its checksums."""
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
    """Open the tokenizer in a corpus folder."""
    return open_found(manifest, find_tokenizer_files(manifest, folder))


def open_found(manifest: Manifest, files: TokenizerFiles) -> Encoder:
    """Open the tokenizer whose files find_tokenizer_files has found."""
    config = manifest.config
    return open_encoder(files, config.get("eos_token"), config.get("pad_token"), config.get("content_tokens") or ())
