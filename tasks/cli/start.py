"""Start a run or a training in place of this process, or run one stage.

    packcorpus pack CONFIG             ─▶ luigi --module pipeline PackCorpus --config CONFIG
    packcorpus train CORPUS            ─▶ python -m train --manifest MANIFEST
    packcorpus train diagnose CORPUS   ─▶ python -m train diagnose --manifest MANIFEST
    packcorpus train merge …           ─▶ python -m train merge …
    packcorpus certify RUN             ─▶ python -m train certify RUN
    packcorpus part CONFIG             ─▶ a stage, or a share of it, in this process

This package imports neither `pipeline` nor `train`. The new process keeps the terminal, the signals, and the process
id. Its exit code is the exit code of the command.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.messages import JSON
from packcorpus.tasks.core.printable import suggest, with_urls
from packcorpus.tasks.inspection.manifests import find_manifest
from packcorpus.tasks.stores.urls import local_path_of, root_of, url_of

# Commands of `python -m train` that take no corpus. A corpus with such a name must be given with --manifest.
COMMANDS = ("doctor", "merge", "certify")


def pack(config: Path, root: Path, options: list[str]) -> NoReturn:
    """Pack the corpus of a config."""
    words = ["--config", str(config), "--root", url_of(root) or str(root)]
    _run("luigi", "--module", "packcorpus.pipeline", "PackCorpus", *words, *options)


def train(arguments: list[str]) -> NoReturn:
    """Train on a corpus, or diagnose it, or run a command of COMMANDS.

    The first argument, after `diagnose` if it is given, names the corpus unless it is an option or a command. All
    other arguments are passed on. Raises InputMissing, UsageError, or DataError if there is no such corpus.
    """
    words = [word for word in arguments if word != "--json"]
    if words != arguments:
        os.environ[JSON] = "1"
    named = {word.partition("=")[0] for word in words}
    verb = [words.pop(0)] if words[:1] == ["diagnose"] else []
    if words[:1] not in ([command] for command in COMMANDS) and not named & {"--manifest", "--help", "-h"}:
        corpus = local_path_of(words.pop(0)) if words and not words[0].startswith("-") else None
        root = _root_of(words)
        if not corpus or not any(corpus.glob("*.arrow")):  # not a corpus folder, or shards without a manifest
            corpus = find_manifest(corpus, root)
        words = ["--manifest", str(corpus), *words]
        if url_of(root):  # only the corpus is in the bucket; the training writes its own files locally
            at = next(number for number, word in enumerate(words) if word.partition("=")[0] == "--root")
            del words[at : at + 1 + ("=" not in words[at])]
    _run("packcorpus.train", *verb, *words)


def _root_of(words: list[str]) -> Path:
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--root":
            return root_of(value or "".join(words[number + 1 : number + 2]))
    return Path()


def _run(module: str, *words: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # -P keeps the working directory off sys.path, so a user's own train.py or pipeline.py does not replace ours.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *words])  # noqa: S606 - no shell is wanted


def run_part(config: Path, root: Path, stage: str, share: str, sequence_length: str) -> dict[str, Any]:
    """Run one share of a stage, and return its counts or, for `publish`, the manifest.

    `share` is I/N, or "" for all of a stage. Raises PackError.
    """
    from packcorpus.tasks.config import load_config
    from packcorpus.tasks.recipe import resolve
    from packcorpus.tasks.sources.parts import WHOLE, Share
    from packcorpus.tasks.work import KINDS, run_stage

    stages, chosen = {kind.stage: kind for kind in KINDS}, WHOLE
    if stage == "pack":
        raise UsageError("bad_command_line", "--stage pack: is now two stages: --stage plan, then --stage write")
    if stage not in stages:
        raise UsageError("bad_command_line", f"--stage {stage}: expected {', '.join(stages)}{suggest(stage, stages)}")
    if share:
        if not stages[stage].are_steps:
            raise UsageError(
                "bad_command_line", f"--share {share}: --stage {stage} has no shares; run it once, without"
            )
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", share)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise UsageError("bad_command_line", f"--share {share}: expected I/N, from 1/N to N/N, such as 3/16")
        chosen = Share(number, of)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a machine runs several shares in parallel instead
    recipe = replace(resolve(config, root), config=load_config(config, sequence_length))
    steps, done = run_stage(recipe, stages[stage], chosen)
    every = len(stages[stage].all_of(recipe))
    counts = {"stage": stage, "share": share or None, "steps": steps, "all": every, "found_done": done}
    return counts | ({"manifest": with_urls(str(recipe.published))} if stage == "publish" else {})
