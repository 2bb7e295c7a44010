"""What a user gives for the draft of a config; it loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Asks a user which of several tokenizers to use.
Choose = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Given:
    """Settings that the user gives; the others are decided from the data.

    `of_sources` has `format`, `columns`, `roles`, and `ignore` of all sources.
    """

    tokenizer: str = ""
    template: str = ""
    sequence_length: str = ""
    name: str = ""
    of_sources: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> list[tuple[str, str]]:
        """Return the options of a command that give these settings."""
        names = ("tokenizer", "template", "sequence_length", "name")
        return [(f"--{name.replace('_', '-')}", getattr(self, name)) for name in names if getattr(self, name)]
