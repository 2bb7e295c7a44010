"""Small tokenizers of every kind, trained once and cached, and their helpers.

    KINDS = {"sp_bpe_chatml": SentencePiece BPE, …, "hf_byte_level": a folder as Hugging Face writes it, …}
    open_kind(name) ─▶ Encoder        reference(name) ─▶ the library's own tokenizer

The tokenizers are trained on the texts below. Their vocabularies are small, so a text has many tokens and many
boundaries between tokens.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from filelock import FileLock
from hypothesis import strategies as st

from packcorpus.tasks.config import Config
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.sources.model import Part, Source
from packcorpus.tasks.sources.source_files import identify_file
from packcorpus.tasks.storage.token_files import TokenFiles
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.spans import TEXT, Span, Template
from packcorpus.tasks.tokenization.tokenize_part import tokenize_part

SENTENCES = [
    "The train leaves at 9:40 and arrives at 11:05, so the ride takes 85 minutes.",
    "Wie lange dauert die Fahrt? Genau 85 Minuten, also 1 Stunde und 25 Minuten.",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # 12",
    "A kilogram has 1000 grams; 2.5 kg are 2500 g, and 40 % of that is 1000 g.",
    '{"name": "weather", "arguments": {"town": "Ulm", "days": 2}}',
    "Which of the two is larger, 0.9 or 0.11? The first, because 0.90 is more than 0.11.",
    "user assistant system tool <tool> [x] (y) | a / b > c < d = e _ f ~ g ^ h @ i # j & k ; l ! m ` n $ o \\ p",
    "Les nombres premiers sont 2, 3, 5, 7, 11 et 13; le suivant est 17.",
] * 4  # fmt: skip

ASCII = "".join(map(chr, range(32, 127)))

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML_JINJA = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def folder() -> Path:
    """Return a temporary folder of this process."""
    handle = tempfile.TemporaryDirectory(prefix="tokenizer_kinds_")
    _KEPT.append(handle)
    return Path(handle.name)


@functools.cache
def cache_folder() -> Path:
    """Return the folder of the tokenizers, for all processes and runs.

    Its name changes with this file and with the versions of the libraries.
    """
    versions = "".join(version(name) for name in ("sentencepiece", "tokenizers"))
    digest = hashlib.sha256(Path(__file__).read_bytes() + versions.encode()).hexdigest()[:16]
    found = Path(__file__).resolve().parents[2] / ".pytest_cache" / "tokenizers" / digest
    found.mkdir(parents=True, exist_ok=True)
    return found


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def _sentencepiece(place: Path, name: str, **options: Any) -> Path:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in SENTENCES for line in text.split("\n")),
        model_writer=model,
        **{
            "model_type": "bpe",
            "vocab_size": 500,
            "hard_vocab_limit": False,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "required_chars": ASCII.replace(" ", ""),
            "num_threads": 1,
            "pad_id": 0,
            "bos_id": 1,
            "eos_id": 2,
            "unk_id": 3,
            "minloglevel": 2,
        }
        | options,
    )
    path = place / f"{name}.model"
    path.write_bytes(model.getvalue())
    return path


def _sp_bpe_chatml(place: Path) -> Path:
    return _sentencepiece(place, "sp_bpe_chatml", control_symbols=["<|im_start|>", "<|im_end|>"])


def _sp_bpe_user_defined(place: Path) -> Path:
    return _sentencepiece(place, "sp_bpe_user_defined", user_defined_symbols=["<sep>", "<tool_call>", "[INST]", "  "])


def _sp_unigram(place: Path) -> Path:
    return _sentencepiece(place, "sp_unigram", model_type="unigram", vocab_size=460, user_defined_symbols=["<sep>"])


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def _added(content: str, special: bool = True) -> Any:
    from tokenizers import AddedToken

    return AddedToken(content, special=special, normalized=False)


def _write_folder(place: Path, name: str, tokenizer: Any, **settings: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json, as Hugging Face does."""
    path = place / name
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _hf_byte_level(place: Path) -> Path:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([_added(content) for content in LLAMA3_SPECIAL])
    tokenizer.add_tokens([_added(content, special=False) for content in NOT_SPECIAL])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return _write_folder(
        place,
        "hf_byte_level",
        tokenizer,
        bos_token=bos,
        eos_token="<|im_end|>",
        pad_token={"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        chat_template=CHATML_JINJA,
    )


def _hf_llama2(place: Path, name: str, legacy: bool) -> Path:
    """Write a tokenizer with the same kinds of pieces as Llama 2.

    It has bytes, it has <s> and </s> in the vocabulary and among the added tokens, and it never merges across words.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
            pre_tokenizers.Split(Regex("▁+"), "merged_with_next"),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=special, initial_alphabet=[*ASCII.replace(" ", "▁")], show_progress=False
    )
    learner.train_from_iterator(SENTENCES, trainer)
    model = json.loads(learner.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([_added(t) for t in ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([_added("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write_folder(
        place,
        name,
        tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHATML_JINJA,
    )


def _hf_metaspace(place: Path) -> Path:
    return _hf_llama2(place, "hf_metaspace", legacy=False)


def _hf_legacy(place: Path) -> Path:
    return _hf_llama2(place, "hf_legacy", legacy=True)


def _hf_unigram(place: Path) -> Path:
    """Write a Unigram tokenizer with special tokens in its vocabulary.

    The trie of the model matches them in any text that contains them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<pad>", "<unk>", "</s>", "<|im_start|>", "<|im_end|>", "<sep>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=special,
        unk_token="<unk>",
        initial_alphabet=[*ASCII.replace(" ", "▁")],
        show_progress=False,
    )
    learner.train_from_iterator(SENTENCES, trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = [(piece, -0.5 if piece in special else score) for piece, score in model["vocab"]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([_added(content) for content in special])
    return _write_folder(place, "hf_unigram", tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


_Builder = Callable[[Path], Path]
_BUILDERS: dict[str, _Builder] = {
    "sp_bpe_chatml": _sp_bpe_chatml,
    "sp_bpe_user_defined": _sp_bpe_user_defined,
    "sp_unigram": _sp_unigram,
    "hf_byte_level": _hf_byte_level,
    "hf_metaspace": _hf_metaspace,
    "hf_legacy": _hf_legacy,
    "hf_unigram": _hf_unigram,
}


def _of_class(base: str, class_name: str, files: Mapping[str, Any] | None = None, **settings: Any) -> _Builder:
    """Return a builder of a folder that a class loads unlike its tokenizer.json.

    `files` are further JSON files of the folder.
    """

    def build(place: Path) -> Path:
        path = place / "tokenizer"
        shutil.copytree(kind_path(base), path)
        config = json.loads((path / "tokenizer_config.json").read_bytes())
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": class_name} | settings))
        for name, values in (files or {}).items():
            (path / name).write_text(json.dumps(values))
        return path

    return build


_THOUGHT = {"content": "<|thought|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
_CLASSES: dict[str, _Builder] = {
    "qwen2": _of_class("hf_byte_level", "Qwen2Tokenizer", extra_special_tokens=["<|thought|>", "[INST]"]),
    "qwen3_5": _of_class("hf_byte_level", "PreTrainedTokenizerFast", {"config.json": {"model_type": "qwen3_5"}}),
    "gpt2": _of_class("hf_byte_level", "GPT2Tokenizer", add_prefix_space=True),
    "gpt_neox": _of_class(
        "hf_byte_level", "GPTNeoXTokenizer", {"added_tokens.json": {"<|thought|>": 431, "[INST]": 432}}
    ),
    "cohere": _of_class("hf_byte_level", "CohereTokenizer", image_token="<image>"),
    "llama": _of_class("hf_legacy", "LlamaTokenizer", added_tokens_decoder={"523": _THOUGHT}),
    "llama_legacy": _of_class("hf_metaspace", "LlamaTokenizer", legacy=True),
    "llama_without_prefix": _of_class("hf_metaspace", "LlamaTokenizerFast", add_prefix_space=False),
    "gemma": _of_class("hf_metaspace", "GemmaTokenizer", {"special_tokens_map.json": {"sep_token": "[SEP]"}}),
    "unigram_added": _of_class("hf_unigram", "PreTrainedTokenizerFast", extra_special_tokens={"a_token": "[INST]"}),
}
MISTRAL = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "mistral_v3_32k.model"

BUILT = tuple(_BUILDERS)
CLASSES = tuple(_CLASSES)
KINDS = (*BUILT, "mistral_v3")
# Kinds of tokenizers that AutoTokenizer loads unlike their tokenizer.json are in CLASSES.
SENTENCEPIECE = ("sp_bpe_chatml", "sp_bpe_user_defined", "sp_unigram", "mistral_v3")
HUGGING_FACE = ("hf_byte_level", "hf_metaspace", "hf_legacy", "hf_unigram")
# Every byte has a token, so every text decodes to itself.
LOSSLESS = tuple(kind for kind in KINDS if kind != "hf_unigram")


@functools.cache
def kind_path(kind: str) -> Path:
    """Return the model file or folder of a kind.

    Skips the test if the kind is `mistral_v3`, the real tokenizer, and its file is missing.
    """
    if kind == "mistral_v3":
        if not MISTRAL.is_file():
            import pytest

            pytest.skip("needs ../shared/tokenizers/mistral_v3_32k.model")
        return MISTRAL
    # One process trains the tokenizer, and the others wait.
    with FileLock(cache_folder() / f"{kind}.lock"):
        place = cache_folder() / kind
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as name:
                (_BUILDERS | _CLASSES)[kind](Path(name))
                Path(name).rename(place)
                Path(name).mkdir()  # for the context to remove
    return next(place.iterdir())


@functools.cache
def open_kind(kind: str) -> Encoder:
    return open_encoder(find_tokenizer(kind_path(kind)))


@functools.cache
def reference(kind: str) -> Any:
    """Open the tokenizer of a kind with its own library.

    Returns a SentencePieceProcessor, or what AutoTokenizer returns for a Hugging Face folder.
    """
    if kind in SENTENCEPIECE:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(kind_path(kind)))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(kind_path(kind)))


# -- texts ------------------------------------------------------------------------------------------------------------


@functools.cache
def control_strings(kind: str) -> tuple[str, ...]:
    """Return the texts that could be taken for control tokens.

    They are the tokenizer's control tokens and content tokens, and the marks of common templates.
    """
    common = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "<unk>", "<sep>", "[INST]", "<|eot_id|>", "<tool_call>")
    encoder = open_kind(kind)
    return tuple(dict.fromkeys((*encoder.controls, *encoder.content_tokens, *common)))


def ordinary(kind: str) -> st.SearchStrategy[str]:
    """Draw a text that cannot be taken for a control token.

    It has words, digits, and white space. For a lossless tokenizer, it also has emoji and other scripts.
    """
    words = ["The", "train", " ride", "area", "85", "1000", ", ", ".", "?", "\n", "\n\n", " ", "  ", "   "]
    others = ["🙂", "👩‍👩‍👧", "漢字", "Привет", "مرحبا", "\u200d", "\u0301", "\r\n", "\u00a0", "\u2028", "ﬁ", "①", "\t"]
    return st.lists(st.sampled_from(words + others if kind in LOSSLESS else words), max_size=12).map("".join)


def hostile(kind: str) -> st.SearchStrategy[str]:
    """Draw control strings, whole and cut, among ordinary text and any characters."""
    whole = st.sampled_from(control_strings(kind)[:40])
    cut = st.tuples(whole, st.integers(0, 20), st.integers(0, 20)).map(lambda t: t[0][min(t[1:]) : max(t[1:])])
    known = st.characters(exclude_categories=["Cs"], exclude_characters="\0") if kind in LOSSLESS else ASCII
    odd = st.sampled_from(["▁", "▁▁ ", "  ", "\n" * 3, "< s >"])
    pieces = st.one_of(whole, whole, cut, ordinary(kind), st.text(known, max_size=6), odd)
    return st.lists(pieces, max_size=8).map("".join)


@st.composite
def records(draw: st.DrawFn, texts: st.SearchStrategy[str], usual: bool = False) -> dict[str, Any]:
    """Draw a record of the format `messages` with `texts` in every field.

    With `usual`, the only roles are user and assistant, after an optional system message.
    """
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        roles = ["user", "assistant"] if usual else draw(st.lists(st.sampled_from(MANY_ROLES), min_size=1, max_size=3))
        for role in roles:
            message: dict[str, Any] = {"role": role, "content": "Q" * usual + draw(texts)}
            if role == "tool":
                message |= {"tool_call_id": draw(texts), "name": draw(texts)}
            if role == "call":
                function = {"name": draw(texts) or "f", "arguments": {draw(texts): [draw(texts)], "k": draw(texts)}}
                message |= {"role": "assistant", "tool_calls": [{"id": draw(texts), "function": function}]}
            if not usual and draw(st.integers(0, 5)) == 0:
                message |= draw(st.sampled_from(({"weight": 0}, {"train": True})))
            messages.append(message)
    messages.append({"role": "assistant", "content": "The end" + draw(texts)})
    record: dict[str, Any] = {"messages": messages}
    if not usual and draw(st.booleans()):
        record["tools"] = [{"type": "function", "function": {"name": draw(texts), "parameters": {draw(texts): 1}}}]
    return record


MANY_ROLES = ("user", "user", "assistant", "assistant", "call", "tool", "system")


def everywhere(text: str) -> dict[str, Any]:
    """Return a record with `text` in every field that a record can have."""
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: text, "k": [{text: text}]}}}
    return {
        "messages": [
            {"role": "system", "content": text, "name": text},
            {"role": "user", "content": text, "name": text},
            {"role": "assistant", "content": text, "name": text, "tool_calls": [call, call]},
            {"role": "tool", "content": text, "name": text, "tool_call_id": text},
            {"role": "assistant", "content": text},
        ],
        "tools": [{"type": "function", "function": {"name": text, "parameters": {text: {text: text}}}}],
    }


# -- conversations → token files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One sample of a token file. `turn` is the message that ends it, or -1."""

    record: int
    turn: int
    trained_count: int
    separator: bool
    ids: np.ndarray
    trained: np.ndarray


def _no_sync(file: int) -> None:
    """Replace os.fsync.

    A MagicMock for each call would take a seventh of the time.
    """


@functools.cache
def _place(process: int) -> Path:
    """Return the folder in which a process tokenizes; a fork needs its own."""
    return Path(tempfile.mkdtemp(prefix=f"{process}_", dir=folder()))


@functools.cache
def _config(train_on: Any, **settings: Any) -> Config:
    return Config(sources=[Source(path="part.jsonl")], train_on=train_on, **settings)


def tokenize(
    records: Sequence[Mapping[str, Any]],
    encoder: Encoder,
    template: Template | str,
    train_on: str = "assistant",
    format: str = "messages",
    **settings: Any,
) -> tuple[list[Row], dict[str, Any]]:
    """Tokenize records through a JSONL file and `tokenize_part`.

    Returns the rows of the token file, and the receipt.
    """
    config = _config(train_on, **settings)
    if isinstance(template, str):
        template = BuiltIn(template, encoder, config.train_on)
    place = _place(os.getpid())
    # These files do not have to survive a power cut, and fsync would take most of the time.
    with mock.patch("os.fsync", _no_sync):
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        (place / "part.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
        # Not find_parts: its threads would take a third of the time to compute a digest that no test reads.
        file = identify_file(place / "part.jsonl", "part.jsonl", Source(path="part.jsonl", format=format))
        part = Part(file, 0, file.bytes, sha256="")
        receipt = tokenize_part(part, encoder, template, config, place / "tokens.arrow", place / "receipt.json")
        rows = read_rows(place / "tokens.arrow")
    for file_name in ("part.jsonl", "tokens.arrow", "receipt.json"):
        (place / file_name).unlink()
    return rows, receipt


def written(spans: Sequence[Span], encoder: Encoder) -> tuple[bytes, list[bool], list[tuple[int, int]]]:
    """Return the content that a row must have, without its separator.

    The content is its bytes, whether each byte is trained, and the (place, ID) of each control token.
    """
    content, trained, controls = b"", list[bool](), list[tuple[int, int]]()
    behind = "start"
    for span in _joined(spans):
        text = span.text
        if span.token == TEXT:
            rule = encoder.leading_space
            if behind == "start":
                spaced = rule != "none"
            else:
                spaced = behind == "control" and (rule == "each" or (rule == "template" and span.start))
            text = " " + text if spaced and not text.startswith(encoder.has_space) else text
            text = with_inner_spaces(text, encoder)
            text = text.replace("▁", " ") if encoder.underline_is_space else text
        else:
            controls.append((len(content), span.token))
        content += text.encode()
        trained += [span.trained] * (len(content) - len(trained))
        behind = "text" if span.token == TEXT and not span.text.endswith(encoder.space_follows) else "control"
    return content, trained, controls


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join adjacent spans of text that are encoded together."""
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if before and before.token == span.token == TEXT and before.trained == span.trained:
            joined[-1] = before._replace(text=before.text + span.text)
        else:
            joined.append(span)
    return joined


def with_inner_spaces(text: str, encoder: Encoder) -> str:
    """Add the spaces that some tokenizers put after each content token."""
    if not encoder.space_follows:
        return text
    first, *rest = re.split(f"({'|'.join(map(re.escape, encoder.space_follows))})", text)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return first + "".join(token + (encoder.with_leading_space(after) if after else "") for token, after in pairs)


@functools.cache
def bytes_of_tokens(encoder: Encoder) -> list[bytes]:
    return [encoder.token_bytes(token) for token in range(encoder.vocab_size)]


def check_row(row: Row, spans: Sequence[Span], encoder: Encoder) -> None:
    """Check that a row has the content, labels, and control tokens of its spans."""
    content, trained, controls = written(spans, encoder)
    ids, table = row.ids.tolist(), bytes_of_tokens(encoder)
    pieces = [table[number] for number in ids]
    lengths = list(map(len, pieces))
    known = set(encoder.controls.values()) - {encoder.unk_id}
    found = [(start, number) for start, number in zip(accumulate([0, *lengths]), ids, strict=False) if number in known]
    if row.separator:
        controls = [*controls, (len(content), encoder.eos_id)]
        # The separator is trained if the last span before it that is not white space is trained.
        said = [span for span in spans if span.token != TEXT or span.text.strip()]
        trained += [said[-1].trained] * lengths[-1]
        content += pieces[-1]
    assert found == controls
    assert b"".join(pieces) == content
    trained[: lengths[0]] = [False] * lengths[0]
    assert np.repeat(row.trained, lengths).tolist() == trained
    assert row.trained_count == int(row.trained.sum())


def read_rows(token_file: Path) -> list[Row]:
    """Return the rows of a token file, with token IDs and labels apart."""
    files = TokenFiles([token_file])
    table = files.table(0)
    columns = [table.column(name).to_pylist() for name in ("record", "turn", "trained", "separator")]
    rows = []
    for index in range(len(table)):
        values = np.array(files.tokens(0, index))
        facts = (column[index] for column in columns)
        rows.append(Row(*facts, values ^ (values >> 31), values >= 0))
    return rows
