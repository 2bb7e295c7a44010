"""A config with its files found, hashed, and cut into parts.

    config file ─resolve─▶ Recipe(config, parts, keys, number of shards)

The graph is built from a recipe alone. A recipe depends only on the config and on the bytes of the sources, so every
process of a run, on any machine, builds the same graph. This module reads the sources to compute their digests, unless
an earlier run has cached the digests (sources/digests.py). The steps that tokenize the sources read them
again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from packcorpus.tasks.config import Config, load_config, path_in
from packcorpus.tasks.conversations.tokens import TOKENIZER, TOKENS, other_tokenizer
from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.core.printable import named_at, suggest
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import (
    TokenizerFiles,
    find_tokenizer,
    joined_sha256,
    locate_tokenizer,
    open_encoder,
)
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.evaluation_files import find_evaluation_files
from packcorpus.tasks.sources.model import Part, SourceFile, found_layouts
from packcorpus.tasks.sources.parts import find_parts
from packcorpus.tasks.sources.unpack import may_be_far, packed
from packcorpus.tasks.storage.files import has_artifact
from packcorpus.tasks.storage.keys import VERSIONS, corpus_key, key_of, sha256_in
from packcorpus.tasks.storage.layout import TEMPLATE, TOOL_TEMPLATE, Layout, kind_of
from packcorpus.tasks.stores.urls import root_of, sent_root
from packcorpus.tasks.templates.adjust import Adjust, knows_developer
from packcorpus.tasks.templates.built_in import BUILT_IN, MARKERS, BuiltIn, built_in_sha256
from packcorpus.tasks.templates.sections import Sections
from packcorpus.tasks.templates.spans import Template, TrainOn, Turns

# About 100 MB per shard. A task costs 60 ms in addition to its work (fork, page faults, Luigi, syncs), so a corpus of
# 250 MB takes a tenth longer with shards of 25 MB. A smaller corpus has two shards, so that two workers can write it.
SOURCE_BYTES_PER_SHARD = 32 << 20


# The value of `template` for the tokenizer's own chat template; `tokenizer:NAME` chooses one of several.
OF_TOKENIZER = "tokenizer"

MOST_SHARDS = 256  # each shard reads a little of everything


MOST_SHARDS_OF_EPOCHS = 768  # limit for all epochs together


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything that the graph of a run is built from.

    `files` are in the order of the config, and `parts` are in the order of the files. Another process receives neither,
    but everything that was derived from them. `commit` is that of a tokenizer on the Hub, if it was chosen before.
    `evaluation` are the files of evaluation sets.
    """

    config: Config
    folder: Path
    layout: Layout
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]
    commit: str = ""
    evaluation: tuple[SourceFile, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._sent,)

    @cached_property
    def _sent(self) -> bytes:  # a few KB for any number of sources
        config = self.config.model_copy(update={"sources": []})
        derived = {name: getattr(self, name) for name in ("tokenizer_key", "texts_key", "corpus_key", "plan_key")}
        derived |= {"shards": self.shards, "special": self.special, "evaluation": self.evaluation}
        return pickle.dumps(
            (config, self.folder.absolute(), sent_root(self.layout.root), self.tokenizer_commit, derived)
        )

    # Tokenizer

    @cached_property
    def tokenizer_key(self) -> str | None:
        """Return the key of the tokenizer that this run trains."""
        if self.config.tokenizer is not None:
            return None
        import sentencepiece

        content = self.config.in_key("tokenizer") | {
            "sources": [self._content(file) for file in self.files],
            "control_symbols": MARKERS.get(self.config.template, ()),
            # Releases may train different vocabularies from the same text.
            "trainer": sentencepiece.__version__,
        }
        return key_of("tokenizer", content)

    @property
    def has_tokenizer(self) -> bool:
        """Return False if the tokenizer has not been trained yet, or is damaged."""
        key, layout = self.tokenizer_key, self.layout
        return key is None or has_artifact(layout.tokenizer(key), layout.tokenizer_receipt(key), checksum="sha256")

    @cached_property
    def _located(self) -> tuple[Path, str]:
        if self.tokenizer_key is not None:
            return self.layout.tokenizer(self.tokenizer_key), ""
        named = str(self.config.tokenizer)
        return locate_tokenizer(named, path_in(self.folder, named), self.commit)

    @property
    def tokenizer_commit(self) -> str:
        """Return the commit of the tokenizer on the Hub, or "" for a local one."""
        return self._located[1]

    @property
    def tokenizer_name(self) -> str:
        """Return the name of the tokenizer's file or, on the Hub, its name and commit."""
        commit = self.tokenizer_commit
        return named_at(str(self.config.tokenizer), commit) if commit else self.tokenizer_files.main.name

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        return find_tokenizer(self._located[0], self.config.tokenizer_as)

    @cached_property
    def tokenizer_digest(self) -> str:
        """Return the digest of the tokenizer, or of the inputs that train it."""
        return f"trained:{self.tokenizer_key}" if self.tokenizer_key else self.tokenizer_files.digest()

    @cached_property
    def encoder(self) -> Encoder:
        files, config = self.tokenizer_files, self.config
        sha256 = files.sha256()
        self.check_tokenizer(sha256)
        return _open_once(files, sha256, config.eos_token, config.pad_token, tuple(config.content_tokens))

    @cached_property
    def special(self) -> tuple[int, int] | None:
        """Return the ids of EOS and padding, or None if rows hold text."""
        return (self.encoder.eos_id, self.encoder.pad_id) if self.config.packing else None

    def check_tokenizer(self, sha256: str) -> None:
        """Raise DataError if the tokenizer's files have changed during the run.

        `sha256` is the digest of the files in use. It must equal the digest that is part of the key.
        """
        if self.tokenizer_key is None and sha256 != sha256_in(self.tokenizer_digest):
            raise _tokenizer_changed(self.tokenizer_files)

    # Template

    @cached_property
    def template_sources(self) -> dict[str, str]:
        """Return the Jinja sources that the corpus stores, by file name.

        There are two if a template of the tokenizer is only for conversations with tools, and none for a built-in
        template.
        """
        name = self.config.template
        if name in BUILT_IN:
            return {}
        if name == OF_TOKENIZER or name.startswith(f"{OF_TOKENIZER}:"):
            return self._templates_of_tokenizer(name.partition(":")[2])
        file = path_in(self.folder, name)
        if not os.path.isfile(file):  # not file.is_file(), which raises if a name is too long
            raise InputMissing(
                "template_missing",
                f"template: {name!r} is neither built in ({', '.join(BUILT_IN)}, tokenizer) nor a file ({file})"
                f"{suggest(name, (*BUILT_IN, 'tokenizer'))}",
            )
        try:
            return {TEMPLATE: file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise UsageError("bad_template_file", f"{file}: is not UTF-8: {error}") from None

    def _templates_of_tokenizer(self, name: str) -> dict[str, str]:
        """Return the sources of the tokenizer's chat template `name`."""
        found = self.tokenizer_files.chat_templates() if self.config.tokenizer else {}
        where = f"template: {self.config.template}: {self.config.tokenizer or 'the tokenizer that this run trains'} has"
        if not found:
            raise UsageError(
                "no_chat_template", f"{where} no chat template; use one of {', '.join(BUILT_IN)} or a Jinja file"
            )
        names = ", ".join(found)
        if name and name not in found:
            raise UsageError(
                "no_chat_template", f"{where} no chat template {name!r}, only {names}{suggest(name, tuple(found))}"
            )
        if name:
            return {TEMPLATE: found[name]}
        if "default" not in found:
            raise UsageError(
                "no_chat_template",
                f"{where} no chat template `default`; set `template: tokenizer:NAME` (one of {names})",
            )
        files = (TEMPLATE, "default"), (TOOL_TEMPLATE, "tool_use")
        return {file: found[name] for file, name in files if name in found}

    @cached_property
    def template_sha256(self) -> str:
        sources = [
            (name, hashlib.sha256(source.encode()).hexdigest()) for name, source in self.template_sources.items()
        ]
        return joined_sha256(sources) if sources else built_in_sha256(self.config.template)

    @cached_property
    def template(self) -> Template:
        sources, config = tuple(self.template_sources.values()), self.config
        if not sources:
            return BuiltIn(config.template, self.encoder, config.train_on, config.turns, self._adjust, config.sections)
        options = json.dumps(config.template_options)
        name, train_on, date, turns = config.template, config.train_on, config.template_date, config.turns
        return _jinja_once(name, sources, self.encoder, train_on, date, turns, options, self._adjust, config.sections)

    @property
    def undefined(self) -> dict[str, dict[str, int]]:
        """Return in how many places each Jinja template reads names that nothing defines."""
        names = zip(self.template_sources, self.template.undefined, strict=False)
        return {file: dict(undefined) for file, undefined in names if undefined}

    @property
    def _adjust(self) -> Adjust:
        return Adjust(self.config.reasoning == "drop", self.config.default_system)

    @property
    def notes(self) -> list[str]:
        """Return a line for each thing that a user may not expect."""
        return (
            self.config.notes
            + self._own_template_unused()
            + _without_gigatoken(self.config)
            + _unused_options(self.config, self.template_sources)
            + found_layouts(self.files, self.config.sources)
        )

    def _own_template_unused(self) -> list[str]:
        if not self.config.tokenizer or "template" in self.config.model_fields_set:
            return []
        line = (
            f"template: {self.config.template}, the default, although the tokenizer has its own; for the prompts of "
            "inference, set  template: tokenizer"
        )
        return [line] * (self.tokenizer_files.chat_template() is not None)

    # Keys

    @staticmethod
    def _content(file: SourceFile) -> list[object]:
        usual: list[object] = [file.sha256, file.container, file.compression, file.format, list(file.columns)]
        return [*usual, file.reading] if file.reading else usual

    def tokens_key(self, part: Part) -> str:
        read = {"part": part.sha256, "read": self._content(part.file)[1:], "texts": VERSIONS["texts"]}
        group = {"group": part.file.group_key} if part.file.group_key else {}
        return key_of("tokens", read | self._texts | {"whole": not self.config.packing} | group)

    @property
    def token_keys(self) -> list[str]:
        """Return the key of each part's token file; equal parts have equal keys."""
        return [self.tokens_key(part) for part in self.parts]

    @cached_property
    def ranges(self) -> dict[SourceFile, bytes]:
        """Return the ranges of all parts of each file that may be unpacked."""
        return {file: packed(parts) for file, parts in groupby(self.parts, attrgetter("file")) if may_be_far(file)}

    @cached_property
    def _texts(self) -> dict[str, Any]:
        config, uses_jinja = self.config, bool(self.template_sources)
        special = config.in_key("tokens tokenizer").values()
        template = [self.template_sha256, *(config.in_key("tokens template").values() or [None])]
        # The versions of the code for Jinja templates and `reasoning: drop`, and for templates that know `developer`.
        template += [VERSIONS["jinja"]] * (uses_jinja or config.reasoning == "drop")
        template += [VERSIONS["developer"]] * any(map(knows_developer, self.template_sources.values()))
        content = config.in_key("tokens") | {"tokenizer": [self.tokenizer_digest, *special], "template": template}
        if self.evaluation:
            content["evaluation"] = [VERSIONS["evaluation"], *self._evaluation_content]
        return content | ({"loss_weight": "data"} if config.reads_loss_weights else {})

    @property
    def _evaluation_content(self) -> list[list[Any]]:
        return [[file.sha256, file.container, file.compression, file.format] for file in self.evaluation]

    @cached_property
    def texts_key(self) -> str:
        """Return the key of all texts and the tokenizer: a part of that in data/engines."""
        return key_of("engine", self._texts | {"sources": [self._content(file) for file in self.files]})

    @cached_property
    def corpus_key(self) -> str:
        sources, entries = [self._content(file) for file in self.files], [file.entry for file in self.files]
        digests = self.tokenizer_digest, self.template_sha256
        evaluation = self._evaluation_content
        return corpus_key(self.config.settings(), sources, entries, *digests, VERSIONS["corpus"], evaluation)

    # Shards

    @cached_property
    def copies(self) -> float:
        """Return about how many times a conversation is written."""
        return self.config.epochs * self._size / max(1, sum(file.bytes for file in self.files))

    @cached_property
    def _size(self) -> float:
        """Return about how many bytes of the sources are trained on, with copies.

        Those of a share that is held out count, too, but not those of sources for validation.
        """
        entries = [n for n, source in enumerate(self.config.sources) if source.split != "validation"]
        weights = [self.config.sources[entry].weight for entry in entries]
        sizes = [sum(file.bytes for file in self.files if file.entry == entry) for entry in entries]
        if self.config.weighting == "token_share":
            return sum(sizes)
        if self.config.weighting == "proportions":
            return max(size / weight for size, weight in zip(sizes, weights, strict=True)) * sum(weights)
        return sum(size * weight for size, weight in zip(sizes, weights, strict=True))

    @cached_property
    def shards(self) -> dict[str, int]:
        """Return the number of shards of each split, the same for all lengths of rows."""
        config = self.config
        several = 2 if 4 * self._size > SOURCE_BYTES_PER_SHARD else 1
        by_size = max(several, math.ceil(self._size / SOURCE_BYTES_PER_SHARD))
        train = min(by_size, MOST_SHARDS, MOST_SHARDS_OF_EPOCHS // config.epochs)
        for_validation = [file.bytes for file in self.files if config.sources[file.entry].split == "validation"]
        validation = math.ceil(train * config.validation) + math.ceil(sum(for_validation) / SOURCE_BYTES_PER_SHARD)
        validation = min(validation, MOST_SHARDS)
        lengths = len(config.row_lengths)  # the division of the tokens among them is not known yet
        train, validation = -(-train // lengths), -(-validation // lengths)
        names = config.rows.split_names(config.epochs)
        return {name: validation if kind_of(name) == "validation" else train for name in names}

    @cached_property
    def shard_names(self) -> list[str]:
        """Return the file names of all shards; an index is the number in the plan."""
        return [
            f"{split}-{number:05d}-of-{count:05d}.arrow"
            for split, count in self.shards.items()
            for number in range(count)
        ]

    def length_of_shard(self, number: int) -> int:
        """Return the length of the rows of shard `number`, counted over all splits."""
        name = self.shard_names[number].rpartition("-of-")[0].rpartition("-")[0]
        return self.config.rows.length_of(name)

    # Paths

    @property
    def corpus_folder(self) -> Path:
        return self.layout.corpus(self.config.name, self.corpus_key)

    @property
    def published(self) -> Path:
        return self.layout.published(self.config.name, self.corpus_key)

    @property
    def plan_folder(self) -> Path:
        return self.layout.plan_folder(self.plan_key)

    @cached_property
    def plan_key(self) -> str:
        """Return the key of the plan."""
        content = {
            "corpus": self.corpus_key,
            "name": self.config.name,
            "sources": [file.name for file in self.files],
            "tokens": self.token_keys,
        }
        if self.evaluation:
            content["evaluation"] = [file.name for file in self.evaluation]
        return key_of("plan", content)


@lru_cache(maxsize=4)
def _received(sent: bytes) -> Recipe:
    config, folder, root, commit, derived = pickle.loads(sent)  # noqa: S301 - our own
    recipe = Recipe(config, folder, Layout(root_of(root)), (), (), commit)
    vars(recipe).update(derived)
    return recipe


@lru_cache(maxsize=4)
def _open_once(
    files: TokenizerFiles, sha256: str, eos_token: str | None, pad_token: str | None, content_tokens: tuple[str, ...]
) -> Encoder:
    encoder = open_encoder(files, eos_token, pad_token, content_tokens)
    if files.sha256() != sha256:
        raise _tokenizer_changed(files)
    return encoder


@lru_cache(maxsize=2)
def _jinja_once(
    name: str,
    sources: tuple[str, ...],
    encoder: Encoder,
    train_on: TrainOn,
    date: str,
    turns: Turns,
    options: str,
    adjust: Adjust,
    sections: Sections,
) -> Template:
    """Compile a template once per process."""
    from packcorpus.tasks.templates.jinja.template import open_jinja  # loads jinja2

    return open_jinja(name, sources, encoder, train_on, date, turns, json.loads(options), adjust, sections)


def _tokenizer_changed(files: TokenizerFiles) -> DataError:
    return DataError("input_changed", f"{files.main}: the tokenizer changed during the run; run again")


def resolve(config_file: Path, root: Path, check_sources: bool = False) -> Recipe:
    """Read the config, and find, cut, and hash its sources.

    Files that are unchanged since an earlier run are only hashed again with `check_sources`. Raises PackError,
    naming the problem.
    """
    cache = DigestCache(Layout(root).digests(), fresh=check_sources)
    return recipe_of(load_config(config_file), config_file.parent, root, cache=cache)


def recipe_of(
    config: Config,
    folder: Path,
    root: Path,
    revisions: Mapping[int, str] | None = None,
    cache: DigestCache | None = None,
    commit: str = "",
) -> Recipe:
    """Find, cut, and hash the sources of a config in `folder`.

    `revisions` maps indices of entries to commits of datasets on the Hub, and `commit` is that of a tokenizer. Without
    `cache`, all files are hashed. Raises PackError, naming the problem.
    """
    layout = Layout(root)
    of_records = config.group_key, config.pairs
    found = find_parts(config.sources, folder, config.part_size, layout, revisions, cache, *of_records)
    for file, _ in found:
        # A name that is not UTF-8 cannot be written to a manifest.
        if file.name.encode("utf-8", "ignore").decode() != file.name:
            raise UsageError("bad_file_name", f"{file.name!a}: the file name is not UTF-8; rename the file")
    files, parts = tuple(file for file, _ in found), tuple(part for _, parts in found for part in parts)
    evaluation = find_evaluation_files(config.decontaminate, folder, layout)
    recipe = Recipe(config, folder, layout, files, parts, commit, evaluation)
    _check_recorded(recipe)
    return recipe


def _check_recorded(recipe: Recipe) -> None:
    for file in recipe.files:
        problem = ""
        if file.format != TOKENS.name:
            problem = f"{TOKENIZER} applies only to format tokens; remove it" if file.tokenizer_sha256 else ""
        elif not recipe.config.packing:
            problem = (
                "has recorded token ids, but with packing: false a row holds text; set packing: true, or remove the "
                "source"
            )
        elif recipe.config.tokenizer is None:
            problem = "has recorded token ids; set tokenizer to the one that recorded the ids"
        elif file.tokenizer_sha256:
            problem = other_tokenizer(file.tokenizer_sha256, recipe.tokenizer_files.digests())
        if problem:
            raise UsageError("bad_setting", f"{file.name}: {problem}")


def _without_gigatoken(config: Config) -> list[str]:
    if config.engine == "reference" or find_spec("gigatoken"):
        return []
    why = "gigatoken is not installed, so the tokenizer's own library encodes all texts"
    return [f"{why}: the same tokens, but up to 40 times slower; run: pip install gigatoken"]


def _unused_options(config: Config, templates: Mapping[str, str]) -> list[str]:
    """Return a line for each of `template_options` that no template names."""
    if not templates:
        why = "built-in templates have no options, so"
        return [f"template_options: {why} {name} has no effect" for name in config.template_options]
    known = set(re.findall(r"[A-Za-z_]\w*", "\n".join(templates.values())))
    return [
        f"template_options: the template does not use {name}, so it has no effect{suggest(name, known)}"
        for name in config.template_options
        if name not in known
    ]
