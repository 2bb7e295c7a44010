"""Rebuild a tokenizer from its vocabulary and merges.

Some classes of Transformers do so.

These classes ignore the normalizer, the pre-tokenizer, and the options of the model in tokenizer.json. They have their
own, which depend on a few settings of tokenizer_config.json.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.encoders.sentencepiece_encoder import read_model

Spec = dict[str, Any]

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NFC = {"type": "NFC"}
_END = "<|endoftext|>"
SPACE_TO_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
DECODED = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
]}  # fmt: skip
# A tokenizer.json without its model.
EMPTY: Spec = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
}  # fmt: skip
# Options of a BPE model, with their defaults.
OPTIONS: Spec = {
    "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a class builds.

    `names` are special tokens that have a name in the class even if no file names them; None stands for no token.
    `parts` returns normalizer, pre-tokenizer, decoder, and options of the model, from tokenizer_config.json with the
    names of the special tokens. `adds_again` is how the class adds its special tokens once more: "flagged" as new
    special tokens, or "special" with their own flags.
    """

    names: dict[str, str | None]
    parts: Callable[[Mapping[str, Any]], tuple[Spec | None, Spec, Spec, Spec]]
    adds_again: str = ""
    keeps_post_processor: bool = True


def rebuilt(spec: Spec, rule: Rebuilt, config: Mapping[str, Any]) -> Spec:
    """Return a tokenizer.json as the class builds it, without added tokens."""
    normalizer, pre_tokenizer, decoder, options = rule.parts(config)
    model = spec["model"]
    return spec | {
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": decoder,
        "post_processor": spec.get("post_processor") if rule.keeps_post_processor else None,
        "model": {"type": "BPE", **OPTIONS, **options, "vocab": model["vocab"], "merges": model["merges"]},
    }


def _byte_level(config: Mapping[str, Any], use_regex: bool = True) -> Spec:
    prefix = bool(config.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*steps: Spec) -> Spec:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _bytes(normalizer: Spec | None, *before: Spec, use_regex: bool = True) -> Any:
    """Return the parts of a byte-level tokenizer.

    Its pre-tokenizer begins with the steps `before`.
    """

    def parts(config: Mapping[str, Any]) -> tuple[Spec | None, Spec, Spec, Spec]:
        last = _byte_level(config, use_regex)
        return normalizer, _sequence(*before, last) if before else last, _byte_level({}), {}

    return parts


def _split(pattern: str) -> Spec:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _llama(config: Mapping[str, Any]) -> tuple[Spec | None, Spec, Spec, Spec]:
    given = config.get("add_prefix_space")
    scheme = "never" if given is not None and not given else "always" if config.get("legacy") else "first"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return None, metaspace, DECODED, {"fuse_unk": True, "byte_fallback": True}


def _gemma(config: Mapping[str, Any]) -> tuple[Spec | None, Spec, Spec, Spec]:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    options = {"fuse_unk": True, "byte_fallback": True, "unk_token": str(config.get("unk_token"))}
    return SPACE_TO_UNDERLINE, split, DECODED, options


_QWEN_NAMES = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_GPT2_NAMES = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}

REBUILT = {
    "LlamaTokenizer": Rebuilt({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama),
    "Qwen2Tokenizer": Rebuilt(_QWEN_NAMES, _bytes(_NFC, _split(_QWEN2), use_regex=False), "flagged"),
    "Qwen3_5Tokenizer": Rebuilt(_QWEN_NAMES, _bytes(_NFC, _split(_QWEN3_5), use_regex=False)),
    "GPT2Tokenizer": Rebuilt(_GPT2_NAMES, _bytes(None)),
    "CodeGenTokenizer": Rebuilt(_GPT2_NAMES, _bytes(None)),
    "GPTNeoXTokenizer": Rebuilt(_GPT2_NAMES | {"pad_token": "<|padding|>"}, _bytes(_NFC), keeps_post_processor=False),
    "GemmaTokenizer": Rebuilt(
        {
            "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _gemma,
    ),
    "CohereTokenizer": Rebuilt(
        {
            "unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>",
        },
        _bytes(_NFC, {"type": "Digits", "individual_digits": True}),
        "special",
    ),
}  # fmt: skip


# -- SentencePiece -----------------------------------------------------------------------------------------------


def converted(path: Path, rule: Rebuilt | None) -> tuple[Spec, list[Any], dict[str, str | None]]:
    """Return a tokenizer.json, added tokens, and the names of special tokens.

    A class with a rule uses only the vocabulary and the merges. Raises DataError if the file is damaged.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto
    from tokenizers import AddedToken

    model = read_model(path)
    trainer, types = model.trainer_spec, proto.ModelProto.SentencePiece
    added = [
        AddedToken(piece.piece, normalized=False, special=piece.type == types.CONTROL)
        for piece in model.pieces
        if piece.type in (types.CONTROL, types.USER_DEFINED)
    ]
    pieces = [(name, *(getattr(trainer, f"{name}_{key}") for key in ("id", "piece"))) for name in ("bos", "eos", "unk")]
    names = {f"{name}_token": piece for name, number, piece in pieces if number >= 0 and not rule}
    steps = [*precompiled(model.normalizer_spec), SPACE_TO_UNDERLINE]
    spec = EMPTY | {"normalizer": {"type": "Sequence", "normalizers": steps}, "decoder": DECODED}
    if rule is None and trainer.model_type == trainer.UNIGRAM:
        vocabulary = [(piece.piece, piece.score) for piece in model.pieces]
        unigram = {"type": "Unigram", "unk_id": trainer.unk_id, "vocab": vocabulary}
        return spec | {"model": unigram | {"byte_fallback": trainer.byte_fallback}}, added, names
    numbers = {piece.piece: number for number, piece in enumerate(model.pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(numbers, key=numbers.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in numbers and piece[cut:] in numbers
    ]
    return spec | {"model": bpe_of(trainer, numbers, merges)}, added, names


def precompiled(normalizer: Any) -> list[Spec]:
    """Return the step that replaces characters, if a SentencePiece model has one."""
    charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode("ascii")
    return [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []


def bpe_of(trainer: Any, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Spec:
    """Return a BPE model with the options of a SentencePiece model."""
    options = {"unk_token": trainer.unk_piece, "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
    return {"type": "BPE", **OPTIONS, **options, "vocab": vocab, "merges": merges}


def rename_pieces(model: Spec, by_id: Mapping[int, Any]) -> bool:
    """Rename pieces of a BPE model to the added tokens with their ids.

    Returns whether the model is still valid: no merge needs a piece that was renamed.
    """
    numbers = model["vocab"]
    pieces = {number: piece for piece, number in numbers.items()}
    for number, token in by_id.items():
        piece, content = pieces.get(number), token.content
        if piece and piece != content and content not in numbers:
            numbers[content] = numbers.pop(piece)
            pieces[number] = content
    return all(one in numbers and other in numbers and one + other in numbers for one, other in model["merges"])
