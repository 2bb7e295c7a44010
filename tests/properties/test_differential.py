"""An independent reference gives the same IDs, labels, and rejects.

    records ─┬─ tokenize_part, or PackCorpus ─┐
             └─ tests/reference ──────────────┴─▶ every ID, every label, and every reject is the same

The reference follows the published rules and imports none of this code. bench/reliability/differential.py makes the
same comparison with 30,000 real and 3,000 unusual conversations for each pair of a template and a tokenizer.
"""

from __future__ import annotations

import ast
import csv
import json
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conversations.test_conversations import BAD, GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import families, tokens
from reference.corpus import expected
from reference.families import Piece
from reference.records import ROLES
from support.commands import needs_shared, pack
from support.containers import as_csv, as_lines, as_parquet
from support.differential.agent_sessions import session
from support.differential.comparison import (
    AT_ONCE,
    Tally,
    add,
    compare,
    compare_pair,
    compare_rendered,
    library_of,
    real,
)
from support.differential.unusual_conversations import unusual
from support.profiles import examples
from support.templates.agent_templates import AGENTS, LOSING
from support.tokenizer_kinds import CLASSES, KINDS, kind_path

from packcorpus.tasks.conversations.formats import FORMAT_NAMES
from packcorpus.tasks.templates.built_in import BUILT_IN

TESTS = Path(__file__).parents[1]
REAL, UNUSUAL = 60, 80
# The classes of tokenizers change how texts are encoded, so two templates suffice.
PAIRS = [*product(BUILT_IN, KINDS), *product(("chatml", "llama2"), CLASSES)]
IGNORED = -100


@needs_shared
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", BUILT_IN)
def test_real_conversations_have_the_ids_and_labels_of_the_reference(template: str, kind: str) -> None:
    seed = list(BUILT_IN).index(template) * len(KINDS) + KINDS.index(kind)
    tally = compare_pair(template, kind, REAL, 0, 0, real_seed=seed)
    assert not tally.wrong, tally.wrong[0]
    assert (tally.conversations, tally.rejected) == (REAL, 0)


@pytest.mark.parametrize(("template", "kind"), PAIRS)
def test_unusual_conversations_have_the_ids_and_labels_of_the_reference(template: str, kind: str) -> None:
    seed = PAIRS.index((template, kind))
    tally = compare_pair(template, kind, 0, UNUSUAL, seed)
    assert not tally.wrong, tally.wrong[0]
    assert tally.conversations == 4 * UNUSUAL
    assert tally.rejected < tally.conversations / 2


def test_unusual_conversations_are_of_every_format() -> None:
    elsewhere = {"session", "tokens"}  # tests/conversations/traces
    elsewhere |= {"completions", "preference"}  # tests/tokenization/test_several_answers.py
    assert {format for format, _ in unusual("hf_legacy", 0, AT_ONCE)} == set(FORMAT_NAMES) - elsewhere


@needs_shared
def test_there_are_30000_real_conversations() -> None:
    found = real(30_000)
    assert len(found) == 30_000
    assert sum(format != "messages" for format, _ in found) == 26_067


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_records_of_every_format_are_read_and_rejected_as_the_reference_does(train_on: Any) -> None:
    # Reasoning, which a built-in template does not write, ends the run.
    golden = [(format, record) for format, record, said in GOLDEN if not any(turn.reasoning for turn in said.messages)]
    records = golden + [(format, record) for format, record, *_ in BAD if in_json(record)]
    tally = compare(records, "chatml", "sp_bpe_chatml", train_on)
    assert not tally.wrong, tally.wrong[0]
    assert tally.rejected > 60
    assert tally.conversations - tally.rejected >= len(golden) - 3  # three have no answer


def in_json(record: Any) -> bool:
    """Return whether a JSONL file can have this record without failing the run.

    A record with an image or with reasoning fails the whole run.
    """
    if isinstance(record, dict) and {"reasoning", "thinking"}.intersection(record):
        return False
    try:
        return "image" not in json.dumps(record, ensure_ascii=False).encode().decode()
    except (TypeError, UnicodeEncodeError):
        return False


@pytest.mark.parametrize(("template", "kind"), [("chatml", "sp_bpe_chatml"), ("llama2", "hf_legacy")])
def test_rows_of_a_corpus_hold_what_the_reference_says(template: str, kind: str, tmp_path: Path) -> None:
    """The whole command gives the rows of the reference, from three containers.

    The command packs, and it encodes with gigatoken if possible.
    """
    given = unusual(kind, 5, 600)
    messages = [record for format, record in given if format == "messages"]
    asked = [texts_of(("question", "answer"), record) for format, record in given if format == "prompt_completion"]
    dolly = [texts_of(("instruction", "context", "response"), record) for format, record in given if format == "dolly"]
    (tmp_path / "a.jsonl").write_bytes(as_lines(messages))
    (tmp_path / "b.csv").write_bytes(as_csv(asked))
    (tmp_path / "c.parquet").write_bytes(as_parquet(dolly))
    settings = {"name": "rows", "tokenizer": str(kind_path(kind)), "template": template, "max_rejects": 1.0}
    settings |= {"sequence_length": 8192, "overlong": "error", "sources": ["a.jsonl", "b.csv", "c.parquet"]}
    (tmp_path / "corpus.yaml").write_text(yaml.safe_dump(settings))
    manifest = pack(tmp_path, "--config", "corpus.yaml", "--workers", "1")

    read = (
        ("messages", [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().split("\n")[:-1]]),
        ("prompt_completion", list(csv.DictReader((tmp_path / "b.csv").open(newline="")))),
        ("dolly", pq.read_table(tmp_path / "c.parquet").to_pylist()),
    )
    found, tally = packed(manifest), Tally()
    for source, (format, records) in enumerate(read):
        assert len(records) > 20
        said = expected(records, format, template, library_of(kind))
        for number, (record, there) in enumerate(zip(records, said, strict=True), 1):
            add(tally, record, found.pop((source, number), None), there)
    assert not found
    assert not tally.wrong, tally.wrong[0]


def texts_of(names: tuple[str, ...], record: dict[str, Any]) -> dict[str, str]:
    """Return a table's record with the first text values of a record."""
    texts = [value for value in record.values() if type(value) is str]
    return {name: texts[number] if number < len(texts) else "" for number, name in enumerate(names)}


def packed(manifest: Path) -> dict[tuple[int, int], list[tokens.Encoded]]:
    """Return the samples of each conversation from its rows, by source and record."""
    facts = orjson.loads(manifest.read_bytes())
    folder, length = manifest.parent.parent / facts["corpus"], facts["sequence_length"]
    shards = [pa.ipc.open_stream(folder / shard["path"]).read_all() for shard in facts["splits"]["train"]["shards"]]
    rows = [
        {
            name: np.concatenate([chunk.flatten() for chunk in shard[name].chunks]).reshape(-1, length)
            for name in ("input_ids", "labels")
        }
        for shard in shards
    ]
    found: dict[tuple[int, int], list[tokens.Encoded]] = {}
    for place in pa.ipc.open_stream(folder / "index.arrow").read_all().to_pylist():
        inside = slice(place["start"], place["start"] + place["length"])
        ids, labels = (rows[place["shard"]][name][place["row"], inside].tolist() for name in ("input_ids", "labels"))
        assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
        trained = [label != IGNORED for label in labels]
        found.setdefault((place["source"], place["record"]), []).append((ids, trained))
    return found


# -- chat templates ---------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_b",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A town."}}},
        },
    }
]


@pytest.mark.parametrize("turns", ["auto", "apart"])
@pytest.mark.parametrize("name", [*AGENTS, *LOSING])
def test_the_fewest_samples_hold_every_turn_after_its_prompt_or_the_conversation_is_rejected(
    name: str, turns: Any
) -> None:
    tallies = []

    @settings(max_examples=examples(16), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=6, max_size=6), st.randoms())
    def check(sessions: list[list[int]], draw: random.Random) -> None:
        records = [record_of(session(sizes, draw), draw) for sizes in sessions]
        tallies.append(compare_rendered(records, (AGENTS | LOSING)[name], "hf_byte_level", turns))
        assert not tallies[-1].wrong, tallies[-1].wrong[0]

    check()
    tally = sum(tallies, Tally())
    assert (tally.rejected > 0) == (name in LOSING)
    assert tally.samples > 0


def record_of(messages: list[Any], draw: random.Random) -> dict[str, Any]:
    system = [{"role": "system", "content": "Be kind."}] if draw.random() < 0.3 else []
    return {"messages": system + messages} | ({"tools": TOOLS} if draw.random() < 0.3 else {})


# -- the comparison itself --------------------------------------------------------------------------------------------

CHAT = ("messages", {"messages": [{"role": "user", "content": "2+2?"}, {"role": "ai", "content": "4"}]})


def changed(text: Callable[[str], str]) -> Callable[..., list[Piece]]:
    return lambda *given: [piece._replace(text=text(piece.text)) for piece in families.llama2(*given)]


def test_a_changed_space_label_id_or_reject_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> str:
        return "".join(compare([CHAT], "llama2", "sp_bpe_chatml").wrong).partition(": {")[0]

    assert wrong() == ""
    monkeypatch.setitem(families.RULES, "llama2", changed(lambda text: text.replace(" [/INST]", "[/INST]")))
    assert wrong().startswith("sample 0, token ")
    monkeypatch.undo()
    monkeypatch.setattr(families, "flagged", lambda pieces, *_: [(piece.text, True) for piece in pieces])
    assert wrong() == "sample 0, token 1: (id, trained on) is (405, False), (405, True) in the reference"
    monkeypatch.undo()
    monkeypatch.setattr(library_of("sp_bpe_chatml"), "eos", 7)
    assert "(2, True), (7, True) in the reference" in wrong()
    monkeypatch.undo()
    monkeypatch.delitem(ROLES, "ai")
    assert wrong() == "rejected by the reference only"


def test_the_reference_imports_nothing_that_it_is_compared_with() -> None:
    files = sorted((TESTS / "reference").glob("*.py"))
    assert len(files) > 4
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names}
            known = sys.stdlib_module_names | {"numpy", "pyarrow", "reference", "sentencepiece"}
            known |= {"tokenizers", "transformers"}
            assert roots <= known, f"{file.name} imports {names}"
