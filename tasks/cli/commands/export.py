"""Commands that copy a corpus: `export` for other trainers, `push` to the Hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.options import JsonOption, ManifestArgument, RootOption, manifest_argument
from tasks.cli.output import print_lines
from tasks.inspection.manifests import find_manifest


def export(
    manifest: ManifestArgument = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            show_default=False,
            help="The format: trl, megatron, axolotl, llama-factory, xtuner, olmo-core, mds, or automodel.",
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", show_default=False, help="The folder to make. Default: data/exports/<corpus>-<format>."
        ),
    ] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Write a corpus in the format of another trainer.

    Prints what the trainer must be set to, and what the format cannot hold. A complete export is a no-op.
    """
    from tasks.cli.views.export_view import export_lines
    from tasks.exports.export import export_corpus

    print_lines(export_corpus(find_manifest(manifest, root), to, output, root), export_lines, json_output)


def push(
    manifest: Annotated[Path, manifest_argument("MANIFEST")],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="REPO",
            show_default=False,
            help="The dataset: OWNER/NAME, OWNER/NAME/FOLDER, or hf://datasets/OWNER/NAME@BRANCH/FOLDER.",
        ),
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new dataset private.")] = False,
    revision: Annotated[
        str, typer.Option(metavar="BRANCH", show_default=False, help="The branch, made if it is new. Default: main.")
    ] = "",
    message: Annotated[
        str, typer.Option(metavar="TEXT", show_default=False, help="The message of the commits. Default: name and key.")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another corpus in the same place.")] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Push a corpus to a dataset on the Hugging Face Hub.

    Data first, the dataset card and the manifest last. Files that the Hub has are not sent again. The token is that of
    HF_TOKEN or `hf auth login`.
    """
    from tasks.corpus.push import Push, push_corpus

    def progress(line: str) -> None:
        if not json_output:
            print(line, file=sys.stderr, flush=True)

    def lines(done: Push) -> list[str]:
        from tasks.core.printable import counted, in_bytes

        sent = f"sent {counted(done.sent, 'file')} of {done.files:,}, {in_bytes(done.sent_bytes)}"
        return [f"{done.url}: {'nothing to do, it is complete' if done.found_done else sent}; commit {done.commit}"]

    found = find_manifest(manifest, root)
    pushed = push_corpus(
        found, repo, private=private, revision=revision, message=message, replace=replace, report=progress
    )
    print_lines(pushed, lines, json_output)
