"""The damage matrix: every kind of damage to every file that is read.

    rows      ROWS: damages of one file, its replacement by another file, and manifests that are wrong although signed
    columns   COLUMNS: the readers, `repair`, and the next run; each reads some files of a project
    cells     outcomes(column, project) damages one file at a time and yields the outcome: REFUSED, REPAIRED,
              REBUILT, or TRUSTED, which is a bug

tests/properties/test_damage.py checks every cell; bench/reliability/damage.py counts them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import orjson
from support.commands import corpus_bytes
from support.damage.kinds import DAMAGES, SIGNED, swap, touch, undo
from support.small_corpus import conversations, one_second, pack_corpus, write_project
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.cli.questions import Question, answer
from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.inspection.lookup import pieces_in_row
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.report.report import write_report
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import REPAIR, load_manifest, manifest_digest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify
from packcorpus.tasks.work import Publish, run_all
from packcorpus.train.data.conversations import sft_dataset
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset

EDITED, OF_ANOTHER, SWAPPED = "a number edited", "of another corpus", "two files swapped"
RESIGNED = "one copy edited, its digest recomputed"
ROWS = (*DAMAGES, EDITED, OF_ANOTHER, SWAPPED, RESIGNED, *SIGNED)

REJECT = {"messages": [{"role": "assistent", "content": "x"}]}
_JINJA = {"tokenizer": "hf", "template": "own.jinja", "validation": 0.2, "max_rejects": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "packed": _JINJA,
    "whole": _JINJA | {"packing": False},
    # With rows of this length, the first plan is optimal, and two parts and two shards are as many as are damaged: the
    # next run is tested hundreds of times.
    "trained": _JINJA
    | {"tokenizer": None, "vocab_size": 320, "template": "chatml", "part_size": 8192, "sequence_length": 256},
}

_SHARDS, _PLANS, _TOKENS = "data/corpora/*/*.arrow", "data/plans/*/*", "data/tokens/*/*"
# Files that are missing when a run starts, besides the published manifest.
STATES: dict[str, tuple[str, ...]] = {
    "unpublished": (),
    "no shards": (_SHARDS,),
    "no plan": (_SHARDS, _PLANS),
    "no tokens": (_SHARDS, _PLANS, _TOKENS),
}
# Files that a run reuses, and the states in which it reuses them.
KEPT: dict[str, tuple[str, ...]] = {
    "data/tokenizers/*/*": ("no shards", "no tokens"),
    "data/engines/*.json": ("no shards", "no tokens"),
    "data/tokens/*/*.arrow": ("no shards", "no plan"),
    "data/tokens/*/*.json": ("no shards", "no plan"),
    "data/plans/*/plan.arrow": ("no shards", "unpublished"),
    "data/plans/*/index.arrow": ("no shards", "unpublished"),
    "data/plans/*/rows.arrow": ("no shards", "unpublished"),
    "data/plans/*/rejects.jsonl": ("no shards", "unpublished"),
    "data/plans/*/plan.json": ("no shards", "unpublished"),
    "data/plans/*/shard-*.json": ("unpublished",),
    "data/corpora/*/train-*.arrow": ("unpublished",),
}
AT_MOST = 2  # files of each pattern

Cell = tuple[str, Path, tuple[str, ...]]  # damage, file, and texts: an error must contain one of them


@contextmanager
def small_shards() -> Iterator[None]:
    """Make and restore corpora with several shards."""
    usual, recipe_module.SOURCE_BYTES_PER_SHARD = recipe_module.SOURCE_BYTES_PER_SHARD, 8000
    try:
        yield
    finally:
        recipe_module.SOURCE_BYTES_PER_SHARD = usual


def make(root: Path, records: Sequence[dict[str, Any]], **settings: Any) -> Path:
    """Pack a small corpus below `root` and return its published manifest.

    It has several shards, two splits, and a reject.
    """
    root.mkdir(parents=True)
    (root / "own.jinja").write_text(CHATML_JINJA)
    shutil.copytree(kind_path("hf_byte_level"), root / "hf")
    with small_shards():
        return pack_corpus(resolve(write_project(root, records, **_JINJA | settings), root))


class Project:
    """A packed project whose files are damaged and restored.

    `other` is a project with other conversations.
    """

    def __init__(self, published: Path, other: Project | None = None):
        self.published, self.other = published, other
        self.root = published.parent.parent
        self.folder = self.root / "data" / "corpora" / published.stem
        self.own = self.folder / "manifest.json"
        self.listed = [self.folder / file.path for file in load_manifest(published).listed()]
        self.files = [*self.listed, self.own, published]
        self.kept = {pattern: sorted(self.root.glob(pattern)) for pattern in KEPT}
        self.saved = {file: file.read_bytes() for files in (self.files, *self.kept.values()) for file in files}
        self.corpus = corpus_bytes(published)
        self.states: dict[str, tuple[int, ...]] = {}  # of files that have their saved content
        self.paths = {str(path): path for path in self.saved}  # a Path takes longer to look up and to open
        self.damaged: list[Path] = []  # the files of the current cell
        self.restore()
        # The sources stay whole, so all runs share what is known of them.
        self.recipe = resolve(self.root / "corpus.yaml", self.root)
        # From before the damage: an open corpus, and the place of the first conversation in the first row.
        self.opened = open_corpus(published)
        self.place = pieces_in_row(load_manifest(published), self.folder, "train", 0, 0)[0]

    @classmethod
    def make(cls, root: Path, kind: str = "packed") -> Project:
        count = 60 if kind == "trained" else 80  # 80 have three shards for training: one is neither first nor last
        mine, theirs = ([*conversations(count, seed=seed), REJECT] for seed in (0, 1))
        other = cls(make(root / "other", theirs, **KINDS[kind]))
        return cls(make(root / "damaged", mine, **KINDS[kind]), other)

    def name(self, file: Path) -> str:
        """Return the name of a file within the corpus folder, or "published"."""
        return "published" if file == self.published else file.relative_to(self.folder).as_posix()

    def changed(self) -> list[Path]:
        """Return the files that differ from their saved content."""
        return [path for path in self._written() if not self._is_equal(path)]

    def restore(self) -> None:
        for path in self._written():
            if not self._is_equal(path):
                undo(path, self.saved[path])
            touch(path)
            self.states[str(path)] = _state_of(str(path))

    def _written(self) -> list[Path]:
        """Return the files that were written since they had their saved content.

        Reading all files after each damage would take a fifth of the time. `touch` gives a file a time in the future,
        so any later write changes its state, even a write within the same tick of the clock.
        """
        return [path for name, path in self.paths.items() if _state_of(name) != self.states.get(name)]

    def _is_equal(self, path: Path) -> bool:
        return not path.is_symlink() and path.is_file() and path.read_bytes() == self.saved[path]

    def cells(self, files: Iterable[Path]) -> Iterator[Cell]:
        """Damage one file at a time, in every possible way, and restore it."""
        files = [*files]
        rows = [
            how
            for how in ROWS
            if (how not in SIGNED or self.own in files) and (how != RESIGNED or {self.own, self.published} <= {*files})
        ]
        for file in files:
            for how in rows:
                names = self._damage(how, file)
                self.damaged = self.changed()
                if self.damaged:
                    for path in self.damaged:
                        touch(path)
                    yield how, file, names
                    self.restore()

    def _damage(self, how: str, file: Path) -> tuple[str, ...]:
        """Damage a file, if this damage applies to it, and return texts for the error.

        The error must contain one of them.
        """
        manifests = (self.own, self.published)
        if how in DAMAGES:
            if (how, file) != ("link", self.published):  # it is not in a corpus folder, so it may be a link
                DAMAGES[how](file)
        elif how == EDITED and file.suffix == ".json":
            file.write_text(re.sub(r"(?<=: )[0-9]+", lambda found: f"{int(found[0]) + 1}", file.read_text(), count=1))
        elif how == OF_ANOTHER and self.other:
            file.write_bytes(self.other.counterpart(self, file).read_bytes())
            return (str(file), str(self.folder)) if file in manifests else (str(file),)
        elif how == SWAPPED and file not in manifests:
            swap(file, other := self._next(file))
            return (str(file), str(other))
        elif how == RESIGNED and file in manifests:
            self._sign(lambda values: values["noticed"].update(control_text_seen=99), file)
        elif how in SIGNED and file in self.listed:
            self._sign(lambda values: SIGNED[how](values, self.name(file)), *manifests)
            return (str(file), f"({self.name(file)} is listed twice)")
        return (str(file),)

    def _next(self, file: Path) -> Path:
        """Return the next file of the same kind, or else with the same suffix."""
        groups = [group for group in self.kept.values() if file in group and len(group) > 1]
        listed = [p for p in self.listed if p.suffix == file.suffix]
        plans = [p for group in self.kept.values() for p in group if p.suffix == file.suffix]
        group = next(group for group in [*groups, listed, plans, [file]] if file in group)
        return group[(group.index(file) + 1) % len(group)]

    def counterpart(self, project: Project, file: Path) -> Path:
        """Return the file of this project that corresponds to a file of another one."""
        for mine, theirs in ((self.own, project.own), (self.published, project.published)):
            if file == theirs:
                return mine
        for pattern, group in project.kept.items():
            if file in group:
                return self.kept[pattern][min(group.index(file), len(self.kept[pattern]) - 1)]
        return self.folder / project.name(file) if (self.folder / project.name(file)).exists() else self.listed[0]

    def _sign(self, change: Callable[[dict[str, Any]], Any], *manifests: Path) -> None:
        """Change the values of manifests and recompute their digest."""
        values = orjson.loads(self.saved[self.published])
        change(values)
        values["digest"] = manifest_digest(values)
        for manifest in manifests:
            manifest.write_bytes(to_json(values))


def _state_of(path: str) -> tuple[int, ...]:
    """Return what any write or replacement of a file changes."""
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


# -- columns -----------------------------------------------------------------------------------------------------------

REFUSED, REPAIRED, REBUILT, TRUSTED = "refused", "repaired", "rebuilt", "trusted"


@dataclass(frozen=True)
class Reader:
    """A function that reads a corpus, and the files that it reads.

    `files` has patterns of Project.name.
    """

    read: Callable[[Project], Any]
    files: tuple[str, ...] = ("*",)
    kind: str = "packed"

    def reads(self, project: Project) -> list[Path]:
        return [file for file in project.files if any(fnmatch(project.name(file), name) for name in self.files)]


def _rebuild(project: Project) -> None:
    with small_shards():
        verify(project.published)
        rebuild(project.published)


def _inspect(**asked: Any) -> Callable[[Project], Any]:
    return lambda project: answer(project.published, Question(**asked), project.root)


def _inspect_place(project: Project) -> Any:
    asked = Question(at=f"chat.jsonl:{project.place['record']}")
    return answer(project.published, asked, project.root)


def load(path: Path, load: Literal["memory", "mmap"] = "memory") -> None:
    """Read every row of every split, as a training run does."""
    corpus = open_corpus(path)
    for split in corpus.splits:
        PackedDataset(corpus, split, load=load) if corpus.packed else sft_dataset(corpus, split)


def _diff(project: Project, turned: bool = False) -> None:
    assert project.other
    pair = (project.other.published, project.published)
    compare(*(pair if turned else pair[::-1]))


MANIFESTS, INDEX, TOKENIZER = ("manifest.json", "published"), "index.arrow", "tokenizer/*"
ROW = ("train-00000-*", INDEX, TOKENIZER, *MANIFESTS)
ROWS_READ = ("*-of-*.arrow", INDEX, TOKENIZER, *MANIFESTS)
_READERS: dict[str, tuple[Callable[[Project], Any], tuple[str, ...]]] = {
    "`verify MANIFEST`": (lambda project: verify(project.published), ("*",)),
    "`verify FOLDER`": (lambda project: verify(project.own), ("*",)),
    "`verify --rebuild`": (_rebuild, ("*",)),
    "`report`": (lambda project: write_report(project.published, project.root.parent / "page.html"), ("*",)),
    "`inspect`": (_inspect(), ("rows.arrow", *MANIFESTS)),
    "`inspect --row`": (_inspect(row=0), ROW),
    "`inspect --conversation`": (
        lambda project: answer(project.published, Question(conversation=project.place["number"]), project.root),
        ROW,
    ),
    "`inspect --at`": (_inspect_place, ROW),
    "`inspect --search`": (_inspect(search="85 85", limit=10_000), ROWS_READ),
    "`inspect --rejects`": (_inspect(rejects=True), ("rejects.jsonl", *MANIFESTS)),
    "`inspect SHARD`": (
        lambda project: answer(project.listed[0], Question(), project.root),
        ("train-00000-*", "manifest.json"),
    ),
    "`diff`, before": (_diff, ROWS_READ),
    "`diff`, after": (lambda project: _diff(project, turned=True), ("validation-*", INDEX, *MANIFESTS)),
    "training, `open_corpus`": (lambda project: open_corpus(project.published), ("[!tv]*", "t[!r]*", *MANIFESTS)),
    "training, rows in memory": (lambda project: load(project.published, load="memory"), ("*",)),
    "training, rows mapped": (lambda project: load(project.published, load="mmap"), ("*",)),
    "an open corpus, in memory": (lambda project: PackedDataset(project.opened, load="memory"), ("train-*",)),
    "an open corpus, mapped": (lambda project: PackedDataset(project.opened, load="mmap"), ("train-*",)),
}
READERS = {name: Reader(read, files) for name, (read, files) in _READERS.items()}
for _name, _files in {
    "`verify MANIFEST`": ("*",),
    "`report`": ("*",),
    "`inspect --row`": ("train-00000-*", INDEX, *MANIFESTS),
    "`inspect --search`": ("*-of-*.arrow", INDEX, *MANIFESTS),
    "`diff`, before": (INDEX, *MANIFESTS),
    "training, rows in memory": ("*",),
}.items():
    READERS[f"format 2.0: {_name}"] = Reader(_READERS[_name][0], _files, "whole")
READERS["format 2.0: an open corpus"] = Reader(
    lambda project: sft_dataset(project.opened), ("train-*", INDEX, TOKENIZER, "template.jinja"), "whole"
)


def refused(reader: Reader, project: Project, names: tuple[str, ...]) -> str:
    """Return REFUSED if the reader raises the right error and writes nothing.

    The error must contain one of the names and the fix.
    """
    try:
        reader.read(project)
    except PackError as error:
        is_named = any(name in str(error) for name in names) and REPAIR in str(error)
        return REFUSED if is_named and project.changed() == project.damaged else f"{TRUSTED}: {error}"
    return TRUSTED


def repaired(project: Project, path: Path, names: tuple[str, ...]) -> str:
    """Return REPAIRED if `repair` restores exactly the files that are damaged.

    Return REFUSED if it raises an error with one of the names and writes nothing.
    """
    before = project.damaged
    try:
        with small_shards():
            restored = [file.path for file in repair(path)]
    except PackError as error:
        is_named = any(name in str(error) for name in (*names, project.published.stem))
        return REFUSED if is_named and project.changed() == before else f"{TRUSTED}: {error}"
    return REPAIRED if sorted(restored) == sorted(before) and not project.changed() else f"{TRUSTED}: {restored}"


def made_again(project: Project, state: str, names: tuple[str, ...]) -> str:
    """Return REBUILT if the next run makes the same corpus.

    If that run asks for another run, the second run may make it. Return REFUSED if the error has one of the names and
    nothing is published.
    """
    for pattern in STATES[state]:
        for file in project.root.glob(pattern):
            if str(file) not in names and not file.is_dir():
                file.unlink()
    project.published.unlink()
    for _ in range(2):
        try:
            with small_shards():
                run_all(Publish(replace(project.recipe)), one_second)  # a copy has read nothing yet
            return REBUILT if corpus_bytes(project.published) == project.corpus else f"{TRUSTED}: other bytes"
        except PackError as error:
            problem = str(error)
            if not any(name in problem for name in names):
                return f"{TRUSTED}: {problem}"
            if "run again" not in problem:
                break
    return REFUSED if not project.published.exists() else f"{TRUSTED}: {problem}"


# -- the matrix --------------------------------------------------------------------------------------------------------

REPAIRING, RUN = "`repair`", "the next run"
COLUMNS = (*READERS, REPAIRING, RUN)


def kind_of(column: str) -> str:
    """Return the kind of project that a column damages."""
    return READERS[column].kind if column in READERS else "trained" if column == RUN else "packed"


def expected(column: str, how: str) -> str:
    if column == RUN:
        return REFUSED if how == "folder" else REBUILT
    return REPAIRED if column == REPAIRING and how not in ("folder", RESIGNED, *SIGNED) else REFUSED


def outcomes(column: str, project: Project, every_state: bool = False) -> Iterator[tuple[str, Path, str]]:
    """Yield (damage, file, outcome) for every cell of a column.

    The next run is tested in one state per cell, or in every state.
    """
    if column == RUN:
        for pattern, states in KEPT.items():
            for file in project.kept[pattern][:AT_MOST]:
                for number in range(len(states)):
                    for count, (how, _, names) in enumerate(project.cells([file])):
                        if every_state or count % len(states) == number:
                            yield how, file, made_again(project, states[number], names)
        return
    cells = project.cells(READERS[column].reads(project) if column in READERS else project.files)
    for number, (how, file, names) in enumerate(cells):
        if column == REPAIRING:
            yield how, file, repaired(project, (project.published, project.folder)[number % 2], names)
        else:
            yield how, file, refused(READERS[column], project, names)
