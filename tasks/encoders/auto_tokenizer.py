"""Load a tokenizer like AutoTokenizer of Transformers, without Transformers.

    tokenizer_config.json, config.json ─class_of─▶ class ─┐
    tokenizer.json or .model ─────────────────────────────┴─build─▶ parts ─added_by─▶ tokenizer.json in memory

The files of a tokenizer and AutoTokenizer may encode a text differently: AutoTokenizer adds tokens of
tokenizer_config.json, and some classes keep only the vocabulary and the merges of the file. The rules are those of one
release of Transformers (`auto_classes.VERSION`). A tokenizer whose class has no rule here is refused. `compare` looks
for differences from the installed release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.core.errors import DataError, PackError, UsageError
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.encoders.auto_classes import (
    AS_IS,
    REBUILT,
    VERSION,
    Config,
    Settings,
    added_by,
    class_of,
    with_added,
)
from packcorpus.tasks.encoders.encoder import Encoder, Unencodable, is_blank
from packcorpus.tasks.encoders.native import read_spec, tokenizer_of
from packcorpus.tasks.encoders.sentencepiece_encoder import OPTIONS, Spec, converted


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
    code = settings.config.get("auto_map")
    if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
        raise _refused(main, "the tokenizer has code of its own (`auto_map` in tokenizer_config.json)")
    for setting in ("split_special_tokens", "fix_mistral_regex", "fast_tokenizer_files"):
        if settings.config.get(setting):
            raise _refused(main, f"tokenizer_config.json has the setting `{setting}`")
    rule = REBUILT.get(name)
    if rule is None and name != AS_IS:
        raise _refused(main, f"the tokenizer has the class {name}")
    defaults = rule.names if rule else {}
    pieces = None
    try:
        if main.suffix == ".json":
            spec = read_spec(main)
        else:
            spec, pieces, named = converted(main, rule is None)
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
        added = added_by(spec, rule, settings, defaults, pieces)
        if pieces is not None and rule is None and added.by_id:
            if not is_bpe:
                raise _refused(main, "AutoTokenizer cannot add tokens to a Unigram model")
            if not _rename_pieces(spec["model"], added.by_id):
                raise _refused(main, "AutoTokenizer cannot replace pieces of the model by added tokens")
        built = rule.build(spec, settings.config | added.names) if rule else dict(spec)
        built["added_tokens"] = with_added(built, rule, added)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _refused(main, f"a token in the files next to it cannot be read ({error})") from None
    if pieces is not None:
        built["post_processor"] = _post_processor(built, settings.config, added.names)
    if problem := _unmatched(built):
        raise _refused(main, problem)
    differs = pieces is not None or _deciding(built, main) != before
    return Loaded(built if differs else spec, added.names, differs)


def find_class(main: Path, settings: Settings) -> str:
    """Return the name of the class with which AutoTokenizer loads a tokenizer."""
    return class_of(
        settings.config, settings.model, lambda: main.suffix == ".json" and b'"ByteLevel"' in main.read_bytes()
    )


def _unmatched(spec: Spec) -> str:
    """Describe what the encoder would not do like the library, or return "".

    Texts are encoded apart from the control tokens around them, so the encoder itself adds the leading space that the
    library would add, and removes the white space that a control token absorbs.
    """
    _, *later = (spec.get("pre_tokenizer") or {}).get("pretokenizers") or [spec.get("pre_tokenizer") or {}]
    if any(step.get("add_prefix_space") or step.get("prepend_scheme") == "always" for step in later):
        return "the pre-tokenizer adds a space to each piece of a text"
    early = b'"Prepend"' in orjson.dumps(spec.get("normalizer"))
    strips = any(is_blank(token["content"]) for token in spec["added_tokens"])
    for token in spec["added_tokens"]:
        name = f"the added token {shown(token['content'])}"
        if spec.get("normalizer") and token["normalized"] and (token["lstrip"] or token["rstrip"]):
            return f"{name} is normalized and absorbs white space"
        if early and token["normalized"]:
            return f"{name} is normalized, so it is matched only after a space"
        if token["single_word"]:  # texts are encoded without the words of the template beside them
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

    def without_offsets(node: Any) -> Any:
        if isinstance(node, list):
            return list(map(without_offsets, node))
        if isinstance(node, dict):
            return {name: without_offsets(value) for name, value in node.items() if name != "trim_offsets"}
        return node

    options = {name: spec["model"].get(name, default) for name, default in OPTIONS.items()}
    options = {name: value if value or name == "unk_token" else None for name, value in options.items()}
    steps = {name: spec.get(name) for name in ("normalizer", "pre_tokenizer")}
    same = orjson.loads(tokenizer_of(steps | {"model": {"type": "BPE", "vocab": {}, "merges": []}}, path).to_str())
    added = sorted(spec.get("added_tokens") or [], key=lambda token: int(token["id"]))
    processor = spec.get("post_processor") or {}
    begins = processor if processor.get("special_tokens") or processor.get("cls") else None
    return [options, [without_offsets(same[name]) for name in steps], added, begins]


def _rename_pieces(model: Spec, by_id: Mapping[int, Any]) -> bool:
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


def _post_processor(spec: Spec, config: Config, names: dict[str, str]) -> Spec:
    """Return a post-processor that adds BOS and EOS as the settings say."""
    numbers = {token["content"]: token["id"] for token in spec["added_tokens"]}
    bos, eos = (names.get(f"{name}_token") if config.get(f"add_{name}_token") else None for name in ("bos", "eos"))
    steps = [("SpecialToken", bos), ("Sequence", "A"), ("SpecialToken", eos)]
    single = [{kind: {"id": name, "type_id": 0}} for kind, name in steps if name]
    added = {token: {"id": token, "ids": [numbers[token]], "tokens": [token]} for token in (bos, eos) if token}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": added}


# -- the installed AutoTokenizer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """Equal texts, and the first difference or why AutoTokenizer cannot be used."""

    texts: int = 0
    difference: str = ""
    failure: str = ""


def is_installed() -> bool:
    return find_spec("transformers") is not None


def compare(encoder: Encoder, folder: Path, texts: Iterable[str]) -> Comparison:
    """Compare with AutoTokenizer of the tokenizer in a folder.

    Texts with a control string are left out: they stay text here, but AutoTokenizer makes control tokens of them.
    """
    name = f"AutoTokenizer of Transformers {metadata.version('transformers')}"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of the library would break later forks
    with _without_torch():
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a file can be unusable in many ways
            reason = " ".join(str(error).split())[:200]
            return Comparison(failure=f"{name} cannot load {folder}: {type(error).__name__}: {reason}")
        for token, number in (*encoder.controls.items(), *encoder.content_tokens.items()):
            theirs = tokenizer.convert_tokens_to_ids(token)
            if theirs != number:
                what = f"the token {shown(token)} has the id {number} here, but {theirs} with {name}"
                return Comparison(difference=what)
        some = list(islice((text[:2000] for text in texts if text), 300))
        held = set(encoder.holding(some))
        count = 0
        for text, ours in _ours(encoder, [text for number, text in enumerate(some) if number not in held]):
            theirs = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if theirs not in ours:
                pairs = enumerate(zip(ours[0], theirs, strict=False))
                first = next((n for n, (one, other) in pairs if one != other), min(len(ours[0]), len(theirs)))
                around = slice(max(0, first - 4), first + 4)
                tokens = [tokenizer.convert_ids_to_tokens(ids[around]) for ids in (ours[0], theirs)]
                mine, yours = (shown(" ".join(map(str, some_tokens))) for some_tokens in tokens)
                return Comparison(count, f"{shown(text[:80])} becomes {mine} here, but {yours} with {name}")
            count += 1
        return Comparison(count)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from an import of Transformers, unless one of them is loaded.

    No tokenizer needs PyTorch, which takes most of the time. What is imported is forgotten when the block ends.
    """
    before = set(sys.modules)
    if not before.isdisjoint(("torch", "transformers")):
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that no model can be used
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        for module in set(sys.modules) - before:
            if module.partition(".")[0] == "transformers":
                del sys.modules[module]


def _ours(encoder: Encoder, texts: Sequence[str]) -> list[tuple[str, list[list[int]]]]:
    """Return texts, each with its ids at the start of a rendering.

    Texts without an encoding are left out. There are two encodings if the template decides about the leading space.
    """
    spaced = [encoder.with_leading_space(text) for text in texts]
    forms = {"none": [texts], "template": [spaced, texts]}.get(encoder.leading_space, [spaced])
    try:
        encoded = [encoder.encode(form) for form in forms]
    except Unencodable as error:
        pairs = zip(texts, spaced, strict=True)
        return _ours(encoder, [text for text, other in pairs if error.problems.keys().isdisjoint((text, other))])
    return [
        (text, [form.ids[form.offsets[number] : form.offsets[number + 1]].tolist() for form in encoded])
        for number, text in enumerate(texts)
    ]


def texts_in(encoder: Encoder, rows: Iterable[Sequence[int]]) -> list[str]:
    """Return the texts between the control tokens of rows."""
    texts: dict[str, None] = {}
    for row in rows:
        run: list[int] = []
        for token in (*row, encoder.eos_id):
            if token in encoder.control_strings:
                texts[encoder.decode(run)] = None
                run = []
            else:
                run.append(token)
    return list(texts)
