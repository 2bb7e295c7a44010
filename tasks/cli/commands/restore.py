"""Commands for the files of a corpus: `verify` checks and `repair` restores them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.options import ConfigOption, JsonOption, ManifestArgument, RootOption
from tasks.cli.output import print_lines, print_view
from tasks.core.errors import UsageError
from tasks.inspection.manifests import find_damaged, find_manifest


def verify(
    manifest: ManifestArgument = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the corpus in a temporary folder and compare every byte.")
    ] = False,
    config: ConfigOption = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Recompute every checksum of a corpus and check every row."""
    if config and not rebuild:
        raise UsageError("bad_command_line", "--config requires --rebuild")
    path = find_manifest(manifest, root)
    from tasks.cli.views.corpus_view import show_checks
    from tasks.verification.verify import Check
    from tasks.verification.verify import verify as verify_corpus

    checks = verify_corpus(path)
    if rebuild:
        from tasks.verification.rebuild import rebuild as rebuild_corpus

        checks.append(Check("rebuild", rebuild_corpus(path, config)))
    print_view({"manifest": path, "checks": checks}, show_checks, json_output)


def repair(
    manifest: ManifestArgument = None,
    config: ConfigOption = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Restore the damaged or missing files of a corpus.

    Restored files have their recorded checksums. Nothing else is changed.
    """
    path = find_damaged(manifest, root)
    from tasks.core.printable import from_here, printable
    from tasks.verification.repair import repair as repair_corpus

    mended = []
    for file in repair_corpus(path, config):
        mended.append(file)
        if not json_output:
            print(printable(from_here(f"repaired {file.path} ({file.why}) from {file.source}")), flush=True)
    value = {"manifest": path, "mended": mended}
    print_lines(value, lambda _: [] if mended else ["nothing to repair: all files match the manifest"], json_output)
