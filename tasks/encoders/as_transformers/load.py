"""Load a tokenizer with the rules of its class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tasks.core.errors import DataError, PackError, UsageError
from tasks.core.printable import shown
from tasks.encoders.added_tokens import is_blank
from tasks.encoders.as_transformers.added import Config, Settings, wanted, with_added
from tasks.encoders.as_transformers.classes import AS_IS, VERSION, class_of
from tasks.encoders.as_transformers.rebuild import OPTIONS, REBUILT, Spec, rebuilt
from tasks.encoders.as_transformers.sentencepiece_model import converted, rename_pieces
from tasks.encoders.native import read_spec, tokenizer_of


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
