"""Convert a SentencePiece model to a tokenizer.json, as Transformers does.

The result encodes some texts unlike SentencePiece: merges are in the order of the pieces, not of their scores.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.encoders.as_transformers.rebuild import DECODED, OPTIONS, SPACE_TO_UNDERLINE, Rebuilt, Spec
from tasks.encoders.sentencepiece_encoder import read_model


def converted(path: Path, rule: Rebuilt | None) -> tuple[Spec, list[Any], dict[str, str | None]]:
    """Return a tokenizer.json, added tokens, and the names of special tokens.

    A class with a rule uses only the vocabulary and the merges. Raises DataError if the file is damaged.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto
    from tokenizers import AddedToken

    model = read_model(path)
    trainer, charsmap, types = (
        model.trainer_spec,
        model.normalizer_spec.precompiled_charsmap,
        proto.ModelProto.SentencePiece,
    )
    added = [
        AddedToken(piece.piece, normalized=False, special=piece.type == types.CONTROL)
        for piece in model.pieces
        if piece.type in (types.CONTROL, types.USER_DEFINED)
    ]
    names = (
        {}
        if rule
        else {
            name: piece
            for name, number, piece in (
                ("bos_token", trainer.bos_id, trainer.bos_piece),
                ("eos_token", trainer.eos_id, trainer.eos_piece),
                ("unk_token", trainer.unk_id, trainer.unk_piece),
            )
            if number >= 0
        }
    )
    normalizers: list[Spec] = [SPACE_TO_UNDERLINE]
    if charsmap:
        encoded = base64.b64encode(charsmap).decode("ascii")
        normalizers.insert(0, {"type": "Precompiled", "precompiled_charsmap": encoded})
    spec: Spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None, "post_processor": None, "decoder": DECODED,
    }  # fmt: skip
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
    options = {"unk_token": trainer.unk_piece, "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
    return spec | {"model": {"type": "BPE", **OPTIONS, **options, "vocab": numbers, "merges": merges}}, added, names


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
