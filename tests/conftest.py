"""What holds for all tests: the longest come first, and Ctrl-C is heard."""

from __future__ import annotations

import signal

import pytest

# So that no worker is left with one of them when the others have ended.
LONGEST = ("test_training.py", "test_train_adapter.py", "test_gradients.py")

# In the background of a script it is ignored, and would be in all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
