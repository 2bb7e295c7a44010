"""What a run costs, as measured: seconds of one idle core. `check` foretells by these, and a run the time that is left.

What encoding costs is not here: it differs by tokenizer and template, so it is measured on the sample, or as the run
goes. To fit them anew, on an idle machine:

    python bench/eta.py CONFIG               START, TASK (one worker would fork none)
    python bench/eta.py CONFIG --times 10    what is for a byte, a token, a conversation

Its last lines have the CPU seconds of each stage as these foretell them, beside those that they were.
"""

from __future__ import annotations

START = 1.2  # interpreter, libraries and the graph
HASHED_BYTE = 1.0e-9  # of a source, by one of the threads: that of the file and that of the part
TASK = 0.03  # of each part, plan and shard: a fork, page faults, Luigi, syncs
WRITTEN_BYTE = 2.7e-9  # of a shard
COMMIT = 0.1

# Bytes of a token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13


def plan_seconds(pieces: float, tokens: float, epochs: int = 1) -> float:
    """Of the plan beside its task: 0.9 µs a conversation of 200 tokens.

    Filling rows takes the same however many pieces there are; token files are hashed, 4 bytes a token.
    """
    return 0.06 * epochs + 0.7e-6 * pieces + 1.2e-9 * tokens
