"""Encode with a SentencePiece model, and describe it as a tokenizer.json does."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders.encoder import Encoded, Encoder, LeadingSpace, content_tokens_of, special_id
from packcorpus.tasks.encoders.native import check_growth, growth_of_charsmap
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.storage.schemas import offsets_of

Spec = dict[str, Any]


def read_model(path: Path) -> Any:
    """Read a SentencePiece model; raises DataError if the file is damaged."""
    # Imported here, so that a run with another kind of tokenizer does not load this library.
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise DataError("bad_tokenizer", f"{path}: not a SentencePiece model, or truncated: {error}") from None
    # A file that ends between two fields is valid protobuf. The trainer always writes these fields in this order.
    # Without the last field, defaults would apply, which remove spaces.
    for field in ("pieces", "trainer_spec", "normalizer_spec"):
        if not (model.pieces if field == "pieces" else model.HasField(field)):
            raise DataError("bad_tokenizer", f"{path}: has no {field}: not a SentencePiece model, or truncated")
    check_growth(growth_of_charsmap(model.normalizer_spec.precompiled_charsmap), f"{path}: its normalizer")
    return model


class SentencePieceEncoder(Encoder):
    """The reference encoder for `.model` files, BPE and Unigram."""

    kind = "sentencepiece"
    engine = "sentencepiece"
    leading_space: LeadingSpace = "template"
    underline_is_space = True

    def __init__(
        self,
        path: Path,
        eos_token: str | None = None,
        pad_token: str | None = None,
        content_tokens: Sequence[str] = (),
    ):
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as proto

        model = read_model(path)
        # Use lists: there are tens of thousands of pieces, and access through protobuf is ten times slower.
        types = proto.ModelProto.SentencePiece
        control, by_user, byte = types.CONTROL, types.USER_DEFINED, types.BYTE
        kinds = [piece.type for piece in model.pieces]
        self._pieces = [piece.piece for piece in model.pieces]
        self.has_unused = types.UNUSED in kinds
        trainer = model.trainer_spec
        added = {p: kind == control for p, kind in zip(self._pieces, kinds, strict=True) if kind in (control, by_user)}
        # EOS and padding are never content, even if they are ordinary pieces of the model.
        reserved = (eos_token or trainer.eos_piece, pad_token or trainer.pad_piece, trainer.bos_piece)
        allowed = content_tokens_of(added, content_tokens, reserved, path)
        self.controls, self.content_tokens = {}, {}
        for token, piece in enumerate(self._pieces):
            if piece in allowed:
                self.content_tokens[piece] = token
                kinds[token] = model.pieces[token].type = by_user
            elif piece in added or piece in (eos_token, pad_token):
                self.controls[piece] = token
                # SentencePiece never matches a control piece in text.
                kinds[token] = model.pieces[token].type = control
        # SentencePiece matches content tokens before it replaces spaces.
        self.irregular = frozenset(piece for piece in allowed if " " in piece or "▁" in piece)
        named_kinds = list(zip(self._pieces, kinds, strict=True))
        self._byte_pieces = {t: int(p[3:5], 16) for t, (p, kind) in enumerate(named_kinds) if kind == byte}
        self.every_byte = len(self._byte_pieces) == 256
        # SentencePiece allows no NUL in a piece, so the texts on both sides of a NUL are encoded independently.
        looks_around = model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.remove_extra_whitespaces
        nul = next((token for token, byte in self._byte_pieces.items() if not byte), None)
        self.nul_id = None if looks_around else nul
        model.normalizer_spec.add_dummy_prefix = False
        try:
            self._processor = SentencePieceProcessor(model_proto=model.SerializeToString())
        except RuntimeError as error:
            raise DataError("bad_tokenizer", f"{path}: not a SentencePiece model, or truncated: {error}") from None
        self.vocab_size = len(self._pieces)
        self.unk_id = self._processor.unk_id()
        self.bos_id = None if self._processor.bos_id() < 0 else self._processor.bos_id()
        self.adds_bos = self.bos_id is not None
        named = {piece: token for token, piece in enumerate(self._pieces)}
        self.eos_id = special_id("eos_token", eos_token, self._processor.eos_id(), named, path)
        pad = self._processor.pad_id()
        self.pad_id = special_id("pad_token", pad_token, pad if pad >= 0 else self.eos_id, named, path)

    def _encode(self, texts: Texts) -> Encoded:
        arrays = self._processor.encode_as_numpy(list(texts.strings)) if len(texts) else []
        ids = np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.empty(0, np.int32)
        return Encoded(ids, offsets_of(list(map(len, arrays))))

    def model(self) -> bytes:
        model: bytes = self._processor.serialized_model_proto()
        return model

    def token_bytes(self, token: int) -> bytes:
        if token in self._byte_pieces:
            return bytes([self._byte_pieces[token]])
        piece: str = self._pieces[token]
        return (piece if token in self.control_strings else piece.replace("▁", " ")).encode()


# -- tokenizer.json -----------------------------------------------------------------------------------------------

SPACE_TO_UNDERLINE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
DECODER = {"type": "Sequence", "decoders": [
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


def precompiled(normalizer: Any) -> list[Spec]:
    """Return the step that replaces characters, if a SentencePiece model has one."""
    charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode("ascii")
    return [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []


def bpe_of(trainer: Any, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Spec:
    """Return a BPE model with the options of a SentencePiece model."""
    options = {"unk_token": trainer.unk_piece, "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
    return {"type": "BPE", **OPTIONS, **options, "vocab": vocab, "merges": merges}


def converted(path: Path, has_names: bool) -> tuple[Spec, list[Any], dict[str, str | None]]:
    """Return a tokenizer.json, added tokens, and the names of special tokens.

    Without `has_names`, only BPE vocabulary and merges count. Raises DataError if the file is damaged.
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
    names = {f"{name}_token": piece for name, number, piece in pieces if number >= 0 and has_names}
    steps = [*precompiled(model.normalizer_spec), SPACE_TO_UNDERLINE]
    spec = EMPTY | {"normalizer": {"type": "Sequence", "normalizers": steps}, "decoder": DECODER}
    if has_names and trainer.model_type == trainer.UNIGRAM:
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
