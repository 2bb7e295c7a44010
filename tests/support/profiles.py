"""Profiles of hypothesis: `dev` for `make quick`, `ci` for everything. Chosen by pytest's --hypothesis-profile."""

from __future__ import annotations

from hypothesis import settings

DEV_EXAMPLES = 25

settings.register_profile("dev", max_examples=DEV_EXAMPLES, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True)


def examples(count: int) -> int:
    """Return how many examples a test draws that draws `count` with the profile ci."""
    return min(count, DEV_EXAMPLES) if settings.get_current_profile_name().startswith("dev") else count
