"""The whole command: its outputs, the work it repeats, failures, and resumption."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import orjson
import pytest
from support.commands import BIN, ROOT, SHARED, command, corpus_bytes, luigi, needs_shared, pack, started, write_chats
from support.damage.kinds import flip
from support.tokenizer_kinds import kind_path

from packcorpus.pipeline import graph
from packcorpus.tasks.storage.corpus_folder import last_manifest
from packcorpus.tasks.storage.files import read_receipt, write_receipt
from packcorpus.tasks.verification.verify import verify

CONFIG = """
name: chats
sources:
  - path: chats.jsonl
template: chatml
sequence_length: 128
vocab_size: 400
"""
# For runs whose number of workers is not the point: workers take as long to start as the rest of such a run.
ONE = ("--workers", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chats(tmp_path / "chats.jsonl", 300)
    (tmp_path / "corpus.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the chats with their config and return the manifest.

    No test changes the folder.
    """
    folder = tmp_path_factory.mktemp("one_run")
    write_chats(folder / "chats.jsonl", 300)
    (folder / "corpus.yaml").write_text(CONFIG)
    return pack(folder, "--config", "corpus.yaml")


@pytest.fixture
def first(folder: Path, one_run: Path) -> Path:
    """Copy a finished run to `folder` and return its manifest."""
    made = one_run.parent.parent
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder / one_run.relative_to(made)


def set_config(folder: Path, **settings: object) -> None:
    lines = "".join(f"{key}: {value}\n" for key, value in settings.items())
    config = CONFIG.replace("sources:\n  - path: chats.jsonl", "sources: [{path: chats.jsonl}]")
    kept = [line for line in config.strip().splitlines() if line.split(":")[0] not in settings]
    (folder / "corpus.yaml").write_text("\n".join(kept) + "\n" + lines)


def token_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "data" / "tokens").rglob("*.arrow")}


def test_bare_command_packs_the_sample_and_names_the_manifest_last(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "data" / "sample", tmp_path / "data" / "sample")
    first = luigi(tmp_path)
    assert first.returncode == 0, first.stderr
    published = tmp_path / first.stdout.splitlines()[-1]
    manifest = orjson.loads(published.read_bytes())
    assert published.parent.name == "manifests"
    assert manifest["format_version"] == "3.0"
    assert manifest["tokenizer"]["trained_here"]
    assert manifest["ledger"]["conversations"]["read"] == 300
    assert len(manifest["sources"]) == 10
    assert {source["format"] for source in manifest["sources"]} == {
        "messages", "sharegpt", "alpaca", "dolly", "oasst", "prompt_completion", "text",
    }  # fmt: skip
    verify(published)
    again = luigi(tmp_path)
    assert again.returncode == 0
    assert again.stdout == first.stdout
    assert "nothing to do" in again.stderr


def test_a_second_run_is_a_no_op(folder: Path, first: Path) -> None:
    def times() -> dict[Path, int]:
        # A later run adds the digest of a file that was just written.
        kept = (folder / "data", folder / "data" / "digests")
        found = (p for p in folder.rglob("*") if p not in kept and kept[1] not in p.parents)
        return {p: p.stat().st_mtime_ns for p in found}

    before = times()
    assert first in before
    done = luigi(folder, "--config", "corpus.yaml")
    assert "nothing to do" in done.stderr
    assert times() == before


def test_check_sources_hashes_every_source_again(folder: Path) -> None:
    """The cache has a wrong entry, as if a disk had returned other bytes.

    The source is a link to a file that is older than two seconds: digests of younger files are not kept.
    """
    (folder / "chats.jsonl").unlink()
    (folder / "chats.jsonl").symlink_to(ROOT / "data" / "sample" / "chat.jsonl")
    set_config(folder, vocab_size=700, sequence_length=2048)
    first = pack(folder, *ONE, "--config", "corpus.yaml")
    [entry] = (folder / "data" / "digests").iterdir()
    right = read_receipt(entry)
    write_receipt(entry, right | {"sha256": "0" * 64, "ranges": [[0, right["state"][0], "0" * 64]]})
    assert pack(folder, *ONE, "--config", "corpus.yaml").name != first.name, "the cache was not read"
    assert pack(folder, *ONE, "--config", "corpus.yaml", "--check-sources").name == first.name
    assert read_receipt(entry) == right
    assert pack(folder, *ONE, "--config", "corpus.yaml").name == first.name


def test_another_sequence_length_reuses_every_token_file(folder: Path, first: Path) -> None:
    before = token_files(folder)
    second = pack(folder, *ONE, "--config", "corpus.yaml", "--sequence-length", "200")
    assert token_files(folder) == before
    assert first != second
    assert orjson.loads(second.read_bytes())["sequence_length"] == 200
    verify(second)


def test_an_appended_line_retokenizes_one_part(folder: Path, first: Path) -> None:
    set_config(folder, part_size=4096, tokenizer=_a_tokenizer(folder))
    pack(folder, "--config", "corpus.yaml")
    before = token_files(folder)
    assert len(before) > 5
    with (folder / "chats.jsonl").open("ab") as file:
        write_chats(folder / "more.jsonl", 1, start=5000)
        file.write((folder / "more.jsonl").read_bytes())
    done = luigi(folder, "--config", "corpus.yaml")
    assert f"reused: tokens of {len(before) - 1} of {len(before)} parts\n" in done.stderr
    manifest = folder / done.stdout.strip()
    after = token_files(folder)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 1
    assert orjson.loads(manifest.read_bytes())["ledger"]["conversations"]["read"] == 301
    verify(manifest)


def test_the_largest_part_is_tokenized_first(folder: Path, first: Path) -> None:
    for name, count in (("a", 20), ("b", 200), ("c", 90)):
        write_chats(folder / f"{name}.jsonl", count, start=1000)
    set_config(folder, sources="[{path: '?.jsonl'}]", tokenizer=_a_tokenizer(folder))
    pack(folder, "--config", "corpus.yaml", "--workers", "1")
    made = sorted(token_files(folder), key=lambda path: path.stat().st_mtime_ns)
    sizes = [path.stat().st_size for path in made]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)


def _a_tokenizer(folder: Path) -> str:
    """Return the tokenizer that the first run has trained, as a fixed file.

    It stays the same when the sources change.
    """
    trained = next((folder / "data" / "tokenizers").rglob("*.model"))
    shutil.copy(trained, folder / "fixed.model")
    shutil.rmtree(folder / "data" / "tokens")
    return "fixed.model"


@pytest.mark.parametrize("change", [{"template": "zephyr"}, {"train_on": "last"}, {"vocab_size": 410}])
def test_a_changed_template_policy_or_tokenizer_retokenizes_everything(
    folder: Path, first: Path, change: dict[str, object]
) -> None:
    before = token_files(folder)
    set_config(folder, **change)
    pack(folder, *ONE, "--config", "corpus.yaml")
    assert len(token_files(folder)) == 2 * len(before)


def test_same_bytes_for_any_workers_parts_date_folder_and_hash_seed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = corpus_bytes(pack(folder, "--config", "corpus.yaml", "--workers", "1"))
    clock = tmp_path_factory.mktemp("clock")
    (clock / "sitecustomize.py").write_text(
        "import time\nfor name in ('time', 'gmtime', 'localtime'):\n"
        "    def later(*given, real=getattr(time, name), now=time.time, name=name):\n"
        "        return now() + 4e7 if name == 'time' else real(*(given or (now() + 4e7,)))\n"
        "    setattr(time, name, later)\n"
    )
    variants = [
        ("2", 16384, {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": str(clock)}),
        ("4", 2048, {"PYTHONHASHSEED": "8", "LC_ALL": "C"}),
        ("1", 64 << 20, {}),
    ]
    parts = []
    for workers, part_size, environment in variants:
        other = tmp_path_factory.mktemp("elsewhere") / "a folder with spaces"
        other.mkdir()
        shutil.copy(folder / "chats.jsonl", other / "chats.jsonl")
        (other / "corpus.yaml").write_text(CONFIG + f"part_size: {part_size}\n")
        assert corpus_bytes(pack(other, "--config", "corpus.yaml", "--workers", workers, **environment)) == expected
        parts.append(len(token_files(other)))
    assert parts[0] > 2
    assert parts[1] > 10
    assert parts[2] == 1


@needs_shared
def test_same_bytes_on_real_data_for_any_workers_and_parts(tmp_path: Path) -> None:
    found = []
    for workers, part_size in (("1", 64 << 20), ("2", 64 << 10), ("4", 64 << 20)):
        folder = tmp_path / f"{workers}-{part_size}"
        folder.mkdir()
        with (SHARED / "corpora" / "gsm8k_train.jsonl").open("rb") as lines:
            (folder / "gsm8k_train.jsonl").write_bytes(b"".join(islice(lines, 2000)))
        name = "llamafactory_glaive_toolcall_en_demo.json"
        (folder / name).symlink_to(SHARED / "corpora" / name)
        (folder / "corpus.yaml").write_text(
            "name: real\nsources: [{path: gsm8k_train.jsonl}, {path: llamafactory_glaive_toolcall_en_demo.json}]\n"
            f"tokenizer: {SHARED}/tokenizers/mistral_v3_32k.model\noverlong: drop\nvalidation: 0.02\n"
            f"part_size: {part_size}\nunknown_markers: text\n"
        )
        manifest = pack(folder, "--config", "corpus.yaml", "--workers", workers)
        verify(manifest)
        assert (len(token_files(folder)) > 10) == (part_size == 64 << 10)
        found.append(corpus_bytes(manifest))
    assert found[0] == found[1] == found[2]


def test_a_run_killed_at_any_moment_resumes_to_the_same_bytes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    set_config(folder, part_size=2048)
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder, whole, dirs_exist_ok=True)
    assert luigi(whole, "--config", "nowhere.yaml").returncode == 66  # the first command starts a server
    start = time.perf_counter()
    expected = corpus_bytes(pack(whole, "--config", "corpus.yaml"))
    took = time.perf_counter() - start
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--workers", "2"]
    for _ in range(5):
        with started(folder, *words, package="tasks") as run:
            time.sleep(moments.uniform(0, took))
            with suppress(ProcessLookupError):  # it may have ended
                os.killpg(run.pid, signal.SIGKILL)
            assert run.wait() in (0, -signal.SIGKILL)
        for published in (folder / "manifests").glob("*.json"):
            verify(published)  # a manifest that exists is complete
    assert corpus_bytes(pack(folder, "--config", "corpus.yaml")) == expected, f"seed {seed}"
    assert not list(folder.rglob("*.tmp")), f"seed {seed}: debris"


def test_format_2_has_one_conversation_a_row(folder: Path) -> None:
    import datasets

    set_config(folder, packing="false")
    manifest = pack(folder, *ONE, "--config", "corpus.yaml")
    verify(manifest)
    facts = orjson.loads(manifest.read_bytes())
    assert facts["format_version"] == "2.0"
    assert facts["packing_metadata"]["enabled"] is False
    shard = folder / facts["corpus"] / facts["splits"]["train"]["shards"][0]["path"]
    rows = datasets.Dataset.from_file(str(shard))
    assert len(rows) == 300
    wanted = sorted(orjson.dumps([[m["role"], m["content"]] for m in orjson.loads(line)["messages"]])
                    for line in (folder / "chats.jsonl").read_bytes().splitlines())  # fmt: skip
    assert sorted(orjson.dumps([[m["role"], m["content"]] for m in row["messages"]]) for row in rows) == wanted
    assert all(row["text"].startswith("<|im_start|>user\n") for row in rows)


# Failures: an exit code, one message with the fix, no traceback, and nothing published

FAILURES = {
    "no such config": ({}, ("--config", "corpsu.yaml"), "did you mean corpus.yaml?"),
    "unknown key": ({"templat": "chatml"}, (), "did you mean template?"),
    "no such source": ({"sources": "[{path: chatz.jsonl}]"}, (), "chatz.jsonl"),
    "no such tokenizer": ({"tokenizer": "nowhere.model"}, (), "no such tokenizer"),
    "no such template": ({"template": "chatlm"}, (), "neither built in"),
    "overlong": ({"overlong": "error", "sequence_length": 16}, (), "tokens exceed sequence_length 16"),
    "all dropped": ({"overlong": "drop", "sequence_length": 8}, (), "no conversation is left to pack"),
    "not a tokenizer": ({"tokenizer": "chats.jsonl"}, (), "not a .model or .json file"),
    "no number": ({}, ("--sequence-length", "1k"), "sequence_length: must be an integer, found '1k'"),
    "nearly a template": ({"template": "chat-ml"}, (), "did you mean chatml?"),
    "zero length": ({}, ("--sequence-length", "0"), "greater than or equal to 8"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_clear_message(folder: Path, case: str) -> None:
    settings, arguments, expected = FAILURES[case]
    set_config(folder, **settings)
    done = luigi(folder, *ONE, *(arguments if "--config" in arguments else ("--config", "corpus.yaml", *arguments)))
    assert done.returncode not in (0, 70), done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not list(folder.glob("manifests/*"))


def test_rejects_are_shown_counted_and_limited(folder: Path) -> None:
    with (folder / "chats.jsonl").open("ab") as file:
        file.write(b'{"messages": [{"role": "assistent", "content": "x"}]}\n')
        file.write(b'{"messages": [{"role": "user", "content": "trunca')
    set_config(folder, max_rejects=0.0)
    done = luigi(folder, *ONE, "--config", "corpus.yaml")
    assert done.returncode == 65
    assert "chats.jsonl:301" in done.stderr
    assert "did you mean assistant?" in done.stderr
    assert "chats.jsonl:302" in done.stderr
    assert not list(folder.glob("manifests/*"))
    set_config(folder)
    manifest = pack(folder, *ONE, "--config", "corpus.yaml")
    verify(manifest)
    facts = orjson.loads(manifest.read_bytes())
    assert sum(facts["ledger"]["conversations"]["rejected"].values()) == 2
    lines = (folder / facts["corpus"] / "rejects.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["line"] for line in lines] == [301, 302]


def test_an_overlong_answer_and_question_among_300_neither_end_a_run_nor_disappear(folder: Path) -> None:
    with (folder / "chats.jsonl").open("ab") as file:
        for prompt, completion in (("Count.", "and then " * 9000), ("and then " * 9000, "Why?")):
            file.write(orjson.dumps({"prompt": prompt, "completion": completion}) + b"\n")
    wide = {"sources": "[chats.jsonl, long.jsonl]", "sequence_length": 4096}
    set_config(folder, **wide, overlong="truncate")
    lines = (folder / "chats.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "chats.jsonl").write_bytes(b"".join(lines[:300]))
    (folder / "long.jsonl").write_bytes(b"".join(lines[300:]))
    done = luigi(folder, *ONE, "--config", "corpus.yaml")
    assert done.returncode == 0, done.stderr
    assert "302 conversations: 301 packed, 1 rejected, 0 dropped" in done.stderr
    assert "E236 no_trained_tokens, 1: long.jsonl:2 no trained token is left within " in done.stderr
    facts = orjson.loads((folder / done.stdout.split()[-1]).read_bytes())
    cut, length = facts["ledger"]["tokens"]["truncated"], facts["sequence_length"]
    assert cut > 5000
    assert f"overlong: 1 conversation truncated to {length:,} tokens, which drops {cut:,} tokens (" in done.stderr
    assert " % of all); to keep them, raise sequence_length or set overlong: split\n" in done.stderr
    set_config(folder, **wide, overlong="drop")
    done = luigi(folder, *ONE, "--config", "corpus.yaml")
    assert f"overlong: 2 conversations longer than {length:,} tokens dropped; to keep them, " in done.stderr


def test_the_delimiter_and_the_encoding_that_were_found_are_reported(folder: Path) -> None:
    rows = "".join(f"Wie groß ist {n}?;ungefähr {n} m\n" for n in range(300))
    (folder / "a.csv").write_text("prompt;completion\n" + rows, encoding="cp1252")
    found = "a.csv: found delimiter ';' and encoding windows-1252; if that is wrong, set it in its source"
    set_config(folder, sources="[a.csv]")
    assert f"note: {found}\n" in luigi(folder, *ONE, "--config", "corpus.yaml").stderr
    checked = command(folder, str(BIN / "packcorpus"), "check", "corpus.yaml")
    assert found in " ".join(checked.stdout.split())
    shown = command(folder, str(BIN / "packcorpus"), "inspect", "a.csv").stdout
    assert shown.startswith("a.csv  prompt_completion, csv, delimiter ';', windows-1252, ")
    set_config(folder, sources="[{path: a.csv, delimiter: ';', encoding: cp1252}]", sequence_length=64)
    assert "delimiter" not in luigi(folder, *ONE, "--config", "corpus.yaml").stderr


def test_a_failed_run_keeps_the_earlier_corpus(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    (folder / "chats.jsonl").write_bytes(b"{}\n")
    assert luigi(folder, *ONE, "--config", "corpus.yaml").returncode != 0
    assert corpus_bytes(first) == before
    verify(first)


def test_a_missing_shard_is_rebuilt(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    shard = next((folder / "data" / "corpora").rglob("train-*.arrow"))
    shard.unlink()
    assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_shards_that_an_interrupted_run_left_are_checked_once(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    shard = next((folder / "data" / "corpora").rglob("train-00000-*.arrow"))
    for damage in (lambda: flip(shard), next((folder / "data" / "plans").rglob("plan.json")).unlink):
        first.unlink()
        damage()
        assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_a_corpus_is_republished_from_its_folder_alone(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    for cache in ("tokens", "plans"):
        shutil.rmtree(folder / "data" / cache)
    first.unlink()
    assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_a_shard_is_rebuilt_from_other_parts(folder: Path, first: Path) -> None:
    """The corpus key does not depend on the parts, but its plan does.

    The plan refers to rows of token files.
    """
    before = corpus_bytes(first)
    set_config(folder, part_size=1024)
    pack(folder, *ONE, "--config", "corpus.yaml", "--sequence-length", "200")
    for shard in (folder / "data" / "corpora").glob("*/train-*.arrow"):
        shard.unlink()
    assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_the_same_bytes_under_another_name_get_that_name(folder: Path, first: Path) -> None:
    (folder / "chats.jsonl").rename(folder / "talks.jsonl")
    set_config(folder, name="talks", sources="[{path: talks.jsonl}]")
    facts = orjson.loads(pack(folder, *ONE, "--config", "corpus.yaml").read_bytes())
    assert [source["path"] for source in facts["sources"]] == ["talks.jsonl"]


def test_a_missing_plan_file_is_rebuilt(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    shutil.rmtree(folder / "data" / "corpora")
    next((folder / "data" / "plans").rglob("index.arrow")).unlink()
    assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_a_concurrent_run_of_the_same_corpus_is_refused(folder: Path, first: Path) -> None:
    before = corpus_bytes(first)
    shutil.rmtree(folder / "data" / "corpora")
    [held] = (folder / "data" / "plans").glob("chats-*.lock")
    with held.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        busy = luigi(folder, "--config", "corpus.yaml")
        assert busy.returncode == 75
        assert "another run is packing this corpus" in busy.stderr
        assert "Traceback" not in busy.stderr
    assert corpus_bytes(pack(folder, *ONE, "--config", "corpus.yaml")) == before


def test_two_projects_run_at_the_same_time(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml"]
    runs = [
        subprocess.Popen(words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for place in (folder, other)
    ]
    found = [(run.communicate(timeout=300), run.returncode) for run in runs]
    assert [code for _, code in found] == [0, 0], found
    assert corpus_bytes(folder / found[0][0][0].strip()) == corpus_bytes(other / found[1][0][0].strip())


def test_its_own_outputs_are_refused_as_sources(folder: Path) -> None:
    set_config(folder, sources="[{path: '**/*.jsonl'}]")
    pack(folder, *ONE, "--config", "corpus.yaml")
    done = luigi(folder, *ONE, "--config", "corpus.yaml")
    assert done.returncode != 0
    assert "is an output of packcorpus" in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_stops_at_once_and_the_run_resumes(folder: Path, workers: str) -> None:
    write_chats(folder / "chats.jsonl", 12_000)
    shutil.copy(kind_path("sp_bpe_chatml"), folder / "tiny.model")
    set_config(folder, part_size=1 << 17, tokenizer="tiny.model")
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--workers", workers]
    with started(folder, *words, package="tasks") as run:
        deadline = time.monotonic() + 300
        while not list((folder / "data").glob("tokens/*/*.json")):
            assert time.monotonic() < deadline, "no part is done"
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)
        errors = run.stderr.read()
        assert run.wait() == 75
    assert "interrupted; run the same command again to resume" in errors
    assert "Traceback" not in errors
    before = {path: time for path, time in token_files(folder).items() if path.with_suffix(".json").exists()}
    assert before
    verify(pack(folder, "--config", "corpus.yaml"))
    assert before.items() <= token_files(folder).items()


def test_tokens_of_rejected_conversations_are_reported(folder: Path) -> None:
    """The long conversation is encoded, but no trained token is left in a row."""
    long = orjson.dumps({"prompt": "and then " * 4000, "completion": "yes"})
    (folder / "long.jsonl").write_bytes(long + b"\n")
    set_config(folder, sources="[chats.jsonl, long.jsonl]", max_rejects=0.5, overlong="truncate")
    done = luigi(folder, *ONE, "--config", "corpus.yaml")
    tokens = orjson.loads((folder / done.stdout.split()[-1]).read_bytes())["ledger"]["tokens"]
    assert tokens["rejected"] > 400
    assert f"; {tokens['rejected']:,} in rejected conversations" in done.stderr, done.stderr
    shown = command(folder, str(BIN / "packcorpus"), "inspect")
    assert f"not included: rejected {tokens['rejected']:,}" in " ".join(shown.stdout.split())
    page = command(folder, str(BIN / "packcorpus"), "report")
    assert page.returncode == 0, page.stderr
    html = Path(folder / page.stdout.split()[-1]).read_text()
    assert f"in rejected conversations: {tokens['rejected']:,}" in html
    assert f"{tokens['rejected']:,} of rejected conversations." in html


def test_it_works_from_any_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without a luigi.cfg, the exit code is right and no server is contacted."""
    env = {key: value for key, value in os.environ.items() if key != "LUIGI_CONFIG_PATH"}
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config"]
    for config, code in (("corpus.yaml", 0), ("nowhere.yaml", 66)):
        place = tmp_path_factory.mktemp("any")
        done = subprocess.run(
            [*words, str(folder / config)], cwd=place, env=env, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, done.stderr
        assert len(list(place.glob("manifests/*.json"))) == (code == 0)


def test_user_files_named_like_our_packages_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many working directories have a train.py."""
    for name in ("train", "tasks", "pipeline"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported a file of the user')\n")
    manifest = pack(folder, *ONE, "--config", "corpus.yaml")
    monkeypatch.chdir(folder)
    record = graph.record_of(graph.train_command("", f"manifests/{manifest.name}", ".", "", "--base-model nowhere"))
    assert record.name == "training.json"
    assert record.parts[:2] == ("data", "adapters")


def test_the_manifest_of_the_latest_run_is_remembered(folder: Path, first: Path) -> None:
    """`inspect` and `verify` without a name use this manifest.

    It is also remembered if the corpus was already packed.
    """
    assert last_manifest(folder) == first
    other = pack(folder, *ONE, "--config", "corpus.yaml", "--sequence-length", "200")
    assert last_manifest(folder) == other != first
    assert "already packed" in luigi(folder, *ONE, "--config", "corpus.yaml").stderr
    assert last_manifest(folder) == first


def test_sources_may_be_a_single_path(folder: Path, first: Path) -> None:
    set_config(folder, sources="chats.jsonl")
    assert luigi(folder, *ONE, "--config", "corpus.yaml").stdout.strip() == f"manifests/{first.name}"
