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

from pipeline.engines.here import Here
from pipeline.engines.workers import Workers
from tasks.recipe import Recipe
from tasks.sources.shares import Share
from tasks.stages import Publish, refresh, run_share
from tasks.steps import Outcome, Step, _recipe_of, run
from tasks.storage.paths import Layout
from tasks.stores.scratch import SCRATCH, root_of, url_of
from tasks.stores.store import open_store

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
    store = open_store(root)
    keys = [key for key, _ in store.list()]
    if not isinstance(root, Path):
        shared = "run.json", "data/digests/", "data/engines/"
        assert all(is_output(key) or any(name in key for name in shared) for key in keys), "nothing else is there"
    return {key: store.get(key) for key in keys if is_output(key)}


def by_stages(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    pack_corpus(recipe)


def here(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    pack_on(Here(), recipe)


def in_forks(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    refresh(recipe)  # the process has used the store, and its forks need a helper
    with Workers(2) as engine:
        pack_on(engine, recipe)


def on_other_machines(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    """Run each step in a process with its own scratch folder, as Ray does."""

    class Elsewhere(Here):
        def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
            for index, step in enumerate(steps):
                sent = pickle.dumps(step)
                assert len(sent) < 4096
                with pytest.MonkeyPatch.context() as patch:
                    own_scratch(patch, recipe.layout.root.parent / f"machine-{index}")
                    _recipe_of.cache_clear()  # another process
                    arrived = pickle.loads(sent)  # noqa: S301 - our own
                    assert not arrived.is_done()
                    yield from ((index, outcome) for _, outcome in super().map([arrived]))
                    assert arrived.is_done()
                    run(arrived)

    pack_on(Elsewhere(), recipe)


def in_shares(recipe: Recipe, elsewhere: Callable[[], None]) -> None:
    """Pack in shares, as `packcorpus part` does on three machines."""
    url = url_of(recipe.layout.root)
    for stage in ("tokenize", "pack"):
        for number in (3, 1, 2):
            elsewhere()
            share, done = run_share(replace(recipe, layout=Layout(root_of(url))), stage, Share(number, 3))
            assert (share > 0 or stage == "pack", done) == (True, 0)
    elsewhere()
    last = replace(recipe, layout=Layout(root_of(url)))
    assert not Publish(last).is_done()
    assert all(stage.is_done() for stage in Publish(last).requires()), "the last one finds all of it done"
    pack_corpus(last)


WAYS = [by_stages, here, in_forks, on_other_machines, in_shares]
