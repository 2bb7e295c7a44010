"""Profiles of Hypothesis: `dev`, `ci`, and `fresh`.

`make quick` uses `dev`, `make test` uses `ci`, and `make fuzz` uses `fresh`; pytest's --hypothesis-profile selects one.
Tests that run before every change draw the same examples each time, so a failure means that the change broke something.
Only `make fuzz` draws new examples.
"""

from __future__ import annotations

from hypothesis import settings

DEV_EXAMPLES = 25

settings.register_profile("dev", max_examples=DEV_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fresh", max_examples=300, deadline=None, derandomize=False, print_blob=True)


def examples(count: int) -> int:
    """Return the number of examples that a test draws in the current profile.

    `count` is the number with the profile `fresh`. The profile `ci` draws half of them, because it draws the same ones
    each time, and the profile `dev` a quarter, at most DEV_EXAMPLES.
    """
    name = settings.get_current_profile_name()
    if name.startswith("dev"):
        return max(1, min(count // 4, DEV_EXAMPLES))
    return max(1, count // 2) if name.startswith("ci") else count
