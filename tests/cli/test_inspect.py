"""`packcorpus inspect` finds rows, conversations, texts, rejects, and raw records.

tests/cli/test_rows.py tests figures and rows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cli.hostile_corpus import HOSTILE, REJECTED, SHOWN, pack, packcorpus, records, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from support.inspected import as_object, shown
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.cli.console import print_hanging, styled
from packcorpus.tasks.cli.questions import Question, answer, render
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.printable import BOUNDARY
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.inspection import lookup, search
from packcorpus.tasks.inspection.sources import kind_of
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.facts import FileFacts, Split
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.schemas import INDEX_SCHEMA

SETTINGS = {"whole": "overlong: truncate\n", "split": "overlong: split\n", "unpacked": "packing: false\n"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: pack(tmp_path_factory.mktemp(name), settings) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def manifest(corpora: dict[str, Path]) -> Path:
    return corpora["whole"]


def first_message(record: dict[str, Any]) -> str:
    return str(record["messages"][0]["content"])


# From a conversation to its row and back


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_every_line_leads_to_its_row_and_every_row_back(corpora: dict[str, Path], kind: str) -> None:
    path = corpora[kind]
    seen = set()
    for line, record in enumerate(records(), 1):
        if line == REJECTED + 1:
            continue
        found = as_object(path, at=f"chats[bold].jsonl:{line}")
        number = found["conversation"]
        assert as_object(path, conversation=number) == found
        text = "".join(piece["text"] for piece in found["pieces"])
        assert first_message(record) in text
        for piece in found["pieces"]:
            row = as_object(path, row=piece["row_of_split"], split=piece["split"])
            [back] = [place for place in row["conversations"] if place["start"] == piece["start"]]
            assert (back["number"], back["origin"]) == (piece["number"], f"chats[bold].jsonl:{line}")
            seen.add((piece["split"], piece["row_of_split"], piece["start"]))
    everything = {
        (split, row, place["start"])
        for split, row in rows(path)
        for place in as_object(path, row=row, split=split)["conversations"]
    }
    assert seen == everything


def test_all_pieces_of_a_split_conversation_are_shown_from_any_of_them(corpora: dict[str, Path]) -> None:
    pieces = as_object(corpora["split"], at="chats[bold].jsonl:6")["pieces"]
    assert len(pieces) > 1
    pages = {shown(corpora["split"], conversation=piece["number"]) for piece in pieces}
    assert len(pages) == 1
    [page] = pages
    assert [int(n) for n in re.findall(r"piece (\d+) of", page)] == list(range(1, len(pieces) + 1))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"at": "chats.jsonl:1"}, r"did you mean chats\[bold\]\.jsonl"),
        ({"at": "chats[bold].jsonl"}, "expected FILE:LINE"),
        ({"at": "chats[bold].jsonl:8"}, "was rejected with E207: messages"),
        ({"at": "chats[bold].jsonl:99"}, "is not in this corpus"),
        ({"conversation": 39}, "has the numbers 0 to 38"),
        ({"conversation": -1}, "has the numbers 0 to 38"),
        ({"conversation": 1, "row": 1}, "exclude each other"),
        ({"line": 1}, "is a manifest; it takes"),
        ({"search": ""}, "the text is empty"),
        ({"search": "x", "ids": True}, "--ids requires"),
        ({"rejects": True, "split": "train"}, "--split requires"),
    ],
)
def test_a_question_without_an_answer_is_an_error(manifest: Path, question: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shown(manifest, **question)


@pytest.mark.parametrize(
    ("paths", "text", "found"),
    [
        (["a/x.jsonl", "b/x.jsonl"], "a/x.jsonl:3", (0, 3)),
        (["a/x.jsonl", "b/x.jsonl"], "x.jsonl:3", None),
        (["ab/x.jsonl", "b/x.jsonl"], "b/x.jsonl:3", (1, 3)),
        (["a/x.jsonl", "x.jsonl"], "x.jsonl:3", (1, 3)),
        (["a:1/x.jsonl"], "a:1/x.jsonl:3", (0, 3)),
        (["x.jsonl"], f"x.jsonl:{10**30}", (0, (1 << 63) - 1)),
    ],
)
def test_a_place_is_the_end_of_one_source(
    manifest: Path, paths: list[str], text: str, found: tuple[int, int] | None
) -> None:
    facts = load_manifest(manifest)
    facts = facts.model_copy(update={"sources": [facts.sources[0].model_copy(update={"path": p}) for p in paths]})
    if found:
        assert lookup.parse_place(facts, text) == found
    else:
        with pytest.raises(UsageError, match="matches 2 sources"):
            lookup.parse_place(facts, text)


def test_a_single_row_is_one_row(tmp_path: Path) -> None:
    page = shown(pack_corpus(make_recipe(tmp_path, conversations(1))))
    assert "1 row × 128" in page
    assert "1 rows" not in page


# Searches


@pytest.fixture(scope="module")
def opened(manifest: Path) -> tuple[Manifest, Path, Encoder, list[str]]:
    """Open the corpus, with the text of each conversation as a model sees it."""
    facts = load_manifest(manifest)
    folder = corpus_folder(facts, manifest)
    texts = [as_object(manifest, conversation=number)["pieces"][0]["text"] for number in range(39)]
    return facts, folder, open_tokenizer(facts, folder), texts


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_a_text_is_found_in_the_conversations_that_contain_it(
    opened: tuple[Manifest, Path, Encoder, list[str]], data: st.DataObject
) -> None:
    facts, folder, encoder, texts = opened
    text = data.draw(st.sampled_from(texts))
    start = data.draw(st.integers(0, len(text) - 1))
    needle = text[start : start + data.draw(st.integers(1, 40))]
    if "\ufffd" in needle:
        return
    found = set()
    for hit in search.search(facts, folder, needle, encoder):
        places = lookup.pieces_in_row(facts, folder, hit.split, hit.shard, hit.row)
        [number] = [place["number"] for place in places if place["start"] == hit.start]
        assert number not in found, "each once"
        found.add(number)
    assert found == {number for number, text in enumerate(texts) if needle in text}


def test_nothing_is_found_across_two_conversations_or_in_the_padding(
    opened: tuple[Manifest, Path, Encoder, list[str]],
) -> None:
    facts, folder, encoder, texts = opened
    pad = encoder.decode([encoder.pad_id])
    end = texts[0][-20:]
    for needle in (end + texts[1][:5], pad * 3, "not in any conversation"):
        assert not any(needle in text for text in texts)
        assert not list(search.search(facts, folder, needle, encoder))


@pytest.mark.parametrize("kind", SETTINGS)
def test_hits_are_listed_with_their_places(corpora: dict[str, Path], kind: str) -> None:
    page = shown(corpora[kind], search="What is 1", limit=3)
    assert page.count("━━ chats[bold].jsonl:") == 3
    assert "the first 3; use --limit for more" in page
    found = as_object(corpora[kind], search="12 plus 12")["conversations"]
    assert [place["origin"] for place in found] == ["chats[bold].jsonl:13"]
    assert "no conversation contains 'pineapple'" in shown(corpora[kind], search="pineapple")


def test_matches_are_shown_as_text(manifest: Path) -> None:
    for width in (40, 200):
        page = shown(manifest, width, search=HOSTILE[:5])
        assert "\x1b" not in page
        assert "\\x1b[31m" in page


# Rejects


def test_rejects_are_counted_and_listed(manifest: Path) -> None:
    page = shown(manifest, rejects=True)
    assert re.search(r"^ +1  E207 bad_role  The role", page)
    assert f"chats[bold].jsonl:{REJECTED + 1}" in page
    assert "assistent" in page
    [reject] = as_object(manifest, rejects=True)["rejects"]
    assert (reject["line"], reject["reason"]) == (REJECTED + 1, "bad_role")


# Shards, sources and configs


def test_a_shard_is_shown_with_its_own_rows(manifest: Path) -> None:
    facts = load_manifest(manifest)
    folder = corpus_folder(facts, manifest)
    tokens = 0
    for split in facts.splits.values():
        for shard in split.shards:
            found = as_object(folder / shard.path)
            tokens += found["tokens"]
            assert found["rows"] == shard.rows
            assert f"{found['fill']:.2f} % full" in shown(folder / shard.path)
    assert tokens == facts.ledger.tokens.packed
    shard = facts.splits["validation"].shards[0]
    assert shown(folder / shard.path, row=0) == shown(manifest, row=0, split="validation")
    with pytest.raises(UsageError, match="rows, from 0"):
        shown(folder / shard.path, row=shard.rows)


def test_a_source_is_shown_by_line_and_by_text(manifest: Path) -> None:
    source = manifest.parent.parent / "chats[bold].jsonl"
    assert kind_of(source) == "source"
    assert "messages, jsonl" in shown(source)
    for line, record in enumerate(records(), 1):
        if line != REJECTED + 1:
            [found] = as_object(source, line=line)["records"]
            assert found["messages"][0]["content"] == first_message(record)
    page = shown(source, 300, line=4)
    assert SHOWN in page
    assert "\x1b" not in page
    assert "日本語 é 👩‍👩‍👧 [red]x[/red]" in page
    assert "E207 bad_role" in shown(source, line=REJECTED + 1)
    assert [found["record"] for found in as_object(source, search="日本語")["records"]] == [4]
    assert shown(source, search="日本語", limit=1).endswith("\n1 conversation\n"), "there is no other"
    assert shown(source, search="a", limit=1).endswith("\nthe first 1; use --limit for more\n")
    for line in (0, 41, 10_000):
        with pytest.raises(UsageError):
            shown(source, line=line)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.booleans(), st.data())
def test_lines_are_counted_as_the_corpus_counts_them(
    tmp_path_factory: pytest.TempPathFactory, filled: list[bool], ended: bool, data: st.DataObject
) -> None:
    """Lines are numbered like in the corpus.

    Blank lines count, and a block may end anywhere.
    """
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    lines = [json.dumps({"text": f"n{n}"}) if full or not n else "" for n, full in enumerate(filled)]
    path.write_text("\n".join(lines) + "\n" * ended)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr("packcorpus.tasks.readers.json_files.SEEK_BLOCK", data.draw(st.integers(1, 40)))
        for number, line in enumerate(lines, 1):
            if line:
                assert as_object(path, line=number)["records"][0]["messages"][0]["content"] == f"n{number - 1}"
            else:
                with pytest.raises(UsageError):
                    as_object(path, line=number)


def test_reasoning_and_turns_that_are_not_trained_on_are_shown(tmp_path: Path) -> None:
    answers = [
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "assistant", "content": "5", "train": False},
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "2+2?"}, *answers]}) + "\n")
    page = shown(source, line=1)
    titles = re.findall("▐(.*)▌", page)
    assert titles == ["user", "assistant", "reasoning", "content", "assistant not trained on"]
    assert re.search("▐reasoning▌\n +Two and two", page)
    assert "1 conversation\n" in shown(source, search="and two")


def test_columns_of_a_source_are_guessed_by_their_names(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    turns = [{"speaker": "user", "text": "2+2?"}, {"speaker": "agent", "text": "4"}]
    source.write_text(json.dumps({"dialog": turns[:1]}) + "\n" + json.dumps({"dialog": turns}) + "\n")
    page = shown(source, 300)
    assert "messages, jsonl, columns {messages: dialog, role: speaker, content: text}, " in page
    assert "2+2?" in page
    assert 'dialog[1].speaker "agent" is not a role' in shown(source, 300, line=2)
    source.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="no known format"):
        shown(source)


def test_a_config_lists_its_sources_and_its_corpora(manifest: Path) -> None:
    config = manifest.parent.parent / "corpus.yaml"
    made = as_object(config)
    assert [source["name"] for source in made["sources"]] == ["chats[bold].jsonl"]
    assert made["made"] == [str(manifest)]
    other = config.with_name("other.yaml")
    other.write_text(config.read_text() + "seed: 7\n")
    assert as_object(other)["made"] == []
    with pytest.raises(UsageError, match="is a config; it takes none of these options"):
        shown(config, row=1)


def test_the_command_takes_the_options(manifest: Path) -> None:
    for words, text in (
        (["--at", "chats[bold].jsonl:4"], SHOWN),
        (["--search", "plus 12 is"], "chats[bold].jsonl:13"),
        (["--rejects"], "E207"),
    ):
        done = packcorpus("inspect", manifest, *words, COLUMNS="300")
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
        assert "\x1b" not in done.stdout
        assert json.loads(packcorpus("inspect", manifest, *words, "--json").stdout)["manifest"] == str(manifest)


# Token boundaries, and text in any script at any width


def test_boundaries_are_those_of_the_tokens(manifest: Path) -> None:
    """Boundaries separate tokens that are text.

    A character of several tokens is not cut.
    """
    plain, cut = (
        shown(manifest, 400, at="chats[bold].jsonl:4"),
        shown(manifest, 400, at="chats[bold].jsonl:4", ids=True),
    )
    body = [line for line in cut.splitlines() if line.startswith("  ") and not line.startswith("  ids ")]
    assert "\n".join(body).replace(BOUNDARY, "") in plain
    [ids] = [line for line in cut.splitlines() if line.startswith("  ids ")]
    assert 0 < "".join(body).count(BOUNDARY) < len(ids.split())
    assert "日" in cut
    assert "\ufffd" not in cut


SCRIPTS = "aé日本語한국어👩‍👩‍👧🇩🇪👍🏽नमस्तेשלוםمرحبا e\u0301o\u0308 x\n"


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.sampled_from(SCRIPTS), max_size=200), st.integers(24, 90))
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        print_hanging(console, styled(text, ""))
    lines = capture.get().split("\n")
    assert max(map(cell_len, lines)) <= width
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)


def test_an_exported_page_shows_markup_as_text(manifest: Path) -> None:
    console = Console(record=True, width=300, markup=False, emoji=False, highlight=False, quiet=False, file=None)
    with console.capture():
        render(answer(manifest, Question(at="chats[bold].jsonl:4"), manifest.parent.parent), console)
        console.print(Text("<script>alert(1)</script>"))
    page = console.export_svg(title="x")
    assert "<script" not in page
    assert "\x1b" not in page


def test_numbers_count_over_the_batches_of_an_index(manifest: Path, tmp_path: Path) -> None:
    """The number of a conversation is its position in the index.

    Twelve conversations of three sources are in batches of five.
    """
    rows = [
        {
            "source": n // 4,
            "record": n % 4 + 1,
            "split": "train",
            "shard": n % 2,
            "row": n // 2,
            "start": 0,
            "length": 9,
        }
        | {"first": 0, "trained": 1, "separator": True, "truncated": False, "closed": False}
        | {"turns": 2, "digest": n, "dropped": None}
        for n in range(12)
    ]
    file = tmp_path / "index.arrow"
    with pa.ipc.new_stream(str(file), INDEX_SCHEMA) as writer:
        for top in range(0, 12, 5):
            writer.write_batch(pa.RecordBatch.from_pylist(rows[top : top + 5], schema=INDEX_SCHEMA))
    facts = load_manifest(manifest)
    listed = FileFacts(path="index.arrow", bytes=file.stat().st_size, sha256=sha256_of(file))
    facts = facts.model_copy(update={"files": [listed], "sources": [facts.sources[0]] * 3})
    shard = facts.splits["train"].shards[0].model_copy(update={"rows": 6})
    facts.splits["train"] = Split(rows=12, shards=[shard, shard])
    for number, row in enumerate(rows):
        [by_number] = lookup.pieces_of_number(facts, tmp_path, number)
        [by_record] = lookup.pieces_of_record(facts, tmp_path, row["source"], row["record"])
        [by_row] = lookup.pieces_in_row(facts, tmp_path, "train", row["shard"], row["row"])
        assert by_number == by_record == by_row == row | {"number": number}
    assert lookup.pieces_in_row(facts, tmp_path, "validation", 0, 0) == []


def test_an_error_says_why_something_is_not_in_a_corpus(manifest: Path) -> None:
    total = len(records())
    for question, message in (
        ({"at": f"chats[bold].jsonl:{REJECTED + 1}"}, r"was rejected with E2\d\d: "),
        (
            {"at": "chats[bold].jsonl:99999"},
            rf"the source had {total:,} lines with a conversation, and the first has number 1$",
        ),
        ({"row": 99_999}, r"^--row 99999: train has [\d,]+ rows, 0 to"),
        ({"conversation": 99_999}, r"the index of this corpus has the numbers 0 to"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            as_object(manifest, **question)
        assert error.value.code == "E108"
