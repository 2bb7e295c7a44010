"""Find words that this project does not use, and docstrings with a long summary.

    python bench/words.py [FILE…]        prints FILE:LINE of each problem; exit code 1 if there is one

The script reads the identifiers, comments, and texts of all source and documentation files. It finds a word in any case
and as part of a name (`is_told`), but not within another word (`recommend`), and prints the word to use instead.
EXCUSED lists the files that must have such a word. The summary of a docstring is its first line, with at most SUMMARY
characters; ruff checks the rest of its form.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".jinja", ".css", ".cfg", ".txt"}
PLACES = (
    "*",
    ".ci/*",
    "bench/**/*",
    "data/sample/*",
    "docs/**/*",
    "pipeline/**/*",
    "packcorpus/*",
    "tasks/**/*",
    "tests/**/*",
    "train/**/*",
)

# The maximum length of the first line of a docstring, in characters.
SUMMARY = 80

WORDS = {
    r"told|(?<!\.)(?<!def )tells?(?! apart| whether| which)|telling": "report, show, or print",
    r"foretells?|foretold|foresees?|foresaw|foreseen": "predict or estimate",
    r"(?<!cannot_)(?:mend|mends|mended|mending)": "repair or fix",
    r"anew": "again, or re- as in rebuild",
    r"whence|wherein|whereby|thereby|therein|hereby": "a short sentence",
    r"(?<!damaged_)artefacts?": "artifact",
    r"licences?": "license",
    r"coloured|colours?|behaviours?|neighbours?|neighbouring": "American spelling",
    r"(?:token|normal|initial|serial|recogn|optim|summar|minim|special|parallel|random)is(?:ed?|es|ing|ation)": "-ize",
    r"(?<!there )(?:is|are) no(?! longer| more| less| worse| better)": "is not a, or there is no",
    r"(?<!there )(?-i:is none|are none)": "does not exist, or is missing",
    r"stands? (?:in(?! for)|where|beside|below|above|alone|twice|there|here)|stood (?:in|beside)": "is or appears",
    r"lies? (?:in|at|on|below|beside|beneath|where|here|there|within|outside|elsewhere)": "is, or is stored in",
    r"as (?:it|they) stands?": "as is, or verbatim",
    r"(?:says?|said|speaks?) of|is said|are said": "describes, or the message",
    r"in the place of": "instead of, or replaces",
    r"the begin": "the beginning or the start",
    r"for ever": "forever, or endlessly",
    r"another than": "different from",
    r"(?<!once )upon": "on",
    r"can not": "cannot",
    r"need(?:s)? not": "does not need to",
    r"over-long": "overlong",
    r"what is (?:said|told|foreseen|over-long)": "the noun: the message, the error, …",
    r"look(?:s|ed)? (?:like|as if) it was (?:cut|written)": "seems truncated",
    r"goes? on from": "continues from",
    r"not yet there|is not there|are not there": "does not exist, or is missing",
}
EXCUSED = {
    "bench/words.py": "",
    "tests/project/test_words.py": "",
    "CHANGELOG.md": "",
    "docs/changelog.md": "",
    # The config key `license` had another spelling.
    "tasks/config.py": "licence",
    "tests/test_config.py": "licence",
    "tests/corpus/test_card.py": "licence",
    "tests/test_recipe.py": "licence",
    "docs/reference/config.md": "licence",
    "docs/generate.py": "licence",
    "tasks/storage/keys.py": "licence",
    "tests/verification/test_repair.py": "licence",
    # The JSON key `mended` of `packcorpus repair --json`.
    "tasks/cli/app.py": "mended",
}
# Matches a part of a name in snake_case or CamelCase, but not a part of a longer word.
START = r"(?:(?<![A-Za-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
END = r"(?-i:(?![a-z]))"
PATTERN = re.compile(START + "(?:" + "|".join(f"(?P<w{n}>{word})" for n, word in enumerate(WORDS)) + ")" + END, re.I)


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, what to use instead)."""
    suggestions = list(WORDS.values())
    for number, line in enumerate(text.splitlines(), start=1):
        for match in PATTERN.finditer(line):
            yield number, match[0], suggestions[int(str(match.lastgroup)[1:])]


def long_summaries(source: str) -> Iterator[tuple[int, int]]:
    """Yield (line, characters) of each docstring with a summary that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(summary) > SUMMARY:
                yield node.body[0].lineno, len(summary)


def files() -> Iterator[Path]:
    for place in PLACES:
        yield from (path for path in sorted(ROOT.glob(place)) if path.suffix in SUFFIXES or path.name == "Makefile")


def main() -> int:
    found = 0
    for path in [Path(name).resolve() for name in sys.argv[1:]] or files():
        if not path.is_file() or "site-packages" in path.parts:
            continue
        name = path.relative_to(ROOT).as_posix()
        excused, text = EXCUSED.get(name), path.read_text(encoding="utf-8")
        for line, word, suggestion in find(text):
            if excused is None or (excused and word.lower() != excused):
                print(f'{name}:{line}: "{word}": {suggestion}')
                found += 1
        for line, characters in long_summaries(text) if path.suffix == ".py" else ():
            print(f"{name}:{line}: the first line of the docstring has {characters} characters; at most {SUMMARY}")
            found += 1
    if found:
        print(f"{found} problems", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
