"""What a row costs: a part in proportion to its tokens, and attention.

A layer takes about 12 h² multiplications for each token, besides attention, and attention h·n for a token of a segment
of n, as it is causal. The cost of a row of L tokens is therefore in proportion to 6·h·L + Σn²: 24,576·L + Σn² for a
hidden size h of 4,096, as in verl (utils/seqlen_balancing.py, calculate_workload). Rows with padding are equally long,
so that those of one length differ in Σn² alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # `check --help` takes HIDDEN_SIZE from here, and must not wait for numpy
    import numpy as np

Tokens = TypeVar("Tokens", int, "np.ndarray")

# That of models of 8B parameters, such as Llama 3 and Qwen3. Smaller models spend more of their time on attention.
HIDDEN_SIZE = 4096


def linear_cost(length: Tokens, hidden_size: int = HIDDEN_SIZE) -> Tokens:
    """Return the cost of a row of `length` tokens without attention, in the unit of Σn²."""
    return length * (6 * hidden_size)
