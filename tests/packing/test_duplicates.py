"""Duplicates: always counted, by content, in every place that shows the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inspected import page_of, shown
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.corpus.summary import conversation_facts, notes
from packcorpus.tasks.dry_run import dry_run
from packcorpus.tasks.packing import ledger
from packcorpus.tasks.packing.ledger import count_duplicates
from packcorpus.tasks.storage.manifest import load_manifest

ONCE = conversations(30)


def answers(count: int) -> dict[str, Any]:
    """Return a conversation that has a sample for each answer with `turns: apart`."""
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(count) for role in ("user", "assistant")]
    return {"messages": turns}


@pytest.mark.parametrize(
    ("records", "settings", "counted", "dropped"),
    [
        (ONCE, {}, 0, None),
        ([*ONCE, ONCE[0]], {}, 1, None),
        ([*ONCE, ONCE[0]], {"duplicates": "exact"}, 0, 1),
        ([*ONCE, *ONCE, ONCE[3]], {"validation": 0.3}, 31, None),
        ([*ONCE, *[answers(3)] * 4], {"turns": "apart"}, 3, None),
        ([*ONCE, *ONCE], {"sources": [{"path": "chat.jsonl", "weight": 2}]}, 30, None),
        # Those that are dropped for another reason are in no row.
        ([*ONCE, *[answers(20)] * 3], {"max_turns": 8}, 0, None),
        ([*ONCE, ONCE[0]], {"packing": False}, 1, None),
    ],
)
def test_duplicates_are_counted(
    records: list[dict[str, Any]], settings: dict[str, Any], counted: int, dropped: int | None, tmp_path: Path
) -> None:
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path, records, **settings)))
    found = manifest.ledger.conversations
    assert (found.duplicates, found.dropped.get("duplicate")) == (counted, dropped)
    assert any(line.startswith("duplicates:") for line in notes(manifest)) == bool(counted)
    facts = {fact.name: fact.value for fact in conversation_facts(manifest.ledger, manifest.config)}
    assert facts.get("duplicates", 0) == counted


def test_every_view_shows_what_is_lost(tmp_path: Path) -> None:
    say = {"role": "system", "content": "Be brief."}
    records = [{"messages": [say, *record["messages"]]} for record in (*ONCE, ONCE[0])]
    source = {"path": "chat.jsonl", "drop_roles": ["system"]}
    published = pack_corpus(make_recipe(tmp_path, records, sources=[source]))
    for view in (page_of(published, tmp_path / "report.html"), shown(published)):
        assert "duplicates: 1 conversation has the same content as another one and is packed again" in view
        assert "eft out of the context: 31 system messages (drop_roles)" in view


def test_check_says_whether_the_count_is_exact(tmp_path: Path) -> None:
    config = write_project(tmp_path, [*ONCE, ONCE[0], ONCE[0]])
    run = dry_run.predict(load_config(config), tmp_path, tmp_path)
    assert run.whole
    assert run.ledger.conversations.duplicates == 2
    [line] = [line for line in run.warnings if "duplicates" in line]
    assert line == (
        "duplicates: 2 conversations have the same content as another one and are packed again; to leave them out, "
        "set  duplicates: exact"
    )
    config = write_project(tmp_path, conversations(600) * 2)
    run = dry_run.predict(load_config(config), tmp_path, tmp_path, budget=1 << 15)
    assert not run.whole
    lines = [line for line in run.warnings if "duplicates" in line]
    if run.ledger.conversations.duplicates:
        assert lines.pop(0).startswith("duplicates: at least about ")
        assert lines == [
            "duplicates are only found within the sample, so there may be more; the run counts them exactly"
        ]
    assert not lines


class Digests:
    """The digests of token files."""

    def __init__(self, digests: list[int]):
        self._digests = np.array(digests, np.uint64)

    def column(self, _: str, first: int, last: int) -> np.ndarray:
        return self._digests[first:last]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1), st.booleans())),
    st.integers(1, 5),
)
def test_ranges_of_digests_do_not_matter(rows: list[tuple[int, bool]], at_once: int) -> None:
    packed = [digest for digest, left in rows if left]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "SORTED_AT_ONCE", at_once)
        patch.setattr(ledger, "CHUNK", 3)
        found = count_duplicates(np.array([left for _, left in rows], bool), Digests([d for d, _ in rows]))  # type: ignore[arg-type]
    assert found == len(packed) - len(set(packed))


def test_not_all_packed_conversations_can_be_duplicates(tmp_path: Path) -> None:
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path, ONCE)))
    ledger = manifest.ledger
    wrong = ledger.model_copy(update={"conversations": ledger.conversations.model_copy(update={"duplicates": 30})})
    with pytest.raises(DataError, match="30 of 30 packed conversations are duplicates"):
        wrong.check(ledger.tokens.packed + ledger.tokens.padding)
