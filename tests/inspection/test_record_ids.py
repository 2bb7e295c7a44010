"""A conversation is found by its record's own id, and by numbers as printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.commands import packcorpus
from support.inspected import as_object, rendered, shown
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.cli.corpus_view import show_list
from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.core.printable import digits_of
from packcorpus.tasks.inspection.lookup import places_at
from packcorpus.tasks.inspection.manifests import Listed, list_manifests
from packcorpus.tasks.inspection.search import find_conversations
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.manifest import load_manifest


def chat(own_id: object, *texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"id": own_id, "messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


RECORDS = [
    chat("case-1", "a", "b"),
    chat("case:7", "c", "d"),
    chat(31, "e", "f"),
    chat("twice", "g", "h"),
    chat("twice", "i", "j"),
    chat("long", "apple 1", "apple 2", "apple 3", "apple 4"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    (folder / "other.jsonl").write_text(json.dumps(chat("other", "k", "l")) + "\n")
    return pack_corpus(make_recipe(folder, RECORDS, turns="apart", sources=["chat.jsonl", "other.jsonl"]))


@pytest.mark.parametrize(
    ("text", "source", "record"),
    [
        ("case-1", 0, 1),
        ("chat.jsonl:case-1", 0, 1),
        ("case:7", 0, 2),
        ("31", 0, 3),
        ("other", 1, 1),
        ("other.jsonl:other", 1, 1),
        ("chat.jsonl:2", 0, 2),
        ("#0", 0, 1),
        ("long turn 3", 0, 6),
    ],
)
def test_an_id_names_a_conversation(corpus: Path, text: str, source: int, record: int) -> None:
    manifest = load_manifest(corpus)
    places = places_at(manifest, checked_folder(manifest, corpus), text)
    assert {(place["source"], place["record"]) for place in places} == {(source, record)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("twice", "several records have this id: chat.jsonl:4, chat.jsonl:5; name one of them"),
        ("case-2", "no record of its sources has this id"),
        ("other.jsonl:case-1", "no record of other.jsonl has this id"),
        ("chats.jsonl:1", "is not a source of this corpus; did you mean chat.jsonl"),
    ],
)
def test_an_id_without_one_conversation_is_an_error(corpus: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_object(corpus, at=text)


def test_a_source_that_changed_or_is_gone_has_no_ids(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS))
    source = tmp_path / "chat.jsonl"
    source.write_text(source.read_text() + "\n")
    with pytest.raises(DataError, match=r"chat.jsonl: has changed since it was packed"):
        as_object(path, at="case-1")
    source.unlink()
    with pytest.raises(InputMissing, match=r"chat.jsonl"):
        as_object(path, at="case-1")


@pytest.mark.parametrize(
    ("text", "digits"),
    [("22,298", "22298"), ("#22,298", "22298"), ("7", "7"), ("1,00", "1,00"), ("1,2345", "1,2345"), ("x", "x")],
)
def test_a_number_can_be_pasted_as_it_is_printed(text: str, digits: str) -> None:
    assert digits_of(text) == digits


def test_options_take_printed_numbers(corpus: Path) -> None:
    for option, value in (
        ("--conversation", "#0"),
        ("--at", "chat.jsonl:0,001"),
        ("--row", "#0"),
        ("--limit", "1,000"),
    ):
        done = packcorpus(corpus.parent, "inspect", str(corpus), option, value)
        assert done.returncode == 0, (option, done.stderr)
    done = packcorpus(corpus.parent, "inspect", str(corpus), "--row", "1,0")
    assert "'1,0' is not a valid integer" in done.stderr


def test_a_search_counts_conversations_not_their_samples(corpus: Path) -> None:
    found = find_conversations(corpus, "apple 1", 20)
    assert len(found.conversations) == 2
    assert found.count == 1
    assert "1 conversation, 2 samples" in shown(corpus, search="apple 1")
    assert not find_conversations(corpus, "apple 1", 1).more


def test_a_listing_shows_how_corpora_of_one_name_differ(tmp_path: Path) -> None:
    for seed in (1, 2):
        path = pack_corpus(make_recipe(tmp_path, RECORDS, seed=seed))
    listing = list_manifests(tmp_path)
    found = {one.path: one.differs for one in listing.manifests if isinstance(one, Listed)}
    assert sorted(found.values(), key=str) == [{"seed": 1}, {"seed": 2}]
    page = rendered(listing, show_list)
    assert "seed: 1" in page
    assert "seed: 2" in page
    shutil.rmtree(checked_folder(load_manifest(path), path))
    assert rendered(list_manifests(tmp_path), show_list).count("folder missing") == 1
