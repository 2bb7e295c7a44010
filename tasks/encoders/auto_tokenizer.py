"""Load a tokenizer like AutoTokenizer of Transformers, without Transformers.

    tokenizer_config.json, config.json ─class_of─▶ class ─┐
    tokenizer.json or .model ─────────────────────────────┴─rebuilt─▶ parts ─wanted─▶ tokenizer.json in memory

The files of a tokenizer and AutoTokenizer may encode a text differently: AutoTokenizer adds tokens of
tokenizer_config.json, and some classes keep only the vocabulary and the merges of the file. The rules are those of
Transformers 5.23 (`auto_classes.VERSION`). A tokenizer whose class has no rule here is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tasks.core.errors import DataError, PackError, UsageError
from tasks.core.printable import shown
from tasks.encoders.auto_classes import AS_IS, VERSION, class_of
from tasks.encoders.auto_rules import OPTIONS, REBUILT, Rebuilt, Spec, converted, rebuilt, rename_pieces
from tasks.encoders.encoder import is_blank
from tasks.encoders.native import read_spec, tokenizer_of

Config = dict[str, Any]

# Special tokens with a name in every class, in the order in which they are added.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Settings(NamedTuple):
    """The files that decide how AutoTokenizer loads a tokenizer, as values.

    A file that does not exist is {}.
    """

    config: Config  # tokenizer_config.json
    special_map: Config  # special_tokens_map.json
    added: Config  # added_tokens.json
    model: Config  # config.json


class Loaded(NamedTuple):
    """A tokenizer.json in memory.

    `names` maps names of special tokens to their strings. `differs` is whether it encodes unlike the file.
    """

    spec: Spec
    names: dict[str, str]
    differs: bool


def load(main: Path, settings: Settings) -> Loaded:
    """Load a tokenizer like AutoTokenizer.

    `main` is a tokenizer.json or a .model file. Raises UsageError if its class has no rule, and DataError if a file is
    damaged.
    """
    name = find_class(main, settings)
    if setting := _unsupported(settings):
        raise _refused(main, setting)
    rule = REBUILT.get(name)
    if rule is None and name != AS_IS:
        raise _refused(main, f"the tokenizer has the class {name}")
    defaults = rule.names if rule else {}
    pieces = None
    try:
        if main.suffix == ".json":
            spec = read_spec(main)
        else:
            spec, pieces, named = converted(main, rule)
            defaults = defaults | named
        is_bpe = isinstance(spec["model"].get("vocab"), dict) and "merges" in spec["model"]
        before = _deciding(spec, main)
    except PackError:
        raise
    except Exception as error:  # damaged files raise many types
        raise DataError("bad_tokenizer", f"{main}: not a valid tokenizer.json: {error}") from None
    if rule and not is_bpe:
        raise _refused(main, f"the tokenizer has the class {name}, which is for BPE, but its model is not BPE")
    try:
        found = wanted(spec, rule, settings, defaults, pieces)
        if pieces is not None and rule is None and found.by_id:
            if not is_bpe:
                raise _refused(main, "AutoTokenizer cannot add tokens to a Unigram model")
            if not rename_pieces(spec["model"], found.by_id):
                raise _refused(main, "AutoTokenizer cannot replace pieces of the model by added tokens")
        built = rebuilt(spec, rule, settings.config | found.names) if rule else dict(spec)
        built["added_tokens"] = with_added(built, rule, found)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refused(main, f"a token in the files next to it cannot be read ({error})") from None
    if pieces is not None:
        built["post_processor"] = _post_processor(built, settings.config, found.names)
    if problem := _unmatched(built):
        raise _refused(main, problem)
    differs = pieces is not None or _deciding(built, main) != before
    return Loaded(built if differs else spec, found.names, differs)


def find_class(main: Path, settings: Settings) -> str:
    """Return the name of the class with which AutoTokenizer loads a tokenizer."""
    return class_of(
        settings.config, settings.model, lambda: main.suffix == ".json" and b'"ByteLevel"' in main.read_bytes()
    )


def _unsupported(settings: Settings) -> str:
    """Describe a setting that has no rule here, or return ""."""
    code = settings.config.get("auto_map")
    if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
        return "the tokenizer has code of its own (`auto_map` in tokenizer_config.json)"
    for name in ("split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files"):
        if settings.config.get(name):
            return f"tokenizer_config.json has the setting `{name}`"
    return ""


def _unmatched(spec: Spec) -> str:
    """Describe what the encoder would not do like the library, or return "".

    Texts are encoded apart from the control tokens around them, so the encoder itself adds the leading space that the
    library would add, and removes the white space that a control token absorbs.
    """
    first, *later = (spec.get("pre_tokenizer") or {}).get("pretokenizers") or [spec.get("pre_tokenizer") or {}]
    if any(step.get("add_prefix_space") or step.get("prepend_scheme") == "always" for step in later):
        return "the pre-tokenizer adds a space to each piece of a text"
    early = b'"Prepend"' in orjson.dumps(spec.get("normalizer"))
    spaced = early or first.get("add_prefix_space") or first.get("prepend_scheme") in ("first", "always")
    strips = any(is_blank(token["content"]) for token in spec["added_tokens"])
    for token in spec["added_tokens"]:
        name = f"the added token {shown(token['content'])}"
        if spec.get("normalizer") and token["normalized"] and (token["lstrip"] or token["rstrip"]):
            return f"{name} is normalized and absorbs white space"
        if early and token["normalized"]:
            return f"{name} is normalized, so it is matched only after a space"
        if spaced and token["single_word"]:
            return f"{name} is matched only between words"
        if strips and (token["lstrip"] or token["rstrip"]):
            return f"{name} absorbs white space, which is another added token"
    return ""


def _refused(main: Path, why: str) -> UsageError:
    return UsageError(
        "unknown_loading",
        f"{main}: {why}, and there is no rule for how AutoTokenizer of Transformers {VERSION} loads it; if inference "
        f"uses {main.name} as it is, set `tokenizer: {{path: {main.parent}, as: files}}`",
    )


def _deciding(spec: Spec, path: Path) -> list[Any]:
    """Return the parts of a tokenizer.json that decide how it encodes.

    Vocabulary and merges are left out, because no class changes them. The library writes equal parts in the same way.
    """
    options = {name: spec["model"].get(name, default) for name, default in OPTIONS.items()}
    options = {name: value if value or name == "unk_token" else None for name, value in options.items()}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    steps = {name: spec.get(name) for name in ("normalizer", "pre_tokenizer")}
    same = orjson.loads(tokenizer_of(steps | {"model": empty}, path).to_str())
    added = sorted(spec.get("added_tokens") or [], key=lambda token: int(token["id"]))
    processor = spec.get("post_processor") or {}
    begins = processor if processor.get("special_tokens") or processor.get("cls") else None
    return [options, [_without_offsets(same[name]) for name in steps], added, begins]


def _without_offsets(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_offsets(each) for each in node]
    if isinstance(node, dict):
        return {name: _without_offsets(value) for name, value in node.items() if name != "trim_offsets"}
    return node


def _post_processor(spec: Spec, config: Config, names: dict[str, str]) -> Spec:
    """Return a post-processor that adds BOS and EOS as the settings say."""
    numbers = {token["content"]: token["id"] for token in spec["added_tokens"]}
    bos, eos = (names.get(f"{name}_token") if config.get(f"add_{name}_token") else None for name in ("bos", "eos"))
    text: list[Spec] = [{"Sequence": {"id": "A", "type_id": 0}}]
    around = [[{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (bos, eos)]
    added = {token: {"id": token, "ids": [numbers[token]], "tokens": [token]} for token in (bos, eos) if token}
    single = [*around[0], *text, *around[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": added}


# -- added tokens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens that a class adds.

    `tokens` are added tokens of the tokenizers library. `names` maps names of special tokens to their strings, and
    `special` are all special tokens: those with names, and then the others. `by_id` are the tokens whose ids the files
    give.
    """

    tokens: list[Any]
    names: dict[str, str]
    special: list[Any]
    by_id: dict[int, Any]


def wanted(
    spec: Spec, rule: Rebuilt | None, settings: Settings, defaults: Config, pieces: Sequence[Any] | None = None
) -> Wanted:
    """Return the tokens that a class adds, in their order.

    `spec` is the tokenizer.json before it is rebuilt, and `defaults` are special tokens that have a name even if no
    file names them. `pieces` are added tokens of a SentencePiece model. Raises TypeError or ValueError if Transformers
    cannot read the tokens either.
    """
    from tokenizers import AddedToken

    config = dict(settings.config)
    if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens")
    own = {name: config.pop(name) for name in [*config] if _is_own_name(name) and isinstance(config[name], str)}
    if isinstance(config.get("extra_special_tokens"), dict):
        own |= config.pop("extra_special_tokens")
    own = own or config.get("model_specific_special_tokens") or {}
    by_id: dict[int, Any] = {}
    if "added_tokens_decoder" in config:
        by_id = {int(number): AddedToken(**token) for number, token in config["added_tokens_decoder"].items()}
    else:
        _add_special_map(config, own, settings.special_map)
        special = {str(_token(config[name])) for name in NAMES if config.get(name)}
        special |= {str(_token(token)) for token in config.get("extra_special_tokens") or ()}
        for content, number in settings.added.items():
            is_special = content in special
            by_id[number] = AddedToken(content, normalized=not is_special, special=is_special)
        for token in (spec.get("added_tokens") or []) if pieces is None else []:
            by_id[token["id"]] = AddedToken(**{key: value for key, value in token.items() if key != "id"})
    by_string = {token.content: token for token in by_id.values()}
    named = {name: _token(config[name]) for name in NAMES if name in config}
    named = defaults | {name: by_string.get(str(token), token) for name, token in named.items()}
    if spec.get("padding"):
        named.setdefault("pad_token", spec["padding"]["pad_token"])
    if pieces is not None:
        config["additional_special_tokens"] = pieces
    more = {name: token for name in config if _is_own_name(name) and _is_token(token := _token(config[name]))}
    named = {name: named[name] for name in NAMES if named.get(name) is not None}
    named |= more | {name: _token(token) for name, token in own.items()}
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or ()
    extra = [_token(token) for token in extra]
    if bad := [token for token in (*named.values(), *extra) if not _is_token(token)]:
        raise TypeError(f"not a token: {bad[0]!r}")
    tokens = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in tokens}
    if rule is None:
        known |= {token["content"] for token in spec.get("added_tokens") or ()}
    for token in (*named.values(), *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    names = {name: str(token) for name, token in named.items()}
    special = set(names.values())
    return Wanted([_flagged(token, special) for token in tokens], names, [*named.values(), *extra], by_id)


def _add_special_map(config: Config, own: Config, special_map: Config) -> None:
    """Add the values of special_tokens_map.json to those of tokenizer_config.json."""
    from tokenizers import AddedToken

    for name, value in special_map.items():
        if name == "extra_special_tokens" and isinstance(value, list):
            found = list(config.get(name) or [])
            for each in value:
                token = AddedToken(**each, special=True) if isinstance(each, dict) else each
                if token not in found:
                    found.append(token)
            value = found
        elif isinstance(value, dict) and name != "extra_special_tokens":
            value = AddedToken(**value | {"special": True})
        config[name] = value
    if isinstance(config.get("extra_special_tokens"), dict):
        own |= config.pop("extra_special_tokens")


def with_added(spec: Spec, rule: Rebuilt | None, found: Wanted) -> list[Spec]:
    """Return `added_tokens` of a tokenizer.json after a class has added its tokens."""
    from tokenizers import AddedToken, Tokenizer, models

    present = {token["content"]: token for token in spec.get("added_tokens") or ()}
    if rule is None and all(
        _described(token).items() <= present.get(token.content, {}).items() for token in found.tokens
    ):
        return list(present.values())
    vocabulary = spec["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # pieces with scores
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    # A model without merges numbers added tokens in the same way, and takes little time.
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=""))
    for token in present.values():
        tokenizer.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "id"})])
    tokenizer.add_tokens(found.tokens)
    if rule and rule.adds_again == "flagged":
        tokenizer.add_tokens([AddedToken(content, special=True) for content in dict.fromkeys(map(str, found.special))])
    elif rule and rule.adds_again == "special":
        again = [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in found.special]
        tokenizer.add_special_tokens(again)
    return [
        {"id": number, **_described(token)} for number, token in sorted(tokenizer.get_added_tokens_decoder().items())
    ]


def _is_own_name(name: str) -> bool:
    """Return whether a setting is the name of a special token of this tokenizer."""
    return name.endswith("_token") and name not in NAMES


def _token(value: Any) -> Any:
    """Return a token in a setting as a string or added token."""
    from tokenizers import AddedToken

    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: flag for key, flag in value.items() if key != "__type"})
    return value


def _is_token(value: Any) -> bool:
    from tokenizers import AddedToken

    return isinstance(value, str | AddedToken)


def _flagged(token: Any, special: set[str]) -> Any:
    """Return an added token, which is special if it has a name."""
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special and token.content in special:
        return AddedToken(**_described(token) | {"special": True})
    return token


def _described(token: Any) -> Spec:
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {flag: getattr(token, flag) for flag in flags}
