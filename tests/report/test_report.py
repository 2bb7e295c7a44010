"""The report shows the numbers of the manifest and escapes data.

It makes no requests and is reproducible.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import BIN, ROOT, SHARED, command, needs_shared
from support.damage.kinds import flip
from support.inspected import page_of
from support.packed_rows import folder_of, shards_of
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import DataError, PackError, StorageError
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.report import plots, report, rows
from packcorpus.tasks.report.figures import Histogram, read_figures
from packcorpus.tasks.report.report import MOST_BYTES, count_groups, pad_groups, write_report
from packcorpus.tasks.report.rows import Sample, choose, samples
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.schemas import IGNORED

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}[red]\x1b[31m⟦⟧$\\frac{1}{2}$"
SOURCE = "a<b>&$x$ 日.jsonl"
SHOWN = NASTY.replace("\x1b", "\\x1b").replace("⟦⟧", "\\u27e6\\u27e7")


def nasty_records(count: int) -> list[dict[str, Any]]:
    """Return short records and three special ones.

    One contains markup, one is longer than a row, and one is rejected.
    """
    nasty = [{"role": "user", "content": NASTY}, {"role": "assistant", "content": f"{NASTY} مرحبا 日本語 👩‍💻"}]
    long = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "the train leaves " * 200}]
    refused = [{"role": NASTY, "content": "x"}]
    return [*conversations(count, longest=5), *({"messages": messages} for messages in (nasty, long, refused))]


KINDS: dict[str, dict[str, Any]] = {
    "truncate": {"overlong": "truncate", "validation": 0.2},
    "drop": {"overlong": "drop"},
    "split": {"overlong": "split", "train_on": "all"},
    "turns": {"overlong": "turns", "sequence_length": 256},
    "whole": {"packing": False},
    "mixed": {
        "sources": [{"path": SOURCE, "weight": 1.5}],
        "epochs": 2,
        "validation": 0.2,
        "duplicates": "exact",
        "max_turns": 3,
        "overlong": "drop",
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack a corpus of each kind from a source with markup.

    The name of the source, its messages, and a rejected role contain markup.
    """
    found = {}
    for kind, values in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        records = nasty_records(10)
        records += records[:10] if kind == "mixed" else []
        lines = b"".join(orjson.dumps(record) + b"\n" for record in records)
        (folder / SOURCE).write_bytes(lines)
        settings = {"sources": [{"path": SOURCE}], "max_rejects": 1.0, "sequence_length": 512} | values
        found[kind] = pack_corpus(make_recipe(folder, [], **settings))
    return found


def read_columns(shard: Path) -> dict[str, np.ndarray]:
    """Return the columns of a shard of format 3.0 as [R, L]."""
    table = pa.ipc.open_stream(shard.read_bytes()).read_all()
    return {
        name: table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)
        for name in table.column_names
    }


class Page(HTMLParser):
    """Parse the elements with attributes, all text, and each conversation of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.conversations: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append((tag, dict(attrs)))
        if self._in_conversation() and tag == "div":
            self.conversations.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, "elements are nested as they should be"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "style":
            return
        self.text.append(data)
        if self._in_conversation():
            self.conversations[-1] += data

    def _in_conversation(self) -> bool:
        return any(attributes.get("class") == "content" for _, attributes in self._open)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


class Outline(HTMLParser):
    """Convert a page to the text that a screen reader reads.

    Each heading, paragraph, list item, and table row is a line. Plots are left out.
    """

    def __init__(self, html: str):
        super().__init__()
        self._parts: list[str] = []
        self._silent = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in ("style", "svg")
        if tag in ("td", "th"):
            self._parts.append(" | ")
        elif tag not in ("a", "b", "code", "mark", "span", "dd"):
            self._parts.append(f"\n{tag}: ")
        elif tag == "dd":
            self._parts.append(" = ")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._parts.append(data)

    def text(self) -> str:
        """Return the lines that contain text, with digests replaced."""
        lines = [" ".join(line.split()) for line in "".join(self._parts).split("\n")]
        text = "\n".join(line for line in lines if line and not line.endswith(":"))
        return re.sub(r"\b[0-9a-f]{12,64}\b", "HEX", text)


class OnDemand(dict[str, Any]):
    """Values that are made when a test asks for them, once."""

    def __init__(self, make: Callable[[str], Any]):
        super().__init__()
        self._make = make

    def __missing__(self, kind: str) -> Any:
        self[kind] = self._make(kind)
        return self[kind]


@pytest.fixture(scope="module")
def written(made: dict[str, Path]) -> dict[str, Path]:
    return OnDemand(lambda kind: write_report(made[kind], None)[0])


@pytest.fixture(scope="module")
def pages(written: dict[str, Path]) -> dict[str, Page]:
    return OnDemand(lambda kind: Page(written[kind].read_text()))


# -- figures of any corpus -------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(0, 5000), max_size=300).map(lambda values: np.array(values, np.int64))


@given(LENGTHS)
def test_groups_hold_every_row_once(values: np.ndarray) -> None:
    for groups in (pad_groups(Histogram(values)), count_groups(Histogram(values))):
        assert sum(count for _, count in groups) == len(values)
        bounds = [tuple(map(int, (name.split("–") * 2)[:2])) for name, _ in groups]
        for (first, last), (_, count) in zip(bounds, groups, strict=True):
            assert ((values >= first) & (values <= last)).sum() == count
    assert len(count_groups(Histogram(values))) <= 30


@given(st.text("0123456789abcdef", min_size=64, max_size=64), st.integers(0, 10**9), st.integers(0, 30))
def test_rows_are_chosen_by_the_key(key: str, rows: int, count: int) -> None:
    chosen = choose(key, rows, count)
    assert chosen == sorted(set(chosen)) == choose(key, rows, count)
    assert len(chosen) == min(rows, count)
    assert all(0 <= row < rows for row in chosen)


@given(st.lists(st.integers(0, 3000), max_size=50), st.integers(0, 20_000))
def test_texts_are_cut_to_one_size_that_fits(sizes: list[int], budget: int) -> None:
    most = rows._share(sizes, budget)
    assert sum(min(size, most) for size in sizes) <= budget
    if sum(sizes) > budget:
        assert sum(min(size, most + 1) for size in sizes) > budget
    else:
        assert most >= max(sizes, default=0)


def all_samples(path: Path, budget: int = 1 << 20) -> list[Sample]:
    """Return a sample of every row in a corpus."""
    manifest, folder = load_manifest(path), folder_of(path)
    figures = read_figures(manifest, folder, range(manifest.packing_metadata.rows))
    return list(samples(manifest, folder, figures.drawn, budget))


@pytest.mark.parametrize("kind", KINDS)
def test_figures_match_the_rows(made: dict[str, Path], kind: str) -> None:
    manifest, folder = load_manifest(made[kind]), folder_of(made[kind])
    ledger, rows = manifest.ledger, manifest.packing_metadata.rows
    figures = read_figures(manifest, folder, range(rows))
    filled = [sum(piece.length for piece in figures.drawn[row]) for row in range(rows)]
    pieces = [piece for found in figures.drawn.values() for piece in found]
    assert sum(filled) == ledger.tokens.packed
    assert len(pieces) == ledger.pieces.packed
    assert sum(piece.trained for piece in pieces) == ledger.tokens.trained
    accepted = ledger.conversations.read - sum(ledger.conversations.rejected.values())
    assert len(figures.lengths) == accepted
    if manifest.packing_metadata.enabled:
        masks = [
            read_columns(shard)["attention_mask"] for split in manifest.splits for shard in shards_of(made[kind], split)
        ]
        assert filled == np.concatenate(masks).sum(axis=1).tolist()
        first = sum(split.rows for name, split in manifest.splits.items() if "epoch" not in name)
        padding = Histogram([manifest.sequence_length - tokens for tokens in filled[:first]])
        assert figures.padding.values.tolist() == padding.values.tolist()
        assert figures.padding.counts.tolist() == padding.counts.tolist()
        assert len(figures.conversations) == first


@pytest.mark.parametrize("kind", ["truncate", "drop", "split", "mixed"])
def test_every_token_of_a_sampled_row_is_shown_with_its_label(made: dict[str, Path], kind: str) -> None:
    manifest, folder = load_manifest(made[kind]), folder_of(made[kind])
    encoder = open_tokenizer(manifest, folder)
    found = all_samples(made[kind])
    assert len(found) == manifest.packing_metadata.rows
    for sample in found:
        columns = read_columns(folder / sample.shard)
        at = [shard.path for shard in manifest.splits[sample.split].shards].index(sample.shard)
        before = sum(shard.rows for shard in manifest.splits[sample.split].shards[:at])
        row = {name: values[sample.row - before] for name, values in columns.items()}
        shown = [(run.trained, run.text) for talk in sample.conversations for _, runs in talk.groups for run in runs]
        trained = row["labels"] != IGNORED
        assert sample.trained == trained.sum()
        # Decoded token by token, as the encoder reads them: a run is either trained or not.
        assert "".join(text for is_trained, text in shown if is_trained) == _decoded(encoder, row, trained)
        assert not sample.left_out
        assert not any(run.left_out for talk in sample.conversations for _, runs in talk.groups for run in runs)


def _decoded(encoder: Any, row: dict[str, np.ndarray], chosen: np.ndarray) -> str:
    """Decode the trained text run by run."""
    from packcorpus.tasks.core.printable import printable_lines
    from packcorpus.tasks.inspection.rows import runs_of

    filled = int(row["attention_mask"].sum())
    starts = np.flatnonzero(row["position_ids"][:filled] == 0).tolist()
    found = []
    for first, last in zip(starts, [*starts[1:], filled], strict=True):
        for run in runs_of(encoder, row["input_ids"][first:last], row["labels"][first:last]):
            if run.trained:
                found.append(printable_lines(encoder.decode(run.ids)))
    assert sum(len(run) for run in found) or not chosen.any()
    return "".join(found)


def test_trained_turns_of_an_unpacked_row_are_marked(made: dict[str, Path]) -> None:
    for sample in all_samples(made["whole"]):
        (talk,) = sample.conversations
        runs = [run for _, runs in talk.groups for run in runs]
        roles = [place for place, run in enumerate(runs) if run.control]
        assert [run.trained for run in runs] == [
            place - 2 in roles and runs[place - 2].text == "assistant" for place in range(len(runs))
        ]


@pytest.mark.parametrize("train_on", ["assistant", "all", "last"])
def test_an_unpacked_row_has_no_dropped_reasoning(train_on: str, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "<think>mine</think>"},
        {"role": "assistant", "content": "<think>hm</think>\n"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "\n<think>well</think>\nFour.", "tool_calls": [call]},
    ]
    recipe = make_recipe(tmp_path, [{"messages": messages}], packing=False, reasoning="drop", train_on=train_on)
    [sample] = all_samples(pack_corpus(recipe))
    runs = [run for talk in sample.conversations for _, found in talk.groups for run in found if not run.control]
    shown = {run.text.split('"id"')[0]: run.trained for run in runs if run.text.strip()}
    assert shown == {
        "<think>mine</think>": train_on == "all",
        "And?": train_on == "all",
        "Four.\n[{": True,
    }
    assert not any(run.trained for run in runs if not run.text)


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_no_scripts_and_no_requests(pages: dict[str, Page], kind: str) -> None:
    page = pages[kind]
    assert not page.all("script", "link", "iframe", "img", "object", "embed", "base", "form", "input", "image")
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")], tag
        reached = [value or "" for name, value in attributes.items() if "href" in name]
        reached += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in attributes.values()))
        assert all(value.startswith("#") for value in reached), (tag, reached)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    style = (ROOT / "tasks" / "report" / "report.css").read_bytes()
    digest = b64encode(hashlib.sha256(style).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert b"url(" not in style
    assert b"@import" not in style


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_accessible(pages: dict[str, Page], kind: str) -> None:
    page = pages[kind]
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert max(Counter(names).values()) == 1
    for _, attributes in page.elements:
        for name in ("href", "aria-labelledby"):
            if name in attributes:
                assert (attributes[name] or "").removeprefix("#") in names
    assert page.all("html")[0]["lang"] == "en"
    assert (len(page.all("main")), len(page.all("h1"))) == (1, 1)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert len(page.all("figcaption")) == len(page.all("figure"))
    for svg in page.all("svg"):
        assert svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.get("aria-label"))


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_shown_as_text(pages: dict[str, Page], kind: str) -> None:
    page = pages[kind]
    text = "".join(page.text)
    assert "\x1b" not in text
    assert SOURCE in text
    assert f'role "{NASTY[:50]}' in text, "what was rejected"
    assert any(SHOWN in text for text in page.conversations), "the text of a row"


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_numbers_of_the_manifest(pages: dict[str, Page], made: dict[str, Path], kind: str) -> None:
    text, manifest = "".join(pages[kind].text), load_manifest(made[kind])
    ledger = manifest.ledger
    figures = [ledger.conversations.read, ledger.conversations.packed, ledger.tokens.encoded, ledger.tokens.trained]
    figures += [ledger.tokens.packed, *(source.tokens for source in manifest.sources)]
    digests = [manifest.key, manifest.digest, manifest.tokenizer.sha256, manifest.template.sha256]
    digests += [source.sha256 for source in manifest.sources]
    digests += [shard.sha256 for split in manifest.splits.values() for shard in split.shards]
    for expected in (*(f"{figure:,}" for figure in figures), *digests, "1 × bad_role", "E207", f"{manifest.seed}"):
        assert expected in text, expected


@pytest.mark.parametrize("kind", KINDS)
def test_steps_balance(made: dict[str, Path], kind: str) -> None:
    manifest = load_manifest(made[kind])
    for steps in (report._conversation_steps(manifest), report._token_steps(manifest)):
        for above, step in pairwise(steps):
            assert above.left - sum(count for _, count in step.gone) == step.left
    ledger = manifest.ledger.conversations
    assert steps[-1].left == manifest.ledger.tokens.trained
    assert (report._conversation_steps(manifest)[0].left, report._conversation_steps(manifest)[-1].left) == (
        ledger.read,
        ledger.packed,
    )


@pytest.mark.parametrize("kind", ["mixed", "whole"])
def test_text_of_the_page(written: dict[str, Path], kind: str, snapshot: Any) -> None:
    """The text of the page equals its snapshot.

    If the wording was changed, run `pytest tests/report --snapshot-update` and read the diff.
    """
    assert Outline(written[kind].read_text()).text() == snapshot


SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "several lengths": (
        {"sequence_length": [64, 128], "loss_weight": "conversation", "epochs": 2, "neighbors": "distinct"},
        [
            "rows of 64 and 128 tokens (the training split is packed 2 times, once per epoch)",
            "dt: above the lower bound = ",
            "longer than the longest row (dashed line)",
            "tokens; rows of these lengths need room for at least ",
            "The rows of each length are in separate splits, such as train-64. A step has rows of one length.",
            "evenly spread over an epoch (mix: tokens).",
            "Rows of train and validation by padding. In all splits, ",
            "if there are enough other conversations of their length (neighbors: distinct)",
            "Optimizer steps per epoch, by rows of 128 tokens per step",
            "h3: Loss weights",
            "a weight in the loss: the same total for every conversation.",
        ],
    ),
    "shape": (
        {"align": 8, "padding": "none"},
        [
            "rows of up to 128 tokens",
            "p: Conversations start at multiples of 8 (align: 8).",
            "at a multiple of 8, so their lengths differ (padding: none)",
            "Rows by unused tokens, that is, the difference from 128. Rows have ",
            " padding tokens, which align conversations, and end after",
            "tr: | padding that aligns conversations | ",
        ],
    ),
    "aligned": (
        {"align": 8},
        ["(align: 8)", " tokens are padding; ", " of them align conversations.", "tr: | other padding | "],
    ),
    "balance": (
        {"balance": {"ranks": 2}, "neighbors": "similar", "epochs": 2},
        [
            "the ranks of a step have about the same work: for 2 ranks with 1 row each (balance)",
            "p: If conversations of equal length can trade places, each is in a row with others about its topic "
            "(neighbors: similar).",
            "the rows are ordered for 2 ranks, or any divisor of it.",
        ],
    ),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_page_explains_the_shape_of_rows(kind: str, tmp_path: Path) -> None:
    settings, sentences = SHAPES[kind]
    path = pack_corpus(make_recipe(tmp_path, conversations(30), **{"validation": 0.2} | settings))
    manifest, text = load_manifest(path), Outline(page_of(path, tmp_path / "report.html")).text()
    for sentence in sentences:
        assert sentence in text, sentence
    words = ("(mix", "(align", "(padding", "(balance", "(neighbors", "Loss weights", "other padding")
    expected = {word for word in words if any(word in sentence for sentence in sentences)}
    assert {word for word in words if word in text} == expected
    # The contents of all rows add up.
    contents = text.partition("caption: Contents of all rows")[2].partition("h3: ")[0].splitlines()[2:]
    assert sum(int(line.split(" | ")[2].replace(",", "")) for line in contents) == (
        manifest.ledger.tokens.packed + manifest.ledger.tokens.padding
    )
    assert sum(float(line.split(" | ")[3].removesuffix(" %")) for line in contents) == pytest.approx(100, abs=0.21)
    for split, sums in (manifest.loss_weight or {}).items():
        assert f"tr: | {split} | {sums.conversations:,} | {sums.trained:,} | {sums.trained:,}.00 | 1.000 | " in text


def test_the_config_on_the_page_gives_the_same_key(pages: dict[str, Page], made: dict[str, Path]) -> None:
    from packcorpus.tasks.recipe import resolve

    for kind, path in made.items():
        folder = path.parent.parent
        (written,) = [text for text in pages[kind].text if text.startswith("name: small\n")]
        (folder / "again.yaml").write_text(written)
        assert resolve(folder / "again.yaml", folder).corpus_key == load_manifest(path).key


def test_equal_corpora_give_equal_bytes_on_any_machine(
    made: dict[str, Path], written: dict[str, Path], tmp_path: Path
) -> None:
    here = written["truncate"].read_bytes()
    shutil.copytree(made["truncate"].parent.parent, tmp_path / "moved")
    os.utime(next((tmp_path / "moved" / "manifests").iterdir()), (0, 0))
    manifest = tmp_path / "moved" / "manifests" / made["truncate"].name
    set_here = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "SOURCE_DATE_EPOCH": "1", "LC_ALL": "C"}
    done = command(tmp_path, str(BIN / "packcorpus"), "report", str(manifest), "--json", **set_here)
    assert done.returncode == 0, done.stderr
    printed = orjson.loads(done.stdout)
    there = Path(printed["report"])
    assert there == folder_of(manifest).with_suffix(".html")
    assert there.read_bytes() == here
    assert printed["bytes"] == len(here) < MOST_BYTES


def test_a_page_stays_small(tmp_path: Path) -> None:
    """A page stays small, regardless of its data.

    There are long rows, a text that grows as HTML, and many sources with long names.
    """
    folder = tmp_path / "large"
    records = [
        {
            "messages": [
                {"role": "user", "content": '<&"日>' * 500},
                {"role": "assistant", "content": "&" * 3000 + str(i)},
            ]
        }
        for i in range(60)
    ]
    names = [f"{number:04d}{'é' * 110}.jsonl" for number in range(60)]
    folder.mkdir()
    for name, record in zip(names, records, strict=True):
        (folder / name).write_text(orjson.dumps(record).decode() + "\n", encoding="utf-8")
    recipe = make_recipe(folder, [], sequence_length=8192, sources=[{"path": "0*.jsonl"}])
    path = pack_corpus(recipe)
    assert load_manifest(path).packing_metadata.rows >= 20
    written, size = write_report(path, None)
    assert written.stat().st_size == size <= MOST_BYTES
    page = Page(written.read_text())
    assert any("character" in text for text in page.conversations), "omissions are marked"


def test_a_page_that_is_too_large_shows_less_text(
    made: dict[str, Path], written: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    whole = written["truncate"].stat().st_size
    drawn: list[dict[str, Any]] = []
    draw = report._plots

    def draw_once(*arguments: Any) -> dict[str, Any]:
        """Return the same plots for each page: only the text differs."""
        if not drawn:
            drawn.append(draw(*arguments))
        return drawn[0]

    monkeypatch.setattr(report, "_plots", draw_once)
    monkeypatch.setattr(report, "MOST_BYTES", whole - 1)
    monkeypatch.setattr(report, "BUDGETS", (15_000, 300))
    assert write_report(made["truncate"], tmp_path / "less.html")[1] < whole
    monkeypatch.setattr(report, "BUDGETS", (15_000,))
    bare = write_report(made["truncate"], tmp_path / "bare.html")[0].read_text()
    assert "too large for this page" in bare
    monkeypatch.setattr(report, "MOST_BYTES", 1000)
    assert write_report(made["truncate"], tmp_path / "figures.html")[0].read_text() == bare


@needs_shared
def test_real_corpora_have_a_report(tmp_path: Path) -> None:
    sources = [{"path": str(path)} for path in sorted((SHARED / "corpora").glob("*demo.json"))]
    path = pack_corpus(make_recipe(tmp_path, [], sources=sources, max_rejects=1.0, sequence_length=512))
    page = Page(write_report(path, None)[0].read_text())
    assert len(page.all("article")) == 20


# -- errors ----------------------------------------------------------------------------------------------------------


def test_the_report_is_not_written_into_the_corpus_folder(made: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="may only contain files of the corpus"):
        write_report(made["truncate"], folder_of(made["truncate"]) / "report.html")


def test_missing_folders_are_not_created(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"folder .*/gone does not exist; create it, or choose another path"):
        write_report(made["truncate"], tmp_path / "gone" / "x.html")
    assert not (tmp_path / "gone").exists()


def test_no_report_of_a_damaged_corpus_is_written(made: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(made["drop"].parent.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "manifests" / made["drop"].name
    flip(folder_of(path) / "index.arrow")
    with pytest.raises(DataError, match=r"index\.arrow: .*; run: packcorpus repair "):
        write_report(path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("kind", ["truncate", "whole"])
def test_a_flipped_bit_gives_rows_or_a_packcorpus_error(made: dict[str, Path], kind: str, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(made[kind].parent.parent, root)
    manifest = load_manifest(root / "manifests" / made[kind].name)
    folder = root / manifest.corpus
    for file in sorted(folder.glob("*.arrow")):
        whole = file.read_bytes()
        for place in range(0, 8 * len(whole), 8 * len(whole) // 40):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            with suppress(PackError):
                list(samples(manifest, folder, read_figures(manifest, folder, range(20)).drawn, 1000))
        file.write_bytes(whole)


def test_labels_below_bars_do_not_touch(browser: Any) -> None:
    pads = report.pad_groups(Histogram([0, 1, 5, 300, 4095]))
    many = report.count_groups(Histogram([4, 115]))
    few = [("1", 7), ("2", 9)]
    for groups in (pads[:10], pads, many, report.count_groups(Histogram([1, 30])), few, []):
        page = browser.new_page(viewport={"width": 1100, "height": 500})
        page.set_content(f"<figure style='width: 29rem'>{plots.bars(groups, 'pads')}</figure>")
        assert page.evaluate(TOUCHING) == []
        page.close()
    assert plots.labelled([name for name, _ in few]) == 1
    assert plots.labelled([name for name, _ in pads]) == 3


# -- plots -----------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(5), deadline=None)
@example([("$x^2$ <b>&amp; $\\frac{1}{2}$", 7)])
@given(st.lists(st.tuples(st.text(min_size=1).map(report._text), st.integers(0, 10**12)), max_size=5))
def test_any_name_in_a_plot(rows: list[tuple[str, int]]) -> None:
    svg = plots.sources([(name, tokens, tokens // 2) for name, tokens in rows])
    known = {"svg", "g", "path", "text", "tspan", "defs", "use", "rect", "pattern"}
    page = Page(svg)
    assert {tag for tag, _ in page.elements} <= known
    assert all(f"{plots._shortened(name)} · {tokens:,}" in page.text for name, tokens in rows)


@pytest.mark.parametrize(
    ("values", "length"), [([], 8), ([1], 1 << 20), ([7, 7], 8), ([1, 10**7], 1024), ([*range(1, 3000)], 1024)]
)
def test_a_histogram_of_any_lengths(values: list[int], length: int) -> None:
    svg = plots.lengths(Histogram(values), length, packed=True)
    assert f"row: {length:,}" in svg
    assert "style=" not in svg
    assert "#" not in re.sub(r'(href="|url\()#', "", svg), "a color that the page cannot change"


# -- contrast --------------------------------------------------------------------------------------------------------


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast_meets_wcag_aa(scheme: int) -> None:
    style = (ROOT / "tasks" / "report" / "report.css").read_text()
    colors = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{(.*?)\}", style, re.S)[scheme]))
    for text in ("ink", "soft", "link", "warn"):
        for ground in ("page", "panel"):
            assert _contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert _contrast(colors["ink"], colors["mark"]) >= 4.5
    for shape in ("one", "two", "h0", "h1", "h2", "h3"):
        wanted = 3 if shape.startswith("h") else 1.5  # bars have figures next to them
        assert _contrast(colors[shape], colors["page"]) >= wanted, shape


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


# Labels of a plot that are on the same line and less than 2 pixels apart.
TOUCHING = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([name, box], n) => boxes.slice(n + 1).filter(([, other]) =>
    Math.abs(box.top - other.top) < 1 && Math.abs(box.height - other.height) < 1
    && box.left < other.right + 2 && other.left < box.right + 2).map(([other]) => name + ' | ' + other));
})"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncate", "whole"])
def test_a_browser_makes_no_requests_and_logs_no_errors(browser: Any, written: dict[str, Path], kind: str) -> None:
    address = written[kind].resolve().as_uri()
    for scheme, width in (("light", 1100), ("dark", 1100), ("light", 360)):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = context.new_page()
        asked: list[str] = []
        logged: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("console", lambda message, logged=logged: logged.append(message.text))
        page.on("pageerror", lambda error, logged=logged: logged.append(str(error)))
        page.on("dialog", lambda dialog, logged=logged: logged.append(dialog.message))
        page.goto(address)
        assert asked == [address]
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing overflows to the side"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 23, 27)"}[scheme], (
            "the style sheet is applied"
        )
        bar = page.evaluate("getComputedStyle(document.querySelector('figure .fill-one')).fill")
        assert bar == {"light": "rgb(125, 167, 217)", "dark": "rgb(70, 115, 168)"}[scheme]
        touching = page.evaluate(TOUCHING)
        assert not touching, touching
        captions = "[...document.querySelectorAll('caption')].map(one => one.getBoundingClientRect().right)"
        assert max(page.evaluate(captions)) <= width, "a table scrolls below its caption"
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert not logged
        context.close()
