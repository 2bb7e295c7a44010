"""Describe the classes with which AutoTokenizer loads a tokenizer.

    tokenizer_config.json, config.json ─class_of─▶ "Qwen2Tokenizer" ─REBUILT─▶ what the class builds, from
                                                                               vocabulary and merges only

The class follows from `tokenizer_class` of the files, and from the type of the model. For some types of models,
Transformers ignores the class that the files name. Most classes use tokenizer.json as it is. The classes of REBUILT
ignore its normalizer, its pre-tokenizer, and the options of its model. They have their own, which depend on a few
settings of tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.encoders.sentencepiece_encoder import DECODER, OPTIONS, SPACE_TO_UNDERLINE, Spec

Config = dict[str, Any]

# The release of Transformers whose rules these are. It is part of the key of each tokenizer that they change.
VERSION = "5.23"

# The class that uses tokenizer.json as it is.
AS_IS = "TokenizersBackend"

# Special tokens with a name in every class, in the order in which they are added.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# Other names of classes.
ALIASES = {
    "PreTrainedTokenizer": AS_IS,
    "PythonBackend": AS_IS,
    "BloomTokenizer": AS_IS,
    "Phi3Tokenizer": "LlamaTokenizer",
}

# Types of models: by class, or under "of its model" if their class has no rule here; those whose files name a wrong
# class, which the class of the type replaces; and those whose LlamaTokenizer is never looked at.
_TABLES = orjson.loads(Path(__file__).with_name("model_types.json").read_bytes())
CLASS_OF_TYPE = {model_type: name for name, types in _TABLES["classes"].items() for model_type in types}
WRONG_CLASS, MISTRAL = frozenset(_TABLES["wrong"]), frozenset(_TABLES["mistral"])


def class_of(config: Mapping[str, Any], model: Mapping[str, Any], is_byte_level: Callable[[], bool]) -> str:
    """Return the name of the class, without "Fast" at its end.

    `config` is tokenizer_config.json, and `model` is config.json. `is_byte_level` returns whether a tokenizer.json
    encodes bytes.
    """
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    model_type, names = model.get("model_type"), (model.get("model_type"), model.get("model_name"))
    is_wrong = any(isinstance(name, str) and name in WRONG_CLASS for name in names)
    of_type = CLASS_OF_TYPE.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(named, str):
        return of_type or AS_IS
    named = named.removesuffix("Fast")
    if named == "LlamaTokenizer" and model_type not in MISTRAL and not is_wrong and is_byte_level():
        return AS_IS
    if of_type not in (None, named) and (of_type == AS_IS or is_wrong):
        return str(of_type)
    return ALIASES.get(named, named)


# -- what the classes build ---------------------------------------------------------------------------------------

# Normalizer, pre-tokenizer, decoder, and options of the model.
_Parts = tuple[Spec | None, Spec, Spec, Spec]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a class builds.

    `names` are special tokens that have a name in the class even if no file names them; None stands for no token.
    `parts` returns the parts from tokenizer_config.json with the names of the special tokens. `adds_again` is how the
    class adds its special tokens once more: "flagged" as new special tokens, or "special" with their own flags.
    """

    names: dict[str, str | None]
    parts: Callable[[Mapping[str, Any]], _Parts]
    adds_again: str = ""
    keeps_post_processor: bool = True

    def build(self, spec: Spec, config: Mapping[str, Any]) -> Spec:
        """Return a tokenizer.json as the class builds it, without added tokens."""
        normalizer, pre_tokenizer, decoder, options = self.parts(config)
        model = spec["model"]
        return spec | {
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "decoder": decoder,
            "post_processor": spec.get("post_processor") if self.keeps_post_processor else None,
            "model": {"type": "BPE", **OPTIONS, **options, "vocab": model["vocab"], "merges": model["merges"]},
        }


def _bytes(normalizer: Spec | None, *before: Spec, use_regex: bool = True) -> Callable[[Mapping[str, Any]], _Parts]:
    """Return a byte-level class, whose pre-tokenizer begins with the steps `before`."""

    def parts(config: Mapping[str, Any]) -> _Parts:
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        last = decoder | {"add_prefix_space": bool(config.get("add_prefix_space")), "use_regex": use_regex}
        return normalizer, {"type": "Sequence", "pretokenizers": [*before, last]} if before else last, decoder, {}

    return parts


def _llama(config: Mapping[str, Any]) -> _Parts:
    given = config.get("add_prefix_space")
    scheme = "never" if given is not None and not given else "always" if config.get("legacy") else "first"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return None, metaspace, DECODER, {"fuse_unk": True, "byte_fallback": True}


def _gemma(config: Mapping[str, Any]) -> _Parts:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    options = {"fuse_unk": True, "byte_fallback": True, "unk_token": str(config.get("unk_token"))}
    return SPACE_TO_UNDERLINE, split, DECODER, options


def _split(pattern: str) -> Spec:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_QWEN2 = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NFC = {"type": "NFC"}
_END = "<|endoftext|>"
_QWEN_NAMES = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
_GPT2_NAMES = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}

REBUILT = {
    "LlamaTokenizer": Rebuilt({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama),
    "Qwen2Tokenizer": Rebuilt(_QWEN_NAMES, _bytes(_NFC, _QWEN2, use_regex=False), "flagged"),
    "Qwen3_5Tokenizer": Rebuilt(_QWEN_NAMES, _bytes(_NFC, _QWEN3_5, use_regex=False)),
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


# -- added tokens -------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """The files that decide how AutoTokenizer loads; {} for a missing file."""

    config: Config  # tokenizer_config.json
    special_map: Config  # special_tokens_map.json
    added: Config  # added_tokens.json
    model: Config  # config.json


class Added(NamedTuple):
    """The tokens that a class adds.

    `tokens` are added tokens of the tokenizers library. `names` maps names of special tokens to their strings, and
    `special` are all special tokens: those with names, and then the others. `by_id` are the tokens whose ids the files
    give.
    """

    tokens: list[Any]
    names: dict[str, str]
    special: list[Any]
    by_id: dict[int, Any]


def added_by(
    spec: Spec, rule: Rebuilt | None, settings: Settings, defaults: Config, pieces: Sequence[Any] | None
) -> Added:
    """Return the tokens that a class adds, in their order.

    `spec` is the tokenizer.json before it is rebuilt, and `defaults` are special tokens that have a name even if no
    file names them. `pieces` are added tokens of a SentencePiece model. Raises TypeError or ValueError if Transformers
    cannot read the tokens either.
    """
    from tokenizers import AddedToken

    def token_in(value: Any) -> Any:
        if isinstance(value, dict) and value.get("__type") == "AddedToken":
            return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
        return value

    def is_own_name(name: str) -> bool:
        return name.endswith("_token") and name not in NAMES

    config = dict(settings.config)
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    own = {name: config.pop(name) for name in [*config] if is_own_name(name) and isinstance(config[name], str)}
    if isinstance(config.get("extra_special_tokens"), dict):
        own |= config.pop("extra_special_tokens")
    own = own or config.get("model_specific_special_tokens") or {}
    by_id: dict[int, Any] = {}
    if "added_tokens_decoder" in config:
        by_id = {int(number): AddedToken(**token) for number, token in config["added_tokens_decoder"].items()}
    else:
        _add_special_map(config, settings.special_map)
        if isinstance(config.get("extra_special_tokens"), dict):
            own |= config.pop("extra_special_tokens")
        special = {str(token_in(config[name])) for name in NAMES if config.get(name)}
        special |= {str(token_in(token)) for token in config.get("extra_special_tokens") or ()}
        for content, number in settings.added.items():
            is_special = content in special
            by_id[number] = AddedToken(content, normalized=not is_special, special=is_special)
        for token in (spec.get("added_tokens") or []) if pieces is None else []:
            by_id[token["id"]] = AddedToken(**{key: value for key, value in token.items() if key != "id"})
    by_string = {token.content: token for token in by_id.values()}
    named = {name: token_in(config[name]) for name in NAMES if name in config}
    named = defaults | {name: by_string.get(str(token), token) for name, token in named.items()}
    if spec.get("padding"):
        named.setdefault("pad_token", spec["padding"]["pad_token"])
    if pieces is not None:
        config["additional_special_tokens"] = pieces
    named = {name: named[name] for name in NAMES if named.get(name) is not None}
    more = {name: token_in(config[name]) for name in config if is_own_name(name)}
    named |= {name: token for name, token in more.items() if isinstance(token, str | AddedToken)}
    named |= {name: token_in(token) for name, token in own.items()}
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or ()
    all_special = [*named.values(), *map(token_in, extra)]
    tokens = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in tokens}
    if rule is None:
        known |= {token["content"] for token in spec.get("added_tokens") or ()}
    for token in all_special:
        if not isinstance(token, str | AddedToken):
            raise TypeError(f"not a token: {token!r}")
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {name: str(token) for name, token in named.items()}
    for place, token in enumerate(tokens):  # a token with a name is special
        if isinstance(token, str):
            tokens[place] = AddedToken(token, special=True)
        elif not token.special and token.content in names.values():
            tokens[place] = AddedToken(**_described(token) | {"special": True})
    return Added(tokens, names, all_special, by_id)


def _add_special_map(config: Config, special_map: Config) -> None:
    """Add the values of special_tokens_map.json to those of tokenizer_config.json."""
    from tokenizers import AddedToken

    for name, value in special_map.items():
        if name == "extra_special_tokens" and isinstance(value, list):
            tokens = list(config.get(name) or [])
            for item in value:
                token = AddedToken(**item, special=True) if isinstance(item, dict) else item
                if token not in tokens:
                    tokens.append(token)
            value = tokens
        elif isinstance(value, dict) and name != "extra_special_tokens":
            value = AddedToken(**value | {"special": True})
        config[name] = value


def with_added(spec: Spec, rule: Rebuilt | None, added: Added) -> list[Spec]:
    """Return `added_tokens` of a tokenizer.json after a class has added its tokens."""
    from tokenizers import AddedToken, Tokenizer, models

    present = {token["content"]: token for token in spec.get("added_tokens") or ()}
    if rule is None and all(_described(t).items() <= present.get(t.content, {}).items() for t in added.tokens):
        return list(present.values())
    vocabulary = spec["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # pieces with scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    # A model without merges numbers added tokens in the same way, and takes little time.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    for token in present.values():
        tokenizer.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "id"})])
    tokenizer.add_tokens(added.tokens)
    if rule and rule.adds_again == "flagged":
        tokenizer.add_tokens([AddedToken(content, special=True) for content in dict.fromkeys(map(str, added.special))])
    elif rule and rule.adds_again == "special":
        again = [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in added.special]
        tokenizer.add_special_tokens(again)
    return [
        {"id": number, **_described(token)} for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    ]


def _described(token: Any) -> Spec:
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {flag: getattr(token, flag) for flag in flags}
