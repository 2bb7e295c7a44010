"""The ledger: where every conversation and every token went."""

from __future__ import annotations

from pydantic import Field

from tasks.core.errors import DataError
from tasks.core.printable import counted
from tasks.storage.facts.model import Facts


class Conversations(Facts):
    """Conversations: read = packed + Σ rejected + Σ dropped.

    Truncated and split conversations are also counted as packed.
    """

    read: int
    packed: int
    rejected: dict[str, int]
    dropped: dict[str, int]
    truncated: int
    split: int


class Pieces(Facts):
    """Pieces: one per conversation, or more with overlong: split, weights, or epochs."""

    packed: int
    dropped: int


class Tokens(Facts):
    """Tokens: encoded + separators + repeated = packed + truncated + dropped.

    Also, packed + padding = places in rows. A row has sequence_length places or, with `padding: none`, as many as it
    needs.
    """

    encoded: int
    separators: int
    repeated: int = Field(
        description="Tokens of additional copies (from weights and later epochs), without separators."
    )
    truncated: int
    dropped: int
    rejected: int = Field(description="Tokens of conversations that were rejected after tokenization.")
    packed: int
    padding: int
    trained: int
    alignment: int | None = Field(
        None, description="Padding that rounds pieces up to multiples of `align`; part of `padding`. Only with `align`."
    )
    trained_truncated: int | None = Field(
        None, description="Trained tokens among the truncated ones. Only with `overlong: turns`."
    )


class Context(Facts):
    """Tokens that are not trained on, and what settings leave out."""

    tokens: int = Field(description="Packed tokens without a label, which are packed - trained.")
    left_out: dict[str, int] = Field(
        description="What `drop_roles` and `ignore` leave out: messages by role, and, as `tools`, conversations with "
        "tools."
    )


class Apart(Facts):
    """The same conversations with `turns: apart`.

    Each run of trained tokens in a sample counts as a turn.
    """

    samples: int = Field(description="Samples, to compare with `read`.")
    tokens: int = Field(description="Tokens without separators, to compare with `encoded`.")
    repeated_prompt_tokens: int = Field(description="The tokens among them that repeat the sample before.")


class SampleFacts(Facts):
    """Samples: read = packed + rejected + Σ dropped.

    A conversation may have several samples, each with one or several trained turns.
    """

    read: int
    packed: int
    rejected: int = Field(description="Samples of conversations that were rejected after tokenization.")
    dropped: dict[str, int]
    repeated_prompt_tokens: int = Field(
        description="Untrained tokens that packed samples repeat from the previous packed sample of their "
        "conversation: for each sample, its untrained tokens, but at most the length of the previous sample. "
        "Additional copies do not count."
    )
    apart: Apart | None = Field(None, description="Only if `turns: apart` would make more samples.")


class Ledger(Facts):
    """Where every conversation and every token went.

    `samples` exists only if a conversation has several samples.
    """

    conversations: Conversations
    pieces: Pieces
    tokens: Tokens
    samples: SampleFacts | None = None
    context: Context | None = None  # None in manifests of earlier versions

    def check(self, places: int) -> None:
        """Raise DataError unless conversations, samples, tokens, and places balance.

        If they do not balance, something was lost. `places` is rows × sequence_length, 0 without packing, or the places
        that rows actually have with `padding: none`.
        """
        of, tokens, samples = self.conversations, self.tokens, self.samples
        sums = [
            ("conversations read", of.read, of.packed + sum(of.rejected.values()) + sum(of.dropped.values())),
            (
                "tokens encoded",
                tokens.encoded + tokens.separators + tokens.repeated,
                tokens.packed + tokens.truncated + tokens.dropped,
            ),
            ("places in rows", places, (tokens.packed if places else 0) + tokens.padding),
        ]
        if samples:
            accounted = samples.packed + samples.rejected + sum(samples.dropped.values())
            sums.append(("samples read", samples.read, accounted))
        if self.context:
            sums.append(("tokens without a label", tokens.packed - tokens.trained, self.context.tokens))
        for unit, count, accounted in sums:
            if count != accounted:
                raise DataError(
                    "open_ledger", f"the ledger does not balance: {count:,} {unit}, but {accounted:,} accounted for"
                )
        if (tokens.alignment or 0) > tokens.padding:
            raise DataError(
                "open_ledger",
                f"the ledger does not balance: {tokens.alignment:,} tokens of alignment, but {tokens.padding:,} of "
                "padding, which includes them",
            )
        if (tokens.trained_truncated or 0) > tokens.truncated:
            raise DataError(
                "open_ledger",
                f"the ledger does not balance: {tokens.trained_truncated:,} trained tokens are truncated, but only "
                f"{counted(tokens.truncated, 'token')}",
            )
