"""Profiles of Hypothesis: `dev`, `ci`, and `fresh`.

`make quick` uses `dev`, `make test` uses `ci`, and `make fuzz` uses `fresh`; pytest's --hypothesis-profile selects one.
Tests that run before every change draw the same examples each time, so a failure means that the change broke something.
Only `make fuzz` draws new examples.
"""

from __future__ import annotations

from hypothesis import settings

DEV_EXAMPLES = 25

settings.register_profile("dev", max_examples=DEV_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fresh", max_examples=300, deadline=None, derandomize=False, print_blob=True)


def examples(count: int) -> int:
    """Return the number of examples that a test draws in the current profile.

    `count` is the number with the profile `ci`. The profile `dev` draws a quarter of them, at most DEV_EXAMPLES.
    """
    if not settings.get_current_profile_name().startswith("dev"):
        return count
    return max(1, min(count // 4, DEV_EXAMPLES))
