"""The `packcorpus` command: looks at a corpus, checks it and mends it. (Making one is Luigi's: see pipeline.)

    packcorpus init PATH…                       packcorpus check FILE
    packcorpus inspect [PATH] [--row N] [--at FILE:LINE] [--search TEXT] …
    packcorpus list                             packcorpus diff MANIFEST MANIFEST
    packcorpus verify [MANIFEST] [--rebuild]    packcorpus repair MANIFEST
    packcorpus report [MANIFEST] [--output FILE]
    packcorpus schemas FOLDER

With --json a command prints one JSON object on standard output: its result, or {"error": …} (docs/errors.md).

Arrow, numpy and the tokenizers are imported by the commands that need them, so that --help comes at once.
"""

from __future__ import annotations

from tasks.core import startup  # before all else

# isort: split
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from tasks.core.error_codes import DATA
from tasks.core.error_messages import DEBUG, JSON, as_json, as_text, foreseen, is_on
from tasks.core.errors import Interrupted, UsageError
from tasks.inspection import manifests
from tasks.inspection.manifests import (
    MANIFESTS,
    complete_file,
    complete_manifest,
    find_damaged,
    find_file,
    find_manifest,
)

app = typer.Typer(
    help="Look at a corpus of training rows and check it.",
    epilog="A corpus is made with: luigi --module pipeline PackCorpus --config FILE",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# typer reads annotations at run time, on Python 3.11 too.
ManifestArgument = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(
        metavar="MANIFEST",
        show_default=False,
        help="A manifest (file, name or key) or a corpus folder; absent: the newest in manifests/.",
        autocompletion=complete_manifest,
    ),
]
_NAMED = typer.Argument(
    metavar="MANIFEST",
    show_default=False,
    help="A manifest (file, name or key) or a corpus folder.",
    autocompletion=complete_manifest,
)
OneManifest = Annotated[Path, _NAMED]
DamagedManifest = Annotated[Optional[Path], _NAMED]  # noqa: UP045

ConfigOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        metavar="FILE", show_default=False, help="The config of the corpus, where run.json does not lead to its folder."
    ),
]

RootOption = Annotated[
    Path, typer.Option(metavar="FOLDER", show_default=False, help="The project's root, with data/ and manifests/.")
]

JsonOption = Annotated[bool, typer.Option("--json", envvar=JSON, show_envvar=False, help="One JSON object.")]

# typer keeps click's exceptions to itself; this is the one of a command line that cannot be read.
_BadCommandLine: Any = typer.BadParameter.__base__


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"packcorpus {version('packcorpus')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


LookedAtArgument = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="A manifest, a corpus folder, a shard, a source file or a config; absent: the newest in manifests/.",
        autocompletion=complete_file,
    ),
]


@app.command()
def inspect(
    path: LookedAtArgument = None,
    row: Annotated[Optional[int], typer.Option(metavar="N", help="Show row N, decoded; 0 is the first.")] = None,  # noqa: UP045
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="The split that --row counts in: train, validation, train_epoch_2, …"),
    ] = None,
    conversation: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Show the conversation with this number in the index (#N in a row)."),
    ] = None,
    at: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE:LINE", help="Show the conversation of this line, and the row that it went to."),
    ] = None,
    line: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Of a source: show its line (or record) N; 1 is the first."),
    ] = None,
    search: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXT", help="Show the conversations that contain TEXT."),
    ] = None,
    rejects: Annotated[bool, typer.Option("--rejects", help="Show what was rejected, and why.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many to list.")] = 20,
    ids: Annotated[
        bool, typer.Option("--ids", help="With a row or conversation: show token ids and boundaries.")
    ] = False,
    as_object: JsonOption = False,
) -> None:
    """Show what a corpus is made of, and any row, conversation or reject of it as text."""
    from tasks.cli.console import open_console
    from tasks.cli.inspect_command import Asked, view

    asked = Asked(row, split, conversation, at, line, search, rejects, limit, ids)
    asked.one()  # what does not go together is said before a manifest is looked for
    found = view(find_file(path), asked, MANIFESTS)
    if as_object:
        _print_object(found.as_object())
    else:
        found.show(open_console())


@app.command()
def verify(
    manifest: ManifestArgument = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the corpus again in a temporary folder and compare every byte.")
    ] = False,
    config: ConfigOption = None,
    as_object: JsonOption = False,
) -> None:
    """Recompute every digest of a corpus and check every row of it."""
    if config and not rebuild:
        raise UsageError("bad_command_line", "--config goes with --rebuild")
    path = find_manifest(manifest)
    from tasks.cli import corpus_view
    from tasks.cli.console import open_console
    from tasks.verification.verify import verify as verify_corpus

    checks = verify_corpus(path).checks
    if rebuild:
        from tasks.verification.rebuild import rebuild as make_again

        checks = [*checks, ("rebuild", make_again(path, config))]
    if as_object:
        _print_object({"manifest": path, "checks": [{"name": name, "found": found} for name, found in checks]})
    else:
        corpus_view.checks(checks, path, open_console())


@app.command()
def repair(
    manifest: DamagedManifest = None,
    config: ConfigOption = None,
    as_object: JsonOption = False,
) -> None:
    """Put back what is damaged or missing of a corpus, to the recorded digests, and touch nothing else."""
    from tasks.core.printable import printable
    from tasks.verification.repair import repair as mend

    manifest = find_damaged(manifest)
    done = []
    for mended in mend(manifest, config):
        done.append({"path": mended.path, "why": mended.why, "source": mended.source})
        if not as_object:
            print(printable(f"mended {mended.path} ({mended.why}) from {mended.source}"), flush=True)
    if as_object:
        _print_object({"manifest": manifest, "mended": done})
    elif not done:
        print("nothing to mend: every file is as it was recorded")


@app.command()
def init(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", show_default=False, help="Files, folders or globs.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The config to write.")] = Path("corpus.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_object: JsonOption = False,
) -> None:
    """Look at files and write a commented config for them."""
    from tasks.core.printable import printable
    from tasks.dry_run.config_draft import write_draft

    draft = write_draft(paths, output, force)
    if as_object:
        _print_object({"config": output, "settings": draft.values, "found": draft.summary()})
        return
    for line in draft.summary():
        print(printable(line))
    print(printable(f"{output}: written; next: packcorpus check {shlex.quote(str(output))}"))


@app.command()
def check(
    path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="FILE", show_default=False, help="The config of the corpus."),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="The same, as the run has it."),
    ] = None,
    sequence_length: Annotated[str, typer.Option(metavar="N", show_default=False, help="Overrides the config's.")] = "",
    batch_size: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(metavar="ROWS", min=1, show_default=False, help="Rows a step, to tell steps; may be repeated."),
    ] = None,
    tokens_per_step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="TOKENS", min=1, show_default=False, help="The same in tokens, as the training has it."),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Of the run whose time is told.")] = 2,
    root: RootOption = Path(),
    as_object: JsonOption = False,
) -> None:
    """Look at a sample of every source and tell what a run would give. Writes nothing, takes seconds.

    Exits with 65 where the run would fail.
    """
    if path and config:
        raise UsageError("bad_command_line", f"{path} and --config {config}: name one config")
    config = path or config
    if config is None:
        raise UsageError("bad_command_line", "name the config: packcorpus check corpus.yaml")
    from tasks.cli import dry_run_view
    from tasks.cli.console import open_console
    from tasks.config import load_config
    from tasks.dry_run.dry_run import predict

    settings = load_config(config, sequence_length)
    batches = list(batch_size or [])
    if tokens_per_step:
        batches.append(max(1, tokens_per_step // settings.sequence_length))
    found = predict(settings, config.parent, root, workers)
    if as_object:
        _print_object(dry_run_view.as_object(found, config, batches))
    else:
        dry_run_view.show(found, config, batches, open_console())
    if found.fails:
        raise typer.Exit(DATA)


@app.command()
def diff(
    before: OneManifest,
    after: OneManifest,
    as_object: JsonOption = False,
) -> None:
    """Show what is another in a second manifest: sources, settings, figures, conversations that came or went."""
    from tasks.cli import diff_view
    from tasks.cli.console import open_console
    from tasks.inspection.diff import compare

    paths = find_manifest(before), find_manifest(after)
    found = compare(*paths)
    if as_object:
        _print_object(diff_view.as_object(found, *paths))
    else:
        diff_view.show(found, *paths, open_console())


@app.command("list")
def list_manifests(as_object: JsonOption = False) -> None:
    """List all manifests in manifests/."""
    from tasks.cli import list_view
    from tasks.cli.console import open_console

    found = manifests.find_manifests(MANIFESTS)
    if as_object:
        _print_object(list_view.as_object(found))
    elif found:
        list_view.show(found, open_console())
    else:
        print(f"{MANIFESTS}/ holds no manifest; make one with: luigi --module pipeline PackCorpus --config FILE")


@app.command()
def report(
    manifest: ManifestArgument = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", show_default=False, help="Where it goes; else beside the corpus folder."),
    ] = None,
    as_object: JsonOption = False,
) -> None:
    """Write what happened to the data as one HTML page to pass on."""
    path = find_manifest(manifest)
    from tasks.core.printable import printable
    from tasks.report.report import write_report

    written, size = write_report(path, output)
    if as_object:
        _print_object({"manifest": path, "report": written, "bytes": size})
    else:
        print(printable(str(written)))


@app.command()
def schemas(folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False)]) -> None:
    """Write the JSON Schemas of config and manifest, and the table of all errors, into a folder."""
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


def _print_object(value: dict[str, Any]) -> None:
    print(json.dumps(value, default=str))  # as tasks.core.error_messages has it


# What typer makes of a KeyboardInterrupt.
_INTERRUPTED = 130


def main() -> None:
    """Entry point. Exit codes are those of sysexits.h, as in tasks.core.errors."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    startup.is_over()
    try:
        code = app(standalone_mode=False)
        if code != _INTERRUPTED:
            sys.exit(code)
        wrong: Exception = Interrupted("interrupted", "interrupted; nothing was changed but what was said")
    except _BadCommandLine as error:
        if not arguments:  # the help, which typer shows where nothing is asked
            error.show()
            sys.exit(UsageError.exit_code)
        wrong = UsageError("bad_command_line", f"{error.format_message().rstrip('.')}; see packcorpus --help")
    except Exception as error:
        if "--debug" in arguments or is_on(DEBUG):
            raise
        wrong = error
    told = foreseen(wrong)
    if "--json" in arguments or is_on(JSON):
        print(as_json(told))
    else:
        print(as_text(told), file=sys.stderr)
    sys.exit(told.exit_code)


if __name__ == "__main__":
    main()
