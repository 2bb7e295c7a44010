"""Read a YAML file of settings into a pydantic model.

corpus.yaml ──read_settings──▶ dict ──check_settings──▶ Config
qlora.yaml  ──read_settings──▶ dict ──check_settings──▶ TrainingConfig

Messages name the key of a problem and the closest known key.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import orjson
import yaml
from pydantic import BaseModel, ValidationError

from packcorpus.tasks.core.errors import InputMissing, UsageError
from packcorpus.tasks.core.other_tools import where_to_set
from packcorpus.tasks.core.printable import suggest

Model = TypeVar("Model", bound=BaseModel)

INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
# This includes 1e-4, which is text in YAML 1.1.
NUMBER = re.compile(
    r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9_]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$", re.I
)

SHOWN = 20  # problems in one message
MOST_KEYS = 5  # known keys to list in a message
# The limit for the bytes of a file, because PyYAML reads only 100 KB/s.
LARGEST = 512 << 10


class _Loader(yaml.SafeLoader):
    """A loader that refuses aliases and duplicate keys.

    Nested aliases grow without bound, and the first of two duplicate keys would be lost. The loader reads no dates, and
    no numbers that look like something else: in YAML 1.1, 1:00 is 60 and 010 is 8.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases are not supported; write the value out", event.start_mark)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        # PyYAML reads "\ud83d\ude00", as JSON writes an emoji, as two halves of a character.
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f'duplicate key "{key.value}"', key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, list("+-0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("+-.0123456789"))


# Settings that earlier versions had, and what to use instead. A name stands for all values.
# "name: value" stands for one value of a setting that still exists.
Removed = dict[str, str]

NOTHING: Mapping[str, Any] = {}


def read_settings(path: Path, removed: Removed, without_effect: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return the values of a YAML file, or {} if it is empty.

    A removed setting is left out if it has its value in `without_effect`. Raises UsageError or InputMissing, with line
    and column.
    """
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise UsageError(
                "bad_config_file",
                f"{path}: has {size:,} bytes, but the limit is {LARGEST:,}; is it a source instead of a config?",
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = f" ({path.parent} is not a folder)"
        if path.parent.is_dir():
            hint = suggest(path.name, sorted(p.name for p in path.parent.glob("*.y*ml")))
        raise InputMissing("config_missing", f"{path}: no such config{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("bad_config_file", f"{path}: cannot be read as a config: {error}") from error
    return parse_settings(text, str(path), removed, without_effect)


def parse_settings(
    text: str, where: str, removed: Removed, without_effect: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """Return the values of a YAML text, as `read_settings` does.

    `where` names it in messages.
    """
    try:
        values = _json_in(text) or yaml.load(text, Loader=_Loader)  # noqa: S506 - a stricter SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "is not YAML"
        problem = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise UsageError("bad_config_file", f"{where}: {place}: {problem}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError("bad_config_file", f"{where}: expected `key: value` lines, found {type(values).__name__}")
    values = {name: value for name, value in values.items() if (name, value) not in without_effect.items()}
    check_removed(values, removed, where, text)
    return values


def _json_in(text: str) -> Any:
    """Return the values of a JSON text, or None for any other text.

    None also stands for JSON with an error, because the message of YAML about it names its line. YAML reads most of
    JSON, but not tabs between values, and some characters in strings.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    if text.lstrip()[:1] != "{":
        return None
    try:
        return json.loads(text, object_pairs_hook=without_duplicates, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def check_removed(values: dict[str, Any], removed: Removed, where: str, text: str = "") -> None:
    """Raise UsageError if a setting was removed, with what to use instead.

    `text` is the YAML text of the values. If it is given, the message names the lines.
    """
    named = {name: name if name in removed else f"{name}: {value}" for name, value in values.items()}
    gone = {name: setting for name, setting in named.items() if setting in removed}
    if gone:
        root = None
        with suppress(yaml.YAMLError):  # for example JSON with tabs
            root = yaml.compose(text, _Loader)
        lines = {key.value: f"line {key.start_mark.line + 1}: " for key, _ in root.value} if root else {}
        raise UsageError(
            "removed_setting",
            [f"{where}: {lines.get(name, '')}{gone[name]} was removed; {removed[gone[name]]}" for name in gone],
        )


@functools.cache
def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of all settings."""
    return {  # no factory takes arguments: finding that out with `get_default` would take 1 ms
        name: field.default_factory() if field.default_factory else field.get_default()  # type: ignore[call-arg]
        for name, field in model.model_fields.items()
    }


def check_settings(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """Return `values` as `model`. Raises UsageError with one line per problem."""
    try:
        return model.model_validate(values, strict=True)
    except ValidationError as error:
        problems: dict[tuple[str, str], list[str]] = {}
        for item in error.errors(include_url=False):
            place, message, given = _problem(model, item)
            # A setting with several possible types has one problem per type.
            problems.setdefault((place, given), []).append(message)
        lines = [
            f"  {place}{': ' * bool(place)}{' or '.join(messages)}{given}"
            for (place, given), messages in problems.items()
        ]
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"  … and {len(lines) - SHOWN:,} more"]
        raise UsageError("bad_setting", [f"{where}: invalid config", *lines]) from None


def _problem(model: type[BaseModel], item: Any) -> tuple[str, str, str]:
    """Return the place of a pydantic error, its message, and the value found.

    The message about an unknown key says where to set it if another tool has it, or suggests the closest known key. A
    model names the place of its settings in `place`.
    """
    names, inner = _follow(model, item["loc"])
    where = re.sub(r"\.(\d+)", r"[\1]", ".".join(names))
    if item["type"] == "extra_forbidden":
        known = inner.model_fields
        for name, field in known.items():  # the key may be one level too high
            entry = _model_in(field.annotation)
            if entry and names[-1] in entry.model_fields:
                kind = entry.__name__.lower()
                return where, f"unknown key here; it belongs to a {kind}, an entry of `{name}`", ""
        if elsewhere := where_to_set(names[-1], inner.place) if hasattr(inner, "place") else "":
            return where, f"unknown key; {elsewhere}", ""
        listed = f"; known keys: {', '.join(known)}" if len(known) <= MOST_KEYS else ""
        return where, f"unknown key{suggest(names[-1], known) or listed}", ""
    if item["type"] == "missing":
        return where, "missing", ""
    message, value = item["msg"], item["input"]
    for theirs, ours in _PLAINER.items():
        message = message.replace(theirs, ours)
    message = re.sub(r" or instance of \w+", "", message)
    as_written = json.dumps(value) if value is None or isinstance(value, bool) else f"{value!r:.80}"
    return where, message, f", found {as_written}" if where else ""


# Phrases of pydantic, and plainer words for them.
_PLAINER = {
    "Value error, ": "",
    "Input should be": "must be",
    "a valid dictionary": "`key: value` pairs",
    "a valid boolean": "true or false",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid list": "a list",
}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    kinds = [kind for kind in (*get_args(annotation), annotation) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _follow(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel]]:
    """Return the keys of a place in the settings, and the model that contains it.

    Names that pydantic gives to union members are left out.
    """
    names: list[str] = []
    inner: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            names.append(str(part))
        elif inner is not None:
            names.append(part)
            model = inner
            field = model.model_fields.get(part)
            annotation = field.annotation if field else None
            inner = _model_in(annotation)
            keyed = get_origin(annotation) is dict
        elif keyed:
            names.append(part)
    return names, model


def canonical_json(value: Any) -> Any:
    """Return a JSON value with the keys of all its objects in order.

    Raises ValueError for numbers and texts that JSON does not keep: infinite or not a number, integers of more than 64
    bits, and parts of surrogate pairs.
    """
    if isinstance(value, dict):
        return {key: canonical_json(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [canonical_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    try:
        orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise ValueError(f"{value!a} cannot be written as JSON ({error})") from None
    return value
