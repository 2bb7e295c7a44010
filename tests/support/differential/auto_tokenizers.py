"""Folders of tokenizers that AutoTokenizer loads, and the ids of a row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.differential.composed_tokenizers import COMPOSED, composed
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.encoders.encoder import Encoder

Values = dict[str, Any]


def added(content: str, **flags: Any) -> Values:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **usual, **flags}


def _next(spec: Values) -> int:
    """Return the first free id."""
    return max(token["id"] for token in spec["added_tokens"]) + 1


def _all_added(spec: Values) -> Values:
    tokens = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in spec["added_tokens"]}
    return tokens | {str(_next(spec)): added("<zzz>")}


def write_json(place: Path, name: str, value: Any) -> None:
    (place / name).write_text(json.dumps(value))


# Each changes the files of a folder: the folder, tokenizer_config.json, and tokenizer.json (`spec`).
CHANGES: dict[str, Callable[[Path, Values, Values], Any]] = {
    "nothing": lambda place, config, spec: None,
    "decoder": lambda place, config, spec: config.update(
        added_tokens_decoder={
            str(_next(spec)): added("<zzz>"),
            str(_next(spec) + 1): added("<yyy>", special=True, lstrip=True, rstrip=True),
        }
    ),
    "decoder with a gap": lambda place, config, spec: config.update(
        added_tokens_decoder={str(_next(spec) + 5): added("<zzz>"), "2": added("The")}
    ),
    "decoder with other flags": lambda place, config, spec: config.update(
        added_tokens_decoder={n: t | {"special": not t["special"]} for n, t in _all_added(spec).items()}
    ),
    "added_tokens.json": lambda place, config, spec: (
        write_json(place, "added_tokens.json", {"<yyy>": _next(spec), "<mask>": _next(spec) + 1}),
        config.update(mask_token="<mask>"),
    ),
    "special_tokens_map.json": lambda place, config, spec: write_json(
        place,
        "special_tokens_map.json",
        {"additional_special_tokens": ["<zzz>", "<yyy>"], "sep_token": added("<sep>", lstrip=True)},
    ),
    "extra": lambda place, config, spec: config.update(
        extra_special_tokens=["<zzz>", {"__type": "AddedToken", **added("<yyy>")}]
    ),
    "extra by name": lambda place, config, spec: config.update(
        extra_special_tokens={"image_token": "<img>", "z_token": "<zzz>"}
    ),
    "additional": lambda place, config, spec: config.update(additional_special_tokens=["<zzz>", "<|im_start|>"]),
    "other names": lambda place, config, spec: config.update(
        image_token="<img>", mask_token="<mask>", pad_token={"__type": "AddedToken", **added("<zzz>", lstrip=True)}
    ),
    "no names": lambda place, config, spec: config.update(bos_token=None, unk_token=None, pad_token=None),
    "prefix": lambda place, config, spec: config.update(add_prefix_space=True),
    "no prefix": lambda place, config, spec: config.update(add_prefix_space=False),
    "legacy": lambda place, config, spec: config.update(legacy=True),
    "BOS and EOS": lambda place, config, spec: config.update(add_bos_token=True, add_eos_token=True),
    "padding": lambda place, config, spec: spec.update(
        padding={
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<zzz>",
        }
    ),
}  # fmt: skip

TEXTS = (
    "", " ", "  ", "a", " a", "  a  b", "\n", "\n\nThe train", "  def area(w):\n    return w\n", "e\u0301 é ﬁ ①",
    "漢字 🙂", "x<think>y</think> z", "<zzz> a <zzz>b <yyy>  c", "<zzz>", "a<zzz>", "<|im_start|>user\nHi<|im_end|>\n",
    "[INST] The train [/INST] 85", "<s>[INST] The", "<s> The train</s> x </s>y", "don't I'LL we've", "\t\ttabs\r\nand",
    "▁x ▁ y", "1000000 2.5", "a" * 50, " " * 30 + "a", "<img> The <img>train", "<|endoftext|>x", "<mask> a <pad>",
    "Привет мир", "नमस्ते दुनिया", "مرحبا بالعالم", "The train leaves at 9:40 and arrives at 11:05.", "Then a <sep> b",
)  # fmt: skip


# Classes that load some tokenizers unlike their files, with the settings that change how.
CLASSES: dict[str, tuple[str, Values]] = {
    "as it is": ("PreTrainedTokenizerFast", {}),
    "Llama": ("LlamaTokenizer", {}),
    "Llama, legacy": ("LlamaTokenizer", {"legacy": True}),
    "Llama, not legacy": ("LlamaTokenizerFast", {"legacy": False}),
    "Llama, no prefix": ("LlamaTokenizer", {"add_prefix_space": False}),
    "Qwen2": ("Qwen2Tokenizer", {}),
    "Qwen2, prefix": ("Qwen2TokenizerFast", {"add_prefix_space": True}),
    "Qwen3.5": ("Qwen3_5Tokenizer", {}),
    "GPT-2": ("GPT2Tokenizer", {}),
    "GPT-2, prefix": ("GPT2TokenizerFast", {"add_prefix_space": True}),
    "CodeGen": ("CodeGenTokenizer", {}),
    "GPT-NeoX": ("GPTNeoXTokenizer", {}),
    "Gemma": ("GemmaTokenizer", {}),
    "Cohere": ("CohereTokenizer", {}),
    "Cohere, prefix": ("CohereTokenizer", {"add_prefix_space": True}),
    "T5": ("T5Tokenizer", {}),
    "BERT": ("BertTokenizer", {}),
}


def write_folder(
    place: Path,
    kind: str,
    change: str,
    class_name: str | None,
    model_type: str | None = None,
    settings: Values | None = None,
) -> Path:
    """Write a changed folder of a kind of tokenizer.

    `settings` are further values of tokenizer_config.json.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    path = composed(kind) if kind in COMPOSED else kind_path(kind)
    config: Values = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    spec: Values = {"added_tokens": [{"id": 0, **added("<pad>", special=True)}]}
    if path.is_dir():
        config = json.loads((path / "tokenizer_config.json").read_bytes())
        spec = json.loads((path / "tokenizer.json").read_bytes())
    else:
        shutil.copy(path, place / "tokenizer.model")
    config.pop("tokenizer_class", None)
    if class_name:
        config["tokenizer_class"] = class_name
    config |= settings or {}
    CHANGES[change](place, config, spec)
    write_json(place, "tokenizer_config.json", config)
    if path.is_dir():
        write_json(place, "tokenizer.json", spec)
    if model_type:
        write_json(place, "config.json", {"model_type": model_type})
    return place


def ids_in_a_row(encoder: Encoder, text: str) -> list[int]:
    """Return the ids of a rendered text, whose control strings are control tokens."""
    ids: list[int] = []
    behind = "start"

    def say(part: str) -> None:
        nonlocal behind
        if not part:
            return
        at_start = behind == "start" and encoder.leading_space != "none"
        spaced = at_start or (behind == "control" and encoder.leading_space == "each")
        ids.extend(encoder.encode([encoder.with_leading_space(part) if spaced else part]).ids.tolist())
        behind = "text"

    end = 0
    for match in encoder.written_pattern.finditer(text):
        say(text[end : match.start()])
        written = match.group()
        ids.append(encoder.controls[written if written in encoder.controls else written.strip()])
        behind, end = "control", match.end()
    say(text[end:])
    return ids
