"""Damage every file of a project, and check that readers and the next run notice.

    python bench/reliability/damage.py [--flips 10000] [--seed 0]    Markdown tables; exit code 1 if one was accepted

    every cell of tests/support/damage/matrix.py ─▶ refused, repaired, rebuilt, or trusted
    a bit, a path, or a value of the manifest ─▶ verify ─▶ refused, and the file named?
                                              └▶ open_corpus + the rows of every split ─▶ refused, and the file named?

One thing is damaged at a time. The corpora are small, so that 10,000 flips take minutes: at least 3 shards in two
splits, a reject, a Hugging Face tokenizer of several files, and a Jinja template; and a corpus of format 2.0. run.json
is not covered.
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
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # before it: tests has a folder train, too
from support.damage.matrix import COLUMNS, KINDS, REBUILT, REFUSED, REPAIRED, Project, kind_of, load, outcomes

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import manifest_digest
from packcorpus.tasks.verification.verify import verify


@dataclass
class Tally:
    """Counts of each kind of damage.

    How often it was injected, refused by verify, refused by the loader, and refused by both with the name of the file.
    """

    injected: Counter[str] = field(default_factory=Counter)
    verify: Counter[str] = field(default_factory=Counter)
    loader: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)

    def judge(self, what: str, project: Project, named: str, detail: str = "") -> None:
        self.injected[what] += 1
        messages = [refusal(check, project.published) for check in (verify, load)]
        for name, found, message in zip(("verify", "loader"), (self.verify, self.loader), messages, strict=True):
            found[what] += bool(message)
            if not message:
                self.let_in.append(f"{what}, {detail or named}: accepted by {name}")
        self.named[what] += all(named in message for message in messages)

    def rows(self) -> Iterator[str]:
        for what, count in self.injected.items():
            yield f"| {what} | {count:,} | {self.verify[what]:,} | {self.loader[what]:,} | {self.named[what]:,} |"


def matrix(projects: dict[str, Project]) -> Iterator[tuple[str, Counter[str], list[str]]]:
    """Yield each column of the matrix, its counts of outcomes, and its bad cells.

    A bad cell is one that trusted the damage.
    """
    for column in COLUMNS:
        cells = [*outcomes(column, projects[kind_of(column)], every_state=True)]
        trusted = [f"{column}: {how}, {file}: {found}" for how, file, found in cells if found.startswith("trusted")]
        yield column, Counter(found.partition(":")[0] for *_, found in cells), trusted


def refusal(check: Callable[[Path], Any], path: Path) -> str:
    """Return the message of a refusal, or "" if the damage was accepted.

    Any error but a PackError is a bug and ends the run.
    """
    try:
        check(path)
    except PackError as error:
        return str(error)
    return ""


# -- damages ---------------------------------------------------------------------------------------------------------


def flips(project: Project, count: int, source: random.Random, tally: Tally) -> None:
    """Flip single bits, equally often in every file.

    Half of the bits are in the first 1,024 bytes of the file, where an Arrow file has its schema.
    """
    filled = [file for file in project.files if file.stat().st_size]
    for number in range(count):
        file = filled[number % len(filled)]
        original = file.read_bytes()
        bit = source.randrange(8 * (min(1024, len(original)) if source.random() < 0.5 else len(original)))
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        tally.judge(f"a bit flipped: {kind(project, file)}", project, str(file), f"{file} bit {bit}")
        file.write_bytes(original)


def places(project: Project, tally: Tally) -> None:
    """Replace a folder with a link to it."""
    inside, outside = project.folder / "tokenizer", project.root / "moved"
    inside.rename(outside)
    inside.symlink_to(outside)
    tally.judge("a folder that is a link", project, str(inside))
    inside.unlink()
    outside.rename(inside)


def additional(project: Project) -> tuple[int, int]:
    """Add unlisted files; return how many were added, and how many verify refused.

    The loader never opens them.
    """
    refused = 0
    names = ("train-00003-of-00004.arrow", ".hidden", "tokenizer/extra.json", "cache-1.arrow")
    for name in names:
        (project.folder / name).write_bytes((project.files[0]).read_bytes())
        refused += name in refusal(verify, project.published)
        load(project.published)
        (project.folder / name).unlink()
    return len(names), refused


def kind(project: Project, file: Path) -> str:
    if file == project.published:
        return "manifest, published"
    return {"arrow": "shard"}.get(file.suffix[1:], file.name) if file.name != "index.arrow" else "index.arrow"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))
    if not isinstance(value, dict | list):
        yield path


def edited(project: Project, tally: Tally) -> None:
    """Change every value of the manifest, in both copies.

    Each value is changed once with the old digest, like by an editor, and once with a recomputed digest.
    """
    copies = (project.published, project.folder / "manifest.json")
    original = project.published.read_bytes()
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
            what = "a value of both manifests edited" + (", digest recomputed" if signed else "")
            tally.judge(what, project, project.published.stem, name)
    for copy in copies:
        copy.write_bytes(original)


def leading_out(project: Project, tally: Tally) -> None:
    """Replace a path in the manifest by paths outside of the corpus folder.

    The files there have the right bytes, and the digest is recomputed.
    """
    copies = (project.published, project.folder / "manifest.json")
    original = project.published.read_bytes()
    shard = project.files[0]
    outside = project.folder.parent / "outside.arrow"
    shutil.copy(shard, outside)
    (project.folder / "way").symlink_to(project.folder.parent)
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
        tally.judge("a path that leads out, digest recomputed", project, inside)
    for copy in copies:
        copy.write_bytes(original)
    (project.folder / "way").unlink()
    outside.unlink()


def run(project: Project, count: int, seed: int) -> Tally:
    """Flip bits of a packed corpus, and change paths and values of its manifest."""
    source, tally = random.Random(seed), Tally()
    flips(project, count, source, tally)
    places(project, tally)
    leading_out(project, tally)
    edited(project, tally)
    for check in (verify, load):
        check(project.published)  # all damage is undone
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        projects = {kind: Project.make(Path(name) / kind, kind) for kind in KINDS}
        trusted = []
        print("| reader | cells | refused | repaired | rebuilt | trusted |\n|---|---:|---:|---:|---:|---:|")
        for column, found, wrong in matrix(projects):
            counts = [found.total(), *(found[outcome] for outcome in (REFUSED, REPAIRED, REBUILT)), len(wrong)]
            print(f"| {column} | {' | '.join(f'{count:,}' if count else '' for count in counts[:-1])} | {counts[-1]} |")
            trusted += wrong
        tally = run(projects["packed"], options.flips, options.seed)
        print(
            "\n| damage | injected | refused by verify | by the loader | both, the file named |\n|---|---|---|---|---|"
        )
        print(*tally.rows(), sep="\n")
        again = Tally()
        flips(projects["whole"], options.flips // 10, random.Random(options.seed), again)
        print(*(row.replace("| a bit", "| format 2.0, a bit") for row in again.rows()), sep="\n")
        count, refused = additional(projects["whole"])
        print(f"| an additional file | {count} | {refused} | never opened | - |")
    let_in = [*trusted, *tally.let_in, *again.let_in]
    signed = [line for line in let_in if "digest recomputed" in line]
    print(f"\nseed {options.seed}, {os.times().user + os.times().system:.0f} s of CPU")
    print("accepted:", *(sorted({*let_in} - {*signed}) or ["nothing"]), sep="\n  ")
    for name in ("verify", "loader"):
        values = [line.split(", ")[2].partition(":")[0] for line in signed if line.endswith(name)]
        print(f"edited with the digest recomputed, and accepted by {name}: {', '.join(values)}")
    sys.exit(len(let_in) > len(signed))


if __name__ == "__main__":
    main()
