"""Damage, one thing at a time, to every file of a corpus: each must be refused, by name, by verify and by the loader.

    python bench/reliability/damage.py [--flips 10000] [--seed 0]    a Markdown table; exit code 1 if one was let in

corpus ─ one damage ─▶ verify ─▶ refused, the file named?
                    └▶ open_corpus + the rows of every split ─▶ the same            then the file is put back

The corpora are small, so that 10,000 flips take minutes: 3 shards and more in two splits, a reject, a Hugging Face
tokenizer of several files, a Jinja template; and one of format 2.0. run.json is not covered.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.damage import DAMAGES, undo
from support.small_corpus import conversations, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from tasks import recipe as recipe_module
from tasks.core.errors import PackError
from tasks.recipe import resolve
from tasks.storage.files import to_json
from tasks.storage.manifest import load_manifest, manifest_digest
from tasks.verification.verify import verify
from train.data.corpus import PACKED, open_corpus
from train.data.dataset import PackedDataset

RECORDS = [*conversations(100), {"messages": [{"role": "assistent", "content": "x"}]}]
SETTINGS: dict[str, Any] = {"tokenizer": "hf", "template": "own.jinja", "validation": 0.2, "max_rejects": 1.0}


def make(root: Path, **settings: Any) -> Path:
    """Pack a small corpus below `root`; its published manifest."""
    root.mkdir(parents=True)
    (root / "own.jinja").write_text(CHATML_JINJA)
    shutil.copytree(kind_path("hf_byte_level"), root / "hf")
    per_shard, recipe_module.SOURCE_BYTES_PER_SHARD = recipe_module.SOURCE_BYTES_PER_SHARD, 8000
    try:
        return pack_corpus(resolve(write_project(root, RECORDS, **SETTINGS | settings), root))
    finally:
        recipe_module.SOURCE_BYTES_PER_SHARD = per_shard


def load(path: Path) -> None:
    """All that a training run reads of a corpus: every row of every split."""
    corpus = open_corpus(path)
    for split in corpus.splits:
        if corpus.format_version == PACKED:
            PackedDataset(corpus, split, load="memory")
        else:
            from train.data.conversations import sft_dataset

            sft_dataset(corpus, split)


@dataclass
class Corpus:
    """A corpus whose files are damaged and put back."""

    path: Path
    folder: Path = field(init=False)
    files: list[Path] = field(init=False)  # all that is promised, both manifests among them

    def __post_init__(self) -> None:
        self.folder = self.path.parent.parent / "data" / "corpora" / self.path.stem
        listed = [self.folder / file.path for file in load_manifest(self.path).listed()]
        self.files = [*listed, self.folder / "manifest.json", self.path]

    def kind(self, file: Path) -> str:
        if file == self.path:
            return "manifest, published"
        return {"arrow": "shard"}.get(file.suffix[1:], file.name) if file.name != "index.arrow" else "index.arrow"


@dataclass
class Tally:
    """What became of each kind of damage: injected, refused by verify, by the loader, and by both with the name."""

    injected: Counter[str] = field(default_factory=Counter)
    verify: Counter[str] = field(default_factory=Counter)
    loader: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)

    def judge(self, what: str, corpus: Corpus, named: str, detail: str = "") -> None:
        self.injected[what] += 1
        messages = [refusal(check, corpus.path) for check in (verify, load)]
        for name, found, message in zip(("verify", "loader"), (self.verify, self.loader), messages, strict=True):
            found[what] += bool(message)
            if not message:
                self.let_in.append(f"{what}, {detail or named}: let in by {name}")
        self.named[what] += all(named in message for message in messages)

    def rows(self) -> Iterator[str]:
        for what, count in self.injected.items():
            yield f"| {what} | {count:,} | {self.verify[what]:,} | {self.loader[what]:,} | {self.named[what]:,} |"


def refusal(check: Callable[[Path], Any], path: Path) -> str:
    """The message, or nothing where it was let in. Anything but a PackError is a bug and ends the run."""
    try:
        check(path)
    except PackError as error:
        return str(error)
    return ""


# -- damages ---------------------------------------------------------------------------------------------------------


def flips(corpus: Corpus, count: int, source: random.Random, tally: Tally) -> None:
    """Single bits, as many in every file; half of them in its first 1,024 bytes, where an Arrow file has its schema."""
    filled = [file for file in corpus.files if file.stat().st_size]
    for number in range(count):
        file = filled[number % len(filled)]
        original = file.read_bytes()
        bit = source.randrange(8 * (min(1024, len(original)) if source.random() < 0.5 else len(original)))
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        tally.judge(f"a bit flipped: {corpus.kind(file)}", corpus, str(file), f"{file} bit {bit}")
        file.write_bytes(original)


def whole_files(corpus: Corpus, other: Corpus, source: random.Random, tally: Tally) -> None:
    """Every damage of the tests to each file; each file cut, doubled, zeroed, or replaced by that of another corpus."""
    for file, theirs in zip(corpus.files, other.files, strict=True):
        data = file.read_bytes()
        cut = source.randrange(max(1, len(data)))
        for what, damaged in {
            "cut off": data[:cut],
            "twice": 2 * data,
            "512 bytes zeroed": data[:cut] + bytes(len(data[cut : cut + 512])) + data[cut + 512 :],
            "of another corpus": theirs.read_bytes(),
        }.items():
            if damaged != data:  # the tokenizer is the same in both, and zeros stay zeros
                file.write_bytes(damaged)
                tally.judge(what, corpus, str(file))
        file.write_bytes(data)
        for what, damage in DAMAGES.items():
            # The published manifest may be a link: it is in no corpus folder.
            if len(data) >= 8 and not (what == "link" and file == corpus.path):
                damage(file)
                tally.judge(what, corpus, str(file))
                undo(file, data)


def places(corpus: Corpus, tally: Tally) -> None:
    """Shards swapped, a folder that is a link, files that nobody listed."""
    shards = [file for file in corpus.files if file.suffix == ".arrow" and file.name != "index.arrow"]
    for first, second in pairwise(shards):
        for turn in range(2):
            data = first.read_bytes(), second.read_bytes()
            first.write_bytes(data[1])
            second.write_bytes(data[0])
            if not turn:
                tally.judge("two shards swapped", corpus, str(first))
    inside, outside = corpus.folder / "tokenizer", corpus.path.parent.parent / "moved"
    inside.rename(outside)
    inside.symlink_to(outside)
    tally.judge("a folder that is a link", corpus, str(inside))
    inside.unlink()
    outside.rename(inside)


def additional(corpus: Corpus) -> tuple[int, int]:
    """Files that nobody listed: how many there were, and how many verify refused. The loader never opens them."""
    refused = 0
    names = ("train-00003-of-00004.arrow", ".hidden", "tokenizer/extra.json", "cache-1.arrow")
    for name in names:
        (corpus.folder / name).write_bytes((corpus.files[0]).read_bytes())
        refused += name in refusal(verify, corpus.path)
        load(corpus.path)
        (corpus.folder / name).unlink()
    return len(names), refused


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))
    if not isinstance(value, dict | list):
        yield path


def edited(corpus: Corpus, tally: Tally) -> None:
    """Every value of the manifest, in both copies alike: as an editor does it, and with the digest made again."""
    copies = (corpus.path, corpus.folder / "manifest.json")
    original = corpus.path.read_bytes()
    for where in leaves(orjson.loads(original)):
        values = inner = orjson.loads(original)
        for key in where[:-1]:
            inner = inner[key]
        old = inner[where[-1]]
        inner[where[-1]] = not old if isinstance(old, bool) else old + 1 if isinstance(old, int | float) else f"{old}0"
        name = ".".join(map(str, where))
        for signed in (False, True):
            if signed and name == "digest":
                continue
            if signed:
                values["digest"] = manifest_digest(values)
            for copy in copies:
                copy.write_bytes(to_json(values))
            what = "a value of both manifests edited" + (", digest made again" if signed else "")
            tally.judge(what, corpus, corpus.path.stem, name)
    for copy in copies:
        copy.write_bytes(original)


def leading_out(corpus: Corpus, tally: Tally) -> None:
    """Paths in the manifest that lead to the right bytes outside of the corpus folder, the digest made again."""
    copies = (corpus.path, corpus.folder / "manifest.json")
    original = corpus.path.read_bytes()
    shard = corpus.files[0]
    outside = corpus.folder.parent / "outside.arrow"
    shutil.copy(shard, outside)
    (corpus.folder / "way").symlink_to(corpus.folder.parent)
    for inside in (
        "../outside.arrow",
        f"x/../../{outside.name}",
        str(outside),
        f"./../{outside.name}",
        "way/outside.arrow",
    ):
        values = orjson.loads(original)
        values["splits"]["train"]["shards"][0]["path"] = inside
        values["digest"] = manifest_digest(values)
        for copy in copies:
            copy.write_bytes(to_json(values))
        tally.judge("a path that leads out, digest made again", corpus, inside)
    for copy in copies:
        copy.write_bytes(original)
    (corpus.folder / "way").unlink()
    outside.unlink()


def run(folder: Path, count: int, seed: int) -> Tally:
    """All damages to a corpus of format 3.0, and a tenth as many flips to one of format 2.0."""
    source, tally = random.Random(seed), Tally()
    corpus, other = Corpus(make(folder / "a")), Corpus(make(folder / "b", seed=43))
    flips(corpus, count, source, tally)
    whole_files(corpus, other, source, tally)
    places(corpus, tally)
    leading_out(corpus, tally)
    edited(corpus, tally)
    for check in (verify, load):
        check(corpus.path)  # all is as it was
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tally = run(Path(name), options.flips, options.seed)
        print("| damage | injected | refused by verify | by the loader | both, the file named |\n|---|---|---|---|---|")
        print(*tally.rows(), sep="\n")
        conversation_corpus = Corpus(make(Path(name) / "whole", packing=False))
        again = Tally()
        flips(conversation_corpus, options.flips // 10, random.Random(options.seed), again)
        print(*(row.replace("| a bit", "| format 2.0, a bit") for row in again.rows()), sep="\n")
        count, refused = additional(conversation_corpus)
        print(f"| an additional file | {count} | {refused} | never opened | - |")
    let_in = [*tally.let_in, *again.let_in]
    signed = [line for line in let_in if "digest made again" in line]
    print(f"\nseed {options.seed}, {os.times().user + os.times().system:.0f} s of CPU")
    print("let in:", *(sorted({*let_in} - {*signed}) or ["nothing"]), sep="\n  ")
    for name in ("verify", "loader"):
        values = [line.split(", ")[2].partition(":")[0] for line in signed if line.endswith(name)]
        print(f"edited with the digest made again, and let in by {name}: {', '.join(values)}")
    sys.exit(len(let_in) > len(signed))


if __name__ == "__main__":
    main()
