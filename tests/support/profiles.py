"""Profiles of hypothesis: `dev` for `make quick`, `ci` for everything, `fresh` for `make fuzz`.

Tests that run before every change draw the same examples each time: a failure means that the change broke something.
New examples are drawn by `make fuzz`. Chosen by pytest's --hypothesis-profile.
"""

from __future__ import annotations

from hypothesis import settings

DEV_EXAMPLES = 25

settings.register_profile("dev", max_examples=DEV_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fresh", max_examples=300, deadline=None, derandomize=False, print_blob=True)


def examples(count: int) -> int:
    """Return how many examples a test draws that draws `count` with the profile ci: a quarter, at most 25."""
    if not settings.get_current_profile_name().startswith("dev"):
        return count
    return max(1, min(count // 4, DEV_EXAMPLES))
