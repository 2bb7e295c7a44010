"""Detect media and preference data, which are not supervised fine-tuning data.

{"prompt": "…", "completion": "…", "label": true} → the run stops, until the config has  ignore: [label]

Media are images, audio, and video. Training without such a key would miss the purpose of the data, so the config
decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from packcorpus.tasks.conversations.values import found_list
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import suggest

# Keys of a record or a message.
MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")

_PAIRS = tuple((f"chosen{what}", f"rejected{what}") for what in ("", "_response", "_messages"))

_PREFERENCE_KEYS = (*(key for pair in _PAIRS for key in pair), "kto_tag", "label")

# Types of content parts.
MEDIA_PARTS = frozenset(
    ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "input_video")
)

# The keys of a record that can mean other data, and all names that `ignore` may contain.
OTHER_KEYS = frozenset((*MEDIA_KEYS, *_PREFERENCE_KEYS))
IGNORABLE = (*MEDIA_KEYS, *_PREFERENCE_KEYS, *sorted(MEDIA_PARTS.difference(MEDIA_KEYS)), "tools")


def is_other_data(key: str, value: object, format: str) -> bool:
    """Return whether a value means that its record is other data.

    A flag or a number under `images` or `rejected` is only a remark about the record. A `label` of true or false marks
    an answer as wanted or unwanted (KTO). Any other label is a category, and so is every label of plain text.
    """
    if key == "label":
        text = isinstance(value, str) and value.strip().lower() in ("true", "false")  # CSV has only strings
        return format != "text" and (isinstance(value, bool) or text)
    return key == "kto_tag" or not isinstance(value, (bool, int, float))


def other_data(found: Collection[str], place: str, parts: Collection[str] = ()) -> DataError:
    """Return the error for a record with the keys `found`.

    `parts` are the types of its content parts that are other data.
    """
    keys = [name for name in sorted(found) if name in MEDIA_KEYS]
    media = list(dict.fromkeys((*keys, *sorted(parts))))
    names = media or sorted(found)  # ask for one decision at a time
    fix = f"ignore: [{', '.join(names)}]  to its entry of sources"
    if media:
        kinds = ["images" if key == "image" else key for key in MEDIA_KEYS[::2] if any(key in name for name in media)]
        what = [f"the record has {_and(keys)}"] if keys else []
        what += [f"a content part has type {_and(sorted(parts))}"] if parts else []
        return DataError(
            "media_data",
            f"{place}: {_and(what)}: this is data with {_and(kinds)}, not supervised fine-tuning data for a language "
            f"model; to train on its text alone, add  {fix}",
        )
    pairs = "; to train on its pair, set  format: preference" * {"chosen", "rejected"}.issubset(names)
    return DataError(
        "preference_data",
        f"{place}: the record has {_and(names)}: this is preference data (for methods such as DPO and KTO), not "
        f"supervised fine-tuning data{pairs}; to train on the conversation in the record nonetheless, add  {fix}",
    )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def unread_preference(records: Collection[Mapping[str, object]], name: str) -> DataError | None:
    """Return the error for preference data that matches no format, or None."""
    for record in records:
        for chosen, rejected in _PAIRS:
            answer = record.get(chosen)
            if not answer or not record.get(rejected):
                continue
            columns = f"{{messages: {chosen}}}"
            if isinstance(answer, str):
                prompts = ("prompt", "question", "instruction", "input")
                asked = next((key for key in prompts if record.get(key)), "")
                columns = f"{{prompt: {asked}, completion: {chosen}}}" if asked else f"{{text: {chosen}}}"
            return DataError(
                "preference_data",
                f"{name}: its records have {chosen} and {rejected}: this is preference data (for methods such as DPO), "
                "not supervised fine-tuning data; to train on the chosen answers nonetheless, add  "
                f"columns: {columns}  and  ignore: [{rejected}]  to its entry of sources",
            )
    return None


def without_parts(record: object, ignored: Collection[str]) -> object:
    """Return a record without the content parts of the ignored types.

    The given record is not changed.
    """
    types = MEDIA_PARTS.intersection(ignored)
    if not types or not isinstance(record, dict):
        return record
    return {key: _turns_kept(value, types) for key, value in record.items()}


def _turns_kept(value: object, types: Collection[str]) -> object:
    """Return a value without the content parts of these types in its turns.

    It may also be a list of answers that have turns.
    """
    turns = found_list(value) or []  # also from JSON text, or from a struct of lists
    turns_kept = [
        {name: _kept(content, types) for name, content in turn.items()}
        if isinstance(turn, dict)
        else _turns_kept(turn, types)
        if isinstance(turn, list)
        else turn
        for turn in turns
    ]
    return turns_kept if turns_kept != turns else value


def _kept(content: object, types: Collection[str]) -> object:
    if not isinstance(content, list):
        return content
    return [
        {**part, "content": _kept(part["content"], types)} if isinstance(part, dict) and "content" in part else part
        for part in content
        if not (isinstance(part, dict) and part_of_other_data(part) in types)
    ]


def part_of_other_data(part: Mapping[str, object]) -> str:
    """Return the type of a content part that is an image, audio, or video, or ""."""
    found = part.get("type")
    return found if isinstance(found, str) and found in MEDIA_PARTS else ""


def check_ignored(names: Sequence[str]) -> None:
    """Raise ValueError if `ignore` contains a name that has no effect.

    A setting that does nothing would be misleading.
    """
    for name in names:
        if name not in IGNORABLE:
            hint = suggest(name, IGNORABLE)
            known = f"; only these keys and content parts can be: {', '.join(IGNORABLE)}"
            raise ValueError(f"{name!r} cannot be ignored{hint or known}")
