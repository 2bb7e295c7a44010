"""Long-running commands: `pack` and `part` build a corpus, `train` trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.cli.options import ConfigArgument, JsonOption, RootOption, SequenceLengthOption, default_config, option
from tasks.cli.output import print_lines


def pack(
    config: ConfigArgument = None,
    sequence_length: SequenceLengthOption = "",
    workers: Annotated[int | None, option("N", "Worker processes. Default: 2.")] = None,
    root: RootOption = Path(),
    check_sources: Annotated[
        bool, typer.Option("--check-sources", help="Hash every source again, even if it looks unchanged.")
    ] = False,
    on: Annotated[
        str,
        option(
            "ENGINE",
            "The engine that does the work: here, workers, workers:N, ray://auto, or ray://HOST:PORT. "
            "Default: workers.",
        ),
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and the manifest path.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print progress and errors as lines of JSON.")] = False,
) -> None:
    """Pack the corpus of a config.

    An interrupted run resumes. If the corpus is complete, the command does nothing. The last line of standard output is
    the path of the manifest. Equivalent to: luigi --module pipeline PackCorpus --config CONFIG
    """
    config = config or default_config()
    from tasks.cli import start

    options = [f"--sequence-length={sequence_length}"] * bool(sequence_length)
    options += [f"--workers={workers}"] * (workers is not None) + ["--check-sources"] * check_sources
    options += [f"--on={on}"] * bool(on)
    start.pack(config, root, [*options, *["--quiet"] * quiet, *["--json"] * json_output])


def part(
    config: ConfigArgument = None,
    stage: Annotated[
        str, option("STAGE", "prepare, tokenize (parts), plan, write (shards), or publish. Run them in this order.")
    ] = "",
    share: Annotated[
        str, option("I/N", "The share of tokenize or write to run, from 1/N to N/N. Default: all of it.")
    ] = "",
    sequence_length: SequenceLengthOption = "",
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Run one stage of `pack`, or a share of it, on one of several machines.

    The machines share files or a bucket. For Slurm arrays, Kubernetes jobs, and xargs: run --stage prepare once,
    tokenize for every share, plan once, write for every share, and publish once. Start each stage after the stage
    before has ended everywhere; a machine that starts too early exits with 75.
    """
    from tasks.cli.shares import run_part

    value = run_part(config or default_config(), root, stage, share, sequence_length)
    print_lines(value, _lines_of_part, json_output)


def _lines_of_part(value: dict[str, Any]) -> list[str]:
    if "manifest" in value:
        return [value["manifest"]]
    name = f"{value['stage']} {value['share']}" if value["share"] else value["stage"]
    return [f"{name}: {value['steps']:,} of {value['all']:,}, {value['found_done']:,} of them already done"]


# All options of `train` are passed on, including --help.
PASSED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "options_metavar": "[CORPUS] [OPTION]...",
}


def train(context: typer.Context) -> None:
    """Train a QLoRA adapter on a corpus.

    CORPUS is a manifest (file, name, or key) or a corpus folder. The default is the corpus of the latest run. All
    options are passed to `python -m train`. `packcorpus train doctor` reports what this machine can use for training,
    and `packcorpus train merge RUN` merges an adapter into its base model.
    """
    from tasks.cli import start

    start.train(context.args)
