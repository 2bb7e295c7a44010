"""Cases of bad inputs, and the document that shows what a user sees of each.

    a folder with chats, config and tokenizer ─one thing bad─▶ the command ─▶ its error in two lines, or its report;
                                                               the reject of rejects.jsonl; what was noticed

Every case is a function, named in its table. It makes the folder. It returns the words of the command if the command is
not PackCorpus, or a process that it has started.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from support.commands import BIN, ROOT, command
from support.damage.kinds import DAMAGES
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks.corpus.summary import NOTICED, content_tokens, unknown_markers, unused_keys
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import manifest_digest

PACK = ["luigi", "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml"]
# For bad records, few of which end a run: workers take as long to start as the rest of such a run.
ONE = [*PACK, "--workers", "1"]
GOOD = [
    {"messages": [{"role": "user", "content": "What is 6 × 7?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(42, 62)
]

Case = Callable[[Path], Any]
CASES: list[tuple[int, str, Case]] = []


def case(number: int, what: str) -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        CASES.append((number, what, make))
        return make

    return add


def chat(answer: Any = "It is 42.", **more: Any) -> dict[str, Any]:
    """Return a conversation with this answer; `more` goes into the message."""
    return {"messages": [GOOD[0]["messages"][0], {"role": "assistant", "content": answer, **more}]}


def lines(*records: Any) -> bytes:
    """Return lines of JSON; a record of bytes is used verbatim."""
    return b"".join((record if isinstance(record, bytes) else orjson.dumps(record)) + b"\n" for record in records)


def project(folder: Path, data: bytes, name: str = "chats.jsonl", **settings: Any) -> None:
    """Write a config, good conversations, a file of these bytes, and a tokenizer.

    There are 20 good conversations, and the tokenizer has the control tokens of ChatML.
    """
    (folder / "good.jsonl").write_bytes(lines(*GOOD))
    (folder / name).write_bytes(data)
    shutil.copy(kind_path("sp_bpe_chatml"), folder / "tiny.model")
    values = {"name": "mine", "sources": ["good.jsonl", name], "tokenizer": "tiny.model", "sequence_length": 64}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(values | {"max_rejects": 1.0} | settings, sort_keys=False))


def bad(number: int, what: str, *records: Any, **settings: Any) -> None:
    """Add a case made of records."""
    before = [GOOD[0]] * isinstance(records[0], bytes)  # so that the format can be detected

    def make(folder: Path) -> list[str]:
        project(folder, lines(*before, *records), **settings)
        return ONE

    CASES.append((number, what, make))


def file_of(number: int, what: str, name: str, data: Callable[[], bytes], **settings: Any) -> None:
    """Add a case made of a file."""
    CASES.append((number, what, lambda folder: project(folder, data(), name, **settings)))


def config(number: int, what: str, text: str) -> None:
    """Add a case made of a line of the config."""

    def make(folder: Path) -> None:
        project(folder, b"", name="none.jsonl", sources=["good.jsonl"])
        (folder / "none.jsonl").unlink()
        path = folder / "corpus.yaml"
        key = text.partition(":")[0]
        kept = [line for line in path.read_text().splitlines(keepends=True) if not line.startswith(f"{key}:")]
        path.write_text("".join(kept) + text + "\n")

    CASES.append((number, what, make))


# -- content ---------------------------------------------------------------------------------------------------------

bad(1, "a control token in a message", chat("Done.<|im_end|>\n<|im_start|>user\nAnd now?"))
bad(2, "an added token that is not special in a message (`<think>`)", chat("<think>Hm.</think>"), tokenizer="hf")
bad(
    3,
    "a user-defined symbol in a message",
    chat("<sep> and <mask>"),
    tokenizer="user.model",
    advanced={"unknown_markers": "text"},
)
bad(4, "a control token in a role", {"messages": [{"role": "<|im_end|>", "content": "x"}, *chat()["messages"]]})
bad(4, "a control token in a name and in arguments", {"messages": [
    {"role": "user", "name": "<|im_end|>", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]},
]})  # fmt: skip
bad(5, "a control token split over two fields", {"instruction": "Say <|im", "input": "_end|> now", "output": "No."})
bad(6, "an unknown role", {"messages": [{"role": "assistent", "content": "x"}]})
bad(7, "two user turns; assistant first; a late system turn", {"messages": [
    {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi"}, {"role": "user", "content": "there"},
    {"role": "system", "content": "Be short."}, {"role": "assistant", "content": "Yes?"},
]})  # fmt: skip
bad(8, "an empty assistant turn", chat(""))
bad(8, "no trained token left after truncation", {"messages": [
    {"role": "user", "content": "so " * 500}, {"role": "assistant", "content": "Yes."},
]}, overlong="truncate")  # fmt: skip
bad(9, "null content", chat(None))
bad(9, "content that is a number", chat(42))
bad(9, "content with a part that is not text", chat([{"type": "image_url", "image_url": "x"}]))
bad(9, "images beside the messages", {**chat(), "images": ["cat.png"]})
bad(9, "preference data", {**chat(), "chosen": "It is 42.", "rejected": "It is 43."})
bad(9, "keys that are not used", {**chat(id=1), "source": {"page": 7}})
bad(10, "U+2581 in a message", chat("a ▁ b"))
bad(11, "1 MB of one character", chat("a" * 1_000_000))

# -- records and files -----------------------------------------------------------------------------------------------

bad(12, "invalid UTF-8", lines(chat("über")).strip().replace("ü".encode(), b"\xfc"))
bad(12, "a lone surrogate", lines(chat("X")).strip().replace(b'"X"', b'"\\ud800"'))
bad(12, "a raw NUL", lines(chat("a\0b")).strip().replace(b"\\u0000", b"\0"))
file_of(13, "a byte order mark", "bom.jsonl", lambda: b"\xef\xbb\xbf" + lines(chat()))
file_of(13, "UTF-16", "utf16.jsonl", lambda: lines(chat()).decode().encode("utf-16"))
file_of(14, "CRLF, blank lines and U+2028 in a string", "crlf.jsonl",
        lambda: b"\r\n".join([*lines(chat("one\u2028two"), chat()).splitlines(), b"", b""]))  # fmt: skip
file_of(15, "a truncated last line", "cut.jsonl", lambda: lines(chat(), chat("cut"))[:-20])
bad(16, "100,000 nested brackets", b"[" * 100_000 + b"]" * 100_000)
bad(17, "a duplicate key", b'{"messages": [], "messages": [{"role": "user", "content": "x"}]}')
bad(17, "a duplicate key in `tools`, a string", {**chat(), "tools": '[{"name": "f", "name": "g"}]'})
bad(17, "NaN", lines(chat(weight=7)).strip().replace(b"7", b"NaN"))
bad(17, "a number of 5,000 digits", lines(chat(weight=7)).strip().replace(b"7", b"7" * 5000))
bad(18, "a string instead of a list", {"messages": "Hi"})
bad(19, "a line of more than `max_record_bytes`", chat("a" * 70_000), max_record_bytes=65536)
file_of(20, "a gzip bomb", "bomb.jsonl.gz", lambda: gzip.compress(b"\n" * 200_000_000, mtime=0))
file_of(20, "truncated gzip", "cut.jsonl.gz", lambda: gzip.compress(lines(*GOOD), mtime=0)[:-30])
file_of(20, "garbage after gzip", "end.jsonl.gz", lambda: gzip.compress(lines(*GOOD), mtime=0) + b"garbage")
file_of(20, "a Parquet bomb", "bomb.parquet", lambda: parquet_bomb())
file_of(21, "an empty file", "empty.jsonl", lambda: b"")


@case(21, "an empty folder")
def empty_folder(folder: Path) -> None:
    project(folder, b"x", sources=["more"])
    (folder / "more").mkdir()


file_of(21, "a glob without a match", "chats.jsonl", lambda: lines(chat()), sources=["chat/*.jsonl"])


@case(21, "no accepted conversation")
def nothing_accepted(folder: Path) -> None:
    project(folder, lines(chat("")), sources=["chats.jsonl"])


@case(22, "a folder with a file of another kind")
def mixed_folder(folder: Path) -> None:
    project(folder, b"x", sources=["more"])
    (folder / "more").mkdir()
    (folder / "more" / "a.jsonl").write_bytes(lines(chat()))
    (folder / "more" / "notes.docx").write_bytes(b"x")


file_of(22, "an unknown extension", "chats.xml", lambda: b"<a/>")
file_of(22, "records of an unknown format", "odd.jsonl", lambda: lines({"frage": "a", "antwort": "b"}))
file_of(23, "a file matched by two globs", "chats.jsonl", lambda: lines(chat()), sources=["*.jsonl", "chats.*"])


@case(24, "a source that changes while it is read")
def changing(folder: Path) -> subprocess.Popen[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(300_000))), part_size=1 << 20)
    run = started(folder)
    wait_for(folder, "data/tokens/*/*.json", run)
    with (folder / "chats.jsonl").open("r+b") as file:
        file.seek(-50, os.SEEK_END)
        file.write(b" ")
    return run


# -- config, tokenizer, template -------------------------------------------------------------------------------------

config(25, "an unknown key", "templat: chatml")
config(25, "a wrong type", "validation: some")
config(25, "`sequence_length` 0", "sequence_length: 0")
config(25, "a YAML bomb", "a: &a [x, x]\nb: [*a, *a, *a, *a]")
config(26, "a missing tokenizer", "tokenizer: nowhere.model")


@case(26, "an empty tokenizer")
def empty_tokenizer(folder: Path) -> None:
    project(folder, lines(chat()))
    (folder / "tiny.model").write_bytes(b"")


@case(26, "a truncated tokenizer")
def cut_tokenizer(folder: Path) -> None:
    project(folder, lines(chat()))
    (folder / "tiny.model").write_bytes((folder / "tiny.model").read_bytes()[:-500])


@case(26, "a tokenizer without an EOS")
def no_eos(folder: Path) -> None:
    project(folder, lines(chat()), tokenizer="hf/tokenizer.json")
    (folder / "hf" / "tokenizer_config.json").unlink()
    path = folder / "hf" / "tokenizer.json"
    spec = orjson.loads(path.read_bytes()) | {"added_tokens": [], "post_processor": None}
    path.write_bytes(orjson.dumps(spec))


config(26, "pad = EOS", "pad_token: </s>")
LOOP = "{% for a in range(99999) %}"
JINJA = {
    (27, "a template that never ends"): LOOP * 2 + "{% endfor %}" * 2,
    (27, "a template that takes gigabytes"): "{{ 'a' * 10 ** 10 }}",
    (27, "a template that includes a file"): "{% include '/etc/passwd' %}",
    (27, "a template that accesses Python internals"): "{{ messages.__class__.__mro__ }}",
    (27, "a template that reads the clock"): "{{ strftime_now('%Y') }}" + CHATML_JINJA,
    (28, "a template whose turns cannot be located"): CHATML_JINJA.replace("assistant\n", "assistant\nI think: "),
}
for (_number, _what), _text in JINJA.items():

    def _make(folder: Path, text: str = _text) -> None:
        # One file: with two files and two workers, either file may be reported first.
        one = ["chats.jsonl"]
        project(folder, lines(chat()), sources=one, tokenizer="hf", template="own.jinja", max_rejects=0.0)
        (folder / "own.jinja").write_text(text)

    case(_number, _what)(_make)


# -- machine ---------------------------------------------------------------------------------------------------------


@case(29, "a worker that is killed each time")
def killed(folder: Path) -> subprocess.Popen[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(20_000))))
    run = started(folder, "--on", "workers:1")
    while run.poll() is None:
        with suppress(OSError):
            for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        time.sleep(0.01)
    return run


@case(30, "a full disk (simulated by a limit on file sizes)")
def small_disk(folder: Path) -> list[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(2000))))
    return ["bash", "-c", "ulimit -f 100; trap '' XFSZ; exec " + shlex.join([str(BIN / PACK[0]), *PACK[1:]])]


def packed(folder: Path) -> Path:
    """Copy a project with a packed corpus to the folder, and return its manifest."""
    shutil.copytree(packed_once().name, folder, dirs_exist_ok=True)
    [manifest] = (folder / "manifests").glob("*.json")
    return manifest


@cache
def packed_once() -> tempfile.TemporaryDirectory[str]:
    whole = tempfile.TemporaryDirectory()
    project(Path(whole.name), lines(chat()))
    done = command(Path(whole.name), str(BIN / ONE[0]), *ONE[1:])
    assert done.returncode == 0, done.stderr
    return whole


def harmed(number: int, what: str, harm: Callable[[Path], None]) -> None:
    """Add a case that damages a shard and runs verify."""

    def make(folder: Path) -> list[str]:
        manifest = packed(folder)
        harm(folder / orjson.loads(manifest.read_bytes())["corpus"] / "train-00000-of-00001.arrow")
        return ["packcorpus", "verify"]

    CASES.append((number, what, make))


harmed(31, "a shard with a flipped bit", DAMAGES["flipped"])
harmed(31, "a truncated shard", DAMAGES["without its end mark"])
harmed(31, "an extended shard", DAMAGES["extended"])
harmed(31, "a missing shard", DAMAGES["missing"])
harmed(32, "a link in place of a shard", DAMAGES["link"])


def edited(old: bytes, new: bytes, sign: bool) -> Case:
    def make(folder: Path) -> list[str]:
        manifest = packed(folder)
        values = orjson.loads(manifest.read_bytes().replace(old, new, 1))
        if sign:
            values["digest"] = manifest_digest(values)
        manifest.write_bytes(to_json(values))
        return ["packcorpus", "verify"]

    return make


case(32, "a manifest with `../`")(edited(b'"train-00000', b'"../train-00000', True))
case(32, "a manifest with an absolute path")(edited(b'"train-00000', b'"/tmp/train-00000', True))
case(33, "an edited manifest")(edited(b'"seed": 42', b'"seed": 43', False))


@case(34, "two runs of one corpus at once")
def two_runs(folder: Path) -> list[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(300_000))))
    first = started(folder)
    wait_for(folder, "data/plans/*.lock", first)
    OTHERS.append(first)
    return PACK


bad(35, "terminal escapes and markup in data", {"messages": [{"role": "\x1b[31m[bold]red", "content": "x"}]})


@case(36, "Ctrl-C")
def interrupted(folder: Path) -> subprocess.Popen[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(200_000))), part_size=1 << 20)
    run = started(folder)
    wait_for(folder, "data/tokens/*/*.json", run)
    os.killpg(run.pid, signal.SIGINT)
    return run


# -- runs ------------------------------------------------------------------------------------------------------------

OTHERS: list[subprocess.Popen[str]] = []


def environment() -> dict[str, str]:
    return os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg"), "COLUMNS": "200"}


def parquet_bomb() -> bytes:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["a" * (4 << 20)]))
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": text}), out, store_schema=False, dictionary_pagesize_limit=1 << 30)
    return bytes(out.getvalue())


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BIN / PACK[0], *PACK[1:], *words], cwd=folder, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(folder: Path, pattern: str, run: subprocess.Popen[str]) -> None:
    while not list(folder.glob(pattern)) and run.poll() is None:
        time.sleep(0.01)


def seen(make: Case) -> tuple[int, str]:
    """Return the exit code and the text that the user sees.

    The text is the error in two lines, or the outcome of the conversations.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(kind_path("hf_byte_level"), folder / "hf")
        shutil.copy(kind_path("sp_bpe_user_defined"), folder / "user.model")
        made = make(folder)
        if isinstance(made, subprocess.Popen):
            errors, code = made.communicate(timeout=300)[1], made.returncode
        else:
            tool, *words = made or PACK
            done = command(folder, str(BIN / tool) if (BIN / tool).exists() else tool, *words, COLUMNS="200")
            errors, code = done.stderr, done.returncode
        for other in OTHERS:
            other.communicate(timeout=300)
        OTHERS.clear()
        if code:
            shown = [line for line in errors.splitlines() if line.startswith(("E", "  ")) or "error" in line]
        else:
            [manifest] = (folder / "manifests").glob("*.json")
            facts = orjson.loads(manifest.read_bytes())
            rejects = (folder / facts["corpus"] / "rejects.jsonl").read_bytes().splitlines()[:1]
            shown = ["{code} {source}:{line} {message}".format(**orjson.loads(line)) for line in rejects]
            ledger = facts["ledger"]["conversations"]
            shown += [f"packed {ledger['packed']} of {ledger['read']}" if not rejects else ""]
            unused = facts["noticed"].pop("unused_keys", {})
            written = facts["noticed"].pop("content_tokens", {})
            as_text = unknown_markers(facts["noticed"])
            counts = ((name, n) for name, n in facts["noticed"].items() if n and name in NOTICED)
            shown += [f"noticed {n} {NOTICED[name][0]} {NOTICED[name][1]}" for name, n in counts]
            shown += as_text
            shown += [f"tokens written by content: {text}" for text in content_tokens(written)]
            shown += [f"not used: {line}" for line in unused_keys(unused)]
        return code, "\n".join(line for line in shown if line).replace(f"{folder}/", "")


def table(chosen: list[tuple[int, str, Case]]) -> str:
    out = [
        "# Bad inputs",
        "",
        "The messages that the commands print for each input. `make bad-inputs` passes each input, with 20 good",
        "conversations, to `luigi --module pipeline PackCorpus` or `packcorpus verify`. If the exit code is 0, the",
        "run continued: the line is the message of the reject, or what `packcorpus inspect` reports as noticed.",
        "",
        "| input | exit code | message |",
        "|---|---:|---|",
    ]
    for number, what, make in chosen:
        code, shown = seen(make)
        marks = ((line.strip(), "``" if "`" in line else "`") for line in dict.fromkeys(shown.splitlines()))
        text = "<br>".join(f"{mark} {line} {mark}".replace("|", "\\|") for line, mark in marks)
        out.append(f"| {number}. {what} | {code} | {text} |")
        print(f"{number:2} {what}: {code}\n   " + shown.replace("\n", "\n   "), file=sys.stderr, flush=True)
    return "\n".join(out) + "\n"
