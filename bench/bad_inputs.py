"""What a person sees of each bad input, made by giving each one to the real command: docs/reference/bad-inputs.md.

    make bad-inputs      (or: python bench/bad_inputs.py [--only 16] [--write docs/reference/bad-inputs.md])

    a folder with chats, config and tokenizer ─one thing bad─▶ the command ─▶ its error in two lines, or its report;
                                                               the reject of rejects.jsonl; what was noticed

Every case is a function below, named in its table. It makes the folder and returns the words of the command where that
is another than PackCorpus.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from tasks.inspection.labels import NOTICED
from tasks.storage.files import to_json
from tasks.storage.manifest import manifest_digest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACK = ["luigi", "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml"]
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
    """A conversation that answers so; `more` goes into the answer."""
    return {"messages": [GOOD[0]["messages"][0], {"role": "assistant", "content": answer, **more}]}


def lines(*records: Any) -> bytes:
    """Lines of JSON; a record that is bytes is a line as it is."""
    return b"".join((record if isinstance(record, bytes) else orjson.dumps(record)) + b"\n" for record in records)


def project(folder: Path, data: bytes, name: str = "chats.jsonl", **settings: Any) -> None:
    """A config, a file of 20 good conversations, a file of these bytes, and a tokenizer that knows ChatML."""
    (folder / "good.jsonl").write_bytes(lines(*GOOD))
    (folder / name).write_bytes(data)
    shutil.copy(kind_path("sp_bpe_chatml"), folder / "tiny.model")
    values = {"name": "mine", "sources": ["good.jsonl", name], "tokenizer": "tiny.model", "sequence_length": 64}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(values | {"max_rejects": 1.0} | settings, sort_keys=False))


def bad(number: int, what: str, *records: Any, **settings: Any) -> None:
    """A case that is its records."""
    before = [GOOD[0]] * isinstance(records[0], bytes)  # so that the format can be told
    CASES.append((number, what, lambda folder: project(folder, lines(*before, *records), **settings)))


def file_of(number: int, what: str, name: str, data: Callable[[], bytes], **settings: Any) -> None:
    """A case that is a file."""
    CASES.append((number, what, lambda folder: project(folder, data(), name, **settings)))


def config(number: int, what: str, text: str) -> None:
    """A case that is a line of the config."""

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
bad(3, "a user-defined symbol in a message", chat("<sep> and <mask>"), tokenizer="user.model")
bad(4, "a control token in a role", {"messages": [{"role": "<|im_end|>", "content": "x"}, *chat()["messages"]]})
bad(4, "a control token in a name and in arguments", {"messages": [
    {"role": "user", "name": "<|im_end|>", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]},
]})  # fmt: skip
bad(5, "a control token split over two fields", {"instruction": "Say <|im", "input": "_end|> now", "output": "No."})
bad(6, "an unknown role", {"messages": [{"role": "assistent", "content": "x"}]})
bad(7, "two user turns; the assistant first; a late system turn", {"messages": [
    {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi"}, {"role": "user", "content": "there"},
    {"role": "system", "content": "Be short."}, {"role": "assistant", "content": "Yes?"},
]})  # fmt: skip
bad(8, "an empty assistant turn", chat(""))
bad(8, "nothing trained is left of a long conversation", {"messages": [
    {"role": "user", "content": "so " * 500}, {"role": "assistant", "content": "Yes."}]})  # fmt: skip
bad(9, "content that is null", chat(None))
bad(9, "content that is a number", chat(42))
bad(9, "content with a part that is no text", chat([{"type": "image_url", "image_url": "x"}]))
bad(10, "U+2581 in a message", chat("a ▁ b"))
bad(11, "1 MB of one character", chat("a" * 1_000_000))

# -- records and files -----------------------------------------------------------------------------------------------

bad(12, "a byte that is not UTF-8", lines(chat("über")).strip().replace("ü".encode(), b"\xfc"))
bad(12, "a lone surrogate", lines(chat("X")).strip().replace(b'"X"', b'"\\ud800"'))
bad(12, "a raw NUL", lines(chat("a\0b")).strip().replace(b"\\u0000", b"\0"))
file_of(13, "a byte order mark", "bom.jsonl", lambda: b"\xef\xbb\xbf" + lines(chat()))
file_of(13, "UTF-16", "utf16.jsonl", lambda: lines(chat()).decode().encode("utf-16"))
file_of(14, "CRLF, blank lines and U+2028 in a string", "crlf.jsonl",
        lambda: b"\r\n".join([*lines(chat("one\u2028two"), chat()).splitlines(), b"", b""]))  # fmt: skip
file_of(15, "a last line that is cut", "cut.jsonl", lambda: lines(chat(), chat("cut"))[:-20])
bad(16, "100,000 nested brackets", b"[" * 100_000 + b"]" * 100_000)
bad(17, "a key twice", b'{"messages": [], "messages": [{"role": "user", "content": "x"}]}')
bad(17, "a key twice in `tools`, a text", {**chat(), "tools": '[{"name": "f", "name": "g"}]'})
bad(17, "NaN", lines(chat(weight=7)).strip().replace(b"7", b"NaN"))
bad(17, "a number of 5,000 digits", lines(chat(weight=7)).strip().replace(b"7", b"7" * 5000))
bad(18, "a text where a list is expected", {"messages": "Hi"})
bad(19, "a line of more than `max_record_bytes`", chat("a" * 70_000), max_record_bytes=65536)
file_of(20, "a gzip bomb", "bomb.jsonl.gz", lambda: gzip.compress(b"\n" * 200_000_000, mtime=0))
file_of(20, "gzip that is cut", "cut.jsonl.gz", lambda: gzip.compress(lines(*GOOD), mtime=0)[:-30])
file_of(20, "garbage behind gzip", "end.jsonl.gz", lambda: gzip.compress(lines(*GOOD), mtime=0) + b"garbage")
file_of(20, "a Parquet bomb", "bomb.parquet", lambda: parquet_bomb())
file_of(21, "an empty file", "empty.jsonl", lambda: b"")


@case(21, "an empty folder")
def empty_folder(folder: Path) -> None:
    project(folder, b"x", sources=["more"])
    (folder / "more").mkdir()


file_of(21, "a glob without a match", "chats.jsonl", lambda: lines(chat()), sources=["chat/*.jsonl"])


@case(21, "no conversation that is accepted")
def nothing_accepted(folder: Path) -> None:
    project(folder, lines(chat("")), sources=["chats.jsonl"])


@case(22, "a folder with a file of another kind")
def mixed_folder(folder: Path) -> None:
    project(folder, b"x", sources=["more"])
    (folder / "more").mkdir()
    (folder / "more" / "a.jsonl").write_bytes(lines(chat()))
    (folder / "more" / "notes.docx").write_bytes(b"x")


file_of(22, "an extension that is not known", "chats.xml", lambda: b"<a/>")
file_of(22, "records of no format that is known", "odd.jsonl", lambda: lines({"frage": "a", "antwort": "b"}))
file_of(23, "a file that two globs reach", "chats.jsonl", lambda: lines(chat()), sources=["*.jsonl", "chats.*"])


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
config(26, "a tokenizer that is not there", "tokenizer: nowhere.model")


@case(26, "an empty tokenizer")
def empty_tokenizer(folder: Path) -> None:
    project(folder, lines(chat()))
    (folder / "tiny.model").write_bytes(b"")


@case(26, "a tokenizer that is cut")
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
    (27, "a template that loops for ever"): LOOP * 2 + "{% endfor %}" * 2,
    (27, "a template that takes gigabytes"): "{{ 'a' * 10 ** 10 }}",
    (27, "a template that includes a file"): "{% include '/etc/passwd' %}",
    (27, "a template that reaches for Python"): "{{ messages.__class__.__mro__ }}",
    (27, "a template that reads the clock"): "{{ strftime_now('%Y') }}" + CHATML_JINJA,
    (28, "a template whose turns cannot be located"): "{{ messages | length }}" + CHATML_JINJA,
}
for (_number, _what), _text in JINJA.items():

    def _make(folder: Path, text: str = _text) -> None:
        # One file: with two of them and two workers it is chance which is told of first.
        one = ["chats.jsonl"]
        project(folder, lines(chat()), sources=one, tokenizer="hf", template="own.jinja", max_rejects=0.0)
        (folder / "own.jinja").write_text(text)

    case(_number, _what)(_make)


# -- machine ---------------------------------------------------------------------------------------------------------


@case(29, "a worker that is killed")
def killed(folder: Path) -> subprocess.Popen[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(200_000))), part_size=1 << 20)
    run = started(folder, "--workers", "2")
    wait_for(folder, "data/tokens/*/*.json", run)
    for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[:1]:
        os.kill(int(child), signal.SIGKILL)
    return run


@case(30, "a disk that takes no more (a limit on the size of files)")
def small_disk(folder: Path) -> list[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(2000))))
    return ["bash", "-c", "ulimit -f 100; trap '' XFSZ; exec " + shlex.join([str(BIN / PACK[0]), *PACK[1:]])]


def packed(folder: Path) -> Path:
    """A finished corpus; its manifest."""
    project(folder, lines(chat()))
    done = subprocess.run(
        [BIN / PACK[0], *PACK[1:]], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    return folder / done.stdout.split()[-1]


def harmed(number: int, what: str, harm: Callable[[Path], None]) -> None:
    """A case that does something to a shard, and looks at the corpus with verify."""

    def make(folder: Path) -> list[str]:
        manifest = packed(folder)
        harm(folder / orjson.loads(manifest.read_bytes())["corpus"] / "train-00000-of-00001.arrow")
        return ["packcorpus", "verify"]

    CASES.append((number, what, make))


def flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def link(shard: Path) -> None:
    shutil.move(shard, shard.parents[3] / "elsewhere.arrow")
    shard.symlink_to(shard.parents[3] / "elsewhere.arrow")


harmed(31, "a shard with a flipped bit", flip)
harmed(31, "a shard that is cut", lambda shard: shard.write_bytes(shard.read_bytes()[:-8]))
harmed(31, "a shard that is extended", lambda shard: shard.write_bytes(shard.read_bytes() + b"\0"))
harmed(31, "a shard that is missing", lambda shard: shard.unlink())
harmed(32, "a link for a shard", link)


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


@case(34, "two runs at once for one corpus")
def two_runs(folder: Path) -> list[str]:
    project(folder, lines(*(chat(f"It is {n}.") for n in range(300_000))))
    first = started(folder)
    wait_for(folder, "data/plans/*.lock", first)
    OTHERS.append(first)
    return PACK


bad(35, "orders to a terminal, and markup, in data", {"messages": [{"role": "\x1b[31m[bold]red", "content": "x"}]})


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


def started(folder: Path, *words: str, command: list[str] = PACK) -> subprocess.Popen[str]:
    tool = BIN / command[0] if (BIN / command[0]).exists() else command[0]
    return subprocess.Popen(
        [tool, *command[1:], *words], cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(folder: Path, pattern: str, run: subprocess.Popen[str]) -> None:
    while not list(folder.glob(pattern)) and run.poll() is None:
        time.sleep(0.01)


def seen(make: Case) -> tuple[int, str]:
    """The exit code, and what is told: the error in two lines, or what became of the conversations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(kind_path("hf_byte_level"), folder / "hf")
        shutil.copy(kind_path("sp_bpe_user_defined"), folder / "user.model")
        made = make(folder)
        run = made if isinstance(made, subprocess.Popen) else started(folder, command=made or PACK)
        _, said = run.communicate(timeout=300)
        for other in OTHERS:
            other.communicate(timeout=300)
        OTHERS.clear()
        if run.returncode:
            told = [line for line in said.splitlines() if line.startswith(("E", "  ")) or "error" in line]
        else:
            [manifest] = (folder / "manifests").glob("*.json")
            facts = orjson.loads(manifest.read_bytes())
            rejects = (folder / facts["corpus"] / "rejects.jsonl").read_bytes().splitlines()[:1]
            told = ["{code} {source}:{line} {message}".format(**orjson.loads(line)) for line in rejects]
            ledger = facts["ledger"]["conversations"]
            told += [f"packed {ledger['packed']} of {ledger['read']}" if not rejects else ""]
            told += [f"noticed {n} {NOTICED[name][0]} {NOTICED[name][1]}" for name, n in facts["noticed"].items() if n]
        return run.returncode, "\n".join(line for line in told if line).replace(f"{folder}/", "")


def table(chosen: list[tuple[int, str, Case]]) -> str:
    out = [
        "# Bad inputs",
        "",
        "What a person sees of each, as the command really says it. Made by `make bad-inputs`, which gives every one",
        "to `luigi --module pipeline PackCorpus` or `packcorpus verify`, beside 20 good conversations. Where the exit",
        "code is 0 the run went on: the line is that of the reject, or what `packcorpus inspect` says was noticed.",
        "",
        "| input | exit code | what is said |",
        "|---|---:|---|",
    ]
    for number, what, make in chosen:
        code, told = seen(make)
        marks = ((line.strip(), "``" if "`" in line else "`") for line in dict.fromkeys(told.splitlines()))
        text = "<br>".join(f"{mark} {line} {mark}".replace("|", "\\|") for line, mark in marks)
        out.append(f"| {number}. {what} | {code} | {text} |")
        print(f"{number:2} {what}: {code}\n   " + told.replace("\n", "\n   "), file=sys.stderr, flush=True)
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--write", type=Path, help="the document to write")
    options = parser.parse_args()
    text = table([entry for entry in CASES if options.only is None or entry[0] in options.only])
    if options.write:
        options.write.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
