"""Outputs of a run: splits with their shards, packing figures, and other files."""

from __future__ import annotations

from pydantic import Field

from tasks.storage.facts.model import SHA256, Facts


class PackingMetadata(Facts):
    """How full the rows are.

    packing_efficiency is packed / (rows × sequence_length) in percent.
    """

    enabled: bool
    algorithm: str
    rows: int
    lower_bound_rows: int
    lower_bound: str
    above_lower_bound_percent: float
    packing_efficiency: float | None
    avg_conversations_per_sequence: float
    compression_ratio: float
    places: int | None = Field(None, description="Tokens and padding of all rows. Only if rows have several lengths.")
    lower_bound_places: int | None = Field(
        None,
        description="Minimum number of places that any packing needs; `above_lower_bound_percent` refers to it. Only "
        "if rows have several lengths. In this case, `lower_bound_rows` is the sum of the bounds for the conversations "
        "chosen for each length.",
    )


class Shard(Facts):
    """One Arrow file; `path` is relative to the corpus folder."""

    path: str
    rows: int
    bytes: int
    sha256: str = SHA256


class RowSums(Facts):
    """Sums over the records of rows.arrow; `longest` is a maximum."""

    squares: int = Field(description="Squared lengths of all segments, to which the cost of attention is proportional.")
    longest: int
    segments: int
    trained: int


class Split(Facts):
    """Rows and shards of one split.

    A split is train, validation, or train repacked for a later epoch: train_epoch_2, train_epoch_3, …
    """

    rows: int
    shards: list[Shard]
    statistics: RowSums | None = Field(
        None,
        description="Sums over the rows of this split in rows.arrow. Absent without packing, and in corpora of earlier "
        "versions.",
    )
    groups: list[int] | None = Field(
        None,
        description="With `balance`, in a corpus of an earlier version with several plans: the rows of each, in order.",
    )
    sequence_length: int | None = Field(None, description="Length of its rows, if rows have several lengths.")
    tokens: int | None = Field(None, description="Tokens without padding, if rows have several lengths.")
    lower_bound_rows: int | None = Field(None, description="Lower bound of rows for the conversations of this length.")


class WeightSums(Facts):
    """The weights of the trained tokens of a split.

    If all conversations have the same weight, the mean weight of a token is 1.
    """

    trained: int = Field(description="Trained tokens.")
    conversations: int = Field(description="Conversations, counted as often as they are packed.")
    loss_weight: float = Field(description="Sum of the column `loss_weight` over all rows.")


class FileFacts(Facts):
    """A file next to the shards."""

    path: str
    bytes: int
    sha256: str = SHA256
