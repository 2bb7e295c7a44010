"""Cost model of `packcorpus check` and of the time remaining.

The constants are measured seconds of one idle core. The cost of encoding depends on tokenizer and template, so it is
measured on the sample, or during the run. To refit the constants, run on an idle machine:

    python bench/eta.py CONFIG               for START, TASK, STEP (not with one worker, which forks no process)
    python bench/eta.py CONFIG --times 10    for the constants per byte, token, and conversation

The last lines of its output compare the predicted and the measured CPU seconds of each stage.
"""

from __future__ import annotations

START = 1.2  # interpreter, libraries and the graph
HASHED_BYTE = 1.0e-9  # of a source, per thread: hashed once as a file and once as a part
TASK = 0.03  # a fork, page faults, Luigi, syncs
STEP = 0.007  # per part and shard, in a worker that stays: two files, two lists of all parts
WRITTEN_BYTE = 2.7e-9  # of a shard
COMMIT = 0.1

# Bytes per token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13


def plan_seconds(pieces: float, tokens: float, epochs: int = 1) -> float:
    """Return the seconds of the plan, without its TASK.

    A conversation of 200 tokens takes 0.9 µs. Filling rows takes the same time for any number of pieces. Token files
    are hashed, 4 bytes per token.
    """
    return 0.06 * epochs + 0.7e-6 * pieces + 1.2e-9 * tokens
