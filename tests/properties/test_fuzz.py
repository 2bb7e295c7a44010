"""Any input gives a value, a Reject, or a PackError, and nothing else.

    bytes ─read_source─▶ conversations and Rejects     text ─read_config─▶ Config     JSON ─read_manifest─▶ Manifest

Here, Hypothesis makes the input from valid pieces. `make fuzz` runs the same three functions with Atheris.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import orjson
import yaml
import zstandard
from conversations.record_keys import RECORD_KEYS
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.conversations.formats import FORMAT_NAMES, read_record
from packcorpus.tasks.conversations.model import content_digest, whole_text
from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.parts import PartReader, find_parts
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, manifest_digest

MANY = settings(max_examples=examples(250), deadline=None, database=None, suppress_health_check=list(HealthCheck))

NAMES = ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.json.zst")


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_fuzz_"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def check_message(error: PackError | Reject) -> None:
    """Check that the message is not empty and can be shown."""
    assert str(error).strip()
    assert len(str(error)) < 20_000
    if isinstance(error, Reject):
        assert error.reason
        assert error.message.encode(), "it is written to rejects.jsonl"


def read_source(data: bytes, name: str, format: str, part_size: int = 1 << 20) -> int:
    """Return the number of conversations in a file of these bytes.

    The number is 0 if the file is refused.
    """
    (_place() / name).write_bytes(data)
    found = 0
    try:
        for file, parts in find_parts([Source(path=name, format=format)], _place(), part_size):
            for part in parts:
                for _, record in PartReader(part, max_record_bytes=1 << 12):
                    if isinstance(record, Reject):
                        check_message(record)
                        continue
                    try:
                        conversation = read_record(record, file.format)
                        content_digest(whole_text(conversation).encode())
                        orjson.dumps([[m.role, m.content, m.context, m.name] for m in conversation.messages])
                        found += 1
                    except Reject as reject:
                        check_message(reject)
    except PackError as error:
        check_message(error)
    return found


def read_config(text: str) -> Config | None:
    path = _place() / "c.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    try:
        config = load_config(path)
        config.settings()
        return config
    except PackError as error:
        check_message(error)
        return None


def read_manifest(data: bytes) -> Manifest | None:
    a_manifest()
    path = _place() / "corpus" / "manifests" / "m.json"
    path.write_bytes(data)
    try:
        manifest = load_manifest(path)
        corpus_folder(manifest, path)
        return manifest
    except PackError as error:
        check_message(error)
        return None


# -- what hypothesis makes --------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "a", "\0", "\ud800", "</s>", "user", "assistant", '{"a": 1}', "[1]", "9" * 30, "x" * 5000]),
)
NUMBERS = st.one_of(st.integers(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.booleans(), st.none())
KEYS = st.sampled_from(RECORD_KEYS)
VALUES = st.recursive(
    st.one_of(TEXTS, NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, TEXTS), inner, max_size=5)),
    max_leaves=12,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": st.one_of(TEXTS, VALUES)},
        optional={"tool_calls": VALUES, "name": VALUES, "weight": VALUES, "function_call": VALUES},
    ),
    max_size=3,
)
RECORDS = st.one_of(
    VALUES,
    st.dictionaries(KEYS, VALUES, max_size=6),
    st.fixed_dictionaries({"messages": TURNS}, optional={"tools": VALUES}),
    st.fixed_dictionaries({"prompt": st.dictionaries(KEYS, VALUES)}),
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw bytes with some of them cut out, doubled, or replaced."""
    for _ in range(draw(st.integers(0, 3))):
        left, right = sorted(draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
        if right - left > 64 and draw(st.booleans()):
            right = left + 1
        whole = whole[:left] + draw(st.one_of(st.binary(max_size=4), st.just(whole[left:right] * 2))) + whole[right:]
    return whole


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, str]:
    name = draw(st.sampled_from(NAMES))
    records = [json.dumps(r, ensure_ascii=draw(st.booleans())) for r in draw(st.lists(RECORDS, max_size=4))]
    whole = f"[{','.join(records)}]" if ".json" in name and ".jsonl" not in name else "\n".join([*records, ""])
    if "sv" in name:
        whole = "instruction,output\n" + whole.replace("{", "").replace(":", ",")
    data = draw(damaged(whole.encode("utf-8", "surrogatepass")))
    if name.endswith(".gz"):
        data = draw(damaged(gzip.compress(data, 1)))
    if name.endswith(".zst"):
        data = draw(damaged(zstandard.compress(data)))
    return data, name


@MANY
@given(files(), st.sampled_from(["auto", *FORMAT_NAMES]), st.sampled_from([1, 100, 1 << 20]))
def test_any_bytes_are_read_or_refused(file: tuple[bytes, str], format: str, part_size: int) -> None:
    read_source(*file, format, part_size)


CONFIG = {"name": "a", "sources": [{"path": "a.jsonl", "columns": {"text": "b"}}], "sequence_length": 64, "seed": 1}
FIELDS = st.sampled_from(["advanced", *Config.model_fields, "sorces", "path", "format"])


@MANY
@given(st.data())
def test_any_config_is_read_or_refused(data: st.DataObject) -> None:
    values = CONFIG | data.draw(st.dictionaries(FIELDS, VALUES, max_size=3))
    try:
        text = yaml.safe_dump(values, allow_unicode=data.draw(st.booleans()))
    except (yaml.YAMLError, UnicodeEncodeError):
        assume(False)
    odd = [
        "&a ",
        "*a",
        "!!int ",
        "!!binary ",
        "!!set {a}",
        "? ",
        "<<: {a: b}",
        ": ",
        "- ",
        "[",
        "{",
        "|\n",
        "%TAG",
        "---\n",
    ]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.one_of(st.sampled_from(odd), st.text(max_size=3))) + text[at:]
    read_config(text)


@functools.cache
def a_manifest() -> dict[str, Any]:
    from support.small_corpus import conversations, make_recipe, pack_corpus

    published = pack_corpus(make_recipe(_place() / "corpus", conversations(20), sequence_length=64))
    found: dict[str, Any] = orjson.loads(published.read_bytes())
    return found


def as_bytes(values: Any) -> bytes:
    """Return values as a published manifest, or as json writes them.

    json writes values that a manifest cannot have.
    """
    try:
        return to_json(values)
    except TypeError:
        return json.dumps(values).encode("utf-8", "surrogatepass")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


@MANY
@given(st.data())
def test_any_manifest_is_read_or_refused(data: st.DataObject) -> None:
    values: Any = orjson.loads(orjson.dumps(a_manifest()))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from([place for place in places(values) if place]))
        inner = functools.reduce(lambda found, key: found[key], path, values)
        if data.draw(st.booleans()):
            inner[last] = data.draw(VALUES)
        else:
            del inner[last]
    with contextlib.suppress(TypeError):  # if it cannot be written
        values["digest"] = manifest_digest(values)  # so that the digest is not the only error
    whole = as_bytes(values)
    manifest = read_manifest(data.draw(damaged(whole)) if data.draw(st.booleans()) else whole)
    if manifest is not None:
        assert not any(".." in Path(file.path).parts for file in manifest.listed())


def test_what_is_valid_is_read() -> None:
    """The functions that are fuzzed accept valid input."""
    assert read_source(b'{"text": "a"}\n{"text": 1}\n', "a.jsonl", "auto") == 1
    assert read_config(yaml.safe_dump(CONFIG)) is not None
    assert read_manifest(as_bytes(a_manifest())) == Manifest.model_validate(a_manifest())


def test_a_manifest_nested_more_deeply_than_can_be_written_is_refused() -> None:
    nested = functools.reduce(lambda inner, _: {"a": inner}, range(400), {})
    assert read_manifest(json.dumps(a_manifest() | {"config": nested}).encode()) is None
