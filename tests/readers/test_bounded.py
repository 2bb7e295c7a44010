"""The real command handles hostile inputs in limited time and memory.

Each run takes at most 10 s of CPU time and at most 1 GB more memory than a usual run, and ends without a signal. The
system measures the CPU time of the command and its workers, and the memory of the largest process
(support/servers/command_server.py). The usual run measures the memory of Python, the libraries, and the tokenizer.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.commands import BIN, started
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import PackError, UsageError
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.templates.jinja import renderer

# A command takes one more second of CPU time to load the libraries, which the server has loaded.
SECONDS, MEMORY = 9.0, 1 << 30
COMMAND = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "c.yaml", "--workers", "2"]


@dataclass(frozen=True)
class Run:
    code: int
    cpu: float
    memory: int
    messages: str
    manifest: Path | None


def pack(
    folder: Path,
    data: bytes,
    name: str = "a.jsonl",
    kind: str = "sp_bpe_chatml",
    more: str = "",
    command: Sequence[str] = COMMAND,
) -> Run:
    """Run PackCorpus on one file that contains `data`."""
    (folder / name).write_bytes(data)
    tokenizer = shutil.copy(kind_path(kind), folder) if kind.startswith("sp") else kind_path(kind)
    config = f"sources: [{{path: {name}, format: messages}}]\ntokenizer: {tokenizer}\nsequence_length: 64\n"
    (folder / "c.yaml").write_text(config + (more or "max_rejects: 1.0\n"))
    return run(folder, command)


def run(folder: Path, words: Sequence[str]) -> Run:
    """Run a command in a fork of the command server until all its processes end.

    The stderr of a process that goes on would stay open, and would be read until then.
    """
    with started(folder, *words, package="tasks") as command:
        messages = command.stderr.read().rstrip("\n")
        end = command.end()
    return Run(end.code, end.seconds, end.memory, messages, next((folder / "manifests").glob("*.json"), None))


def chat(content: str) -> bytes:
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": f"This: {content}"}]
    return orjson.dumps({"messages": turns}) + b"\n"


GOOD = chat("A usual conversation.")


@cache
def usual(kind: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return pack(Path(folder), GOOD * 20, kind=kind)


def check(found: Run, kind: str = "sp_bpe_chatml") -> None:
    assert found.code in (0, 65), found.messages
    assert "Traceback" not in found.messages
    assert found.cpu < SECONDS, found
    assert found.memory < usual(kind).memory + MEMORY, (found.memory >> 20, usual(kind).memory >> 20)


def rejects(found: Run) -> dict[str, int]:
    assert found.manifest is not None, found.messages
    ledger: dict[str, int] = orjson.loads(found.manifest.read_bytes())["ledger"]["conversations"]["rejected"]
    return ledger


def keys(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":{}' % i for i in range(count)) + b', "messages": []}\n'


def turns(count: int) -> bytes:
    return (
        b'{"messages": [' + b'{"role": "assistant", "content": "a"},' * count + b'{"role": "user", "content": ""}]}\n'
    )


def chat_json(more: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", ' + more + b"}]}\n"


# Records that must be rejected, with the reason.
REJECTED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "100,000 nested brackets": ("too_deep", lambda: b"[" * 100_000 + b"]" * 100_000 + b"\n"),
    "a million nested objects": ("too_deep", lambda: b'{"a":' * 1_000_000 + b"\n"),
    "nested arguments": ("too_deep", lambda: chat_json(b'"tool_calls": ' + b"[" * 5000 + b"]" * 5000)),
    "an integer of 5,000 digits": ("bad_json", lambda: chat_json(b'"weight": ' + b"7" * 5000)),
    "an integer of 300 digits": ("big_integer", lambda: chat_json(b'"weight": ' + b"7" * 300)),
    "70,000 integers": ("big_integer", lambda: chat_json(b'"x": [1' + 70_000 * (b"," + b"7" * 19) + b"000]")),
    "a line of 17 MB": ("too_long_record", lambda: chat("x" * 17_000_000)),
    "200,000 keys": ("empty", lambda: keys(200_000)),
    "two equal keys among 200,000": ("duplicate_key", lambda: keys(200_000).replace(b'"messages"', b'"k5"')),
    "400,000 turns": ("too_many_turns", lambda: turns(400_000)),
    "a role of 5 MB": ("bad_role", lambda: chat("a").replace(b"assistant", b"assistent" * 500_000)),
    "an unknown key of 5 MB": ("missing_key", lambda: b'{"' + b"k" * 5_000_000 + b'": 1}\n'),
    "2 million messages that are numbers": ("bad_type", lambda: b'{"messages": [' + b"1," * 2_000_000 + b"1]}\n"),
    "4 MB of quotes": ("bad_json", lambda: b'"\\' * 2_000_000 + b"\n"),
}  # fmt: skip

# Records that must be packed, with the tokenizer.
PACKED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "15 MB of one character": ("sp_bpe_chatml", lambda: chat("a" * 15_000_000)),
    "1 MB of spaces": ("sp_bpe_chatml", lambda: chat(" " * 1_000_000)),
    "7 MB of control strings": ("sp_unigram", lambda: chat("</s><sep>" * 800_000)),
    "100,000 turns": ("sp_bpe_chatml", lambda: turns(99_999)),
    "11 MB of spaces, byte-level": ("hf_byte_level", lambda: chat(" " * 11_000_000)),
    "2 million emoji, byte-level": ("hf_byte_level", lambda: chat("🙂" * 2_000_000)),
    "15 MB of one character, metaspace": ("hf_metaspace", lambda: chat("a" * 15_000_000)),
    "4 MB of control strings, Unigram": ("hf_unigram", lambda: chat("</s><sep>" * 450_000)),
}  # fmt: skip


def test_all_hostile_records_of_a_file_are_rejected_within_the_limits_of_one(tmp_path: Path) -> None:
    data = b"".join(make() for _, make in REJECTED.values())
    found = pack(tmp_path, data + GOOD)
    check(found)
    assert found.code == 0, found.messages
    assert rejects(found) == dict(sorted(Counter(code for code, _ in REJECTED.values()).items()))


def test_a_text_of_many_megabytes_is_packed(tmp_path: Path) -> None:
    """A text of 15 MB is packed.

    The other texts take too long for a test. `make fuzz` packs them.
    """
    kind, make = PACKED["15 MB of one character"]
    found = pack(tmp_path, make() + GOOD, kind=kind)
    check(found, kind)
    assert found.code == 0, found.messages
    assert rejects(found) == {}


def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path: Path) -> None:
    data = gzip.compress(b"\n" * 10_000_000) * 40 + gzip.compress(GOOD)
    assert len(data) < 400_000
    found = pack(tmp_path, data, "a.jsonl.gz")
    check(found)
    assert found.code == 65
    assert "E323 error: a.jsonl.gz: byte " in found.messages


def test_a_table_of_one_text_again_and_again_is_refused(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["a" * (4 << 20)]))
    file = io.BytesIO()
    pq.write_table(pa.table({"text": text}), file, store_schema=False, dictionary_pagesize_limit=1 << 30)
    assert len(file.getvalue()) < 300_000
    found = pack(tmp_path, file.getvalue(), "a.parquet")
    check(found)
    assert found.code == 65
    assert "E323 error: a.parquet: from record 1 on, a batch takes over 64" in found.messages


# Hostile or mistaken configs, with a part of the message.
CONFIGS = {
    "a YAML bomb": ("aliases are not supported", "a: &a x\n" + "".join(f"b{i}: [*a, *a]\n" for i in range(30))),
    "nested brackets": ("c.yaml", "a: " + "[" * 100_000),
    "nested mappings": ("c.yaml", "{a: " * 100_000),
    "an integer of 5,000 digits": ("c.yaml", "seed: " + "9" * 5000),
    "more than a config can be": ("the limit is", "# \n" * 5_000_000),
    "many unknown keys": ("unknown key", "".join(f"sourcs{i}: 1\n" for i in range(3000))),
    "a tag": ("could not determine a constructor", "a: !!python/object/apply:os.system ['true']\n"),
}  # fmt: skip


@pytest.mark.parametrize("key", ["sources", "tokenizer", "template"])
def test_a_path_longer_than_the_system_allows_is_reported(key: str, tmp_path: Path) -> None:
    model = shutil.copy(kind_path("sp_bpe_chatml"), tmp_path)
    values = {"sources": ["a.jsonl"], "tokenizer": str(model), key: "x" * 5000}
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    with pytest.raises(PackError, match="xxx"):
        _ = resolve(write(tmp_path / "c.yaml", yaml.safe_dump(values)), tmp_path).template


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_is_refused_with_one_message(name: str, tmp_path: Path) -> None:
    message, text = CONFIGS[name]
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    start = time.process_time()
    with pytest.raises(UsageError) as raised:
        load_config(write(tmp_path / "c.yaml", text))
    assert message in str(raised.value)
    assert len(str(raised.value)) < 10_000
    assert time.process_time() - start < SECONDS


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# A loop of 6 s shows no more than a loop of half a second.
WITH_SHORT_LIMIT = """
import sys
from luigi.cmdline import luigi_run
from packcorpus.tasks.templates.jinja import renderer
renderer.SECONDS = 0.5
sys.exit(luigi_run(sys.argv[1:]))
"""


def test_a_template_that_loops_ends_the_run_and_all_its_processes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "t.jinja").write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    command = ["-c", WITH_SHORT_LIMIT, *COMMAND[1:]]
    found = pack(tmp_path, GOOD, kind="hf_byte_level", more="template: t.jinja\n", command=command)
    check(found, "hf_byte_level")
    assert found.cpu + renderer.SECONDS < SECONDS, "with its own limit, the run would take too long"
    assert found.code == 65
    [message] = [line for line in found.messages.splitlines() if " error: " in line]
    assert message == "E415 error: template t.jinja: still rendering one conversation after 0.5 s; it loops"


def test_a_template_that_fails_on_every_conversation_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "t.jinja").write_text("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")
    found = pack(tmp_path, GOOD, kind="hf_byte_level", more="template: t.jinja\nmax_rejects: 0.0\n")
    check(found, "hf_byte_level")
    assert found.code == 65
    assert "the template is t.jinja" in found.messages
    assert "recursion" in found.messages
