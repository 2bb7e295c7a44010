"""Ctrl-C while a command still loads its modules: one line, as later, and no traceback. To be imported first."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from tasks.errors import Interrupted
from tasks.messages import told

_hook = sys.excepthook


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        _hook(kind, error, trace)
        return
    print(told(Interrupted("interrupted", "interrupted; nothing had begun")), file=sys.stderr, flush=True)
    os._exit(Interrupted.exit_code)


sys.excepthook = _on_uncaught
