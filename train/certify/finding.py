"""A finding of a check, the run that is checked, and the table of all findings.

find_run, find_base, merge.json ─Subject─▶ checks ─▶ [Finding, …] ─table, verdict─▶ lines of at most 80 columns
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from packcorpus.tasks.core.printable import counted, from_here, printable
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer_files, open_found
from packcorpus.train.certify.prompts import Prompt, prompts_of
from packcorpus.train.merge.find_run import Base, Run
from packcorpus.train.merge.other_files import Facts

WIDTH = 80

# What a finding is about. "run" is everything that is made of the adapter.
Of = Literal["merged", "base", "adapter", "run"]
# "avoid" is a fault of base plus adapter if there is a merged model to serve instead. "note" is a condition of serving.
Result = Literal["ok", "FAULT", "avoid", "note", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of one part. `text` names place, value, and fix."""

    check: str
    of: Of
    result: Result
    text: str


@dataclass(frozen=True)
class Subject:
    """A run with its base model, its merged model, and its corpus, if they exist."""

    run: Run
    base: Base
    merged: Path | None
    facts: Facts | None
    root: Path

    @property
    def folders(self) -> dict[Of, Path]:
        """Return the folders that a server loads."""
        found: dict[Of, Path] = {"base": self.base.folder}
        return found | ({"merged": self.merged} if self.merged else {})

    @property
    def corpus_folder(self) -> Path | None:
        """Return the folder of the corpus; None if its files cannot be used."""
        return self.facts.corpus.folder if self.facts and self.facts.corpus else None

    @cached_property
    def prompts(self) -> tuple[list[Prompt], str]:
        """Return prompts of the corpus, and what they are."""
        if self.facts is None or self.corpus_folder is None:
            return [], "the corpus is missing"
        manifest = self.facts.manifest
        encoder = open_found(manifest, find_tokenizer_files(manifest, self.corpus_folder))
        return prompts_of(manifest, self.corpus_folder, encoder, self.root)


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of the table of findings."""
    widths = 10, 7, 7
    start = "  ".join(title.ljust(width) for title, width in zip(("check", "of", "result"), widths, strict=True))
    yield start.rstrip()
    room, before = WIDTH - sum(widths) - 2 * len(widths), ""
    for finding in findings:
        cells = ("" if finding.check == before else finding.check, finding.of, finding.result)
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        for line in textwrap.wrap(printable(from_here(finding.text)), room, break_on_hyphens=False):
            yield start + line
            start = " " * (WIDTH - room)
        before = finding.check


def verdict(subject: Subject, findings: Sequence[Finding]) -> tuple[bool, list[str]]:
    """Return whether the best way to serve the run is sound, and the lines of it."""
    faults = [finding.of for finding in findings if finding.result == "FAULT"]
    served = str(subject.merged) if subject.merged else "base plus adapter"
    text = f"{served} is served as it was trained"
    if faults:
        text = f"{counted(len(faults), 'fault')}: what is served is not what was trained"
        if subject.merged is None and "run" not in faults:
            text += f"; serve the merged model: packcorpus train merge {subject.run.folder}, then certify again"
    elif any(finding.result == "avoid" for finding in findings):
        text += "; serve this merged model, not base plus adapter"
    skipped = [f"{finding.check} of {finding.of}" for finding in findings if finding.result == "skipped"]
    if skipped:
        text += f". Not checked: {', '.join(dict.fromkeys(skipped))}"
    name = "NOT SOUND" if faults else "SOUND"
    return not faults, textwrap.wrap(printable(from_here(f"{name}: {text}")), WIDTH, break_on_hyphens=False)
