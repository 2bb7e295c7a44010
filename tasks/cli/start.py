"""Start a run or a training in place of this process, or run one stage.

    packcorpus pack CONFIG             ─▶ luigi --module pipeline PackCorpus --config CONFIG
    packcorpus train …                 ─▶ python -m packcorpus.train …
    packcorpus certify RUN             ─▶ python -m packcorpus.train certify RUN
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
from packcorpus.tasks.stores.urls import url_of


def pack(config: Path, root: Path, options: list[str]) -> NoReturn:
    """Pack the corpus of a config."""
    words = ["--config", str(config), "--root", url_of(root) or str(root)]
    _run("luigi", "--module", "packcorpus.pipeline", "PackCorpus", *words, *options)


def train(arguments: list[str]) -> NoReturn:
    """Run a command of `train`, which reads all arguments but --json."""
    words = [word for word in arguments if word != "--json"]
    if words != arguments:
        os.environ[JSON] = "1"
    _run("packcorpus.train", *words)


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
