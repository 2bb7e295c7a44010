"""Convert a SentencePiece model to the tokenizer.json that gigatoken loads.

gigatoken's own converter, `Tokenizer.from_sentencepiece`, parses the model byte by byte in Python. This takes 0.22 s
for 32,768 pieces, in a run of 1.6 s. The converter in this module takes less than half the time. A test checks that
both produce the same JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import orjson


class Unsupported(Exception):
    """gigatoken cannot replace this tokenizer.

    The message is the reason.
    """


def json_of_sentencepiece(model: bytes, added: Sequence[str] = ()) -> bytes:
    """Convert a BPE model with byte fallback to a tokenizer.json.

    The control tokens `added` follow the pieces of the model. Raises Unsupported if the format cannot describe the
    model.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    read = proto.ModelProto.FromString(model)
    trainer, normalizer, types = read.trainer_spec, read.normalizer_spec, proto.ModelProto.SentencePiece
    pieces = [(piece.piece, piece.score, piece.type) for piece in read.pieces]
    pieces += [(piece, 0.0, types.CONTROL) for piece in added]
    refused = {
        "the model is not BPE": trainer.model_type != trainer.BPE,
        "the model has no byte fallback": not trainer.byte_fallback,
        "the model does not escape white space": not normalizer.escape_whitespaces,
        "the model treats white space as a suffix": trainer.treat_whitespace_as_suffix,
        "a piece of the model is not UTF-8": any(isinstance(piece, bytes) for piece, _, _ in pieces),
    }
    for reason in (reason for reason, applies in refused.items() if applies):
        raise Unsupported(reason)
    return orjson.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": number, "content": piece, "single_word": False, "lstrip": False, "rstrip": False,
                    "normalized": False, "special": kind == types.CONTROL,
                }
                for number, (piece, _, kind) in enumerate(pieces)
                if kind in (types.CONTROL, types.USER_DEFINED)
            ],
            "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer)},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": trainer.unk_piece,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {piece: number for number, (piece, _, _) in enumerate(pieces)},
                "merges": _merges({piece: score for piece, score, _ in pieces}),
            },
        }
    )  # fmt: skip


def _normalizers(spec: Any) -> list[dict[str, Any]]:
    """Describe how SentencePiece normalizes a text before it segments it."""
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """List the pairs of pieces that form a piece, in merge order.

    `scores` has the score of each piece. SentencePiece merges the pair whose piece has the highest score, but
    tokenizer.json ranks pairs. So every way to split a piece in two is a pair, ranked by the score of the piece. If
    scores are equal, the pair with the longer left half comes first, and then the pair with the longer right half.
    """
    merges: list[tuple[str, str]] = []
    for _, equal in groupby(sorted(scores, key=scores.__getitem__, reverse=True), key=scores.__getitem__):
        pieces = list(equal)
        pairs = [
            (left, right)
            for piece in pieces
            for cut in range(len(piece) - 1, 0, -1)
            if (right := piece[cut:]) in scores and (left := piece[:cut]) in scores
        ]
        if len(pieces) > 1:
            pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
        merges += pairs
    return merges
