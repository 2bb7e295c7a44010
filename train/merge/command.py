"""Run `packcorpus train merge RUN`: merge an adapter into its base model.

The last line of standard output is the path of the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packcorpus.tasks.core.printable import printable
from packcorpus.train.config import Parser
from packcorpus.train.machine import devices
from packcorpus.train.merge.find_run import find_base, find_run, run_parser


def parser() -> Parser:
    ours = run_parser(
        prog="packcorpus train merge",
        description="Merge the adapter of a run into its base model, and check the result against both.",
    )
    ours.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="precision of the merged weights (default: that of the base model)",
    )
    ours.add_argument(
        "--base",
        choices=("original", "dequantized"),
        help="weights of the base model to add the adapter to (default: dequantized for a run with NF4, whose loss the "
        "merged model then has)",
    )
    ours.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder to write (default: data/merged/<name of the run>-<dtype>)"
    )
    return ours


def main(arguments: list[str]) -> int:
    """Merge a run and return 0."""
    options = parser().parse_args(arguments)
    run = find_run(options.run, options.root)
    base = find_base(run)
    devices.check_libraries()
    from packcorpus.train.merge.merge_run import merge

    folder = printable(str(merge(run, base, options.dtype, options.output, options.root, options.base)))
    checked = f"packcorpus certify {printable(str(run.folder))} --merged {folder}"
    print(f"before you serve it: {checked}", file=sys.stderr, flush=True)
    print(folder)
    return 0
