"""The `packcorpus` command.

    packcorpus init PATH…                       packcorpus check CONFIG
    packcorpus pack CONFIG                      packcorpus train [CORPUS] [OPTION…]
    packcorpus part CONFIG --stage NAME --part I/N
    packcorpus inspect [PATH] [--row N] [--at FILE:LINE] [--search TEXT] …
    packcorpus list                             packcorpus diff BEFORE AFTER
    packcorpus verify [MANIFEST] [--rebuild]    packcorpus repair [MANIFEST]
    packcorpus report [MANIFEST] [--output FILE]
    packcorpus export [MANIFEST] --to FORMAT [--output FOLDER]
    packcorpus push MANIFEST OWNER/NAME [--private] [--revision BRANCH]
    packcorpus schemas FOLDER

With --json a command prints one JSON object on standard output: the value that it would render as text, or
{"error": …} (docs/reference/errors.md).

Each command imports Arrow, numpy, and tokenizers only if it needs them, so that --help is immediate.
"""

from __future__ import annotations

from tasks.core import startup  # before all else

# isort: split
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.cli.options import (
    DEFAULT_CONFIG,
    ConfigArgument,
    ConfigOption,
    HiddenSizeOption,
    JsonOption,
    ManifestArgument,
    RootOption,
    SequenceLengthOption,
    manifest_argument,
)
from tasks.core.error_codes import DATA
from tasks.core.error_messages import DEBUG, JSON, as_json, as_text, is_on, to_pack_error
from tasks.core.errors import InputMissing, Interrupted, UsageError
from tasks.inspection.manifests import (
    complete_file,
    find_damaged,
    find_file,
    find_manifest,
    list_manifests,
)
from tasks.packing.balance.cost import HIDDEN_SIZE
from tasks.stores.scratch import local_path_of

app = typer.Typer(
    help="Pack conversations into training rows; inspect, verify, and train on the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# typer does not export click's exceptions; this one is raised for an invalid command line.
_BadCommandLine: Any = typer.BadParameter.__base__


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"packcorpus {version('packcorpus')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with each error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _default_config() -> Path:
    """Return the config of a command that names none. Raises InputMissing if it does not exist."""
    if not DEFAULT_CONFIG.is_file():
        raise InputMissing(
            "config_missing", f"{DEFAULT_CONFIG}: no such config; name another one, or run: packcorpus init PATH…"
        )
    return DEFAULT_CONFIG


# -- make a corpus -----------------------------------------------------------------------------------------------------


@app.command()
def init(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", show_default=False, help="Files, folders, or globs.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The config to write.")] = DEFAULT_CONFIG,
    format: Annotated[str, typer.Option(metavar="NAME", help="The record format of the files.")] = "auto",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=YOURS",
            show_default=False,
            help="A key of the format and its name in the files, such as instruction=frage; repeatable.",
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=YOURS",
            show_default=False,
            help="A role and its name in the files, such as user=customer; repeatable.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            show_default=False,
            help="A key or part to leave out of images, audio, video, or preference data; repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Inspect data files and write a commented config for them."""
    from tasks.dry_run.config_draft import write_draft

    draft = write_draft(paths, output, force, format, columns or (), roles or (), ignore or ())
    next_step = f"{output}: written; next: packcorpus check {shlex.quote(str(output))}"
    value = {"config": output, "settings": draft.values, "found": draft.summary()}
    _show(value, lambda value: [*value["found"], next_step], json_output)


@app.command()
def check(
    path: ConfigArgument = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Same as CONFIG.", hidden=True)
    ] = None,
    sequence_length: SequenceLengthOption = "",
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ROWS",
            min=1,
            show_default=False,
            help="Rows per step, for the step count; repeatable.",
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, show_default=False, help="Tokens per step, instead of --batch-size."),
    ] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of worker processes for the time estimate.")
    ] = 2,
    hidden_size: HiddenSizeOption = HIDDEN_SIZE,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Predict the result of a run from a sample of every source.

    Writes nothing and takes seconds. Exits with 65 if the run would fail.
    """
    if path and config:
        raise UsageError("bad_command_line", f"{path} and --config {config}: name one config")
    config = path or config or _default_config()
    from tasks.cli.views.dry_run_view import show_dry_run
    from tasks.config import load_config
    from tasks.dry_run.dry_run import predict
    from tasks.inspection.dry_run import summarize

    settings = load_config(config, sequence_length)
    batches = list(batch_size or [])
    if tokens_per_step:
        batches.append(max(1, tokens_per_step // settings.sequence_length))
    result = summarize(predict(settings, config.parent, root, workers), config, batches, hidden_size)
    _render(result, show_dry_run, json_output)
    if result.run_fails:
        raise typer.Exit(DATA)


@app.command()
def pack(
    config: ConfigArgument = None,
    sequence_length: SequenceLengthOption = "",
    workers: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, help="Worker processes. Default: 2.")
    ] = None,
    root: RootOption = Path(),
    check_sources: Annotated[
        bool, typer.Option("--check-sources", help="Hash every source again, also if it looks unchanged.")
    ] = False,
    on: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            show_default=False,
            help="Where the work is done: here, workers, workers:N, luigi, ray://auto, or ray://HOST:PORT. "
            "Default: workers.",
        ),
    ] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and the manifest path.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print progress and errors as lines of JSON.")] = False,
) -> None:
    """Pack the corpus of a config.

    An interrupted run resumes, and a complete one is a no-op. The last line of standard output is the path of the
    manifest. The same as: luigi --module pipeline PackCorpus --config CONFIG
    """
    config = config or _default_config()
    from tasks.cli import start

    options = [f"--sequence-length={sequence_length}"] * bool(sequence_length)
    options += [f"--workers={workers}"] * (workers is not None) + ["--check-sources"] * check_sources
    options += [f"--on={on}"] * bool(on)
    start.pack(config, root, [*options, *["--quiet"] * quiet, *["--json"] * json_output])


@app.command()
def part(
    config: ConfigArgument = None,
    stage: Annotated[
        str, typer.Option(metavar="tokenize|pack", show_default=False, help="tokenize: parts; pack: shards.")
    ] = "",
    part: Annotated[
        str, typer.Option("--part", metavar="I/N", show_default=False, help="Which share of N, from 1/N to N/N.")
    ] = "1/1",
    sequence_length: SequenceLengthOption = "",
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Do a share of the work of `pack`, on a machine that shares the files with others.

    For Slurm arrays, Kubernetes jobs, and xargs: run --stage tokenize for every share, then --stage pack for every
    share, then `packcorpus pack`, which finds all of it done and publishes the corpus.
    """
    from tasks.cli.part_command import run_part

    value = run_part(config or _default_config(), root, stage, part, sequence_length)
    _show(
        value,
        lambda value: [
            f"{value['stage']} {part}: {value['share']:,} of {value['all']:,}, "
            f"{value['found_done']:,} of them done before"
        ],
        json_output,
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="[CORPUS] [OPTION]...",
)
def train(context: typer.Context) -> None:
    """Train a QLoRA adapter on a corpus.

    CORPUS is a manifest (file, name, or key) or a corpus folder, by default that of the latest run. The options are
    those of `python -m train`, which this starts. `packcorpus train doctor` reports what this machine can train with,
    and `packcorpus train merge RUN` makes one model of an adapter and its base.
    """
    from tasks.cli import start

    start.train(context.args)


# -- inspect a corpus --------------------------------------------------------------------------------------------------


@app.command()
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
    row: Annotated[int | None, typer.Option(metavar="N", help="Show row N as text; 0 is the first.")] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The split of --row: train, validation, train_epoch_2, …"),
    ] = None,
    conversation: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show the conversation with number N in the index (#N in a row)."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="FILE:LINE", help="Show the conversation of this source line, with its row."),
    ] = None,
    line: Annotated[
        int | None,
        typer.Option(metavar="N", help="For a source file: show its line (or record) N; 1 is the first."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Show the conversations that contain TEXT."),
    ] = None,
    rejects: Annotated[bool, typer.Option("--rejects", help="Show what was rejected, and why.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The maximum number of results to list.")] = 20,
    ids: Annotated[
        bool, typer.Option("--ids", help="With a row or conversation: show token ids and boundaries.")
    ] = False,
    hidden_size: HiddenSizeOption = HIDDEN_SIZE,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Show the figures of a corpus, or its rows and conversations."""
    from tasks.cli.inspect_command import Question, answer, render

    question = Question(row, split, conversation, at, line, search, rejects, limit, ids, hidden_size)
    question.option()  # report options that exclude each other before searching for a manifest
    _render(answer(find_file(path, root), question, root), render, json_output)


@app.command("list")
def list_command(root: RootOption = Path(), json_output: JsonOption = False) -> None:
    """List all corpora in manifests/."""
    from tasks.cli.views.corpus_view import show_list

    _render(list_manifests(root), show_list, json_output)


@app.command()
def diff(
    before: Annotated[Path, manifest_argument("BEFORE")],
    after: Annotated[Path, manifest_argument("AFTER", "The one to compare it with.")],
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Compare two corpora: settings, figures, and conversations."""
    from tasks.cli.views.diff_view import show_difference
    from tasks.inspection.diff import compare

    _render(compare(find_manifest(before, root), find_manifest(after, root)), show_difference, json_output)


@app.command()
def report(
    manifest: ManifestArgument = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="The file to write. Default: next to the corpus folder."),
    ] = None,
    hidden_size: HiddenSizeOption = HIDDEN_SIZE,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Write a shareable, self-contained HTML page about a corpus."""
    path = find_manifest(manifest, root)
    from tasks.report.report import write_report

    written, size = write_report(path, output, hidden_size)
    value = {"manifest": path, "report": written, "bytes": size}
    _show(value, lambda value: [str(value["report"])], json_output)


# -- check and restore a corpus ----------------------------------------------------------------------------------------


@app.command()
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
    from tasks.inspection.verification import verify_corpus

    _render(verify_corpus(path, rebuild, config), show_checks, json_output)


@app.command()
def repair(
    manifest: ManifestArgument = None,
    config: ConfigOption = None,
    root: RootOption = Path(),
    json_output: JsonOption = False,
) -> None:
    """Restore the damaged or missing files of a corpus.

    Each has its recorded checksum afterwards; nothing else is changed.
    """
    path = find_damaged(manifest, root)
    from tasks.core.printable import from_here, printable
    from tasks.inspection.verification import Repaired, Repairs, repair_corpus

    def print_file(file: Repaired) -> None:
        if not json_output:
            print(printable(from_here(f"repaired {file.path} ({file.why}) from {file.source}")), flush=True)

    def summary(repairs: Repairs) -> list[str]:
        return [] if repairs.mended else ["nothing to repair: every file is as recorded"]

    _show(repair_corpus(path, config, print_file), summary, json_output)


@app.command()
def export(
    manifest: ManifestArgument = None,
    to: Annotated[
        str, typer.Option(metavar="FORMAT", show_default=False, help="The format; the guide on exports lists them.")
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

    _show(export_corpus(find_manifest(manifest, root), to, output, root), export_lines, json_output)


@app.command()
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
    _show(pushed, lines, json_output)


@app.command()
def schemas(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="The folder to write to.")],
) -> None:
    """Write the JSON Schemas and the table of errors to a folder."""
    from tasks.config import Config
    from tasks.core.error_codes import table
    from tasks.storage.files import to_json, write_bytes
    from tasks.storage.manifest import Manifest

    for name, model in (("config", Config), ("manifest", Manifest)):
        file = folder / f"{name}.schema.json"
        write_bytes(file, to_json(model.model_json_schema()))
        print(file)
    write_bytes(folder / "errors.md", table().encode())
    print(folder / "errors.md")


# -- output ------------------------------------------------------------------------------------------------------------


def _render(value: Any, render: Callable[[Any, Any], None], json_output: bool) -> None:
    """Print a value: as JSON, or with a renderer on a console."""
    if json_output:
        print(value_as_json(value))
        return
    from tasks.cli.views.console import open_console

    render(value, open_console())


def _show(value: Any, lines: Callable[[Any], list[str]], json_output: bool) -> None:
    """Print a value: as JSON, or as lines of text."""
    if json_output:
        print(value_as_json(value))
        return
    from tasks.core.printable import printable

    for line in lines(value):
        print(printable(line))


def value_as_json(value: Any) -> str:
    """Return a value of tasks.inspection as one line of JSON, in ASCII: file names may have lone surrogates."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


# The exit code that typer returns for a KeyboardInterrupt.
_INTERRUPTED = 130


def main() -> None:
    """Run the command. Exit codes follow sysexits.h, as in tasks.core.errors."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    startup.restore_interrupt()
    try:
        code = app(standalone_mode=False)
        if code != _INTERRUPTED:
            sys.exit(code)
        failure: Exception = Interrupted("interrupted", "interrupted; only the changes reported above were made")
    except _BadCommandLine as error:
        if not arguments:  # the help, which typer shows without arguments
            error.show()
            sys.exit(UsageError.exit_code)
        command = error.ctx.info_name if error.ctx and error.ctx.parent else None
        help_command = " ".join(filter(None, ("packcorpus", command, "--help")))
        failure = UsageError("bad_command_line", f"{error.format_message().rstrip('.')}; see {help_command}")
    except Exception as error:
        if "--debug" in arguments or is_on(DEBUG):
            raise
        failure = error
    reported = to_pack_error(failure)
    if "--json" in arguments or is_on(JSON):
        print(as_json(reported))
    else:
        print(as_text(reported), file=sys.stderr)
    sys.exit(reported.exit_code)


if __name__ == "__main__":
    main()
