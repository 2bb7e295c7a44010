"""Train an adapter on a corpus.

This package never imports `pipeline`.

    packcorpus train sample --base-model Qwen/Qwen3-8B

    manifest ─data─▶ verified rows in memory ──────────────────────┐
    settings ─model─▶ base model with an adapter, proven isolated ─┴─loop─▶ adapter, tokenizer, record, picture
    machine: the device, one process per GPU, signals

The names that other trainers use are names of `packcorpus`.
"""

import logging

# On import, bitsandbytes warns about kernels that it would use on some CPUs.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
