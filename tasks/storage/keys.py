"""Compute content keys, which are part of the path of every artifact.

A key is the digest of everything that a stage reads, and of nothing else. Stale files are therefore never used, and
unchanged work is never repeated:

    tokenizer   the sources in order + training settings                        data/tokenizers/KEY/
    tokens      bytes of the part + how they are read + tokenizer + template + labels              data/tokens/KEY
    engine      the sources + how they become texts + tokenizer + versions of the encoders         data/engines/KEY
    plan        the corpus key + the token files, in order + names of corpus and sources    data/plans/KEY/
    corpus      digests of the whole sources + every setting that can change the output            data/corpora/NAME-KEY
                (not the part size, the number of workers, or file locations)

Each key contains the version of its stage. Raise this version when you change the output of the stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

# Most names are stages. The others:
# texts: the wording of reject messages, of the dataset card, and of the manifest's `tokenizer.engine`. This version is
# in the manifest and in the keys of tokens, whose receipts hold reject messages. It is not in the key of the corpus,
# because shards, index, and plan do not depend on it.
# corpus: the content of the shards and the index. It is the manifest's `key_version`.
# jinja: the location of trained turns in the rendering of a Jinja template, and `reasoning: drop`. This version is only
# in the keys of tokens and engines of corpora that use one of them.
# developer: the role developer in Jinja templates that know it. This version is only in the keys of tokens and engines
# of corpora that use such a template.
# evaluation: what is an overlap with an evaluation set; only in the keys of tokens and corpora with `decontaminate`.
VERSIONS = {
    "tokenizer": 1, "tokens": 14, "jinja": 7, "developer": 1, "evaluation": 1, "texts": 9, "engine": 5, "plan": 6,
    "corpus": 11,
}  # fmt: skip

# Since this version of `corpus`, the messages of format 2.0 have `reasoning_content` and `train`.
WHOLE_MESSAGES = 11

# Rows of tokens, one conversation per row, rows of another shape, and rows with trees.
PACKED, WHOLE, SHAPED, SHARED = "3.0", "2.0", "3.1", "3.2"

# Settings that make rows differ from format 3.0. They are recorded only if they differ from their defaults.
SHAPE_SETTINGS = ("align", "padding", "share")


def format_version_of(settings: dict[str, Any]) -> str:
    """Return the format version of a corpus from its recorded settings."""
    if settings.get("packing") is False:
        return WHOLE
    if "share" in settings:
        return SHARED
    is_shaped = isinstance(settings.get("sequence_length"), list) or any(name in settings for name in SHAPE_SETTINGS)
    return SHAPED if is_shaped else PACKED


# Settings that locate or name something. The corpus key contains digests of the content instead, and no byte of a shard
# depends on the name.
KEYED_BY_CONTENT = ("name", "sources", "tokenizer", "template", "decontaminate")

# Recorded in every manifest as `plan_group`, a setting of earlier versions that divided larger corpora into several
# plans. It is in the key, so that corpora with one plan keep their keys.
ONE_PLAN = 100_000_000


# Values of `weighting` with which weights are relative to each other, so that weights of 1 have an effect, too.
RELATIVE = ("proportions", "token_share")


# Renamed settings and values, with the names that they keep in the key, so that the key of a corpus stays the same.
KEY_NAMES = {"license": "licence", "neighbors": "company"}
KEY_VALUES = {("neighbors", "distinct"): "apart", ("duplicates", "exact"): "drop"}


def with_current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Give settings and values from older versions their current names."""
    names = {old: name for name, old in KEY_NAMES.items()}
    settings = {names.get(name, name): value for name, value in settings.items()}
    return settings | {name: value for (name, value), old in KEY_VALUES.items() if settings.get(name) == old}


def _in_key(name: str, value: Any) -> tuple[str, Any]:
    """Return the name and the value that a setting has in the key."""
    renamed = KEY_VALUES.get((name, value), value) if isinstance(value, str) else value
    return KEY_NAMES.get(name, name), renamed


def key_of(stage: str, content: dict[str, Any], version: int = 0) -> str:
    """Return the key of the inputs of a stage, 64 hexadecimal digits.

    `version` 0 means the current version of the stage.
    """
    value = {"stage": stage, "version": version or VERSIONS[stage]} | content
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def sha256_in(digest: str) -> str:
    """Return the checksum of the files in the digest of a tokenizer."""
    return digest.rpartition(":")[2]


def corpus_key(
    settings: dict[str, Any],
    sources: list[list[Any]],
    entries: list[int],
    tokenizer: str,
    template: str,
    version: int = 0,
    evaluation: Sequence[list[Any]] = (),
) -> str:
    """Return the key of a corpus.

    The arguments come from a recipe, or from the parts of the recipe that a manifest repeats. `settings` are the
    settings that affect the output. A source is its digest, container, compression, format, and columns; `entries` has
    the index of its entry in the config's `sources`. `tokenizer` and `template` are digests. A file of `evaluation` is
    its digest, container, compression, and format.
    """
    content = dict(_in_key(*setting) for setting in settings.items() if setting[0] not in KEYED_BY_CONTENT)
    content |= {"format_version": format_version_of(settings), "sources": sources}
    given = [settings["sources"][entry] for entry in entries]
    mixture = [[n, float(s.get("weight", 1)), s.get("limit")] for n, s in zip(entries, given, strict=True)]
    # If each source is packed once, its entry has no effect.
    if settings.get("weighting") in RELATIVE or any(rest != [1.0, None] for _, *rest in mixture):
        content["mixture"] = mixture
    if any(splits := [source.get("split") for source in given]):
        content["splits"] = splits
    if evaluation:
        content["evaluation"] = [VERSIONS["evaluation"], *evaluation]
    return key_of("corpus", content | {"tokenizer": tokenizer, "template": template}, version)
