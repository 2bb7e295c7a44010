"""An accepted tokenizer always encodes a text to the same ids.

the files of a tokenizer ─▶ any fields in any object, numbers spelled in any way ─▶ refused, or always the same ids
                               └─ the random fields removed ───────────────────────▶ the same ids
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from support.json_texts import STYLES, Pairs, Raw, as_written, objects, written
from support.profiles import examples
from support.tokenizer_kinds import HUGGING_FACE, SENTENCES, kind_path

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder

# Settings of the libraries for drawing tokens at random.
RANDOM = ("dropout", "alpha", "nbest_size", "enable_sampling")
SENTENCEPIECE = ("sp_bpe_chatml", "sp_unigram")
# Protobuf fields that are unknown to this version, like fields of a later version: 200 is 1, and 201 is 0.5.
UNKNOWN = b"\xc0\x0c\x01" + b"\xcd\x0c\x00\x00\x00\x3f"
TEXTS = [*SENTENCES[:8], "".join(SENTENCES[:8]).replace(" ", ""), "<|im_end|> <think> ünïcödé 漢字 🙂 " * 4]
REPEATED = 3


class Change(NamedTuple):
    """A change adds or replaces a field of an object in a file.

    `at` is the position among the other fields; -1 replaces a field with the same key.
    """

    object: int
    key: str
    value: Any
    at: int


class Case(NamedTuple):
    """A case has a tokenizer, changes, and the style in which files are written.

    `changes` are changes of its main file, and `config` are changes of tokenizer_config.json.
    """

    kind: str
    changes: tuple[Change, ...]
    config: tuple[Change, ...]
    style: str = "compact"


# -- generated files --------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([
    "0.5", "5E-1", "0.1", "1", "1.0", "1e0", "0.05e+1", "0.50000000000000000000001", "1e-2", "0", "0.0", "-0.0", "0e5",
    "1e-46", "1e-45", "2", "-0.5", "true", "false", "null", '"0.5"', "[0.5]", "64", "-1", "3", "1e400", "NaN",
]).map(Raw)  # fmt: skip
# Objects and lists also contain random fields.
NESTED = st.recursive(
    NUMBERS | st.sampled_from(["", "BPE", "Unigram", "a"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.lists(st.tuples(st.sampled_from(RANDOM), inner), max_size=2).map(Pairs)
    ),
    max_leaves=3,
)
FIELDS = (
    "type", "model", "vocab", "merges", "unk_token", "unk_id", "fuse_unk", "byte_fallback", "ignore_merges", "pattern",
    "continuing_subword_prefix", "end_of_word_suffix", "cache_capacity", "normalizer", "pre_tokenizer", "decoder",
    "post_processor", "truncation", "padding", "pretokenizers", "normalizers", "decoders", "prepend_scheme", "split",
    "add_prefix_space", "use_regex", "trim_offsets", "behavior", "invert", "replacement", "special", "lstrip", "rstrip",
    "single_word", "normalized", "content", "id", "x", "seed", "dropout ", "Dropout", "sp_model_kwargs", "random",
)  # fmt: skip
AT = st.integers(-1, 6)
# Objects are counted from the end of the file. Number 0 is the model, because it is the last object.
DROPOUTS = st.builds(Change, st.just(0), st.just("dropout"), NUMBERS, AT)
OTHERS = st.builds(Change, st.integers(0, 40), st.sampled_from([*RANDOM, *FIELDS]), NUMBERS | NESTED, AT)
CHANGES = DROPOUTS | OTHERS


def cases() -> st.SearchStrategy[Case]:
    kinds = st.sampled_from([*HUGGING_FACE, *SENTENCEPIECE])
    some = st.lists(CHANGES, max_size=3).map(tuple)
    return st.builds(Case, kinds, some, st.lists(CHANGES, max_size=2).map(tuple), st.sampled_from(STYLES))


def changed(tree: Pairs, changes: tuple[Change, ...]) -> Pairs:
    """Apply changes to the objects of a file in place."""
    for change in changes:
        found = objects(tree)
        node = found[-1 - change.object % len(found)]
        if change.at < 0:
            node[:] = [pair for pair in node if pair[0] != change.key]
        node.insert(len(node) if change.at < 0 else change.at, (change.key, change.value))
    return tree


@functools.cache
def _files(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json.

    The model is the last key of tokenizer.json.
    """
    path = kind_path(kind)
    if not path.is_dir():
        return {}, {"tokenizer_class": "LlamaTokenizer", "sp_model_kwargs": {}}
    spec = json.loads((path / "tokenizer.json").read_bytes())
    model = spec.pop("model")
    return spec | {"model": model}, json.loads((path / "tokenizer_config.json").read_bytes())


def _tree(spec: dict[str, Any]) -> Pairs:
    tree = as_written(spec)
    for node in objects(tree):
        node[:] = [
            (key, Raw(json.dumps(spec["model"][key])) if key in ("vocab", "merges") else value) for key, value in node
        ]
    return tree


def _model(kind: str, changes: tuple[Change, ...]) -> bytes:
    """Return a SentencePiece model with changed and unknown fields.

    Fields of the trainer's settings are changed.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(kind_path(kind).read_bytes())
    for change in changes:
        fields = sorted(model.trainer_spec.DESCRIPTOR.fields, key=lambda field: field.number)
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            value = json.loads(change.value) if isinstance(change.value, Raw) else change.value
            setattr(model.trainer_spec, fields[(change.object + change.at) % len(fields)].name, value)
        for part in (model, model.trainer_spec, model.normalizer_spec):
            part.MergeFromString(UNKNOWN)
    return bytes(model.SerializeToString())


# -- the check --------------------------------------------------------------------------------------------------------


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_random_tokenizers_"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def ids_of(name: str, text: bytes, config: str) -> list[list[int]] | PackError:
    """Return the ids of all texts, or the error that refuses the tokenizer."""
    for file, content in ((name, text), ("tokenizer_config.json", config.encode("utf-8", "surrogatepass"))):
        (_place() / file).write_bytes(content)
    files = find_tokenizer(_place() / name)
    files = type(files)(files.main, (files.main, _place() / "tokenizer_config.json"))
    try:
        encoder = open_encoder(files)
        return [encoder.encode([text]).ids.tolist() for _ in range(2) for text in TEXTS]
    except PackError as error:
        return error


def without_random(value: Any) -> Any:
    """Return a value of json.loads without the fields that make encoding random."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in RANDOM}
        return {key: item if key == "vocab" else without_random(item) for key, item in kept.items()}
    return [without_random(item) for item in value] if isinstance(value, list) else value


def check(case: Case) -> str:
    """Check that a tokenizer is refused or not random, and return the outcome.

    An accepted tokenizer encodes like the same tokenizer without random fields.
    """
    rng = random.Random(0)
    spec, other = _files(case.kind)
    config = written(changed(as_written(other), case.config), case.style, rng)
    plain_config = json.dumps(without_random(json.loads(config)))
    if spec:
        name, main = "tokenizer.json", written(changed(_tree(spec), case.changes), case.style, rng).encode()
        parsed = json.loads(main)
        plain = json.dumps(without_random(parsed)).encode()
    else:
        name, main = "tokenizer.model", _model(case.kind, case.changes)
        parsed, plain = {}, main
    expected = ids_of(name, plain, plain_config)
    assert not isinstance(expected, PackError) or expected.reason != "random_tokenizer"
    found = ids_of(name, main, config)
    if isinstance(found, PackError):
        if found.reason == "random_tokenizer":
            assert parsed["model"]["dropout"], "nothing is random"
            return "refused as random"
        return "refused"
    assert isinstance(expected, list), expected
    for _ in range(REPEATED):
        assert found == expected
        found = ids_of(name, main, config)
    return "accepted"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@example(Case("hf_byte_level", (Change(0, "dropout", Raw("5E-1"), 0),), ()))
@given(cases())
def test_a_tokenizer_is_refused_or_encodes_the_same_each_time(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_the_sampling_of_sentencepiece_is_not_used(kind: str) -> None:
    wanted = Pairs([("enable_sampling", Raw("true")), ("nbest_size", Raw("-1")), ("alpha", Raw("0.1"))])
    assert check(Case(kind, (), (Change(0, "sp_model_kwargs", wanted, -1),))) == "accepted"
