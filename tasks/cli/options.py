"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.core.errors import InputMissing
from tasks.core.messages import JSON
from tasks.inspection.manifests import complete_manifest
from tasks.stores.scratch import local_path_of, root_of

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

SequenceLengthOption = Annotated[str, option("N", "Override the config's sequence_length.")]

# The config that `init` writes, and other commands read, if no config is named.
DEFAULT_CONFIG = Path("corpus.yaml")

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", show_default=False, help=f"The config of the corpus. Default: {DEFAULT_CONFIG}."),
]

JsonOption = Annotated[
    bool, typer.Option("--json", envvar=JSON, show_envvar=False, help="Print the result as one JSON object.")
]


def default_config() -> Path:
    """Return the default config.

    Raises InputMissing if it does not exist.
    """
    if not DEFAULT_CONFIG.is_file():
        raise InputMissing(
            "config_missing", f"{DEFAULT_CONFIG}: no such config; name another config, or run: packcorpus init PATH…"
        )
    return DEFAULT_CONFIG
