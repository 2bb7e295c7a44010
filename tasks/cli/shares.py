"""Run a stage, or a share of it, on one of several machines: `packcorpus part`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.config import load_config
from tasks.core.errors import UsageError
from tasks.core.printable import suggest, with_urls
from tasks.recipe import resolve
from tasks.sources.shares import WHOLE, Share
from tasks.work import KINDS, run_stage

STAGES = {kind.stage: kind for kind in KINDS}


def run_part(config: Path, root: Path, stage: str, share: str, sequence_length: str) -> dict[str, Any]:
    """Run one share of a stage, and return its counts or, for `publish`, the manifest.

    `share` is I/N, or "" for all of a stage. Raises PackError.
    """
    own = _check(stage, share)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a machine runs several shares in parallel instead
    recipe = replace(resolve(config, root), config=load_config(config, sequence_length))
    steps, done = run_stage(recipe, STAGES[stage], own)
    every = len(STAGES[stage].all_of(recipe))
    found = {"stage": stage, "share": share or None, "steps": steps, "all": every, "found_done": done}
    if stage == "publish":
        found["manifest"] = with_urls(str(recipe.published))
    return found


def _check(stage: str, share: str) -> Share:
    if stage == "pack":
        raise UsageError("bad_command_line", "--stage pack: is now two stages: --stage plan, then --stage write")
    if stage not in STAGES:
        raise UsageError("bad_command_line", f"--stage {stage}: expected {', '.join(STAGES)}{suggest(stage, STAGES)}")
    if not share:
        return WHOLE
    if not STAGES[stage].are_steps:
        raise UsageError("bad_command_line", f"--share {share}: --stage {stage} has no shares; run it once, without")
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", share)
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of:
        raise UsageError("bad_command_line", f"--share {share}: expected I/N, from 1/N to N/N, such as 3/16")
    return Share(number, of)
