"""A dataset on the Hub has a whole corpus, or no manifest.

Readers get the rows unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.commands import packcorpus, process
from support.packed_rows import folder_of, pack_small, shards_of
from support.servers.remote import SECRET, HubStandIn, hub_stand_in, needs_remote

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.core.messages import as_json, as_text
from packcorpus.tasks.core.printable import in_bytes
from packcorpus.tasks.corpus import push as push_module
from packcorpus.tasks.corpus.push import Push, push_corpus
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.verify import verify

needs_remote()

from packcorpus.tasks.stores import hub as hub_store  # noqa: E402

REPO = "someone/chats"
TOKEN = f"hf_{SECRET}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("other"), sequence_length=96)


def use(patch: pytest.MonkeyPatch, stand_in: HubStandIn) -> None:
    import huggingface_hub.constants

    patch.setenv("HF_ENDPOINT", stand_in.url)
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # the stand-in does not have Xet storage
    patch.setattr(push_module, "COMMIT_FILES", 2)
    stand_in.token = TOKEN
    hub_store._commit.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in:
        use(monkeypatch, stand_in)
        yield stand_in
    hub_store._commit.cache_clear()


def files_of(manifest: Path) -> dict[str, bytes]:
    """Return the files that a dataset must have for a corpus."""
    folder = folder_of(manifest)
    names = ["manifest.json", *(file.path for file in load_manifest(manifest).listed())]
    return {name: (folder / name).read_bytes() for name in names}


def held(hub: HubStandIn, revision: str = "main", folder: str = "") -> dict[str, bytes]:
    files = hub.commits[REPO][hub.revisions[REPO][revision]]
    return {
        path.removeprefix(folder): content
        for path, content in files.items()
        if path.startswith(folder) and path != ".gitattributes"
    }


def refusal(*arguments: Any, **options: Any) -> PackError:
    """Return the error of a push, which must not contain the secret.

    The token and the messages of the server contain the secret.
    """
    with pytest.raises(PackError) as caught:
        push_corpus(*arguments, **options)
    assert SECRET not in as_text(caught.value) + as_json(caught.value)
    return caught.value


# -- properties --------------------------------------------------------------------------------------------------------


def whole_or_unseen(hub: HubStandIn, *corpora: Path) -> None:
    """Each commit with a manifest or a dataset card has all files, unchanged."""
    wanted = [files_of(path) for path in corpora]
    for files in hub.commits.get(REPO, {}).values():
        if {"manifest.json", "README.md"} & files.keys():
            assert {path: content for path, content in files.items() if path != ".gitattributes"} in wanted


def test_a_push_is_complete_and_its_manifest_comes_last(hub: HubStandIn, corpus: Path) -> None:
    lines: list[str] = []
    done = push_corpus(corpus, REPO, report=lines.append)
    assert held(hub) == files_of(corpus)
    whole_or_unseen(hub, corpus)
    *data, (message, last) = hub.history
    assert last == ["README.md", "manifest.json"]
    manifest = load_manifest(corpus)
    assert message == f"Add {manifest.name} {manifest.key[:12]}"
    assert [summary for summary, _ in data] == [
        f"{message} (data {n} of {len(data)})" for n in (*range(1, len(data) + 1),)
    ]
    assert len(data) > 1, "several commits"
    size = sum(map(len, files_of(corpus).values()))
    assert done == Push(
        f"hf://datasets/{REPO}",
        REPO,
        "main",
        "",
        hub.revisions[REPO]["main"],
        len(held(hub)),
        len(held(hub)),
        size,
        False,
    )
    assert len(lines) == len(data)
    assert lines[-1].endswith(f"of {len(held(hub))} files")


def test_a_second_push_sends_nothing(hub: HubStandIn, corpus: Path) -> None:
    first = push_corpus(corpus, REPO)
    requests = len(hub.requests)
    second = push_corpus(corpus, REPO)
    assert (second.found_done, second.sent, second.commit) == (True, 0, first.commit)
    assert not [request for request in hub.requests[requests:] if request.startswith(("POST", "PUT"))]


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(after=st.integers(1, 40), replaces=st.booleans())
def test_an_interrupted_push_shows_no_manifest_and_continues(
    corpus: Path, other: Path, after: int, replaces: bool
) -> None:
    """An interrupted push shows no manifest and can be continued.

    Any request may fail. Files that were committed or uploaded before are not sent again.
    """
    with pytest.MonkeyPatch.context() as patch, hub_stand_in() as hub:
        use(patch, hub)
        import huggingface_hub.utils._http as http

        patch.setattr(http.time, "sleep", lambda seconds: None)
        if replaces:
            push_corpus(other, REPO)
        start, uploads = len(hub.requests), len(hub.sent)
        hub.fails = lambda request: len(hub.requests) - start > after
        failed = False
        try:
            push_corpus(corpus, REPO, replace=replaces)
        except PackError as error:
            failed = True
            assert error.reason == "store_failed"  # noqa: PT017
        whole_or_unseen(hub, corpus, other)
        hub.fails = None
        done = push_corpus(corpus, REPO, replace=replaces)
        assert held(hub) == files_of(corpus)
        whole_or_unseen(hub, corpus, other)
        assert failed or done.found_done
        assert len(hub.sent[uploads:]) == len(set(hub.sent[uploads:])), "each large file is sent once"


# -- another corpus in the same place ----------------------------------------------------------------------------------


def test_another_corpus_is_refused_unless_it_is_to_be_replaced(hub: HubStandIn, corpus: Path, other: Path) -> None:
    push_corpus(other, REPO)
    hub.commits[REPO][hub.revisions[REPO]["main"]]["notes.txt"] = b"kept"
    before = hub.revisions[REPO]["main"]
    for options in ({}, {"revision": "new"}):  # a new branch starts as a copy of main
        error = refusal(corpus, REPO, **options)
        assert (error.code, hub.revisions[REPO]) == ("E543", {"main": before})
        assert f"has the corpus small {load_manifest(other).key[:12]}" in str(error)
        assert "--replace" in str(error)
    push_corpus(corpus, REPO, replace=True)
    assert held(hub) == files_of(corpus) | {"notes.txt": b"kept"}
    assert hub.history[-1][1] == ["README.md", "manifest.json"]


def test_a_folder_of_the_dataset_has_a_corpus_of_its_own(hub: HubStandIn, corpus: Path, other: Path) -> None:
    push_corpus(corpus, REPO)
    done = push_corpus(other, f"{REPO}/long/rows")
    assert (done.folder, done.url) == ("long/rows", f"hf://datasets/{REPO}")
    assert held(hub, folder="long/rows/") == files_of(other)
    assert push_corpus(corpus, REPO).found_done
    assert push_corpus(other, f"hf://datasets/{REPO}@main/long/rows").found_done


@pytest.mark.parametrize("name", ["README.md", "manifest.json", "rejects.jsonl"])
def test_a_file_of_someone_else_is_not_overwritten(hub: HubStandIn, corpus: Path, name: str) -> None:
    hub.publish(REPO, {name: b"x" * max(1, len(files_of(corpus)[name]))})
    error = refusal(corpus, REPO)
    assert (error.code, hub.history) == ("E543", [])
    assert f"has another {name}" in str(error)
    push_corpus(corpus, REPO, replace=True)
    assert held(hub) == files_of(corpus)


def test_a_lost_file_is_sent_again(hub: HubStandIn, corpus: Path) -> None:
    push_corpus(corpus, REPO)
    files = {path: content for path, content in held(hub).items() if path != "index.arrow"}
    hub.publish(REPO, files)
    done = push_corpus(corpus, REPO)
    assert (done.sent, hub.history[-1][1]) == (1, ["index.arrow"])
    assert held(hub) == files_of(corpus)


# -- branches and visibility -------------------------------------------------------------------------------------------


def test_a_branch_is_made_and_messages_are_those_that_were_given(hub: HubStandIn, corpus: Path, other: Path) -> None:
    push_corpus(corpus, REPO, revision="v1", message="First")
    assert held(hub, "v1") == files_of(corpus)
    assert held(hub, "main") == {}
    assert hub.history[-1][0] == "First"
    assert push_corpus(corpus, f"hf://datasets/{REPO}@v1").found_done
    push_corpus(other, REPO)  # to main
    assert refusal(other, f"hf://datasets/{REPO}@v1", revision="v2").reason == "bad_command_line"


@pytest.mark.parametrize("revision", ["tag-1", "0" * 40])
def test_a_tag_or_a_commit_is_no_branch(hub: HubStandIn, corpus: Path, revision: str) -> None:
    hub.publish(REPO, {})
    hub.publish(REPO, {}, "tag-1")
    assert refusal(corpus, REPO, revision=revision).code == "E543"


def test_private_is_for_new_datasets(hub: HubStandIn, corpus: Path) -> None:
    push_corpus(corpus, REPO, private=True)
    assert hub.private == {REPO: True}
    assert push_corpus(corpus, REPO, private=True).found_done
    hub.private[REPO] = False
    error = refusal(corpus, REPO, private=True)
    assert (error.code, "is public" in str(error)) == ("E543", True)


# -- errors ------------------------------------------------------------------------------------------------------------


ANSWERS = {401: "E687", 403: "E687", 404: "E688", 409: "E711", 412: "E711", 429: "E689", 500: "E690", 503: "E689"}


@pytest.mark.parametrize(("status", "code"), ANSWERS.items())
def test_an_answer_of_the_hub_has_a_code(hub: HubStandIn, corpus: Path, status: int, code: str) -> None:
    hub.publish(REPO, {})
    hub.status = status
    error = refusal(corpus, REPO)
    assert error.code == code
    assert str(error).startswith(f"hf://datasets/{REPO}: ")


def test_a_token_is_required_and_must_be_allowed_to_write(
    hub: HubStandIn, corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.token = "another"
    for exists in (False, True):
        if exists:
            hub.publish(REPO, {})
        error = refusal(corpus, REPO)
        assert (error.code, "with a token that may write there" in str(error)) == ("E687", True)
    monkeypatch.delenv("HF_TOKEN")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    error = refusal(corpus, REPO)
    assert (error.code, "no token; set HF_TOKEN, or run: hf auth login" in str(error)) == ("E687", True)
    assert hub.history == []


def test_no_network_and_names_that_are_none(hub: HubStandIn, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("chats", "s3://bucket/chats", "https://huggingface.co/datasets/a/b", "a/b c"):
        assert refusal(corpus, name).code == "E685"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refusal(corpus, REPO).code == "E690"


def test_a_commit_in_between_stops_the_push(hub: HubStandIn, corpus: Path) -> None:
    def interfere(line: str) -> None:
        hub.publish(REPO, {**held(hub), "notes.txt": b"of another client"})

    with pytest.raises(PackError) as caught:
        push_corpus(corpus, REPO, report=interfere)
    assert caught.value.code == "E711"
    whole_or_unseen(hub, corpus)
    push_corpus(corpus, REPO)
    assert held(hub) == files_of(corpus) | {"notes.txt": b"of another client"}


def test_files_that_do_not_arrive_are_found_before_the_manifest_is_sent(hub: HubStandIn, corpus: Path) -> None:
    hub.ignored.add("index.arrow")
    error = refusal(corpus, REPO)
    assert (error.code, "index.arrow is missing or differs" in str(error)) == ("E691", True)
    assert "manifest.json" not in held(hub)


def test_a_damaged_corpus_is_not_sent(hub: HubStandIn, tmp_path: Path) -> None:
    from support.damage.kinds import flip

    path = pack_small(tmp_path)
    flip(shards_of(path)[0])
    assert refusal(path, REPO).code == "E510"
    assert hub.requests == []


# -- reading -----------------------------------------------------------------------------------------------------------


LOAD = """
import sys
import datasets
for repo in sys.argv[2:]:
    for name in datasets.get_dataset_config_names(repo):
        found = datasets.load_dataset(repo, name)
        for split in found:
            found[split].save_to_disk(f"{sys.argv[1]}/{repo}/{name}/{split}")
"""
SHAPES: list[dict[str, Any]] = [
    {},
    {"sequence_length": [48, 96], "epochs": 2, "loss_weight": "conversation"},
    {"padding": "none", "align": 16, "epochs": 2},
    {"packing": False},
]


def test_load_dataset_gives_the_rows_from_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    """`load_dataset` gives the rows from the Hub.

    The rows of each length are a separate configuration.
    """
    pytest.importorskip("datasets")
    corpora = {f"{REPO}-{number}": pack_small(tmp_path / str(number), **each) for number, each in enumerate(SHAPES)}
    for repo, corpus in corpora.items():
        push_corpus(corpus, repo)
    place = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = process(tmp_path, sys.executable, "-c", LOAD, str(tmp_path / "loaded"), *corpora, **place)
    assert done.returncode == 0, done.stderr
    for shape, (repo, corpus) in zip(SHAPES, corpora.items(), strict=True):
        check_rows(corpus, tmp_path / "loaded" / repo, shape)


def check_rows(corpus: Path, saved: Path, shape: dict[str, Any]) -> None:
    """Check that the saved datasets have the rows of a corpus, and no others."""
    import datasets

    splits = {name: facts for name, facts in load_manifest(corpus).splits.items() if facts.rows}
    loaded = {f"{folder.parent.name}/{folder.name}": folder for folder in saved.glob("*/*")}
    assert len(loaded) == len(splits) >= 2
    assert {facts.sequence_length for facts in splits.values()} == {*(shape.get("sequence_length") or [None])}
    for name, facts in splits.items():
        shards = [datasets.Dataset.from_file(str(shard)) for shard in shards_of(corpus, name)]
        found = datasets.load_from_disk(str(loaded[f"{facts.sequence_length or 'default'}/{kind_of(name)}"]))
        assert found[:] == datasets.concatenate_datasets(shards)[:]
        assert found.features == shards[0].features


def test_a_downloaded_dataset_is_a_corpus(hub: HubStandIn, corpus: Path, other: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    from packcorpus.train.data.corpus import open_corpus

    push_corpus(corpus, REPO)
    push_corpus(other, f"{REPO}/long", revision="long", replace=True)
    for revision, name, path in (("main", "mine", corpus), ("long", "mine/long", other)):
        place = {"local_dir": tmp_path / revision / "mine", "endpoint": hub.url}
        snapshot_download(REPO, repo_type="dataset", revision=revision, **place)
        folder = tmp_path / revision / name
        if revision == "long":  # a corpus within the folder of another corpus is verified separately
            folder = folder.rename(tmp_path / "long" / "alone")
        assert verify(folder / "manifest.json")
        assert open_corpus(folder).key == load_manifest(path).key
        (folder / "extra.txt").write_bytes(b"")
        with pytest.raises(PackError, match=r"extra\.txt"):
            verify(folder / "manifest.json")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_reports_what_was_sent(hub: HubStandIn, tmp_path: Path) -> None:
    path = pack_small(tmp_path)
    place = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    first, second = (packcorpus(tmp_path, "push", "small", REPO, **place) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    files, commit = len(held(hub)), hub.revisions[REPO]["main"]
    size = in_bytes(sum(map(len, held(hub).values())))
    assert first.stdout == f"hf://datasets/{REPO}: sent {files} files of {files}, {size}; commit {commit}\n"
    assert second.stdout == f"hf://datasets/{REPO}: already complete, nothing to do; commit {commit}\n"
    assert SECRET not in first.stdout + first.stderr
    as_json = packcorpus(tmp_path, "push", path, REPO, "--json", **place)
    assert json.loads(as_json.stdout) | {"files": files, "sent": 0, "found_done": True} == json.loads(as_json.stdout)
    assert as_json.stderr == ""
