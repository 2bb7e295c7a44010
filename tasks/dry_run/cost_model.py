"""Define the cost model of `packcorpus check` and of the time remaining: measured seconds of one idle core.

The cost of encoding depends on tokenizer and template, so it is measured on the sample, or during the run. To refit the
constants, on an idle machine:

    python bench/eta.py CONFIG               START, TASK, STEP (one worker would fork none)
    python bench/eta.py CONFIG --times 10    constants per byte, token, and conversation

Its last lines compare predicted and measured CPU seconds of each stage.
"""

from __future__ import annotations

START = 1.2  # interpreter, libraries and the graph
HASHED_BYTE = 1.0e-9  # of a source, per thread: hashed once as a file and once as a part
TASK = 0.03  # a fork, page faults, Luigi, syncs
STEP = 0.007  # per part and shard, in a process that stays: two files, two lists of all parts
WRITTEN_BYTE = 2.7e-9  # of a shard
COMMIT = 0.1

# Bytes per token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13


def plan_seconds(pieces: float, tokens: float, epochs: int = 1) -> float:
    """Return the seconds of the plan without its TASK: 0.9 µs per conversation of 200 tokens.

    Filling rows takes the same time for any number of pieces. Token files are hashed, 4 bytes per token.
    """
    return 0.06 * epochs + 0.7e-6 * pieces + 1.2e-9 * tokens
