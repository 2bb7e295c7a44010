"""Content keys, and where the artefact of each key lies.

A key is the digest of all that a stage reads, and of nothing else; it is in the artefact's path. A changed setting
can therefore never meet a stale file, and what did not change is found again:

    tokenizer   the sources in order + how it is trained                       data/tokenizers/KEY/
    tokens      bytes of the part + how they are read + tokenizer + template + what is trained on   data/tokens/KEY
    engine      the sources + how texts are made of them + tokenizer + versions of the encoders    data/engines/KEY
    plan        the corpus key + the token files, in order + the names that it repeats      data/plans/KEY/
    corpus      digests of the whole sources + every setting that can change the output            data/corpora/NAME-KEY
                (not the part size, not the workers, not where the files lie)

Each stage has a version in its keys. Whoever changes what a stage writes raises it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

# texts: the wording of reject messages and of the dataset card. It is in the key of the tokens, whose receipts hold
# reject messages, and in the manifest. It is not in the key of the corpus: shards, index, and plan do not depend on it.
VERSIONS = {"tokenizer": 1, "tokens": 5, "texts": 2, "engine": 2, "plan": 4, "corpus": 4}


FORMAT_VERSION = {True: "3.0", False: "2.0"}  # by config.packing


# Settings that say where something lies or what it is called: what lies there is in the corpus key by its digest, and
# no byte of a shard depends on the name.
BY_CONTENT = ("name", "sources", "tokenizer", "template")


# Settings that were renamed, with the name that they keep in the key, so that the key of a corpus stays the same.
KEY_NAMES = {"license": "licence"}


def key_of(stage: str, content: dict[str, Any], version: int = 0) -> str:
    """64 hexadecimal digits for what a stage reads; `version` is that of the stage, 0 for the one of today."""
    value = {"stage": stage, "version": version or VERSIONS[stage]} | content
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def corpus_key(
    settings: dict[str, Any],
    sources: list[list[Any]],
    entries: list[int],
    tokenizer: str,
    template: str,
    version: int = 0,
) -> str:
    """Key of a corpus, of a recipe or of what a manifest repeats of it. `settings` are those that affect the output.

    A source is its digest, container, compression, format and columns, and has the number of its entry in the
    config's sources in `entries`; tokenizer and template are their digests.
    """
    content = {KEY_NAMES.get(name, name): value for name, value in settings.items() if name not in BY_CONTENT}
    content |= {"format_version": FORMAT_VERSION[settings.get("packing") is not False], "sources": sources}
    if mixture := _mixture(settings, entries):
        content["mixture"] = mixture
    return key_of("corpus", content | {"tokenizer": tokenizer, "template": template}, version)


def _mixture(settings: dict[str, Any], entries: list[int]) -> list[list[Any]]:
    """Entry, weight and limit of each source; empty where each is packed once, in whatever entry it stands."""
    given = [settings["sources"][entry] for entry in entries]
    found = [[n, float(s.get("weight", 1)), s.get("limit")] for n, s in zip(entries, given, strict=True)]
    plain = settings.get("weighting") != "token_share" and all(rest == [1.0, None] for _, *rest in found)
    return [] if plain else found
