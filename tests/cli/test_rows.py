"""`packcorpus` prints a small corpus correctly.

The corpus is packed with the real command. The tests read the text like a person: marks surround trained text, and
control characters are text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from cli.hostile_corpus import (
    ANSWER,
    REJECTED,
    ROOT,
    SHOWN,
    pack,
    packcorpus,
    records,
    rows,
)
from support.inspected import rendered, shown

from packcorpus.tasks.cli import corpus_view
from packcorpus.tasks.core import printable
from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.inspection import lookup
from packcorpus.tasks.inspection import rows as rows_module
from packcorpus.tasks.inspection.manifests import Overview
from packcorpus.tasks.storage.facts import Shard, Split
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.schemas import row_schema


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("packed"), "overlong: truncate\n")


@pytest.fixture
def copy(manifest: Path, tmp_path: Path) -> Path:
    """Copy the corpus folder to another place, where tests damage it."""
    corpus = manifest.parent.parent / load_manifest(manifest).corpus
    return Path(shutil.copytree(corpus, tmp_path / "moved[bold]"))


def printed(
    path: Path, row: int, split: str = "train", ids: bool = False, terminal: bool = False, width: int = 80
) -> str:
    return shown(path, width, terminal, row=row, split=split, ids=ids)


def conversations(path: Path) -> dict[int, str]:
    """Return the text of each conversation by its source line.

    The pieces of a conversation are joined.
    """
    found: dict[int, str] = {}
    for split, row in rows(path):
        for block in printed(path, row, split).split("\n━━ ")[1:]:
            head, _, body = block.partition("\n")
            if line := re.search(r"jsonl:(\d+)  ", head):
                lines = body.rstrip("\n").split("\n")
                assert all(text.startswith("  ") for text in lines), "every line of a conversation is indented"
                found[int(line[1])] = found.get(int(line[1]), "") + "\n".join(text[2:] for text in lines)
    return found


def trained_runs(text: str) -> list[str]:
    return re.findall(f"{printable.TRAINED[0]}([^{printable.TRAINED[1]}]*){printable.TRAINED[1]}", text)


# A row


def test_every_conversation_is_shown_once_with_its_source_line(manifest: Path) -> None:
    expected = {line for line in range(1, 41) if line != REJECTED + 1}
    assert set(conversations(manifest)) == expected


def test_trained_runs_are_the_answers_with_their_stop_tokens(manifest: Path) -> None:
    stop = "".join(f"{printable.CONTROL[0]}{token}{printable.CONTROL[1]}" for token in ("<|im_end|>", "</s>"))
    texts = conversations(manifest)
    for line, record in enumerate(records(), 1):
        if line in (6, REJECTED + 1):  # truncated and rejected
            continue
        assert trained_runs(texts[line]) == [record["messages"][1]["content"] + stop]


def test_a_truncated_answer_has_no_trained_stop_token(manifest: Path) -> None:
    [run] = trained_runs(conversations(manifest)[6])
    assert ("one two three " * 200).startswith(run)
    pages = [printed(manifest, row, split) for split, row in rows(manifest)]
    assert [page.count("truncated") for page in pages if "jsonl:6 " in page] == [1]


def test_escape_sequences_and_markup_are_shown_as_text(manifest: Path) -> None:
    texts = conversations(manifest)
    assert SHOWN in texts[4]
    assert "⟦" not in texts[5].split("assistant")[0], "text of the user cannot look like trained text"
    assert texts[5].count("▐") == len(["<|im_start|>"] * 2 + ["<|im_end|>"] * 2 + ["</s>"])
    for split, row in rows(manifest):
        on_terminal = printed(manifest, row, split, terminal=True)
        left = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal)
        assert not [char for char in left if not (char.isprintable() or char in "\n" + printable.JOINERS)]
        assert "\x1b[31mred" not in on_terminal


@pytest.mark.parametrize(
    "char", ["\x00", "\x08", "\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\u200b", "\u2028", "\u2066", "\U000e0041"]
)
def test_printable_escapes_invisible_characters(char: str) -> None:
    assert printable.printable(f"a{char}b") == f"a{char.encode('unicode_escape').decode()}b"


@pytest.mark.parametrize("text", ["plain", "日本語", "نمی\u200cخواهم", "👩\u200d👧", "a\u00a0b", "\\x1b", "[bold]"])
def test_printable_keeps_visible_characters(text: str) -> None:
    assert printable.printable(text) == text


def test_symbols_distinguish_trained_from_untrained_without_color(manifest: Path) -> None:
    for variables in ({}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        done = packcorpus("inspect", manifest, "--row", "0", **variables)
        assert done.returncode == 0, done.stderr
        assert trained_runs(done.stdout)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", done.stdout), "no color was requested"
    assert "\x1b" not in packcorpus("inspect", manifest, "--row", "0").stdout


def test_colors_distinguish_them_too(manifest: Path) -> None:
    text = printed(manifest, 0, terminal=True)
    assert re.search(r"\x1b\[1;32m⟦", text)
    assert re.search(r"\x1b\[2m[^\x1b]*user", text)


def test_long_lines_are_wrapped_on_a_terminal(manifest: Path) -> None:
    for split, row in rows(manifest):
        lines = re.sub(r"\x1b\[[0-9;]*m", "", printed(manifest, row, split, terminal=True, width=60)).splitlines()
        body = [line for line in lines if line.startswith("  ")]
        assert body
        assert max(map(len, body)) <= 60


def test_ids_are_those_of_the_shard(manifest: Path) -> None:
    corpus = manifest.parent.parent / load_manifest(manifest).corpus
    shard = next(corpus.glob("train-*.arrow"))
    with pa.memory_map(str(shard)) as file:
        table = pa.ipc.open_stream(file).read_all()
    for row in (0, table.num_rows - 1):
        blocks = re.findall(r"^  ids (.*)$", printed(manifest, row, ids=True), re.M)
        found = [int(token) for block in blocks for token in re.findall(r"\d+", block)]
        filled = sum(table["attention_mask"][row].as_py())
        assert found == table["input_ids"][row].as_py()[:filled]
        trained = [int(token) for block in blocks for run in trained_runs(block) for token in run.split()]
        assert trained == [label for label in table["labels"][row].as_py() if label != -100]


def test_padding_is_counted(manifest: Path) -> None:
    pads = sum(
        int(count)
        for split, row in rows(manifest)
        for count in re.findall(r"^━━ (\d+) padding tokens?  ", printed(manifest, row, split), re.M)
    )
    assert pads == load_manifest(manifest).ledger.tokens.padding > 0


def test_rows_are_counted_over_all_shards_and_batches(manifest: Path, tmp_path: Path) -> None:
    """Rows are counted over all shards and batches.

    Five rows are in two shards of two batches each. All tokens of row n are n.
    """
    length = 8
    facts = load_manifest(manifest)
    schema = row_schema(RowLayout((length,)), length, facts.key)
    shards = []
    for name, batches in (("a", [[0], [1, 2]]), ("b", [[3], [4]])):
        file = tmp_path / name
        with pa.ipc.new_stream(str(file), schema) as writer:
            for numbers in batches:
                rows = [dict.fromkeys(schema.names, [number] * length) for number in numbers]
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
        count = sum(map(len, batches))
        shards.append(Shard(path=name, rows=count, bytes=file.stat().st_size, sha256=sha256_of(file)))
    facts = facts.model_copy(update={"splits": {"train": Split(rows=5, shards=shards)}, "sequence_length": length})
    for number in range(5):
        place, shard, at = lookup.find_row(facts, number, "train")
        assert shard is shards[place]
        row = rows_module.read_row(facts, tmp_path, shard, at)
        assert row["input_ids"].tolist() == [number] * length


@pytest.mark.parametrize("row", [-1, 10_000])
def test_a_row_out_of_range_names_the_range(manifest: Path, row: int) -> None:
    last = load_manifest(manifest).splits["train"].rows - 1
    with pytest.raises(UsageError, match=f"0 to {last}$"):
        printed(manifest, row)
    assert packcorpus("inspect", manifest, "--row", str(row)).returncode == 64


def test_pieces_of_a_split_conversation_are_numbered(tmp_path: Path) -> None:
    path = pack(tmp_path, "overlong: split\n")
    pages = [printed(path, row, split) for split, row in rows(path)]
    pieces = sorted(re.findall(r"jsonl:6  .* · piece (\d+) of (\d+), from its token", "\n".join(pages)))
    assert [int(number) for number, _ in pieces] == list(range(1, int(pieces[0][1]) + 1))
    assert len(pieces) > 1


def test_format_2_shows_messages(tmp_path: Path) -> None:
    path = pack(tmp_path, "packing: false\n")
    pages = [printed(path, row, split) for split, row in rows(path)]
    [hostile] = [page for page in pages if "jsonl:4 " in page]
    assert SHOWN in hostile
    assert f"▐assistant▌\n{re.sub('^', '  ', ANSWER, flags=re.M)}\n" in hostile
    assert packcorpus("inspect", path, "--row", "0", "--ids").returncode == 64
    assert "format 2.0" in packcorpus("inspect", path).stdout


# Damage


def test_another_tokenizer_is_refused(copy: Path) -> None:
    model = copy / "tokenizer" / "tokenizer.model"
    model.write_bytes(model.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"tokenizer\.model: does not have the recorded SHA-256"):
        printed(copy / "manifest.json", 0)


@pytest.mark.parametrize("change", [-100, 100])
def test_a_shard_of_another_size_is_refused(copy: Path, change: int) -> None:
    shard = next(copy.glob("train-*.arrow"))
    os.truncate(shard, shard.stat().st_size + change)
    with pytest.raises(DataError, match=f"{shard.name}: has "):
        printed(copy / "manifest.json", 0)


def test_a_shard_that_is_not_arrow_is_refused(copy: Path) -> None:
    shard = next(copy.glob("train-*.arrow"))
    shard.write_bytes(b"\x01" * shard.stat().st_size)
    with pytest.raises(DataError, match=shard.name):
        printed(copy / "manifest.json", 0)


def test_a_shard_that_is_gone_is_named(copy: Path) -> None:
    shard = next(copy.glob("train-*.arrow"))
    shard.unlink()
    with pytest.raises(InputMissing, match=shard.name):
        printed(copy / "manifest.json", 0)


def test_a_moved_corpus_can_be_inspected(copy: Path) -> None:
    assert trained_runs(printed(copy / "manifest.json", 0))
    done = packcorpus("inspect", copy, COLUMNS="300")
    assert f"manifest    {copy}/manifest.json\n" in done.stdout


# The summary


@pytest.mark.parametrize("width", [80, 120])
def test_summary_holds_the_figures_of_the_manifest(manifest: Path, width: int) -> None:
    done = packcorpus("inspect", manifest, COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    facts = load_manifest(manifest)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()], "piped lines end where their text ends"
    words = re.sub(r"\s+", " ", done.stdout)
    assert facts.key[:12] in words
    assert "chats[bold].jsonl" in words
    assert f"read {facts.ledger.conversations.read}" in words
    assert "bad_role 1" in words
    assert f"{facts.ledger.tokens.packed + facts.ledger.tokens.padding:,}" in words
    assert f"{facts.packing_metadata.packing_efficiency:.2f} %" in words
    assert "fewer than 100" in words
    assert "2 conversations with the name of a control token" in words


def test_a_marker_that_the_tokenizer_lacks_is_reported(manifest: Path) -> None:
    facts = load_manifest(manifest)
    template = facts.template.model_copy(update={"markers_as_text": ["<|im_start|>"]})
    overview = Overview(manifest, facts.model_copy(update={"template": template}), manifest.parent, [])
    page = rendered(overview, corpus_view.show_overview)
    assert "<|im_start|>: not tokens of this tokenizer, encoded as text" in page


# The command


def test_help_and_version() -> None:
    assert packcorpus("--help").returncode == 0
    for command in ("inspect", "verify"):
        assert command in packcorpus("--help").stdout
        assert packcorpus(command, "--help").returncode == 0
    assert re.fullmatch(r"packcorpus \d+\.\d+\.\d+\n", packcorpus("--version").stdout)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom packcorpus.tasks.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "loaded = {'numpy', 'pyarrow', 'pydantic', 'rich', 'sentencepiece', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["nonsense"], ["inspect", "--row", "x"], ["inspect", "--ids"], ["inspect", "a", "b"]]
)
def test_a_wrong_command_line_exits_64(arguments: list[str]) -> None:
    done = packcorpus(*arguments)
    assert done.returncode == 64
    assert "rror: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_manifest_exits_66(tmp_path: Path) -> None:
    for arguments in (["inspect", "nowhere.json"], ["inspect"], ["inspect", "."]):
        done = packcorpus(*arguments, cwd=tmp_path)
        assert done.returncode == 66, done.stderr
        assert done.stderr.startswith("E501 error: ")
        assert "Traceback" not in done.stderr
    debugged = packcorpus("--debug", "inspect", "nowhere.json", cwd=tmp_path)
    assert debugged.returncode != 0
    assert "Traceback" in debugged.stderr


def test_errors_escape_control_characters(tmp_path: Path) -> None:
    done = packcorpus("inspect", "\x1b[31mx.json", cwd=tmp_path)
    assert "\\x1b[31mx.json" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_manifest_of_the_latest_run_is_taken_and_named(manifest: Path) -> None:
    root = manifest.parent.parent
    newer = root / "manifests" / "zzz.json"
    newer.write_text("{}")
    try:
        done = packcorpus("inspect", cwd=root)
    finally:
        newer.unlink()
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"manifests/{manifest.name}: from the latest run\n"


def test_verify_lists_what_it_checked(manifest: Path, copy: Path) -> None:
    done = packcorpus("verify", manifest)
    assert done.returncode == 0, done.stderr
    checks = done.stdout.count("✓")
    assert checks > 0
    assert done.stdout.endswith(f"all {checks} checks passed\n")
    with next(copy.glob("train-*.arrow")).open("r+b") as shard:
        shard.seek(-2000, os.SEEK_END)
        byte = shard.read(1)[0]
        shard.seek(-1, os.SEEK_CUR)
        shard.write(bytes([byte ^ 1]))
    damaged = packcorpus("verify", copy)
    assert damaged.returncode == 65
    assert "train-00000-of-" in damaged.stderr
