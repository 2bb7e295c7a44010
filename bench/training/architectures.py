"""Train all tiny architectures with the real command, and compare losses.

    .venv/bin/python bench/training/architectures.py [NAME …] [--two-ranks]

Each model trains three steps. The losses of the first two, before the adapter has an effect, must be those of the same
conversations, each computed alone by the class of Transformers. Prints one line per model. The exit code is 1 if a
model does not train as the table of the tests says, such as one that ends with E791.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from support.training.architectures import ARCHITECTURES  # noqa: E402
from support.training.tiny_runs import outcome  # noqa: E402
from transformers.utils import logging  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in ARCHITECTURES (default: all)")
    parser.add_argument("--two-ranks", action="store_true", help="train in two ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    failed = 0
    for name in options.names or ARCHITECTURES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(name, Path(folder), 2 if options.two_ranks else 1)
        expected = ARCHITECTURES[name][1]
        good = found.agrees(expected)
        failed += not good
        left = f", {found.unused} layers left out" if found.unused else ""
        print(
            f"{'ok  ' if good else 'FAIL'} {name:<24} {found.way}{left} ({found.difference:.0e}, "
            f"{time.perf_counter() - start:.1f} s)" + ("" if good else f"; expected: {expected}"),
            flush=True,
        )
    print(f"{failed} of {len(options.names or ARCHITECTURES)} are not as the table says")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
