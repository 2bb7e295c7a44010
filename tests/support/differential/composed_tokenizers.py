"""24 kinds of tokenizers, composed of the parts of the tokenizers library.

    model, normalizer, pre-tokenizer, flags of added tokens ─composed─▶ folder with tokenizer.json

All have the special tokens of CHATML and the added tokens of THOUGHTS, so that one chat template fits all.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from support.tokenizer_kinds import ASCII, CHATML_JINJA, LLAMA3_SPLIT, SENTENCES, folder, kind_path

Spec = dict[str, Any]

NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = (*NAMED.values(), "<|im_start|>", "<|im_end|>")
THOUGHTS = ("<think>", "</think>")
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

_NFC, _NFKC, _LOWER = ({"type": name} for name in ("NFC", "NFKC", "Lowercase"))
_TO_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}


class Parts(NamedTuple):
    """The parts of a tokenizer.

    `flags` are those of all added tokens, and `thoughts` more flags of THOUGHTS.
    """

    model: str
    pre_tokenizer: Spec | None
    normalizer: Spec | None = None
    flags: dict[str, bool] = {}  # noqa: RUF012
    thoughts: dict[str, bool] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012


def _bytes(prefix: bool = False, regex: bool = True) -> Spec:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def _metaspace(scheme: str, split: bool = False) -> Spec:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _steps(*steps: Spec) -> Spec:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _norms(*steps: Spec) -> Spec:
    return {"type": "Sequence", "normalizers": list(steps)}


def _split(pattern: Spec, behavior: str = "Isolated") -> Spec:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_PUNCTUATION = {"type": "Punctuation", "behavior": "Isolated"}

COMPOSED = {
    "byte-level": Parts("bytes", _bytes()),
    "byte-level, split": Parts("bytes", _steps(_split({"Regex": LLAMA3_SPLIT}), _bytes(regex=False))),
    "byte-level, NFC": Parts("bytes", _bytes(), _NFC),
    "byte-level, NFKC, digits": Parts("bytes", _steps(_DIGITS, _bytes()), _NFKC),
    "byte-level, lower case": Parts("bytes", _bytes(), _LOWER),
    "byte-level, prefix": Parts("bytes", _bytes(prefix=True)),
    "byte-level, prefix, punctuation": Parts("bytes", _steps(_PUNCTUATION, _bytes(prefix=True))),
    "byte-level, ignore_merges": Parts("bytes", _bytes(), options={"ignore_merges": True}),
    "byte-level, lstrip": Parts("bytes", _bytes(), flags={"lstrip": True}),
    "byte-level, rstrip": Parts("bytes", _bytes(), flags={"rstrip": True}),
    "byte-level, single_word": Parts("bytes", _bytes(), thoughts={"single_word": True}),
    "byte-level, NFC, normalized": Parts("bytes", _bytes(), _NFC, thoughts={"normalized": True}),
    "metaspace first": Parts("pieces", _metaspace("first")),
    "metaspace always": Parts("pieces", _metaspace("always")),
    "metaspace never": Parts("pieces", _metaspace("never", split=True)),
    "metaspace, no bytes, rstrip": Parts(
        "pieces", _metaspace("first"), flags={"rstrip": True}, options={"byte_fallback": False}
    ),
    "prepended": Parts("pieces", None, _norms(_PREPEND, _TO_UNDERLINE)),
    "prepended, normalized": Parts("pieces", None, _norms(_PREPEND, _TO_UNDERLINE), thoughts={"normalized": True}),
    "replaced": Parts("pieces", _split({"String": " "}, "MergedWithPrevious"), _TO_UNDERLINE),
    "WordPiece": Parts(
        "words",
        {"type": "BertPreTokenizer"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
    ),
    "WordLevel": Parts("levels", {"type": "Whitespace"}),
    "Unigram": Parts("unigram", _metaspace("always", split=True)),
    "Unigram, NFKC, lstrip": Parts("unigram", _metaspace("first", split=True), _NFKC, flags={"lstrip": True}),
    "SentencePiece": Parts("sp_bpe_chatml", None),
}


@functools.cache
def composed(kind: str) -> Path:
    """Return the folder of a tokenizer, or its .model file."""
    parts = COMPOSED[kind]
    if parts.model.startswith("sp_"):
        return kind_path(parts.model)
    place = folder() / re.sub(r"\W+", "_", kind)
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps(spec_of(parts)))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, "chat_template": CHATML_JINJA}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def spec_of(parts: Parts) -> Spec:
    """Return the tokenizer.json of parts, as the library writes it."""
    from tokenizers import Tokenizer

    spec = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer, "post_processor": None, "decoder": None,
        "model": _models()[parts.model] | parts.options, "added_tokens": [],
    }  # fmt: skip
    vocabulary = Tokenizer.from_str(json.dumps(spec)).get_vocab()
    tokens = []
    for content in (*SPECIAL, *THOUGHTS):
        number = vocabulary.setdefault(content, max(vocabulary.values()) + 1)
        flags = PLAIN | parts.flags | (parts.thoughts if content in THOUGHTS else {})
        tokens.append({"id": number, "content": content, **flags, "special": content in SPECIAL})
    spec["added_tokens"] = sorted(tokens, key=lambda token: int(token["id"]))
    return dict(json.loads(Tokenizer.from_str(json.dumps(spec)).to_str()))


@functools.cache
def _models() -> dict[str, Spec]:
    """Return small models, trained on the sentences of the tests."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    def trained(model: Any, split: Any, trainer: Any) -> Spec:
        learner = Tokenizer(model)
        learner.pre_tokenizer = split
        learner.train_from_iterator(SENTENCES, trainer)
        return dict(json.loads(learner.to_str())["model"])

    usual = {"show_progress": False, "special_tokens": [*NAMED.values()]}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    every_byte = [*NAMED.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    splits = [
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
        pre_tokenizers.Split(Regex("▁+"), "merged_with_next"),
    ]
    underlines = [*ASCII.replace(" ", "▁")]
    return {
        "bytes": trained(
            models.BPE(),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, **usual),
        ),
        "pieces": trained(
            models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
            pre_tokenizers.Sequence(splits),
            trainers.BpeTrainer(vocab_size=520, initial_alphabet=underlines, **usual | {"special_tokens": every_byte}),
        ),
        "words": trained(
            models.WordPiece(unk_token="<unk>"),
            pre_tokenizers.BertPreTokenizer(),
            trainers.WordPieceTrainer(vocab_size=400, initial_alphabet=[*ASCII], **usual),
        ),
        "levels": trained(
            models.WordLevel(unk_token="<unk>"),
            pre_tokenizers.Whitespace(),
            trainers.WordLevelTrainer(vocab_size=400, **usual),
        ),
        "unigram": trained(
            models.Unigram(),
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", initial_alphabet=underlines, **usual),
        ),
    }
