"""Run `packcorpus certify RUN`: compare what is served with what was trained.

The table and the verdict are standard output. The exit code is 0 if the best way to serve the run is sound, else 65.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packcorpus.tasks.core.error_codes import DATA
from packcorpus.tasks.core.errors import InputMissing, PackError
from packcorpus.tasks.storage.files import read_json
from packcorpus.train.config import Parser
from packcorpus.train.machine import devices
from packcorpus.train.merge.find_run import Run, base_of, find_run, run_parser

if TYPE_CHECKING:
    from packcorpus.train.certify.finding import Finding, Of, Subject


def parser() -> Parser:
    ours = run_parser(
        prog="packcorpus certify",
        description="Compare what is served with what was trained: token ids, chat template, names of the adapter, "
        "stop tokens, weights, and logits.",
    )
    ours.add_argument(
        "--merged",
        type=Path,
        metavar="FOLDER",
        help="the merged model (default: the newest merge of RUN in data/merged)",
    )
    return ours


def main(arguments: list[str]) -> int:
    """Check a run and return 0, or 65 if it has faults."""
    options = parser().parse_args(arguments)
    run = find_run(options.run, options.root)
    base, merged = base_of(run), find_merged(run, options.merged, options.root)
    devices.check_libraries()
    from packcorpus.train.certify.finding import Subject, table, verdict
    from packcorpus.train.merge.other_files import find_facts
    from packcorpus.train.model.base_model import silence_libraries

    silence_libraries()
    subject = Subject(run, base, merged, find_facts(run.record, options.root)[0], options.root)
    findings = certify(subject)
    is_sound, lines = verdict(subject, findings)
    print("\n".join([*table(findings), "", *lines]))
    return 0 if is_sound else DATA


def find_merged(run: Run, named: Path | None, root: Path) -> Path | None:
    """Return the merged model of a run: the named one, the newest one, or None."""
    if named is not None:
        if not (named / "config.json").is_file():
            raise InputMissing("model_missing", f"--merged {named}: is not a model (it has no config.json)")
        return named
    found = []
    for path in (root / "data" / "merged").glob(f"{run.folder.resolve().name}-*/merge.json"):
        values = read_json(path)
        if isinstance(values, dict) and values.get("run") == run.key:
            found.append(path)
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.parent.name)).parent if found else None


def certify(subject: Subject) -> list[Finding]:
    """Return the findings of all checks; one that cannot be made is a finding, too."""
    from packcorpus.train.certify.adapter_checks import check_adapter, check_names
    from packcorpus.train.certify.finding import Finding
    from packcorpus.train.certify.model_checks import check_logits, check_stops, check_weights
    from packcorpus.train.certify.prompt_checks import check_ids, check_template

    best: Of = "merged" if subject.merged else "adapter"
    checks: list[tuple[str, Of, Callable[[Subject], Iterator[Finding]]]] = [
        ("ids", best, check_ids),
        ("template", best, check_template),
        ("stops", best, check_stops),
        ("adapter", "run", check_adapter),
        ("names", "adapter", check_names),
        ("weights", best, check_weights),
        ("logits", best, check_logits),
    ]
    findings: list[Finding] = []
    for name, of, check in checks:
        print(f"checking {name}", file=sys.stderr, flush=True)
        try:
            findings += check(subject)
        except PackError as error:
            findings.append(Finding(name, of, "FAULT", str(error)))
        except (RuntimeError, ValueError, OSError, MemoryError) as error:  # of a library
            reason = " ".join(str(error).split())[:200]
            findings.append(Finding(name, of, "skipped", f"{type(error).__name__}: {reason}"))
    order = list(dict.fromkeys(finding.check for finding in findings))
    findings.sort(key=lambda finding: order.index(finding.check))
    if subject.merged is None:
        return findings
    unmerged = ("base", "adapter")
    return [
        replace(finding, result="avoid") if finding.result == "FAULT" and finding.of in unmerged else finding
        for finding in findings
    ]
