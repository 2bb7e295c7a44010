"""Every export has the token ids, labels, and bounds of every conversation.

It reports all that its format cannot hold. tests/reference/exports.py has the readers. bench/exports/readers.py
compares exports with the trainers' own readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from reference.exports import READERS, Facts, Row, expected, flat, mds_samples
from support.commands import ROOT, packcorpus
from support.packed_rows import folder_of, pack_small, shards_of
from support.profiles import examples
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.cli.app import export as export_command
from packcorpus.tasks.core.errors import DataError, PackError, UsageError
from packcorpus.tasks.exports import export as export_module
from packcorpus.tasks.exports import mds
from packcorpus.tasks.exports.export import EXPORTS, Export, export_corpus
from packcorpus.tasks.exports.model import OutputFolder
from packcorpus.tasks.storage.facts import RowShape
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import rows_of

NAMES = [format.name for format in EXPORTS]
IGNORED = -100
CORPORA: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2},
    "split": {"overlong": "split", "sequence_length": 32},
    "turns": {"overlong": "turns", "sequence_length": 48},
    # EOS ends every turn and is also the padding. A BOS begins each conversation.
    "eos pads": {
        "tokenizer": str(kind_path("hf_metaspace")),
        "template": "mistral",
        "sequence_length": 96,
        "overlong": "truncate",
        "unknown_markers": "text",
    },
    "lists": {"padding": "none", "overlong": "split", "sequence_length": 32},
    "gaps": {"align": 16, "overlong": "split", "sequence_length": 96, "epochs": 2},
    "gaps in lists": {"align": 16, "padding": "none", "overlong": "split", "sequence_length": 96, "epochs": 2},
    "balanced": {"balance": {"ranks": 2}},
    "no bos": {"tokenizer": str(kind_path("hf_unigram")), "template": "zephyr", "sequence_length": 256},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack CORPORA and return their manifests."""
    return {name: pack_small(tmp_path_factory.mktemp("corpus"), **given) for name, given in CORPORA.items()}


def export(manifest: Path, to: str, output: Path) -> Export:
    return export_corpus(manifest, to, output, Path())


Exported = Callable[[str, str], Export]


@pytest.fixture(scope="module")
def exported(corpora: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export one of CORPORA to a format, once for all tests that only read it."""

    @cache
    def make(name: str, to: str) -> Export:
        return export(corpora[name], to, tmp_path_factory.mktemp("exports") / f"{name} {to}")

    return make


def read(found: Export, manifest: Path, split: str = "train") -> list[Row]:
    content = load_manifest(manifest)
    facts = Facts(content.sequence_length, content.tokenizer.pad_token_id, found.record["settings"])
    return READERS[found.record["format"]](found.folder, split, facts)


# -- contents of every format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("name", CORPORA)
def test_an_export_holds_every_conversation(name: str, to: str, corpora: dict[str, Path], exported: Exported) -> None:
    manifest, found = corpora[name], exported(name, to)
    splits = load_manifest(manifest).splits
    assert list(found.record["splits"]) == [split for split, facts in splits.items() if facts.rows]
    assert len(splits) == 2 + ("epochs" in CORPORA[name])
    keeps = next(format for format in EXPORTS if format.name == to).rows_kept
    for split, figures in found.record["splits"].items():
        rows, wanted = read(found, manifest, split), expected(folder_of(manifest), split)
        if keeps:
            assert rows == wanted
        assert list(flat(rows)) == list(flat(wanted))
        counts = {
            "rows": len(wanted),
            "pieces": sum(map(len, wanted)),
            "tokens": sum(len(ids) for ids, _ in flat(wanted)),
            "trained": sum(target != IGNORED for _, targets in flat(wanted) for target in targets),
        }
        assert figures == counts
    listed = {file["path"]: (file["bytes"], file["sha256"]) for file in found.record["files"]}
    present = {p.relative_to(found.folder).as_posix(): p for p in found.folder.rglob("*") if p.is_file()}
    record = present.pop("export.json")
    assert listed == {path: (file.stat().st_size, sha256_of(file)) for path, file in present.items()}
    assert json.loads(record.read_bytes()) == found.record


@pytest.mark.parametrize("to", NAMES)
@pytest.mark.parametrize("names", [("split", "lists"), ("gaps", "gaps in lists")])
def test_rows_without_padding_are_exported_as_those_with_it(
    names: tuple[str, str], to: str, exported: Exported
) -> None:
    padded, lists = (
        {p.relative_to(found.folder): p for p in found.folder.rglob("*") if p.is_file()}
        for found in (exported(name, to) for name in names)
    )
    assert padded.keys() == lists.keys()
    differ = {path.name for path in padded if padded[path].read_bytes() != lists[path].read_bytes()}
    assert differ <= {"export.json", "state.json", "dataset_info.json", "paths.json"}


def test_the_corpora_have_what_is_hard(corpora: dict[str, Path]) -> None:
    """The corpora contain hard cases, so that the test above proves something."""
    pads, splits = load_manifest(corpora["eos pads"]), load_manifest(corpora["split"])
    assert pads.tokenizer.pad_token_id == pads.tokenizer.eos_token_id
    rows = expected(folder_of(corpora["eos pads"]), "train")
    assert any(pads.tokenizer.eos_token_id in ids[:-1] for ids, _ in flat(rows)), "EOS ends turns"
    assert pads.ledger.conversations.truncated
    assert splits.ledger.conversations.split
    assert any(targets[-1] == IGNORED for _, targets in flat(expected(folder_of(corpora["split"]), "train")))
    for manifest in corpora.values():
        assert any(len(row) > 1 for row in expected(folder_of(manifest), "train"))
        assert len(load_manifest(manifest).splits["train"].shards) > 1


def test_the_segments_of_megatron_have_one_token_more_than_they_count(
    corpora: dict[str, Path], exported: Exported
) -> None:
    manifest = corpora["eos pads"]
    eos = load_manifest(manifest).tokenizer.eos_token_id
    found = exported("eos pads", "megatron")
    sizes, last = [], []
    for path in sorted((found.folder / "train").glob("*.parquet")):
        for row in parquet.read_table(path).to_pylist():
            bounds = [*row["seq_start_id"], len(row["input_ids"])]
            sizes.append([end - start for start, end in pairwise(bounds)])
            last += [(row["input_ids"][end - 1], row["loss_mask"][end - 2]) for end in bounds[1:]]
    rows = expected(folder_of(manifest), "train")
    assert sizes == [[len(ids) for ids, _ in row] for row in rows], (
        "the last token of each, which no input is, is stored"
    )
    assert {token for token, _ in last} == {eos}
    assert any(trained for _, trained in last), "the last EOS is trained on"
    [facts] = json.loads((found.folder / "train" / "metadata.json").read_bytes())
    counted = [sum(size - 1 for size in row) for row in sizes]
    assert facts["dataset_max_seqlen"] == max(max(row) for row in sizes) - 1
    assert facts["max_samples_per_bin"] == max(map(len, sizes))
    assert facts["min_packed_seqlen"] == min(counted)
    assert facts["packing_efficiency"] == round(100 * sum(counted) / (len(counted) * facts["pack_size"]), 2)


def test_small_files_of_mds(corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = corpora["split"]
    monkeypatch.setattr(mds, "SHARD_BYTES", 7 * 12 * 32)
    found = export(manifest, "mds", tmp_path / "export")
    rows = [shard["samples"] for shard in json.loads((found.folder / "train" / "index.json").read_bytes())["shards"]]
    assert max(rows) == 7
    assert len(rows) > len(load_manifest(manifest).splits["train"].shards)
    assert read(found, manifest) == expected(folder_of(manifest), "train")


@st.composite
def lengths_of_rows(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """Draw the length of rows, and the length and gap of each piece in each row."""
    align = draw(st.sampled_from([1, 1, 4]))
    length = draw(st.integers(1 if align > 1 else 2, 24 // align)) * align
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        row: list[tuple[int, int]] = []
        while not row or (length - sum(map(sum, row)) >= 2 and draw(st.booleans())):
            size = draw(st.integers(2, length - sum(map(sum, row))))
            row.append((size, -size % align))
        rows.append(row)
    return length, rows


@settings(max_examples=examples(150), deadline=None)
@given(lengths_of_rows(), st.randoms(use_true_random=False))
def test_rows_have_the_bounds_and_the_next_labels_of_their_pieces(
    drawn: tuple[int, list[list[tuple[int, int]]]], source: Any
) -> None:
    length, rows = drawn
    columns: dict[str, list[list[int]]] = {
        name: [] for name in ("input_ids", "attention_mask", "labels", "position_ids")
    }
    following = []
    for row in rows:
        ids = [source.randint(0, 9) for _ in range(length)]
        row[-1] = row[-1][0], row[-1][1] + length - sum(map(sum, row))
        labels: list[int] = []
        for size, gap in row:
            labels += [IGNORED, *(ids[len(labels) + at] if source.random() < 0.6 else IGNORED for at in range(1, size))]
            labels += [IGNORED] * gap
        columns["input_ids"].append(ids)
        columns["labels"].append(labels)
        columns["attention_mask"].append([on for size, gap in row for on in [1] * size + [0] * gap])
        columns["position_ids"].append([at for sizes in row for size in sizes for at in range(size)])
        following.append([*labels[1:], IGNORED])
    kinds = {"attention_mask": pa.int8()}
    batch = pa.RecordBatch.from_pydict(
        {name: pa.array(values, pa.list_(kinds.get(name, pa.int32()), length)) for name, values in columns.items()}
    )
    found = rows_of(batch, length, RowShape())
    assert found.lengths.tolist() == [size for row in rows for size, _ in row]
    assert found.gaps.tolist() == [gap for row in rows for _, gap in row]
    assert found.pieces.tolist() == [len(row) for row in rows]
    assert found.tokens.tolist() == [sum(size for size, _ in row) for row in rows]
    assert found.filled.tolist() == [[on == 1 for on in row] for row in columns["attention_mask"]]
    assert found.starts.tolist() == [
        number * length + sum(map(sum, row[:at])) for number, row in enumerate(rows) for at in range(len(row))
    ]
    assert found.next_labels().tolist() == following
    assert found.trained == sum(label != IGNORED for row in columns["labels"] for label in row)


# -- limits of formats -------------------------------------------------------------------------------------------------


def test_what_a_format_cannot_hold_is_noted(exported: Exported) -> None:
    notes = {
        (name, to): [note["name"] for note in exported(name, to).record["notes"]] for name in CORPORA for to in NAMES
    }
    own = {"trl": ["isolation"], "megatron": ["alignment", "labels"], "axolotl": ["rows"], "llama-factory": [],
           "xtuner": ["paths", "last_step"], "mds": ["labels"], "automodel": ["alignment"]}  # fmt: skip
    for (name, to), found in notes.items():
        wanted = own[to] if to in own else ["isolation"] * (name == "no bos" or "align" in CORPORA[name])
        lost = ["align"] * ("align" in CORPORA[name] and to in ("trl", "megatron", "axolotl"))
        order = ["balance"] * (name == "balanced" and to != "xtuner")
        assert found == [*wanted, *lost, *order, *["epochs"] * ("epochs" in CORPORA[name])], (name, to)


def test_the_order_of_balanced_rows_is_kept_or_its_loss_is_noted(exported: Exported) -> None:
    """The order of balanced rows is kept, or its loss is noted.

    The settings of trainers that keep the order are set only for such rows.
    """
    found = {}
    for name in ("balanced", "split"):
        records = {to: exported(name, to).record for to in NAMES}
        found[name] = {
            "trl": records["trl"]["settings"]["SFTConfig"].get("train_sampling_strategy"),
            "llama-factory": records["llama-factory"]["settings"].get("disable_shuffling"),
            "mds": records["mds"]["settings"]["StreamingDataset"]["shuffle"],
        }
        texts = {
            to: [note["text"] for note in record["notes"] if note["name"] == "balance"]
            for to, record in records.items()
        }
        if name == "balanced":
            assert texts.pop("xtuner") == []
            assert texts.pop("axolotl") == [
                "the order for 2 ranks is lost, because axolotl packs the conversations again"
            ]
            assert all("rows are ordered for 2 ranks, or a divisor of 2" in text for [text] in texts.values())
    assert found["balanced"] == {"trl": "sequential", "llama-factory": True, "mds": False}
    assert found["split"] == {"trl": None, "llama-factory": None, "mds": True}


def test_olmo_core_finds_bounds_by_eos_only_where_that_is_exact(corpora: dict[str, Path], exported: Exported) -> None:
    found = {name: exported(name, "olmo-core").record for name in CORPORA}
    settings = {name: record["settings"] for name, record in found.items()}
    assert {name: own["NumpyFSLDatasetConfig"]["generate_doc_lengths"] for name, own in settings.items()} == {
        "epochs": True, "split": True, "eos pads": True, "lists": True, "gaps": False,
        "gaps in lists": False, "balanced": True, "no bos": False, "turns": True,
    }  # fmt: skip
    assert {name: own["TokenizerConfig"]["bos_token_id"] for name, own in settings.items()} == {
        "epochs": None, "split": None, "eos pads": 1, "lists": None, "gaps": None,
        "gaps in lists": None, "balanced": None, "no bos": None, "turns": None,
    }  # fmt: skip
    [note] = found["no bos"]["notes"]
    pieces = list(flat(expected(folder_of(corpora["no bos"]), "train")))
    pieces += flat(expected(folder_of(corpora["no bos"]), "validation"))
    within = sum(ids[:-1].count(2) for ids, _ in pieces)
    assert f"({within:,} of them would be wrong)" in note["text"]


def test_a_corpus_without_rows_cannot_be_exported(tmp_path: Path) -> None:
    manifest = pack_small(tmp_path, packing=False)
    with pytest.raises(DataError, match=r"holds conversations as text .*packing: true") as caught:
        export(manifest, "trl", tmp_path / "export")
    assert caught.value.code == "E541"


@pytest.mark.parametrize("to", NAMES)
def test_weights_are_held_or_refused(to: str, weighted: Path, tmp_path: Path) -> None:
    if not next(format for format in EXPORTS if format.name == to).weighted:
        with pytest.raises(DataError, match=rf"{to} cannot hold; .* loss_weight: none, or export it to mds") as caught:
            export(weighted, to, tmp_path / "export")
        assert caught.value.code == "E541"
        return
    found = export(weighted, to, tmp_path / "export")
    assert read(found, weighted) == expected(folder_of(weighted), "train")
    [columns] = {tuple(sample) for sample in mds_samples(found.folder / "train", 64)}
    assert columns == ("input_ids", "labels", "loss_weight", "position_ids")
    weights = [sample["loss_weight"].tolist() for sample in mds_samples(found.folder / "train", 64)]
    tables = [pa.ipc.open_stream(shard).read_all() for shard in shards_of(weighted)]
    assert weights == [row for table in tables for row in table["loss_weight"].to_pylist()]
    assert {note["name"] for note in found.record["notes"]} == {"labels", "loss_weight"}


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("weighted"), loss_weight="conversation")


# -- files -------------------------------------------------------------------------------------------------------------


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", NAMES)
def test_threads_and_folder_do_not_change_the_bytes(
    to: str, corpora: dict[str, Path], exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content(exported("epochs", to).folder)
    monkeypatch.setattr(export_module, "THREADS", 1)
    second = content(export(corpora["epochs"], to, tmp_path / "second").folder)
    own = {"xtuner": ["export.json", *(name for name in first if name.endswith("paths.json"))]}.get(to, [])
    assert first.keys() == second.keys()
    assert [name for name in sorted(first) if first[name] != second[name]] == sorted(own)


def test_a_complete_export_is_found_done(corpora: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "export"
    assert not export(corpora["split"], "trl", output).found_done
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    again = export(corpora["split"], "trl", output)
    assert again.found_done
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    with pytest.raises(UsageError, match="has another export") as caught:
        export(corpora["epochs"], "trl", output)
    assert caught.value.code == "E542"
    with pytest.raises(UsageError, match="has another export"):
        export(corpora["split"], "megatron", output)
    (output / "train" / "state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"state\.json: is missing, or changed"):
        export(corpora["split"], "trl", output)
    with pytest.raises(UsageError, match="expected the name of a new folder"):
        export(corpora["split"], "trl", Path())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(UsageError, match="is not an export"):
        export(corpora["split"], "trl", tmp_path / "other")


@pytest.mark.parametrize("to", NAMES)
def test_an_interrupted_export_leaves_nothing(
    to: str, corpora: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted export leaves nothing, wherever it is interrupted.

    The next export with the same name is complete.
    """
    files = len(export(corpora["split"], to, tmp_path / "whole").record["files"])
    opened = OutputFolder.file
    for stop in sorted({1, 2, files - 1, files}):
        count = iter(range(files))

        def interrupted(self: OutputFolder, name: str, stop: int = stop, count: Iterator[int] = count) -> Any:
            if next(count) == stop - 1:
                raise KeyboardInterrupt
            return opened(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(OutputFolder, "file", interrupted)
            with pytest.raises(KeyboardInterrupt):
                export(corpora["split"], to, tmp_path / "export")
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    killed = tmp_path / ".export.partial" / "train"
    killed.mkdir(parents=True)
    (killed / "data-00009-of-00010.arrow").write_bytes(b"cut")
    found = export(corpora["split"], to, tmp_path / "export")
    assert read(found, corpora["split"])
    assert len(content(found.folder)) == files + 1


def test_a_damaged_shard_is_not_exported(tmp_path: Path) -> None:
    manifest = pack_small(tmp_path)
    shard = shards_of(manifest)[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PackError, match="does not have the recorded SHA-256"):
        export(manifest, "trl", tmp_path / "out" / "export")
    assert list((tmp_path / "out").iterdir()) == []


# -- the command and the documentation ---------------------------------------------------------------------------------


def test_the_command(corpora: dict[str, Path], tmp_path: Path) -> None:
    manifest = corpora["split"]
    done = packcorpus(tmp_path, "export", manifest, "--to", "trl")
    folder = tmp_path / "data" / "exports" / f"{manifest.stem}-trl"
    assert done.returncode == 0, done.stderr
    name = folder.relative_to(tmp_path)
    assert f"{name}: written: " in done.stdout
    assert f"  train_dataset = datasets.load_from_disk('{name}')['train']\n" in done.stdout
    assert "note: isolation: " in done.stdout
    again = packcorpus(tmp_path, "export", manifest, "--to", "trl", "--json")
    value = json.loads(again.stdout)
    assert value["found_done"]
    assert value["record"] == json.loads((folder / "export.json").read_bytes())
    wrong = packcorpus(tmp_path, "export", manifest, "--to", "tlr")
    assert wrong.returncode == 64
    assert "--to tlr: expected trl" in wrong.stderr
    assert "did you mean trl?" in wrong.stderr
    missing = packcorpus(tmp_path, "export", manifest)
    assert f"--to is missing: expected {', '.join(NAMES)}\n" in missing.stderr
    options = " ".join(packcorpus(tmp_path, "export", "--help").stdout.split())
    assert f"The format: {', '.join(NAMES[:-1])}, or {NAMES[-1]}." in options


def test_the_guide_has_every_format() -> None:
    guide = (ROOT / "docs" / "guides" / "export.md").read_text(encoding="utf-8")
    for format in EXPORTS:
        assert f"| [`{format.name}`](#" in guide


def test_the_help_lists_every_format() -> None:
    """The help lists every format without importing any."""
    *names, last = NAMES
    [option] = get_type_hints(export_command, include_extras=True)["to"].__metadata__
    assert option.help == f"The format: {', '.join(names)}, or {last}."
