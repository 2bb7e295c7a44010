"""The same corpus has a manifest with the same bytes.

A manifest is refused if it was edited or leads elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError
from packcorpus.tasks.corpus import publish
from packcorpus.tasks.corpus.publish import build_manifest, commit
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.facts import Ledger
from packcorpus.tasks.storage.files import sha256_of, to_json
from packcorpus.tasks.storage.keys import VERSIONS
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, manifest_digest, repair_hint
from packcorpus.tasks.work import Publish

Corpus = tuple[Path, Path]  # the root of the project, and the published manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("made")
    return root, pack_corpus(make_recipe(root, conversations(40), validation=0.2))


@pytest.fixture
def copied(made: Corpus, tmp_path: Path) -> Corpus:
    shutil.copytree(made[0], tmp_path / "copy")
    return tmp_path / "copy", tmp_path / "copy" / made[1].relative_to(made[0])


def write_values(path: Path, values: dict[str, Any], sign: bool = True) -> None:
    if sign:
        values["digest"] = manifest_digest(values)
    path.write_bytes(to_json(values))


def test_round_trip(made: Corpus) -> None:
    root, path = made
    manifest = load_manifest(path)
    assert to_json(manifest.model_dump()) == path.read_bytes()
    assert Manifest.model_validate_json(path.read_bytes()) == manifest
    folder = root / manifest.corpus
    assert (folder / "manifest.json").read_bytes() == path.read_bytes()
    assert corpus_folder(manifest, path) == folder
    on_disk = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert on_disk == {file.path for file in manifest.listed()} | {"manifest.json", "run.json"}
    for file in manifest.listed():
        assert (file.bytes, file.sha256) == ((folder / file.path).stat().st_size, sha256_of(folder / file.path))
    assert manifest.tokenizer.sha256 == sha256_of(folder / manifest.tokenizer.path)
    assert path.name == f"small-{manifest.key[:12]}.json"


def test_how_a_source_is_read_is_recorded_if_it_is_unusual(tmp_path: Path) -> None:
    rows = "".join(f"Wie groß ist {n}?;{n} m, ungefähr\n" for n in range(20))
    (tmp_path / "a.csv").write_text("prompt;completion\n" + rows, encoding="cp1252")
    sources = [{"path": "a.csv"}, {"path": "chat.jsonl", "roles": {"user": ["Kunde"]}}]
    records = [{"messages": [{"role": "KUNDE", "content": "2+2?"}, {"role": "Bot", "content": "4"}]}] * 9
    path = pack_corpus(make_recipe(tmp_path, records, sources=sources))
    manifest = load_manifest(path)
    assert to_json(manifest.model_dump()) == path.read_bytes()
    table, chat = orjson.loads(path.read_bytes())["sources"]
    assert (table["delimiter"], table["encoding"], "roles" in table) == (";", "windows-1252", False)
    assert (chat["roles"], {"delimiter", "encoding"} & {*chat}) == ({"kunde": "user"}, set())
    assert manifest.ledger.conversations.packed == 29
    assert (manifest.sources[0].accepted, manifest.sources[1].accepted) == (20, 9)
    config = [{"path": "a.csv"}, {"path": "chat.jsonl", "roles": {"user": ["Kunde"]}}]
    usual = {"format": "auto", "columns": {}, "weight": 1.0, "limit": None}
    assert manifest.config["sources"] == [usual | source for source in config]


def test_fixed_key_names(made: Corpus) -> None:
    values = orjson.loads(made[1].read_bytes())
    assert values["format_version"] == "3.0"
    wanted = {
        "": "format_version name key corpus sequence_length tokenizer template train_on seed sources ledger "
        "packing_metadata splits config",
        "tokenizer": "kind path sha256 vocab_size eos_token_id pad_token_id engine",
        "template": "name sha256",
        "sources.0": "path format bytes sha256 conversations accepted rejected tokens trained_tokens",
        "ledger.conversations": "read packed rejected dropped",
        "ledger.tokens": "encoded separators truncated dropped packed padding trained",
        "packing_metadata": "enabled algorithm rows lower_bound_rows packing_efficiency "
        "avg_conversations_per_sequence compression_ratio",
        "splits": "train validation",
        "splits.train": "rows shards",
        "splits.train.shards.0": "path rows bytes sha256",
    }
    for where, names in wanted.items():
        found: Any = values
        for key in where.split("."):
            found = found[int(key) if key.isdigit() else key] if key else found
        assert set(names.split()) <= set(found), where
    assert values["splits"]["train"]["shards"][0]["path"] == "train-00000-of-00001.arrow"


def test_the_same_recipe_gives_the_same_bytes(made: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, path = made
    other = make_recipe(tmp_path / "elsewhere", conversations(40), validation=0.2, part_size=1024)
    assert len(other.parts) > 3
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    again = pack_corpus(other)
    assert again.name == path.name
    assert again.read_bytes() == path.read_bytes()
    folder = root / load_manifest(path).corpus
    for file in load_manifest(path).listed():
        assert (other.corpus_folder / file.path).read_bytes() == (folder / file.path).read_bytes(), file.path
    before = path.read_bytes()
    assert build_manifest(other, *read_back(other)).digest == orjson.loads(before)["digest"]


def read_back(recipe: Any) -> tuple[Any, Any, Any]:
    plan = orjson.loads((recipe.plan_folder / "plan.json").read_bytes())
    shards = [
        orjson.loads((recipe.plan_folder / f"shard-{number:05d}.json").read_bytes())
        for number in range(len(recipe.shard_names))
    ]
    return plan, shards, orjson.loads(recipe.published.read_bytes())["files"]


def test_a_manifest_contains_no_path_and_no_time(made: Corpus) -> None:
    root, path = made
    text = path.read_text()
    for part in (str(root), str(Path.home()), "/tmp"):  # noqa: S108 - searched for, not written
        assert part not in text
    assert not re.search(r'"/[a-z]', text), "an absolute path"
    values = orjson.loads(text)
    assert "template_date" not in values["config"]  # a built-in template does not see a date
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b|\d\d:\d\d:\d\d", orjson.dumps(values).decode()), "a time"
    assert "part_size" not in values["config"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path


def test_every_edited_value_is_refused(copied: Corpus) -> None:
    _, path = copied
    original = path.read_bytes()
    paths = list(leaves(orjson.loads(original)))
    assert len(paths) > 80
    for where in paths:
        values = orjson.loads(original)
        inner = values
        for key in where[:-1]:
            inner = inner[key]
        old = inner[where[-1]]
        if isinstance(old, bool):
            new: Any = not old
        elif isinstance(old, int | float):
            new = old + 1
        else:
            new = f"{old}0"
        inner[where[-1]] = new
        write_values(path, values, sign=False)
        with pytest.raises(DataError, match=re.escape(str(path))) as caught:
            load_manifest(path)
        assert "was edited or damaged" in str(caught.value) or "is not a packcorpus manifest" in str(caught.value)


def test_extra_and_missing_keys_are_refused(copied: Corpus) -> None:
    _, path = copied
    original = orjson.loads(path.read_bytes())
    for key in original.keys() - {"texts_version", "held_out"}:  # corpora of earlier versions do not have these keys
        write_values(path, {k: v for k, v in original.items() if k != key}, sign=key != "digest")
        with pytest.raises(DataError, match=f"is not a packcorpus manifest: {key}") as caught:
            load_manifest(path)
        assert str(caught.value).endswith(f"; {repair_hint(path)}")
    write_values(path, original | {"comment": "mine"})
    with pytest.raises(DataError, match="is not a packcorpus manifest: comment"):
        load_manifest(path)


@pytest.mark.parametrize("inside", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\0b"])
@pytest.mark.parametrize("what", ["shard", "file", "tokenizer", "corpus"])
def test_a_path_that_leads_out_is_refused(what: str, inside: str, copied: Corpus) -> None:
    _, path = copied
    values = orjson.loads(path.read_bytes())
    if what == "shard":
        values["splits"]["train"]["shards"][0]["path"] = inside
    elif what == "file":
        values["files"][0]["path"] = inside
    elif what == "tokenizer":
        values["tokenizer"]["path"] = inside
    else:
        values["corpus"] = inside
    write_values(path, values)
    with pytest.raises(DataError) as caught:
        load_manifest(path)
    assert str(caught.value) == f"{path}: {inside!r} points outside the corpus folder"


@pytest.mark.parametrize(
    "inside", ["index.arrow", "./index.arrow", "tokenizer//tiny.model", "./tokenizer/./tiny.model"]
)
@pytest.mark.parametrize("where", ["files", "train", "validation"])
def test_a_file_that_is_listed_twice_is_refused(where: str, inside: str, copied: Corpus) -> None:
    _, path = copied
    values = orjson.loads(path.read_bytes())
    again = {"path": inside, "bytes": 1, "sha256": "0" * 64}
    if where == "files":
        values["files"].append(again)
    else:
        values["splits"][where]["shards"].append(again | {"rows": 1})
    write_values(path, values)
    name = str(PurePosixPath(inside))
    with pytest.raises(DataError, match=rf"was edited \({name} is listed twice\); run: packcorpus repair {path}$"):
        load_manifest(path)


@pytest.mark.parametrize("old", [b"\n", b'": ', b"{", b'"seed": 42'])
def test_a_reformatted_manifest_is_refused(old: bytes, copied: Corpus) -> None:
    """A reformatted manifest is refused, although its digest ignores white space.

    The digest also ignores duplicate keys.
    """
    _, path = copied
    new = {b"\n": b" ", b'": ': b'":  ', b"{": b" {", b'"seed": 42': b'"seed": 43, "seed": 42'}[old]
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(DataError, match="was edited or damaged"):
        load_manifest(path)


KEYED: list[tuple[str, Any]] = [
    ("config.seed", 43), ("config.overlong", "drop"), ("config.packing", None), ("sources.0.sha256", "0" * 64),
    ("sources.0.columns", {"messages": "x"}), ("tokenizer.digest", "0" * 64), ("template.sha256", "0" * 64),
    ("key", "0" * 64), ("key_version", 99), ("sources.0.container", "json"),
]  # fmt: skip
TWICE: list[tuple[str, Any]] = [
    ("name", "other"), ("config.name", "other"), ("sequence_length", 64), ("train_on", "all"), ("seed", 43),
    ("corpus", "data/corpora/other"), ("template.name", "zephyr"), ("packing_metadata.enabled", False),
    ("format_version", "2.0"), ("tokenizer.trained_here", True), ("tokenizer.sha256", "0" * 64),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value"), [*KEYED, *TWICE], ids=[where for where, _ in [*KEYED, *TWICE]])
def test_an_edited_manifest_is_refused_even_if_signed_again(where: str, value: Any, copied: Corpus) -> None:
    _, path = copied
    inner = values = orjson.loads(path.read_bytes())
    *above, last = where.split(".")
    for key in above:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    write_values(path, values)
    reason = "its key does not match its settings and sources" if (where, value) in KEYED else "in one place"
    with pytest.raises(DataError, match=f"was edited .*{reason}.*run: packcorpus repair {path}$"):
        load_manifest(path)


def test_a_manifest_with_an_older_key_version_is_accepted(copied: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, "corpus", VERSIONS["corpus"] + 1)
    assert load_manifest(copied[1]).key_version == VERSIONS["corpus"] - 1


LEDGER: dict[str, dict[str, Any]] = {
    "conversations": {
        "read": 10, "packed": 6, "rejected": {"a": 1, "b": 1}, "dropped": {"too_long": 2}, "truncated": 0, "split": 0,
    },
    "pieces": {"packed": 6, "dropped": 0},
    "tokens": {
        "encoded": 100, "separators": 6, "repeated": 4, "truncated": 14, "dropped": 6, "rejected": 0,
        "packed": 90, "padding": 10, "trained": 50,
    },
}  # fmt: skip


def test_a_ledger_balances_in_conversations_tokens_and_places() -> None:
    Ledger.model_validate(LEDGER).check(100)
    balancing = {("conversations", "read"), ("conversations", "packed")}
    balancing |= {("tokens", name) for name in LEDGER["tokens"].keys() - {"rejected", "trained"}}
    for group, name in balancing:
        for change in (-1, 1):
            changed = {**LEDGER, group: {**LEDGER[group], name: LEDGER[group][name] + change}}
            with pytest.raises(DataError, match="the ledger does not balance"):
                Ledger.model_validate(changed).check(100)
    for name, reason in (("rejected", "b"), ("dropped", "too_long")):
        changed = orjson.loads(orjson.dumps(LEDGER))
        changed["conversations"][name][reason] += 1
        with pytest.raises(DataError, match="10 conversations read, but 11 accounted for"):
            Ledger.model_validate(changed).check(100)
    with pytest.raises(DataError, match="99 places in rows, but 100 accounted for"):
        Ledger.model_validate(LEDGER).check(99)
    with pytest.raises(DataError, match="0 places in rows, but 10 accounted for"):
        Ledger.model_validate(LEDGER).check(0)


def test_a_ledger_that_does_not_balance_makes_no_manifest(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(10), validation=0.5)
    pack_corpus(recipe)
    plan, shards, files = read_back(recipe)
    build_manifest(recipe, plan, shards, files)
    for name in ("packed", "trained", "rows"):
        changed = [{**shards[0], name: shards[0][name] + 1}, *shards[1:]]
        with pytest.raises(DataError, match="the ledger does not balance"):
            build_manifest(recipe, plan, changed, files)
    moved = [{**shards[0], "rows": shards[0]["rows"] + 1}, {**shards[1], "rows": shards[1]["rows"] - 1}]
    with pytest.raises(DataError, match="the rows per shard differ from the plan"):
        build_manifest(recipe, plan, moved, files)


def test_folders_of_a_killed_run_are_synced_before_publishing(copied: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    root, path = copied
    manifest = load_manifest(path)
    folder = root / manifest.corpus
    synced: list[tuple[Path, bool]] = []
    path.unlink()
    monkeypatch.setattr(publish, "sync_folder", lambda folder: synced.append((folder, path.exists())))
    *files, card = manifest.files
    commit(manifest.model_copy(update={"files": files}), card, folder, path)
    assert synced == [(above, False) for above in (folder.parent, folder.parent.parent, root)]
    assert path.read_bytes() == (folder / "manifest.json").read_bytes()
    assert load_manifest(path) == manifest


def test_not_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(InputMissing, match=r"x\.json: no such manifest$"):
        load_manifest(path)
    path.write_text("{")
    with pytest.raises(DataError, match=r"x\.json:1:\d+: is not JSON: .*, so it is not a manifest$"):
        load_manifest(path)
    for text in ("{}", "[]", "null", '"a"', "1", '{"digest": 5}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"x\.json: is not a packcorpus manifest") as caught:
            load_manifest(path)
        assert "repair" not in str(caught.value), "it may be any file"


def test_a_manifest_nested_too_deeply_is_refused(copied: Corpus) -> None:
    _, path = copied
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    values = orjson.loads(path.read_bytes())
    path.write_bytes(to_json(values).replace(b'"config": {', b'"config": {"x": ' + json.dumps(deep).encode() + b","))
    with pytest.raises(DataError, match="is not a packcorpus manifest: Recursion limit reached"):
        load_manifest(path)


def test_the_corpus_folder_is_found(copied: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, path = copied
    manifest = load_manifest(path)
    home = root / manifest.corpus
    assert corpus_folder(manifest, path) == home
    assert corpus_folder(manifest, home / "manifest.json") == home
    monkeypatch.chdir(root)
    assert corpus_folder(manifest, Path("manifests") / path.name) == home
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    assert corpus_folder(manifest, tmp_path / "copy.json") == home, "below the current folder"
    # A corpus folder may be named `manifests`, like the folder of published manifests.
    shutil.copytree(home, root / "manifests", dirs_exist_ok=True)
    assert corpus_folder(manifest, root / "manifests" / "manifest.json") == root / "manifests"
    (root / "manifests" / "manifest.json").unlink()
    moved = home / "manifest.json"
    content = moved.read_bytes()
    moved.unlink()
    with pytest.raises(InputMissing, match=r"manifest\.json: is missing; run: packcorpus repair"):
        corpus_folder(manifest, path)
    moved.write_bytes(content)
    # The folder is moved as a whole.
    moved = tmp_path / "on another disk" / "corpus"
    shutil.copytree(home, moved)
    shutil.rmtree(home)
    monkeypatch.chdir(tmp_path)
    assert corpus_folder(manifest, moved / "manifest.json") == moved
    with pytest.raises(InputMissing, match=rf"{path.name}: its corpus folder .* is missing; pack the corpus again"):
        corpus_folder(manifest, path)


def test_is_published(copied: Corpus) -> None:
    root, path = copied
    recipe = make_recipe(root, conversations(40), validation=0.2)
    assert recipe.published == path
    assert Publish(recipe).is_done()
    for file in load_manifest(path).listed():
        where = recipe.corpus_folder / file.path
        data = where.read_bytes()
        where.write_bytes(data + b"x")
        assert not Publish(recipe).is_done()
        where.unlink()
        assert not Publish(recipe).is_done()
        where.write_bytes(data)
    assert Publish(recipe).is_done()
    for where in (recipe.corpus_folder / "manifest.json", path):
        data = where.read_bytes()
        where.write_bytes(data.replace(b'"seed": 42', b'"seed": 43'))
        assert not Publish(recipe).is_done()
        where.write_bytes(data)
    assert Publish(recipe).is_done()
    path.unlink()
    assert not Publish(recipe).is_done()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_a_manifest_is_reported(made: Corpus, tmp_path: Path, data: st.DataObject) -> None:
    original = made[1].read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    damaged = data.draw(
        st.sampled_from(
            [original[:at], original[at:], original[:at] + b"\xff" + original[at:], original[:at] + original[at + 1 :]]
        )
    )
    path = tmp_path / "damaged.json"
    path.write_bytes(damaged)
    try:
        found = load_manifest(path)
    except PackError as error:
        assert "damaged.json" in str(error)  # noqa: PT017 - or no error
    else:
        assert to_json(found.model_dump()) == original, "another value was accepted"


def test_more_shards_than_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 100)
    recipe = make_recipe(tmp_path, conversations(6, longest=5), sequence_length=512, validation=0.5)
    manifest = load_manifest(pack_corpus(recipe))
    shards = manifest.splits["train"].shards
    assert len(shards) > manifest.splits["train"].rows == sum(shard.rows for shard in shards)
    assert manifest.packing_metadata.rows == 2
