"""Run a share of the parts or shards of a corpus: `packcorpus part`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.config import load_config
from tasks.core.errors import UsageError
from tasks.core.suggest import suggest
from tasks.recipe import resolve
from tasks.sources.shares import Share
from tasks.stages import run_share

STAGES = ("tokenize", "pack")


def run_part(config: Path, root: Path, stage: str, part: str, sequence_length: str) -> dict[str, Any]:
    """Run one share of a stage and return the counts of its steps.

    `part` is the share as I/N. Raises PackError.
    """
    if stage not in STAGES:
        raise UsageError("bad_command_line", f"--stage {stage}: expected {' or '.join(STAGES)}{suggest(stage, STAGES)}")
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of:
        raise UsageError("bad_command_line", f"--part {part}: expected I/N, from 1/N to N/N, such as 3/16")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a machine runs several shares in parallel instead
    own = Share(number, of)
    recipe = replace(resolve(config, root), config=load_config(config, sequence_length))
    share, done = run_share(recipe, stage, own)
    every = len(recipe.parts) if stage == "tokenize" else len(recipe.shard_names())
    return {"stage": stage, "part": part, "share": share, "all": every, "found_done": done}
