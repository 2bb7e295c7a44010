"""What a run costs, as measured: seconds of one idle core. `check` foretells by these, and a run the time that is left.

What encoding costs is not here: it differs by tokenizer and template, so it is measured on the sample, or as the run
goes. To fit them anew, on an idle machine:

    python bench/eta.py CONFIG               START, TASK (one worker would fork none)
    python bench/eta.py CONFIG --times 10    what is for a byte, a token, a conversation

Its last lines have the CPU seconds of each stage as these foretell them, beside those that they were.
"""

from __future__ import annotations

START = 1.1  # interpreter, libraries and the graph
HASHED_BYTE = 1.2e-9  # of a source: that of the file and that of the part
TASK = 0.06  # of each part, plan and shard: a fork, page faults, Luigi, syncs
PLANNED_CONVERSATION = 0.8e-6
PLANNED_TOKEN = 3e-9  # its token file is hashed: 1.4 µs in all for a conversation of 200 tokens
WRITTEN_BYTE = 2.6e-9  # of a shard
COMMIT = 0.1

# Bytes of a token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13
