"""The `packcorpus` command.

    packcorpus init PATH…                       packcorpus check CONFIG
    packcorpus pack CONFIG                      packcorpus train [CORPUS] [OPTION…]
    packcorpus part CONFIG --stage NAME --share I/N
    packcorpus inspect [PATH] [--row N] [--at FILE:LINE] [--search TEXT] …
    packcorpus list                             packcorpus diff BEFORE AFTER
    packcorpus verify [MANIFEST] [--rebuild]    packcorpus repair [MANIFEST]
    packcorpus report [MANIFEST] [--output FILE]
    packcorpus export [MANIFEST] --to FORMAT [--output FOLDER]
    packcorpus push MANIFEST OWNER/NAME [--private] [--revision BRANCH]

With --json, a command prints one JSON object on standard output: the value that it would otherwise render as text, or
{"error": …} (docs/reference/errors.md).

A command imports Arrow, numpy, and tokenizers only if it needs them, so that --help is immediate.
"""

from __future__ import annotations

from tasks.core import startup  # before all else

# isort: split
import sys
from typing import Annotated, Any

import typer

from tasks.cli import commands
from tasks.core.errors import Interrupted, UsageError
from tasks.core.messages import DEBUG, JSON, as_json, as_text, is_on, to_pack_error

app = typer.Typer(
    help="Pack conversations into training rows; inspect, verify, and train on the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# The exception of click for an invalid command line, which typer does not export.
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


# In the order of the help. To add a command, add a function to tasks/cli/commands.py and a line here.
app.command()(commands.init)
app.command()(commands.check)
app.command()(commands.pack)
app.command()(commands.part)
app.command(**commands.PASSED_ON)(commands.train)
app.command()(commands.inspect)
app.command("list")(commands.list_command)
app.command()(commands.diff)
app.command()(commands.report)
app.command()(commands.verify)
app.command()(commands.repair)
app.command()(commands.export)
app.command()(commands.push)


# The exit code that typer returns for a KeyboardInterrupt.
_INTERRUPTED = 130


def main() -> None:
    """Run the command line.

    Exit codes follow sysexits.h, as in tasks.core.errors.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    arguments = sys.argv[1:]
    startup.end()
    try:
        code = app(standalone_mode=False)
        if code != _INTERRUPTED:
            sys.exit(code)
        failure: Exception = Interrupted("interrupted", "interrupted; only the changes reported above were made")
    except _BadCommandLine as error:
        if not arguments:  # the error is the help (no_args_is_help)
            error.show()
            sys.exit(UsageError.exit_code)
        command = error.ctx.info_name if error.ctx and error.ctx.parent else None
        if error.ctx is None and arguments[0] in typer.main.get_group(app).commands:  # an option lacks its value
            command = arguments[0]
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
