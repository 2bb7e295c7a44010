"""Arguments and options that several commands share, and the output of a command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from packcorpus.tasks.core.errors import InputMissing
from packcorpus.tasks.core.messages import JSON
from packcorpus.tasks.core.printable import digits_of
from packcorpus.tasks.inspection.manifests import complete_manifest
from packcorpus.tasks.stores.urls import local_path_of, root_of

_MANIFEST = "A manifest (file, URL, name, or key) or a corpus folder."


def manifest_argument(metavar: str, help_text: str = _MANIFEST) -> Any:
    """Return an argument that names a corpus."""
    return typer.Argument(
        metavar=metavar,
        show_default=False,
        parser=local_path_of,
        help=help_text,
        autocompletion=complete_manifest,
    )


def number(text: str) -> int:
    """Parse an integer, which may be as messages show it: 22,298, or #22,298."""
    try:
        return int(digits_of(str(text)))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid integer.") from None


def positive(text: str) -> int:
    """Parse an integer of at least 1 like `number`."""
    if (value := number(text)) < 1:
        raise typer.BadParameter(f"{value} is not in the range x>=1.")
    return value


def option(metavar: str, help_text: str, **settings: Any) -> Any:
    """Return an option whose default is not shown."""
    return typer.Option(metavar=metavar, show_default=False, help=help_text, **settings)


ManifestArgument = Annotated[
    Path | None, manifest_argument("MANIFEST", f"{_MANIFEST} Default: the corpus of the latest run.")
]

ConfigOption = Annotated[
    Path | None,
    option("FILE", "The config of the corpus, if it is not where run.json records it."),
]

RootOption = Annotated[
    Path,
    option(
        "FOLDER",
        "The project's root, with data/ and manifests/: a folder, or a URL in a bucket. Default: the working "
        "directory.",
        parser=root_of,
    ),
]

SequenceLengthOption = Annotated[
    str, option("N", "Override the config's sequence_length. For data without a config, default: 99 % fit.")
]
DraftedLengthOption = Annotated[str, option("N", "Tokens in a row. Default: 99 % of the conversations fit.")]
TokenizerOption = Annotated[
    str,
    option(
        "PATH|NAME",
        "For data: the tokenizer of your model, a folder, file, or name on the Hub. Default: the only one nearby.",
    ),
]
TemplateOption = Annotated[
    str, option("TEMPLATE", "For data: built-in name, `tokenizer`, or Jinja file. Default: the tokenizer's own.")
]
NameOption = Annotated[str, option("NAME", "For data: the name of the corpus. Default: that of the first path.")]

# The config that `init` writes, and other commands read, if no config is named.
DEFAULT_CONFIG = Path("corpus.yaml")

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        show_default=False,
        readable=False,
        help=f"The config of the corpus. Default: {DEFAULT_CONFIG}.",
    ),
]

ConfigOrDataArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|DATA",
        show_default=False,
        help="The config of the corpus, or its data: files, folders, globs, URLs, or datasets on the Hub. "
        f"Default: {DEFAULT_CONFIG}.",
    ),
]

JsonOption = Annotated[
    bool, typer.Option("--json", envvar=JSON, show_envvar=False, help="Print the result as one JSON object.")
]


def default_config() -> Path:
    """Return the default config; raise InputMissing if it does not exist."""
    if not DEFAULT_CONFIG.is_file():
        raise InputMissing(
            "config_missing", f"{DEFAULT_CONFIG}: no such config; name another config, or run: packcorpus init PATH…"
        )
    return DEFAULT_CONFIG


def print_view(value: Any, view: Callable[[Any, Any], None], json_output: bool) -> None:
    """Print a value as JSON, or with a view on a console."""
    if json_output:
        print(value_as_json(value))
        return
    from packcorpus.tasks.cli.console import open_console

    view(value, open_console())


def print_lines(value: Any, lines: Sequence[str], json_output: bool) -> None:
    """Print a value as JSON, or as lines of text."""
    if json_output:
        print(value_as_json(value))
        return
    from packcorpus.tasks.core.printable import printable

    for line in lines:
        print(printable(line))


def value_as_json(value: Any) -> str:
    """Return a value of tasks.inspection or tasks.dry_run as one line of JSON.

    Fields with repr=False are left out. The line is ASCII, because file names may contain lone surrogates.
    """

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)

    return json.dumps(value, default=plain)
