"""Define one command-line option for each setting of TrainingConfig.

arguments ─settings_parser─▶ --manifest, --config, --root, --learning-rate … ─config_of─▶ TrainingConfig
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, get_args, get_origin

from tasks.core.errors import UsageError
from tasks.stores.scratch import local_path_of, root_of
from tasks.stores.urls import check_url, is_url
from train.config import DEFAULT, REMOVED, TrainingConfig, load_training_config

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("bad_command_line", f"{message}; see {self.prog} --help")


def settings_parser(prog: str, description: str) -> Parser:
    """Build a parser with the options shared by all commands that take a corpus."""
    ours = Parser(prog=prog, description=description, allow_abbrev=False)
    ours.add_argument(
        "--manifest",
        type=local_path_of,
        required=True,
        help="a manifest (file, URL, name, or key), a corpus folder, or a folder of shards",
    )
    ours.add_argument(
        "--config", type=Path, metavar="FILE", default=DEFAULT, help="YAML file of settings (default: train/qlora.yaml)"
    )
    ours.add_argument(
        "--root",
        type=_local_root,
        metavar="FOLDER",
        default=Path(),
        help="folder that contains data/ (default: this folder)",
    )
    ours.add_argument("--where", action="store_true", help="print the path of the run's record and exit")
    ours.add_argument("--debug", action="store_true", help="print a traceback if an error occurs")
    settings = ours.add_argument_group("settings (override those of the file)")
    for name, field in TrainingConfig.model_fields.items():
        text = (field.description or "").replace("%", "%%")
        if field.default is not None:
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            text += f" (default: {default})"
        settings.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", metavar=_values(field), help=text)
    for name in _removed_options():
        settings.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", help=argparse.SUPPRESS)
    return ours


def _removed_options() -> list[str]:
    """Return removed settings, whose options lead to the error that says what to use."""
    return [name for name in REMOVED if ":" not in name]


def _local_root(text: str) -> Path:
    """Return the folder of the outputs.

    Raises UsageError for the URL of a bucket, because checkpoints are not written to buckets.
    """
    if is_url(text) and check_url(text) != "file":
        raise UsageError(
            "url_not_supported",
            f"--root {text}: training writes to a local folder; pass a local folder as --root, and the URL of "
            "the manifest as --manifest",
        )
    return root_of(text)


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Return the settings of the config file, overridden by the options.

    Raises UsageError or InputMissing.
    """
    return load_training_config(options.config, overrides(options))


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings given as options: {name: YAML text}."""
    given = {name: getattr(options, f"set_{name}") for name in (*TrainingConfig.model_fields, *_removed_options())}
    return {name: text for name, text in given.items() if text is not None}


def _values(field: FieldInfo) -> str:
    """Return the values that a setting accepts, such as `auto|N`."""
    kinds = get_args(field.annotation) or (field.annotation,)
    words: list[str] = []
    for kind in kinds:
        words += [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
        words += [kind] if isinstance(kind, str) else []
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
    bare = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    words += [names[kind] for kind in bare if kind in names]
    words += ["[NAME,…]" for kind in bare if get_origin(kind) is list]
    return "|".join(words)
