"""The format `tokens`: recorded token ids, with a mask or labels.

    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}                  ┐
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}                  ├─▶  RecordedTokens([5, 6, 7], [no, yes, yes])
    {"prompt_ids": [5], "completion_ids": [6, 7]}                     ┘

These are the ids that a model was given and that it wrote, as in the traces of verifiers and prime-rl, one row for each
branch. They are packed as they are: no template and no tokenizer changes them. The ids have to be below the size of
the vocabulary. A record, or its source, may name the tokenizer by its SHA-256; then it has to be the tokenizer of the
config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from packcorpus.tasks.conversations.model import Conversation, Format, Message, Record, RecordedTokens
from packcorpus.tasks.conversations.values import missing, parsed, required, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown

# Keys of all ids of a record.
_IDS = ("input_ids", "token_ids")

# Keys of flags that say which ids are trained on.
_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "sampled_mask", "mask")

# Keys of the two sides, and of their flags. TRL calls the flags of a rollout `env_mask`.
_SIDES = {"prompt_ids": ("prompt_mask",), "completion_ids": ("completion_mask", "env_mask")}
_WITH_IDS = ("labels", "attention_mask", *_MASKS)
_OF_SIDES = (*_SIDES, *(mask for masks in _SIDES.values() for mask in masks))

TOKENIZER = "tokenizer_sha256"

# The label of an id that is not trained on.
_IGNORED = -100

SHA256 = re.compile(r"[0-9a-f]{64}")


def read(record: Record) -> Conversation:
    ids, trained = _read_sides(record) if _has_sides(record) else _read_all(record)
    if not ids:
        raise Reject("empty", "the record holds no ids")
    tokenizer = record.get(TOKENIZER)
    digest = "" if tokenizer is None else text_of(tokenizer, TOKENIZER)
    if tokenizer is not None and not SHA256.fullmatch(digest):
        raise Reject("bad_ids", f"{TOKENIZER} is {shown(digest)}; expected a SHA-256 in 64 lower-case digits")
    return Conversation((Message("text", ""),), recorded=RecordedTokens(tuple(ids), tuple(trained), digest))


def _read_all(record: Record) -> tuple[list[int], list[bool]]:
    """Read the ids of the whole record, with its labels or masks."""
    key = _ids_key(record)
    ids = _ids_of(record, key)
    attention = record.get("attention_mask")
    if attention is not None and not all(_flags(attention, "attention_mask", len(ids), key)):
        raise Reject("bad_ids", f"attention_mask leaves ids out; remove this padding from {key} and its mask")
    found = {name: _flags(record[name], name, len(ids), key) for name in _MASKS if record.get(name) is not None}
    if record.get("labels") is not None:
        labels = _list_in(record["labels"], "labels", len(ids), key)
        for index, (label, at_its_place) in enumerate(zip(labels, ids, strict=True)):
            if type(label) is not int or label not in (_IGNORED, at_its_place):
                expected = f"expected {at_its_place}, the id at its place, or {_IGNORED}"
                raise Reject("bad_ids", f"labels[{index}] is {_value(label)}; {expected}; labels must not be shifted")
        found["labels"] = [label != _IGNORED for label in labels]
    if not found:
        missing(record, "labels", "")
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise Reject("bad_ids", f"{first} and {other} differ; keep one")
    return ids, found[first]


def _read_sides(record: Record) -> tuple[list[int], list[bool]]:
    """Read the ids of the prompt, and those that the model wrote after it."""
    ids: list[int] = []
    trained: list[bool] = []
    for key, masks in _SIDES.items():
        of_side = _ids_of(record, key)
        given = [mask for mask in masks if record.get(mask) is not None]
        if len(given) > 1:
            raise Reject("bad_ids", f"the record has {' and '.join(given)}; keep one")
        ids += of_side
        count = len(of_side)
        trained += _flags(record[given[0]], given[0], count, key) if given else [key == "completion_ids"] * count
    return ids, trained


def _list_in(value: object, name: str, length: int | None = None, key: str = "") -> list[object]:
    """Return a list with one value for each of the `length` ids under `key`.

    It may be JSON text.
    """
    if isinstance(value, str):
        value = parsed(text_of(value, name), name, "bad_ids")
    if not isinstance(value, list):
        raise Reject("bad_ids", f"{name}: expected a list of numbers, found {kind(value)}")
    if length is not None and len(value) != length:
        raise Reject("bad_ids", f"{name} has {len(value):,} values, but {key} has {length:,}; one is needed for each")
    return value


def _ids_of(record: Record, key: str) -> list[int]:
    values = _list_in(required(record, key), key)
    ids = [value for value in values if type(value) is int and value >= 0]
    if len(ids) != len(values):
        index = next(n for n, value in enumerate(values) if not (type(value) is int and value >= 0))
        raise Reject("bad_ids", f"{key}[{index}] is {_value(values[index])}; expected an id of 0 or more")
    return ids


def _flags(value: object, name: str, length: int, key: str) -> list[bool]:
    values = _list_in(value, name, length, key)
    for index, flag in enumerate(values):
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise Reject("bad_ids", f"{name}[{index}] is {_value(flag)}; expected 0 or 1")
    return [flag == 1 for flag in values]


def _value(value: object) -> str:
    return str(value) if isinstance(value, (bool, int, float)) and len(str(value)) <= 40 else kind(value)


def other_tokenizer(digest: str, known: Collection[str]) -> str:
    """Return the problem if ids were recorded with another tokenizer.

    `known` are the digests of the tokenizer in the config.
    """
    if digest in known:
        return ""
    return (
        f"{TOKENIZER} is {digest}, but the tokenizer of the config has {' or '.join(sorted(known))}; set tokenizer to "
        "the one that recorded the ids"
    )


def _has_sides(record: Mapping[str, object]) -> bool:
    return record.get("prompt_ids") is not None and all(record.get(key) is None for key in _IDS)


def _ids_key(record: Mapping[str, object]) -> str:
    return "token_ids" if record.get("input_ids") is None and record.get("token_ids") is not None else "input_ids"


def _matches(record: Mapping[str, object]) -> bool:
    if any(key in record for key in _IDS):
        return any(key in record for key in ("labels", *_MASKS))
    return "prompt_ids" in record and "completion_ids" in record


def _used(record: Record) -> Collection[str]:
    return *(_OF_SIDES if _has_sides(record) else (_ids_key(record), *_WITH_IDS)), TOKENIZER


TOKENS = Format(
    name="tokens",
    keys=tuple(dict.fromkeys((*_IDS, *_WITH_IDS, *_OF_SIDES, TOKENIZER))),
    matches=_matches,
    read=read,
    summary="recorded ids: `input_ids` (or `token_ids`) with `labels` or a mask (`loss_mask`, `completion_mask`, "
    "`assistant_masks`, `sampled_mask`, `mask`), or `prompt_ids` and `completion_ids` with optional masks; "
    "optionally `tokenizer_sha256`: no turns, no template",
    example='{"input_ids": [5, 6, 7, 2], "labels": [-100, -100, 7, 2]}',
    used=_used,
)
