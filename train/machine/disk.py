"""Determine whether machines share the run folder, and which ranks write to it.

    node 0: rank 0 ─a file─▶ folder ◀─ node 1: is it there?     yes: shared, rank 0 writes
                                                                no: separate, the first rank of each node writes

No setting is needed. A folder that merely has the same name on every machine is not mistaken for a shared folder.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import DataError, StorageError
from tasks.storage.files import make_folder

if TYPE_CHECKING:
    from train.machine.ranks import Place

# Prefix of the files that show whether a folder is shared. A killed run may leave some behind.
MARK = ".rank-"


@dataclass(frozen=True, slots=True)
class Disk:
    """File system of a run, as seen by this rank."""

    shared: bool  # by all ranks
    writes: bool  # this rank writes, for all ranks that see the same files


def find_disk(folder: Path) -> Disk:
    """Determine which ranks write to a folder.

    All ranks must call this. If there are several, the folder is created. Raises DataError if some machines share the
    folder and others do not, StorageError if it cannot be written.
    """
    import torch

    from train.machine.ranks import gather, place, together

    here = place()
    if not torch.distributed.is_initialized():
        return Disk(shared=True, writes=True)
    places = gather(here)
    [run, *_] = gather(secrets.token_hex(8))
    with together():
        if here.local_rank == 0:
            try:
                make_folder(folder)
                (folder / _name(run, here)).touch()
            except OSError as error:
                path, reason = folder / _name(run, here), error.strerror or error
                raise StorageError("cannot_write", f"{path}: cannot be written: {reason}") from error
    try:
        with together():
            seen = [where for where in places if where.local_rank == 0 and (folder / _name(run, where)).exists()]
        views = gather([where.rank for where in seen])
    finally:
        if here.local_rank == 0:
            (folder / _name(run, here)).unlink(missing_ok=True)
    firsts = {where.node: where.rank for where in places if where.local_rank == 0}
    if all(0 in view for view in views):
        return Disk(shared=True, writes=here.rank == 0)
    if all(view == [firsts.get(where.node)] for where, view in zip(places, views, strict=True)):
        return Disk(shared=False, writes=here.local_rank == 0)
    with_first, without = (
        ", ".join(str(where) for where, view in zip(places, views, strict=True) if (0 in view) == sees)
        for sees in (True, False)
    )
    with together():
        raise DataError(
            "folders_differ",
            f"{folder}: {with_first} share it, but {without} cannot see their files; set `output` to a folder that "
            "all machines share, or to a separate local folder on each machine",
        )


def _name(run: str, where: Place) -> str:
    return f"{MARK}{run}-{where.rank}"
