"""Every command that reads a corpus handles rows that are trees of samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inspected import as_object, page_of, rendered, shown
from support.packed_rows import folder_of, shards_of
from support.row_shapes import read_corpus
from support.trees import IGNORED, Sample, agent_records, pack_trees, samples_of

import packcorpus
from packcorpus.tasks.cli.corpus_view import show_difference
from packcorpus.tasks.corpus.summary import explain_samples, explain_shared, notes
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.exports.export import EXPORTS, export_corpus
from packcorpus.tasks.inspection import search
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.inspection.rows import row_of_split, shard_figures
from packcorpus.tasks.report.figures import read_figures
from packcorpus.tasks.report.rows import COLUMNS, samples
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import statistics_of_split
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

RECORDS = agent_records(30)


@pytest.fixture(scope="module", params=["conversation", "all"])
def trees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack conversations as trees; the longest are cut into several."""
    settings = {"validation": 0.2, "loss_weight": "conversation", "share": request.param}
    return pack_trees(tmp_path_factory.mktemp("trees"), RECORDS, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the same samples, each of them whole."""
    settings = {"validation": 0.2, "loss_weight": "conversation", "share": "none"}
    return pack_trees(tmp_path_factory.mktemp("whole"), RECORDS, **settings)


@pytest.fixture(scope="module")
def apart(whole: Path) -> dict[tuple[int, int], Sample]:
    return samples_of(whole)


def test_the_corpus_has_what_is_hard(trees: Path, whole: Path, apart: dict[tuple[int, int], Sample]) -> None:
    verify(trees)
    found = samples_of(trees)
    assert {key: sample[:2] for key, sample in found.items()} == {key: sample[:2] for key, sample in apart.items()}
    rows = [row_of_split(trees, n, "train") for n in range(load_manifest(trees).splits["train"].rows)]
    pieces = [piece for row in rows for piece in row.conversations]
    assert max(piece["level"] for piece in pieces) > 2
    assert any(len(piece["path"]) > 1 for piece in pieces), "a path with a gap"
    begun = [piece["record"] for piece in pieces if piece["under"] is None]
    assert len(begun) > len(set(begun)), "a conversation that is cut into several trees"
    assert load_manifest(trees).ledger.tokens.packed < load_manifest(whole).ledger.tokens.packed


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_a_row_is_shown_as_trees(trees: Path, apart: dict[tuple[int, int], Sample]) -> None:
    for number, row in enumerate(read_corpus(trees).rows["train"]):
        held = row_of_split(trees, number, "train")
        page = shown(trees, row=number, split="train")
        heads = re.findall(r"^( *)━━ (\d+)/\d+  (\S+ turn \d+)  (.*)$", page, re.M)
        assert len(heads) == len(held.conversations) == len(row.entries)
        for piece, entry, (indent, _, place, facts) in zip(held.conversations, row.entries, heads, strict=True):
            assert (piece["start"], piece["length"], piece["shared"]) == (
                entry["start"], entry["length"], entry["shared"],
            )  # fmt: skip
            assert place == f"chat.jsonl:{entry['record']} turn {entry['turn']}"
            assert len(indent) == 2 * piece["level"]
            assert facts.startswith(f"{entry['length']} tokens · ")
            assert f" · {entry['trained']} trained · " in facts
            assert "".join(span.text for span in piece["spans"])
            sample = apart[entry["record"], entry["turn"]]
            before = [place for first, last in piece["path"] for place in range(first, last)]
            assert len(before) == entry["shared"]
            assert [row.columns["input_ids"][place] for place in before] == sample.ids[: len(before)]
            if piece["under"] is None:
                assert (piece["level"], before) == (0, [])
                assert "positions" not in facts
                continue
            above = held.conversations[piece["under"]]
            assert piece["level"] == above["level"] + 1
            assert above["start"] <= before[-1] < above["start"] + above["length"]
            assert sample.ids[: len(before)] == apart[above["record"], above["turn"]].ids[: len(before)]
            last = len(before) + entry["length"] - 1
            assert f"positions {len(before)} to {last} · after the first {len(before)} of {piece['under'] + 1}" in facts
        count = sum(piece["under"] is None for piece in held.conversations)
        trees_of_row = f" in {count} tree{'s' * (count > 1)}" if count < len(row.entries) else ""
        assert f"{len(row.entries)} samples{trees_of_row}, {held.tokens} tokens of 512, " in page
        assert held.manifest == trees
        assert held.longest == max(len(apart[entry["record"], entry["turn"]].ids) for entry in row.entries)
    statistics = statistics_of_split(load_manifest(trees), folder_of(trees), "train")
    assert statistics is not None
    squares = [row_of_split(trees, number, "train").squares for number in range(len(statistics))]
    assert squares == statistics.squares.tolist()


def test_a_conversation_is_shown_whole_along_its_path(trees: Path, apart: dict[tuple[int, int], Sample]) -> None:
    encoder = open_tokenizer(load_manifest(trees), folder_of(trees))
    for record in sorted({record for record, _ in apart})[::3]:
        found = as_object(trees, at=f"chat.jsonl:{record}")
        wanted = {turn: sample for (of, turn), sample in apart.items() if of == record}
        assert [piece["turn"] for piece in found["pieces"]] == sorted(wanted)
        page = shown(trees, width=10_000, at=f"chat.jsonl:{record}")
        heads = re.findall(r"^━━ row \d+ of \w+, tokens ([\d, to]+)  \S+ turn \d+  (.*)$", page, re.M)
        for piece, (places, facts) in zip(found["pieces"], heads, strict=True):
            sample = wanted[piece["turn"]]
            assert (piece["input_ids"], piece["labels"]) == sample[:2]
            assert piece["text"] == encoder.decode(sample.ids)
            assert "".join(span["text"] for span in piece["spans"]) == piece["text"]
            trained = [token for span in piece["spans"] if span["trained"] for token in span["ids"]]
            assert trained == [label for label in sample.labels if label != IGNORED]
            runs = [[int(place) for place in run.split(" to ")] for run in places.split(", ")]
            assert sum(last + 1 - first for first, last in runs) == len(sample.ids)
            assert [[first, last + 1] for first, last in runs[:-1]] == piece["path"]
            shared = f" · {piece['shared']} shared" * bool(piece["shared"])
            assert facts.startswith(f"{len(sample.ids)} tokens{shared} · ")
            if sample.shared == 0:
                [one] = as_object(trees, at=f"chat.jsonl:{record} turn {piece['turn']}")["pieces"]
                assert one == piece
    assert "piece" not in page, "a piece of a tree is not a piece of a conversation that is cut"


def test_the_api_returns_whole_samples(trees: Path, whole: Path, apart: dict[tuple[int, int], Sample]) -> None:
    one, other = packcorpus.open(trees), packcorpus.open(whole)
    for record in {record for record, _ in apart}:
        found, usual = one.conversation(f"chat.jsonl:{record}"), other.conversation(f"chat.jsonl:{record}")
        for name in ("tokens", "labels", "weights"):
            assert np.array_equal(getattr(found, name), getattr(usual, name)), name
        assert [sample.turn for sample in found.samples] == [sample.turn for sample in usual.samples]
        assert found.text == usual.text


def test_rows_and_batches_have_the_ends_of_trees(trees: Path) -> None:
    corpus = packcorpus.open(trees)
    rows, seen = corpus.rows(), 0
    known = sorted(row["end"].tolist() for row in rows)
    for batch in corpus.batches(2):
        assert batch["end"].dtype == np.int32
        seen += len(batch["end"])
        assert all(ends in known for ends in batch["end"].tolist())
    assert seen == len(rows) == len(known)


def test_a_search_finds_a_text_once_also_where_a_piece_begins(
    trees: Path, apart: dict[tuple[int, int], Sample]
) -> None:
    """A search finds what a plain one finds in the samples.

    It finds it in each sample that adds a token of the text. The other samples only share it.
    """
    manifest = load_manifest(trees)
    encoder = open_tokenizer(manifest, folder_of(trees))
    shared = {key: sample.shared for key, sample in samples_of(trees).items()}

    def plain(text: str) -> set[tuple[int, int]]:
        found = set()
        for key, sample in apart.items():
            written = [encoder.token_bytes(token) for token in sample.ids]
            known = len(b"".join(written[: shared[key] + 1])) if shared[key] else 0
            at = (all_bytes := b"".join(written)).find(text.encode())
            while 0 <= at <= known - len(text.encode()):
                at = all_bytes.find(text.encode(), at + 1)
            if at >= 0:
                found.add(key)
        return found

    texts = ["minutes", "system", "no such text"]
    for key, sample in list(apart.items())[::9]:
        if shared[key]:  # texts that begin before the piece and end in it
            texts.append(encoder.decode(sample.ids[shared[key] - 4 : shared[key] + 5]))
            texts.append(encoder.decode(sample.ids[: shared[key] + 2]))
            texts.append(encoder.decode(sample.ids[shared[key] - 4 : shared[key] + 1]))  # ends with the copied token
    for text in texts:
        result = search.find_conversations(trees, text, 1000)
        hits = [(piece["record"], piece["turn"]) for piece in result.conversations]
        assert len(hits) == len(set(hits))
        assert set(hits) == plain(text), text
        for piece in result.conversations:
            assert text[-12:].strip() in "".join(span.text for span in piece["excerpt"].spans)
    assert any(len(plain(text)) > 1 for text in texts)


def test_a_match_is_trained_on_if_its_own_sample_trains_on_it(trees: Path) -> None:
    manifest = load_manifest(trees)
    encoder = open_tokenizer(manifest, folder_of(trees))
    for (record, turn), sample in list(samples_of(trees).items())[::4]:
        if sample.shared:  # the shared tokens end with an answer, on which an earlier sample may train
            first = next(place for place, label in enumerate(sample.labels) if label != IGNORED)
            for last in (sample.shared + 1, first):
                text = encoder.decode(sample.ids[max(0, sample.shared - 12) : last + 1])
                pieces = search.find_conversations(trees, text, 1000).conversations
                [piece] = [one for one in pieces if (one["record"], one["turn"]) == (record, turn)]
                assert piece["trained_on"] == (last == first)


def test_a_shard_counts_samples(trees: Path) -> None:
    shard = shards_of(trees)[0]
    figures = shard_figures(shard)
    entries = [len(row.entries) for row in read_corpus(trees).rows["train"][: figures.rows]]
    assert (figures.conversations, figures.least, figures.most) == (sum(entries), min(entries), max(entries))
    assert f"{sum(entries)} samples, {min(entries)} to {max(entries)} per row" in shown(shard)


# -- figures, report, and card -----------------------------------------------------------------------------------------


def test_what_trees_save_is_said_once_for_all(trees: Path, whole: Path) -> None:
    ledger, other = load_manifest(trees).ledger, load_manifest(whole).ledger
    saved = other.tokens.packed - ledger.tokens.packed
    assert saved == ledger.tokens.shared
    [line] = explain_shared(ledger)
    assert line.startswith(f"{other.tokens.packed:,} tokens of samples in {ledger.tokens.packed:,} (")
    assert list(explain_shared(other)) == []
    page = " ".join(shown(trees).split())
    assert line in page
    assert f"− shared {saved:,} = packed {ledger.tokens.packed:,}" in page
    assert line in [*notes(load_manifest(trees))]
    assert f"{saved:,} shared" in repr(packcorpus.open(trees))
    rows = load_manifest(trees).packing_metadata
    assert f"samples per row {rows.avg_conversations_per_sequence:.2f}" in page
    assert rows.avg_conversations_per_sequence == pytest.approx(len(samples_of(trees)) / rows.rows, abs=1e-4)


def test_the_ways_out_are_compared_with_what_trees_store(trees: Path, whole: Path, tmp_path: Path) -> None:
    ledger, usual = load_manifest(trees).ledger, load_manifest(whole).ledger
    assert ledger.samples is not None
    assert usual.samples is not None
    of_conversations = usual.samples.repeated_prompt_tokens - ledger.samples.repeated_prompt_tokens
    in_all = load_manifest(trees).row_layout.share == "all"  # then they share with other conversations, too
    assert ledger.tokens.shared is not None
    assert of_conversations < ledger.tokens.shared if in_all else of_conversations == ledger.tokens.shared
    _, *lines = explain_samples(ledger)
    ways = "; ".join(lines)
    stored = ledger.tokens.encoded - (ledger.tokens.shared or 0)
    for name, way in ledger.samples.ways_out.items():
        if way.tokens is not None:
            assert (f"{name} (" in ways) == (way.tokens < stored)
    last = ledger.samples.ways_out["train_on: last"]
    settings = {"validation": 0.2, "train_on": "last", "turns": "auto"}
    made = load_manifest(pack_trees(tmp_path, RECORDS, **settings))
    assert last.tokens == pytest.approx(made.ledger.tokens.encoded, abs=len(RECORDS))
    assert last.rows == pytest.approx(made.packing_metadata.rows, rel=0.15)
    assert list(explain_shared(made.ledger)) == [
        "share saves nothing here: no samples that may be in one tree begin alike"
    ]


def test_the_report_draws_trees_and_counts_samples(
    trees: Path, apart: dict[tuple[int, int], Sample], tmp_path: Path
) -> None:
    manifest, folder = load_manifest(trees), folder_of(trees)
    figures = read_figures(manifest, folder, range(manifest.packing_metadata.rows))
    lengths = np.repeat(figures.lengths.values, figures.lengths.counts)
    assert lengths.tolist() == sorted(len(sample.ids) for sample in apart.values())
    drawn = list(samples(manifest, folder, figures.drawn, 1 << 20))
    for sample in drawn:
        held = row_of_split(trees, sample.row, sample.split)
        assert [talk.level for talk in sample.conversations] == [min(8, piece["level"]) for piece in held.conversations]
        assert sample.trees == sum(piece["under"] is None for piece in held.conversations)
        lines = re.findall(r"M(\d+) (\d+)v1.5H(\d+)v1.5", sample.branches)
        below = [piece for piece in held.conversations if piece["under"] is not None]
        assert lines == [
            tuple(
                map(
                    str,
                    (piece["path"][-1][1] * COLUMNS // 512, 13 * piece["level"] - 3, piece["start"] * COLUMNS // 512),
                )
            )
            for piece in below
        ]
        assert sample.height == 19 + 13 * max(piece["level"] for piece in held.conversations)
    page = page_of(trees, tmp_path / "report.html")
    assert '<path class="branch" d="M' in page
    assert "Samples are stored as trees" in page
    assert f"shared by samples of a tree, which store them once: {manifest.ledger.tokens.shared:,}" in page
    assert 'class="branch"' not in page_of(whole_of(tmp_path), tmp_path / "other.html")


def whole_of(folder: Path) -> Path:
    return pack_trees(folder / "whole", RECORDS[:5], share="none")


def test_the_card_says_how_to_mask_trees(trees: Path, whole: Path) -> None:
    torch = pytest.importorskip("torch")
    card, usual = ((folder_of(path) / "README.md").read_text() for path in (trees, whole))
    assert "`end`" not in usual
    shared = load_manifest(trees).ledger.tokens.shared
    assert f"store what they begin with once: {shared:,} tokens fewer" in card
    code = re.findall(r"```python\n(.*?)```", card, re.S)[1]
    collate = code[code.index("def collate") : code.index("rows = load")]
    values: dict[str, Any] = {"torch": torch, "default_data_collator": lambda rows: {"end": torch.tensor(rows)}}
    exec(collate, values)  # noqa: S102 - our own text
    for row in read_corpus(trees).rows["train"]:
        [[seen]] = values["collate"]([row.columns["end"]])["attention_mask"].sum(-1)
        for entry in row.entries:
            own = seen[entry["start"] : entry["start"] + entry["length"]].tolist()
            first = entry["shared"] + 1
            assert own == list(range(first, first + entry["length"])), "a token sees its sample up to itself"


# -- export, diff, repair, rebuild -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [format.name for format in EXPORTS])
def test_no_trainer_gets_trees(to: str, trees: Path, tmp_path: Path) -> None:
    message = rf"trees of samples \(share: \w+\), with which {to} .*; pack it with .*share: none"
    with pytest.raises(packcorpus.DataError, match=message) as caught:
        export_corpus(trees, to, tmp_path / "export", tmp_path)
    assert caught.value.code == "E541"
    assert not (tmp_path / "export").exists()


def test_a_difference_names_the_setting_and_what_is_shared(trees: Path, whole: Path) -> None:
    found = compare(whole, trees)
    changes = {change.name: (change.before, change.after) for change in found.settings}
    assert changes == {"share": (None, load_manifest(trees).row_layout.share), "format_version": ("3.0", "3.2")}
    assert (found.conversations.went, found.conversations.came) == ([], [])
    page = rendered(found, show_difference)
    assert re.search(rf"tokens shared +[-0] +{load_manifest(trees).ledger.tokens.shared:,}", page)


def test_trees_are_rebuilt_and_repaired(tmp_path: Path) -> None:
    path = pack_trees(tmp_path, RECORDS[:10], epochs=2)
    assert rebuild(path).endswith(": identical")
    for file in (shards_of(path)[0], folder_of(path) / "index.arrow", folder_of(path) / "README.md"):
        before = file.read_bytes()
        file.unlink()
        assert [repaired.path for repaired in repair(path)] == [file]
        assert file.read_bytes() == before
    verify(path)
