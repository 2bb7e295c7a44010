"""Ctrl-C while a command still loads its modules: one line, as later, and no traceback. To be imported first."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_hook = sys.excepthook


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _hook(kind, error, trace)
        return
    # Not before there is something to say: while these are loaded, too, Ctrl-C may come.
    from tasks.errors import Interrupted
    from tasks.messages import told

    print(told(Interrupted("interrupted", "interrupted; nothing had begun")), file=sys.stderr, flush=True)
    os._exit(Interrupted.exit_code)


sys.excepthook = _on_uncaught
