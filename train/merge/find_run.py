"""Find a finished run and its base model, unchanged since the training.

    x, KEY, data/adapters/x-KEY, …/training.json ─find_run─▶ Run: folder, record
    Run ─find_base─▶ folder of the base model, checked against the record of the run

This module does not load torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.core.printable import printable, suggest
from packcorpus.tasks.storage.files import read_json
from packcorpus.train.config import Parser
from packcorpus.train.loop.run_folder import COMPLETE, checkpoints_of, model_digest, step_of

SHORTEST_KEY = 4  # minimum number of characters of a shortened key
LISTED = 5
RECORD = "training.json"

# Folders of the Hub's cache: models--owner--name/snapshots/<commit>
_CACHED = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "README.md")


def run_parser(prog: str, description: str) -> Parser:
    """Build a parser with the options shared by all commands that take a run."""
    ours = Parser(prog=prog, usage=f"{prog} RUN [OPTION…]", description=description, allow_abbrev=False)
    ours.add_argument("run", metavar="RUN", help="the folder of a run, its training.json, its name, or its key")
    text = "folder that contains data/ (default: this folder)"
    ours.add_argument("--root", type=Path, metavar="FOLDER", default=Path(), help=text)
    ours.add_argument("--debug", action="store_true", help="print a traceback if an error occurs")
    return ours


@dataclass(frozen=True, slots=True)
class Run:
    """Finished run, with its folder and its training.json."""

    folder: Path
    record: dict[str, Any]

    @property
    def key(self) -> str:
        return str(self.record["key"])


@dataclass(frozen=True, slots=True)
class Base:
    """Base model on this machine; `name` is its name on the Hub or of its folder."""

    folder: Path
    name: str
    commit: str | None  # of the Hub
    digest: str | None  # of the files of a local folder


def find_run(text: str, root: Path) -> Run:
    """Return the run that a user names by its folder, record, name, or key."""
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path) and path.name != RECORD:
        raise UsageError("bad_command_line", f"{path}: is not a training run; name its folder, or its {RECORD}")
    folder = path if os.path.isdir(path) else path.parent if os.path.isfile(path) else _by_name(text, root)
    record = folder / RECORD
    if not record.is_file():
        if not (folder / "run.json").is_file():
            raise InputMissing("no_such_run", f"{folder}: is not a training run (it has no {RECORD})")
        newest = max(
            (path for path in checkpoints_of(folder) if (path / COMPLETE).is_file()), key=step_of, default=None
        )
        found = f"the newest checkpoint is of step {step_of(newest)}" if newest else "and no checkpoint yet"
        fix = "rerun the training command to resume it"
        fix += f", or talk to the checkpoint: packcorpus train chat {newest}" if newest else ""
        text = f"{folder}: the run is not finished (it has no {RECORD}; {found}); {fix}"
        raise InputMissing("no_such_run", text)
    values = read_json(record)
    if not isinstance(values, dict) or not {"key", "corpus", "base_model", "config", "result"} <= values.keys():
        raise DataError("damaged_adapter", f"{record}: is not the record of a training run; restore it, or train again")
    return Run(folder, values)


def _by_name(text: str, root: Path) -> Path:
    home = root / "data" / "adapters"
    folders = [path for path in home.glob("*") if (path / "run.json").is_file() or (path / RECORD).is_file()]
    folders.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    parts = {path: path.name.rpartition("-") for path in folders}  # (name, "-", 12 characters of the key)
    if home / text in parts:
        return home / text
    if named := [path for path in folders if parts[path][0] == text]:
        finished = [path for path in named if (path / RECORD).is_file()] or named
        if len(finished) > 1:
            print(printable(f"{finished[-1]}: the newest of {len(finished)} runs named {text}"), file=sys.stderr)
        return finished[-1]
    keyed = [path for path in folders if parts[path][2].startswith(text)] if len(text) >= SHORTEST_KEY else []
    if len(text) == 64:
        keyed = [path for path in folders if len(parts[path][2]) == 12 and text.startswith(parts[path][2])]
    if len(keyed) == 1:
        return keyed[0]
    if keyed:
        listed = ", ".join(path.name for path in keyed[-LISTED:])
        raise UsageError("bad_command_line", f"{text}: is the prefix of several keys ({listed}); use a longer one")
    names = [path.name for path in folders]
    hint = suggest(text, (name for path in folders for name in (path.name, parts[path][0])), LISTED)
    known = f", which has {', '.join(reversed(names[-LISTED:]))}" if names else ", which has no runs"
    raise InputMissing("no_such_run", f"{text}: no such run, and no such name or key in {home}/{hint or known}")


def base_of(run: Run) -> Base:
    """Return the base model of a run, in whatever precision it is stored."""
    named = str(run.record["base_model"])
    return _local(run, Path(named)) if os.path.isabs(named) else _of_hub(run, named)


def find_base(run: Run) -> Base:
    """Return the base model of a run that an adapter can be merged into."""
    base = base_of(run)
    config = read_json(base.folder / "config.json") if (base.folder / "config.json").is_file() else {}
    parts = (config, config.get("text_config") or {})  # a multimodal model may name it for its text only
    configs = (part.get("quantization_config") for part in parts)
    quantized: dict[str, Any] = next(filter(None, configs), {})
    if quantized.get("quant_method") != "mxfp4" and quantized:  # MXFP4 can be unpacked
        method = quantized.get("quant_method", "low precision")
        raise DataError(
            "cannot_merge",
            f"base_model: {base.folder}: is stored in {method}, and an adapter is merged into weights of 16 bits; "
            "load base and adapter with AutoPeftModelForCausalLM.from_pretrained, or train on the original model, then "
            "merge",
        )
    return base


def _local(run: Run, folder: Path) -> Base:
    if not (folder / "config.json").is_file():
        raise InputMissing(
            "model_missing", f"base_model: {folder}: is missing; restore it at this path, then merge again"
        )
    digest, settings, run_json = model_digest(str(folder)), run.record["config"], run.folder / "run.json"
    expected = run.record.get("base_digest")
    if settings.get("base_model"):
        if not expected and run_json.is_file():  # of a run whose training.json has none
            expected = read_json(run_json).get("base_model")
        is_own = True
    else:  # the name of a small Llama ends with a digest of its config and seed
        described = [read_json(folder / "config.json"), settings.get("seed")]
        key = hashlib.sha256(orjson.dumps(described, option=orjson.OPT_SORT_KEYS)).hexdigest()
        is_own = folder.name.endswith(key[:12])
    if not is_own or (expected and digest != expected):
        raise DataError(
            "base_changed",
            f"base_model: {folder}: has changed since {run.folder} was trained on it (a file was added, removed, or "
            "changed); restore it, or train again",
        )
    cached = _CACHED.search(folder.as_posix())
    name = cached["name"].replace("--", "/") if cached else folder.name
    return Base(folder, name, cached["commit"] if cached else None, digest)


def _of_hub(run: Run, name: str) -> Base:
    from huggingface_hub import snapshot_download

    commit = run.record.get("base_commit")
    try:
        folder = Path(snapshot_download(name, revision=commit, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # network, name, or access token: each library raises its own class
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise InputMissing(
            "model_missing",
            f"base_model: {name!r}{f' at {commit[:12]}' if commit else ''}: is neither in the cache nor could be "
            f"downloaded from the Hub ({reason}); check the network, then merge again",
        ) from None
    return Base(folder, name, commit or folder.name, None)
