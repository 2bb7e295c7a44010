"""Commands that copy a corpus: `export` for other trainers, `push` to the Hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.options import JsonOption, ManifestArgument, RootOption, manifest_argument, option
from tasks.cli.output import print_lines
from tasks.inspection.manifests import find_manifest


def export(
    manifest: ManifestArgument = None,
    to: Annotated[
        str,
        option("FORMAT", "The format: trl, megatron, axolotl, llama-factory, xtuner, olmo-core, mds, or automodel."),
    ] = "",
    output: Annotated[
        Path | None, option("FOLDER", "The folder to write to. Default: data/exports/<corpus>-<format>.")
    ] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Export a corpus to the format of another trainer.

    Prints the settings for the trainer and the limits of the format. If the export is complete, the command does
    nothing.
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
    private: Annotated[bool, typer.Option("--private", help="If the dataset is new, create it as private.")] = False,
    revision: Annotated[
        str, option("BRANCH", "The branch, which is created if it does not exist. Default: main.")
    ] = "",
    message: Annotated[str, option("TEXT", "The commit message. Default: the name and key of the corpus.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another corpus in the same place.")] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Push a corpus to a dataset on the Hugging Face Hub.

    Uploads the data first, then the dataset card and the manifest. Files that are already on the Hub are not uploaded
    again. Uses the token from HF_TOKEN or `hf auth login`.
    """
    from tasks.corpus.push import Push, push_corpus

    def progress(line: str) -> None:
        from tasks.core.printable import printable

        if not json_output:
            print(printable(line), file=sys.stderr, flush=True)

    def lines(done: Push) -> list[str]:
        from tasks.core.printable import counted, in_bytes

        sent = f"sent {counted(done.sent, 'file')} of {done.files:,}, {in_bytes(done.sent_bytes)}"
        return [f"{done.url}: {'already complete, nothing to do' if done.found_done else sent}; commit {done.commit}"]

    found = find_manifest(manifest, root)
    pushed = push_corpus(
        found, repo, private=private, revision=revision, message=message, replace=replace, report=progress
    )
    print_lines(pushed, lines, json_output)
