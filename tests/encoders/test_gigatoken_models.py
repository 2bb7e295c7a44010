"""The converted SentencePiece model equals gigatoken's own, slower conversion."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto
from support.profiles import examples
from support.tokenizer_kinds import open_kind

from packcorpus.tasks.encoders.gigatoken_encoder import Unsupported, json_of_sentencepiece

TYPES = proto.ModelProto.SentencePiece


def check_same(model: bytes) -> None:
    ours, theirs = json_of_sentencepiece(model), sentencepiece_to_tokenizer_json(model)
    assert orjson.loads(ours) == orjson.loads(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "sp_bpe_user_defined", "mistral_v3"])
def test_real_models(kind: str) -> None:
    check_same(open_kind(kind).model())


# With few letters and few scores, many pieces can be merged from others in several equally good ways.
pieces = st.lists(
    st.builds(
        TYPES,
        piece=st.text("ab▁é", min_size=1, max_size=6),
        score=st.sampled_from([0.0, -1.0, -2.0, -2.5, -1e9]),
        type=st.sampled_from([TYPES.NORMAL, TYPES.CONTROL, TYPES.USER_DEFINED, TYPES.BYTE, TYPES.UNKNOWN]),
    ),
    min_size=1,
    max_size=40,
)
normalizers = st.builds(
    proto.NormalizerSpec,
    precompiled_charsmap=st.binary(max_size=4),
    add_dummy_prefix=st.booleans(),
    remove_extra_whitespaces=st.booleans(),
)


def model(pieces: list[Any], normalizer: Any = None, **trainer: Any) -> bytes:
    spec = {"model_type": proto.TrainerSpec.BPE, "byte_fallback": True} | trainer
    made = proto.ModelProto(pieces=pieces, trainer_spec=proto.TrainerSpec(**spec), normalizer_spec=normalizer)
    return bytes(made.SerializeToString())


@settings(max_examples=examples(300), deadline=None)
@given(pieces, normalizers, st.sampled_from(["<unk>", "▁unknown"]))
def test_any_model(pieces: list[Any], normalizer: Any, unknown: str) -> None:
    check_same(model(pieces, normalizer, unk_piece=unknown))


def test_added_tokens_stand_behind_its_own() -> None:
    letters = [TYPES(piece="a", score=-1.0), TYPES(piece="ab", score=-2.0)]
    added = TYPES(piece="\0", type=TYPES.CONTROL)
    assert json_of_sentencepiece(model(letters), ["\0"]) == json_of_sentencepiece(model([*letters, added]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": proto.TrainerSpec.UNIGRAM}, "the model is not BPE"),
        ({"byte_fallback": False}, "the model has no byte fallback"),
        ({"treat_whitespace_as_suffix": True}, "the model treats white space as a suffix"),
        ({"normalizer": proto.NormalizerSpec(escape_whitespaces=False)}, "the model does not escape white space"),
    ],
)
def test_what_gigatoken_would_refuse_is_refused(change: dict[str, Any], why: str) -> None:
    refused = model([TYPES(piece="a")], **change)
    with pytest.raises(ValueError, match=r"only|not supported"):
        sentencepiece_to_tokenizer_json(refused)
    with pytest.raises(Unsupported, match=why):
        json_of_sentencepiece(refused)


def test_a_piece_that_is_not_utf8() -> None:
    damaged = model([TYPES(piece="ab")]).replace(b"ab", b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        sentencepiece_to_tokenizer_json(damaged)
    with pytest.raises(Unsupported, match="a piece of the model is not UTF-8"):
        json_of_sentencepiece(damaged)
