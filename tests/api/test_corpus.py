"""A Corpus gives what is in its shards, and batches in the order of the trainer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.packed_rows import folder_of, pack_small, shards_of
from support.small_corpus import conversations, make_recipe, pack_corpus

import packcorpus
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import read_rows
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.steps import permutation
from packcorpus.train.loop.feed import PackedFeed

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several lengths": {"sequence_length": [64, 128]},
    "balance": {"balance": {"ranks": 2}},
    "three packings": {"epochs": 3},
    "no padding": {"padding": "none"},
    "weights": {"loss_weight": "conversation"},
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def corpus(manifest: Path) -> packcorpus.Corpus:
    return packcorpus.open(manifest)


def test_a_corpus_opens_by_every_name(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, folder = manifest.parent.parent, folder_of(manifest)
    monkeypatch.chdir(root)
    made = packcorpus.open()
    for name in (manifest, str(manifest), "small", made.key[:8], folder, folder / "manifest.json", made):
        found = packcorpus.open(name)
        assert (found.key, found.folder.resolve(), found.name) == (made.key, folder.resolve(), "small")
    monkeypatch.chdir("/")
    assert packcorpus.open("small", root=root).path == manifest
    with pytest.raises(packcorpus.InputMissing, match="no such manifest") as failed:
        packcorpus.open("smoll", root=root)
    assert failed.value.__notes__[0].startswith(failed.value.code)


def test_figures_and_summary(corpus: packcorpus.Corpus) -> None:
    facts = load_manifest(corpus.path)
    assert corpus.splits == {name: split.rows for name, split in facts.splits.items()}
    assert (corpus.ledger, corpus.sequence_length) == (facts.ledger, 64)
    lines = repr(corpus).splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith(f"Corpus small {corpus.key[:12]}")
    assert f"{corpus.ledger.tokens.trained:,} trained on" in repr(corpus)
    assert f"{corpus.ledger.tokens.trained:,} trained on" in corpus._repr_html_()


def test_rows_are_those_of_the_shards(corpus: packcorpus.Corpus) -> None:
    rows = corpus.rows()
    known = [
        row
        for shard in corpus.manifest.splits["train"].shards
        for _, row in read_rows(corpus.manifest, corpus.folder, shard, range(shard.rows))
    ]
    assert len(rows) == len(known) > 20
    for row, other in zip(rows, known, strict=True):
        assert row.keys() == other.keys()
        assert all(np.array_equal(row[name], other[name]) for name in row)
    assert not rows[0]["input_ids"].flags.writeable
    assert np.array_equal(rows[-1]["labels"], known[-1]["labels"])
    assert [row["input_ids"].tolist() for row in rows[3:6]] == [row["input_ids"].tolist() for row in known[3:6]]
    assert np.array_equal(pickle.loads(pickle.dumps(rows))[5]["input_ids"], known[5]["input_ids"])  # noqa: S301
    with pytest.raises(IndexError, match="train has"):
        _ = rows[len(rows)]
    with pytest.raises(packcorpus.UsageError, match="its splits are train, validation"):
        corpus.rows("test")


def test_rows_of_a_corpus_without_packing(tmp_path: Path) -> None:
    corpus = packcorpus.open(pack_small(tmp_path, packing=False, overlong="truncate"))
    assert corpus.rows()[0]["messages"][0]["role"]
    assert corpus.conversation(0).messages
    assert len(corpus.conversation(0).tokens) == 0
    with pytest.raises(packcorpus.DataError, match="conversations, not packed rows"):
        corpus.batches(4)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    manifest = pack_small(tmp_path)
    shard = shards_of(manifest)[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    rows = packcorpus.open(manifest).rows()
    with pytest.raises(packcorpus.DataError, match=rf"{shard.name}: does not have the recorded SHA-256"):
        _ = rows[0]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("seed", [0, 42, 2**31 - 1, 2**32 + 7])
def test_the_order_without_torch_is_that_of_torch(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    assert permutation(count, seed).tolist() == expected
    monkeypatch.delitem(__import__("sys").modules, "torch")
    assert permutation(count, seed).tolist() == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_are_the_steps_of_the_trainer(shape: str, tmp_path: Path) -> None:
    corpus = packcorpus.open(pack_small(tmp_path, **SHAPES[shape]))
    feed = PackedFeed(open_corpus(corpus.path), TrainingConfig(seed=7, load="memory"))
    order, names = feed.order(4), ("input_ids", "labels", "position_ids", "loss_weight")

    def expected() -> Iterator[dict[str, torch.Tensor]]:
        for epoch in range(2):
            for step in order(epoch):
                yield feed.collator("sdpa")(step.rows.__getitems__(step.numbers.tolist()))

    batches = corpus.batches(4, epochs=2, seed=7)
    assert len(batches) == len(order(0)) * 2
    tensors = corpus.batches(4, epochs=2, seed=7, framework="torch")
    for batch, tensor, known in zip(batches, tensors, expected(), strict=True):
        assert batch.keys() == tensor.keys() == known.keys() & set(names)
        for name, values in batch.items():
            assert np.array_equal(values, known[name].numpy()), name
            assert torch.equal(tensor[name].to(known[name].dtype), known[name])
        assert tensor["labels"].dtype == torch.int64


def test_batches_of_validation_are_in_order(corpus: packcorpus.Corpus) -> None:
    ids = [row["input_ids"] for row in corpus.rows("validation")]
    batches = [*corpus.batches(4, split="validation", epochs=2)]
    assert np.array_equal(np.concatenate([batch["input_ids"] for batch in batches]), np.stack(ids * 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be an integer of at least 1, found 0"),
        ({"batch_size": 4, "epochs": 1.5}, "epochs: must be an integer of at least 1, found 1.5"),
        ({"batch_size": 4, "framework": "jax"}, "framework: must be numpy or torch, found 'jax'"),
        ({"batch_size": 4, "split": "test"}, "test: is not a split of small"),
    ],
)
def test_a_wrong_argument_is_named(corpus: packcorpus.Corpus, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(packcorpus.UsageError, match=message):
        corpus.batches(**arguments)


def test_a_dataset_needs_torch(corpus: packcorpus.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(corpus.dataset("validation")) == corpus.splits["validation"]
    monkeypatch.setattr("packcorpus.failures.find_spec", lambda name: None)
    for call in (corpus.dataset, lambda: corpus.batches(4, framework="torch")):
        with pytest.raises(
            packcorpus.PartMissing, match=r"torch is not installed; run: pip install 'packcorpus\[train"
        ):
            call()


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_conversation_has_its_messages_and_tokens(corpus: packcorpus.Corpus) -> None:
    source = corpus.manifest.sources[0].path
    found = corpus.conversation(f"{source}:3")
    assert found.place == f"{source}:3"
    assert found.messages[0]["role"] == "user"
    assert all(message["content"] in found.text for message in found.messages if len(found.samples[0].rows) == 1)
    [sample] = found.samples
    (split, row), *_ = sample.rows
    assert np.isin(found.tokens, corpus.rows(split)[row]["input_ids"]).all()
    assert set(found.labels[found.labels != -100]) <= set(found.tokens)
    assert found.weights is None
    assert corpus.conversation(found.number).place == found.place


def test_a_conversation_with_weights(tmp_path: Path) -> None:
    found = packcorpus.open(pack_small(tmp_path, loss_weight="conversation")).conversation(0)
    assert found.weights is not None
    assert ((found.weights > 0) == (found.labels != -100)).all()


def test_a_conversation_is_shown_in_color_and_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script> \x1b[31m [bold]x[/bold] \u202e ⟦ &amp; ◀"
    records = [
        {"messages": [{"role": "user", "content": hostile}, {"role": "assistant", "content": f"Yes. {hostile}"}]}
    ]
    given = make_recipe(tmp_path, records + conversations(20), sequence_length=512)
    found = packcorpus.open(pack_corpus(given)).conversation(0)
    html = found._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "&amp;amp;" in html
    assert "\x1b" not in html
    assert "\\x1b" in html
    assert "\u202e" not in html + repr(found)
    assert "\x1b" not in repr(found), "there is no terminal"
    assert "⟦Yes." in repr(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
        patch.setenv("TERM", "xterm")
        assert "\x1b[" in repr(found)
        assert "\x1b[31m [bold]" not in repr(found)


def test_a_source_that_has_changed_is_named(tmp_path: Path) -> None:
    corpus = packcorpus.open(pack_small(tmp_path))
    facts = corpus.manifest.sources[0]
    [path] = tmp_path.rglob(Path(facts.path).name)
    path.write_bytes(path.read_bytes().replace(b"e ", b"o "))
    with pytest.raises(packcorpus.DataError, match="is not the conversation that was packed"):
        _ = corpus.conversation(0).messages
    path.unlink()
    with pytest.raises(packcorpus.InputMissing, match="no such"):
        _ = corpus.conversation(0).messages
    assert len(corpus.conversation(0).tokens) > 0


def test_a_wrong_place_is_named(corpus: packcorpus.Corpus) -> None:
    for place, message in (
        ("nowhere.jsonl:3", "is not a source"),
        ("chats", "expected FILE:LINE"),
        (10**6, "numbers 0 to"),
    ):
        with pytest.raises(packcorpus.UsageError, match=message) as failed:
            corpus.conversation(place)
        assert "--" not in failed.value.message
