"""Write tests/properties/bad_inputs.md: the message for each bad input.

    make bad-inputs      (or: python bench/reliability/bad_inputs.py [--only 16] [--write FILE])

The script runs the real commands on all bad inputs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from properties.bad_inputs import CASES, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--write", type=Path, help="the document to write")
    options = parser.parse_args()
    text = table([entry for entry in CASES if options.only is None or entry[0] in options.only])
    if options.write:
        options.write.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
