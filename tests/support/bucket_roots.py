"""Roots in buckets: five ways to make a corpus there, and the files of a root.

Each machine has its own scratch folder.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_corpus import pack_corpus
from support.steps import pack_on

from packcorpus.pipeline.engines import Here, Workers
from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.parts import WHOLE, Share
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.bucket import open_store
from packcorpus.tasks.stores.urls import SCRATCH, root_of, url_of
from packcorpus.tasks.work import KINDS, Outcome, Work, attempt, refresh, run_stage

Tree = dict[str, bytes]


def own_scratch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Act as another machine, which has an empty scratch folder."""
    monkeypatch.setenv(SCRATCH, str(folder))


def is_output(key: str) -> bool:
    """Return whether every run writes the same bytes to this file.

    The bytes are also the same in a bucket and in a folder.
    """
    ours = key.startswith(("data/tokenizers/", "data/tokens/", "data/plans/", "data/corpora/", "manifests/"))
    return ours and not key.endswith(("run.json", ".lock", ".last"))


def tree_of(root: str | Path) -> Tree:
    """Return all outputs below a root."""
    if isinstance(root, Path):
        files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        found = {key: path.read_bytes() for key, path in files.items() if not path.name.startswith(".")}
    else:
        store, shared = open_store(root), ("run.json", "data/digests/", "data/engines/")
        found = {key: store.get(key) for key, _ in store.list()}
        assert all(is_output(key) or any(name in key for name in shared) for key in found), "nothing else is there"
    return {key: content for key, content in sorted(found.items()) if is_output(key)}


def by_stages(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    pack_corpus(recipe)


def here(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    pack_on(Here(), recipe)


def in_processes(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    refresh(recipe)  # this process has used the store, so it cannot fork workers
    with Workers(2) as engine:
        pack_on(engine, recipe)


def on_other_machines(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    """Run each step in a process with its own scratch folder, as Ray does."""

    class Elsewhere(Here):
        def map(self, steps: Sequence[Work]) -> Iterator[tuple[int, Outcome]]:
            for index, step in enumerate(steps):
                sent = pickle.dumps(step)
                assert len(sent) < 4096
                with pytest.MonkeyPatch.context() as patch:
                    own_scratch(patch, recipe.layout.root.parent / f"machine-{index}")
                    recipe_module._received.cache_clear()  # another process
                    arrived = pickle.loads(sent)  # noqa: S301 - our own
                    assert not arrived.is_stored()
                    yield from ((index, outcome) for _, outcome in super().map([arrived]))
                    assert arrived.is_stored()
                    assert not attempt(arrived).error

    pack_on(Elsewhere(), recipe)


def in_shares(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    """Pack as `packcorpus part` does, with three machines for a stage that has shares."""
    url = url_of(recipe.layout.root)
    for kind in KINDS:
        for number in (3, 1, 2) if kind.are_steps else (1,):
            elsewhere()
            own = Share(number, 3) if kind.are_steps else WHOLE
            steps, done = run_stage(replace(recipe, layout=Layout(root_of(url))), kind, own)
            assert (steps > 0 or kind.stage in ("prepare", "write"), done) == (True, 0)


WAYS = [by_stages, here, in_processes, on_other_machines, in_shares]
