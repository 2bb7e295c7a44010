"""The command `schemas`: write the files of docs/reference that the code defines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
