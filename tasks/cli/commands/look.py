"""Commands that show corpora: `inspect`, `list`, `diff`, and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.options import JsonOption, ManifestArgument, RootOption, manifest_argument, option
from tasks.cli.output import print_lines, print_view
from tasks.inspection.manifests import complete_file, find_file, find_manifest, list_manifests
from tasks.stores.scratch import local_path_of


def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            show_default=False,
            parser=local_path_of,
            help="A manifest (file, URL, name, or key), corpus folder, shard, source file, or config. "
            "Default: the corpus of the latest run.",
            autocompletion=complete_file,
        ),
    ] = None,
    row: Annotated[int | None, option("N", "Show row N as text; 0 is the first.")] = None,
    split: Annotated[
        str | None,
        option("NAME", "The split of --row: train, validation, train_epoch_2, …; train-512 with several lengths."),
    ] = None,
    conversation: Annotated[
        int | None, option("N", "Show the conversation with number N in the index (#N in a row).")
    ] = None,
    at: Annotated[str | None, option("FILE:LINE", "Show the conversation of this source line, with its row.")] = None,
    line: Annotated[int | None, option("N", "For a source file: show its line (or record) N; 1 is the first.")] = None,
    search: Annotated[str | None, option("TEXT", "Show the conversations that contain TEXT.")] = None,
    rejects: Annotated[
        bool, typer.Option("--rejects", help="Show the rejected conversations and the reasons.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The maximum number of results to list.")] = 20,
    ids: Annotated[
        bool, typer.Option("--ids", help="With a row or conversation: show token ids and boundaries.")
    ] = False,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Show the figures of a corpus, or its rows and conversations."""
    from tasks.cli.questions import Question, answer, render

    question = Question(row, split, conversation, at, line, search, rejects, limit, ids)
    question.option()  # report options that exclude each other before searching for a manifest
    print_view(answer(find_file(path, root), question, root), render, json_output)


def list_command(root: RootOption = Path(), json_output: JsonOption = False) -> None:
    """List all corpora in manifests/."""
    from tasks.cli.views.corpus_view import show_list

    print_view(list_manifests(root), show_list, json_output)


def diff(
    before: Annotated[Path, manifest_argument("BEFORE")],
    after: Annotated[Path, manifest_argument("AFTER", "The corpus to compare it with.")],
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="List at most N removed and N added conversations; all are counted.")
    ] = 10_000,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Compare two corpora: settings, figures, and conversations."""
    from tasks.cli.views.diff_view import show_difference
    from tasks.inspection.diff import compare

    print_view(compare(find_manifest(before, root), find_manifest(after, root), limit), show_difference, json_output)


def report(
    manifest: ManifestArgument = None,
    output: Annotated[Path | None, option("FILE", "The file to write. Default: next to the corpus folder.")] = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Write a shareable, self-contained HTML page about a corpus."""
    path = find_manifest(manifest, root)
    from tasks.report.report import write_report

    written, size = write_report(path, output)
    value = {"manifest": path, "report": written, "bytes": size}
    print_lines(value, lambda value: [str(value["report"])], json_output)
