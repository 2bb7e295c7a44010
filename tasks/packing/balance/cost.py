"""Cost of a row: a part in proportion to its tokens, and attention.

A layer takes about 12·h² operations per token, and attention takes 2·h·n more per token of a segment of n tokens. The
cost of a row of L tokens is therefore in proportion to 6·h·L + Σn², or 24,576·L + Σn² for a hidden size h of 4,096, as
in verl (utils/seqlen_balancing.py, calculate_workload). With padding, all rows of one length have the same L, so their
costs differ only in Σn².
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # `check --help` takes HIDDEN_SIZE from here, and must not wait for numpy
    import numpy as np

Tokens = TypeVar("Tokens", int, "np.ndarray")

# The hidden size of models with 8B parameters, such as Llama 3 and Qwen3. Smaller models spend a larger share of their
# time on attention.
HIDDEN_SIZE = 4096


def linear_cost(length: Tokens, hidden_size: int = HIDDEN_SIZE) -> Tokens:
    """Return the cost of a row of `length` tokens without attention, in units of Σn²."""
    return length * (6 * hidden_size)
