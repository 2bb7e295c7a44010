"""Add the tokens that AutoTokenizer adds to a tokenizer.

    added_tokens_decoder, or else special_tokens_map.json, added_tokens.json, and tokenizer.json ─┐
    special tokens with names, such as bos_token and image_token ─────────────────────────────────┼─▶ added_tokens
    extra_special_tokens, additional_special_tokens ──────────────────────────────────────────────┘

The tokenizers library numbers the tokens, and decides what a second token with the same string changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.encoders.as_transformers.rebuild import Rebuilt, Spec

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
