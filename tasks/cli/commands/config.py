"""Commands for a config: `init` drafts it, `check` predicts its run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tasks.cli.options import (
    DEFAULT_CONFIG,
    ConfigArgument,
    JsonOption,
    RootOption,
    SequenceLengthOption,
    default_config,
    option,
)
from tasks.cli.output import print_lines, print_view
from tasks.core.error_codes import DATA
from tasks.core.errors import UsageError


def init(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", show_default=False, help="Files, folders, or globs.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The config to write.")] = DEFAULT_CONFIG,
    format: Annotated[str, typer.Option(metavar="NAME", help="The record format of the files.")] = "auto",
    columns: Annotated[
        list[str] | None,
        option("OURS=YOURS", "A key of the format and its name in the files, such as instruction=frage; repeatable."),
    ] = None,
    roles: Annotated[
        list[str] | None, option("OURS=YOURS", "A role and its name in the files, such as user=customer; repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        option("KEY", "A key or content part with images, audio, video, or preference data to ignore; repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Inspect data files and write a commented config for them."""
    from tasks.dry_run.config_draft import write_draft

    draft = write_draft(paths, output, force, format, columns or (), roles or (), ignore or ())
    next_step = f"{output}: written; next: packcorpus check {shlex.quote(str(output))}"
    value = {"config": output, "settings": draft.values, "found": draft.summary()}
    print_lines(value, lambda value: [*value["found"], next_step], json_output)


def check(
    path: ConfigArgument = None,
    config: Annotated[Path | None, option("FILE", "Same as CONFIG.", hidden=True)] = None,
    sequence_length: SequenceLengthOption = "",
    batch_size: Annotated[
        list[int] | None, option("ROWS", "Rows per step, for the step count; repeatable.", min=1)
    ] = None,
    tokens_per_step: Annotated[int | None, option("TOKENS", "Tokens per step, instead of --batch-size.", min=1)] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of worker processes for the time estimate.")
    ] = 2,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Predict the result of a run from a sample of every source.

    It takes seconds and writes nothing. The exit code is 65 if the run would fail.
    """
    if path and config:
        raise UsageError("bad_command_line", f"{path} and --config {config}: name one config")
    config = path or config or default_config()
    from tasks.cli.views.check_view import show_prediction
    from tasks.config import load_config
    from tasks.dry_run.dry_run import predict

    settings = load_config(config, sequence_length)
    batches = list(batch_size or [])
    if tokens_per_step:
        batches.append(max(1, tokens_per_step // settings.sequence_length))
    result = replace(predict(settings, config.parent, root, workers, batches=batches), config=config)
    print_view(result, show_prediction, json_output)
    if result.run_fails:
        raise typer.Exit(DATA)
