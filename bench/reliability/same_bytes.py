"""Check that two checkouts write the same corpora.

    python bench/reliability/same_bytes.py OLDER_CHECKOUT [NAME ...] [--quick] [--list] [--keep FOLDER]

Each checkout needs its own .venv (`make test` creates it). Both pack the configs of pinned_configs.py, and this one
reads what the older one wrote:

    config ─┬─ older checkout ▶ corpus ─┬─ digests ─┬─ equal: shards, rows, index, plan, rejects, key
            └─ this checkout  ▶ corpus ─┼─ digests ─┘
                                        └─ this checkout: verify --rebuild, inspect, export, two steps of training

`rows` are the values of all rows in their order, read back from the shards: if a shard differs but the rows do not,
only its encoding has changed. If a key differs, both keys are shown. README.md, manifest.json, and run.json are not
compared. Both checkouts also export the older corpus, and the files must be equal.

A config with a setting that this checkout has removed may be refused by an error that names the setting. Its corpus is
still verified (without --rebuild), inspected, exported, and trained on.

NAME selects configs whose name contains it, and --quick selects a few that cover most of the code. --no-train leaves
out the training. --keep keeps the older checkout's corpora in a folder, so that the next run does not pack them again.
Prints one line per corpus, and exits with 1 if anything differs or fails. All configs take some minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson
import pyarrow as pa
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from pinned_configs import Pinned, pinned
from support.commands import NO_PICTURE, Done, command, packcorpus

# A model of one layer, and few tokens in each step: the training only has to run.
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
SIZES["max_position_embeddings"] = 8192
TRAINING = ("--quantization", "none", "--device", "cpu", "--micro-batch", "1", "--tokens-per-step", "1")


def pack_with_older(checkout: Path, folder: Path) -> Done:
    environment = os.environ | {"PYTHONPATH": str(checkout), "LUIGI_CONFIG_PATH": str(checkout / "luigi.cfg")}
    words = [str(checkout / ".venv" / "bin" / "packcorpus"), "pack", "--quiet"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def export_with_older(checkout: Path, folder: Path, name: str, output: Path) -> Done:
    words = [str(checkout / ".venv" / "bin" / "packcorpus"), "export", "--to", name, "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def digests(folder: Path, manifest: Path) -> dict[str, str]:
    """Return the key of a corpus, and digests of its files, rows, and plan."""
    facts = orjson.loads(manifest.read_bytes())
    corpus = folder / facts["corpus"]
    found = {"key": facts["key"]}
    rows = hashlib.sha256()
    for path in sorted(corpus.glob("*.*")):
        if path.suffix == ".arrow" or path.name == "rejects.jsonl":
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if "-of-" in path.name:
            for batch in pa.ipc.open_stream(path.read_bytes()):
                rows.update(orjson.dumps(batch.to_pydict(), option=orjson.OPT_SERIALIZE_NUMPY))
    found["rows"] = rows.hexdigest()
    # The name of a plan's folder depends on the versions of its inputs, which may differ.
    plans = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "data").rglob("plan.arrow"))
    return found | {"plan": " ".join(plans)}


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    names = [name for name in [*old, *(new.keys() - old.keys())] if old.get(name) != new.get(name)]
    return [f"key {old['key'][:12]} -> {new['key'][:12]}" if name == "key" else name for name in names]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().replace(os.fsencode(folder), b"")
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def problem(done: Done, doing: str) -> list[str]:
    said = (done.stderr.strip() or done.stdout.strip())[-600:]
    return [f"{doing} fails with {done.returncode}: {said}"] if done.returncode else []


def tiny_model(vocabulary: int, folder: Path) -> Path:
    """Return the folder of a base model with random weights for a vocabulary."""
    path = folder / f"tiny-{vocabulary}"
    if not path.is_dir():
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **SIZES)).save_pretrained(path)
    return path


def use(given: Pinned, checkout: Path, manifest: Path, refused: bool, work: Path, trains: bool) -> list[str]:
    """Verify, inspect, export, and train on a corpus of the older checkout.

    Returns the problems.
    """
    folder = manifest.parent.parent
    problems = problem(packcorpus(folder, "verify", *([] if refused else ["--rebuild"]), manifest), "verify")
    for words in ((), ("--conversation", "0"), ("--rejects",)):
        problems += problem(packcorpus(folder, "inspect", manifest, *words), "inspect")
    if given.exported:
        exports = []
        with tempfile.TemporaryDirectory(dir=work) as name:
            one, other = Path(name) / "older", Path(name) / "newer"
            done = export_with_older(checkout, folder, given.exported, one)
            problems += problem(done, "export with the older checkout")
            done = packcorpus(folder, "export", manifest, "--to", given.exported, "--output", other)
            problems += problem(done, "export")
            exports = [contents(path) for path in (one, other)]
        names = [name for name in exports[0] | exports[1] if exports[0].get(name) != exports[1].get(name)]
        problems += [f"export: {', '.join(names)}"] if names else []
    if trains and given.trains:
        base = tiny_model(orjson.loads(manifest.read_bytes())["tokenizer"]["vocab_size"], work)
        with tempfile.TemporaryDirectory(dir=work) as name:
            words = ["--manifest", str(manifest), "--base-model", str(base), "--output", f"{name}/run", *TRAINING]
            done = command(folder, sys.executable, "-m", "packcorpus.train", *words, "--max-steps", "2", **NO_PICTURE)
        problems += problem(done, "training")
    return problems


def compare(name: str, given: Pinned, checkout: Path, work: Path, kept: Path, trains: bool) -> list[str]:
    """Pack a config with both checkouts, and use the corpus of the older one.

    Returns the problems.
    """
    config = yaml.safe_dump(given.config)
    old, new = kept / name, work / "new" / name
    if (old / "corpus.yaml").is_file() and (old / "corpus.yaml").read_text() != config:
        shutil.rmtree(old)  # kept from an earlier version of the config
    for folder in (old, new):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corpus.yaml").write_text(config)
        (folder / "template.jinja").write_text(given.template)
    if given.config["overlong"] == "split":  # earlier versions split at any token, and do not know the setting
        (new / "corpus.yaml").write_text(config + "advanced: {split_at: tokens}\n")
    theirs, ours = pack_with_older(checkout, old), packcorpus(new, "pack", "--quiet")
    if theirs.returncode and theirs.returncode == ours.returncode:
        one, other = (done.stderr.replace(str(folder), "") for done, folder in ((theirs, old), (ours, new)))
        return [] if one == other else [f"other errors:\n{one}\n{other}"]
    if theirs.returncode:
        return problem(theirs, "the older checkout")
    refused = ours.returncode == 64 and any(setting in ours.stderr for setting in given.removed)
    found = [] if refused else problem(ours, "pack")
    manifest = old / theirs.stdout.splitlines()[-1]
    if not ours.returncode:
        found += differences(digests(old, manifest), digests(new, new / ours.stdout.splitlines()[-1]))
    return found + use(given, checkout, manifest, refused, work, trains)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="the other checkout, with a .venv of its own")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only the configs whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="only a few configs, which cover most of the code")
    parser.add_argument("--list", action="store_true", help="print the names of the configs, and end")
    parser.add_argument("--no-train", action="store_true", help="do not train")
    parser.add_argument("--keep", type=Path, help="keep the corpora of the older checkout in this folder")
    given = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        kept = given.keep.resolve() if given.keep else work / "old"
        for name, each in pinned(kept / "sources").items():
            if (given.quick and not each.quick) or (given.names and not any(part in name for part in given.names)):
                continue
            if given.list:
                print(name)
                continue
            start = time.monotonic()
            problems = compare(name, each, given.older.resolve(), work, kept, not given.no_train)
            failures += bool(problems)
            result = f"DIFFERENT: {'; '.join(problems)}" if problems else "same"
            print(f"{name:24} {time.monotonic() - start:5.1f} s  {result}", flush=True)
    return min(1, failures)


if __name__ == "__main__":
    sys.exit(main())
