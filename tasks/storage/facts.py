"""The parts of a manifest: inputs, the ledger, and outputs.

A part serializes to the JSON that it was read from, without fields that do not apply to the corpus.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class Facts(BaseModel):
    """A part of a manifest.

    A field with a default appears only in manifests of corpora for which it has another value.
    """

    # Build validators on first use: most parts are only validated within the whole manifest, by its validator.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
        }


READING = ("roles", "delimiter", "encoding", "ignore", "drop_roles")


class Tokenizer(Facts):
    """The tokenizer. `path` is the path of its copy in the corpus folder."""

    kind: Literal["sentencepiece", "huggingface"]
    path: str
    sha256: str = SHA256
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int
    engine: str = Field(
        description="The library that defines the tokens: sentencepiece or tokenizers. run.json names the encoder."
    )
    parity: dict[str, Any] | None = Field(
        None, exclude=True, description="Only in manifests of earlier versions; see run.json."
    )
    trained_here: bool = Field(description="True if the run trained it on the sources.")
    digest: str = Field(
        description='Digest of the tokenizer in the corpus key: sha256 or, if the run trained it, "trained:" and the '
        'key of its training. "transformers-VERSION:" before sha256 means that it is loaded like AutoTokenizer of that '
        "version, which is unlike its file."
    )
    revision: str = Field("", description="The commit of a tokenizer on the Hugging Face Hub.")


class TemplateFacts(Facts):
    """The template. A marker that the tokenizer lacks is encoded as text."""

    name: str
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the template. If conversations with tools have a template of their own, "
        "tool_use.jinja, it is the SHA-256 of the names and checksums of both.",
    )
    markers_as_text: list[str]
    leading_space: str = Field(
        description="Where the tokenizer adds a space before text: nowhere (none), at the very start (first), or at "
        "the start and after each control token (each). template: at the start, and after a control token if the "
        "template asks for it."
    )


class SourceFacts(Facts):
    """One source file.

    Over all sources, tokens and trained_tokens add up to encoded and trained of the ledger.
    """

    path: str
    entry: int = Field(ge=0, description="Index in the config's `sources`, from 0.")
    container: str
    compression: str
    format: str
    columns: dict[str, str]
    bytes: int
    sha256: str = SHA256
    conversations: int
    accepted: int
    rejected: int
    tokens: int
    trained_tokens: int
    roles: dict[str, str] = Field(
        default_factory=dict,
        description="Additional role names in the data, in lower case, and the role that each name means.",
    )
    delimiter: str = Field("", description="Delimiter of a CSV or TSV file, if it is neither comma nor tab.")
    encoding: str = Field("", description="Encoding of a CSV or TSV file, if it is not UTF-8.")
    ignore: list[str] = Field(
        default_factory=list, description="Keys and content parts that were left out, as set with `ignore`."
    )
    drop_roles: list[str] = Field(
        default_factory=list, description="Roles whose messages were left out, as set with `drop_roles`."
    )
    revision: str = Field("", description="The commit of a dataset on the Hugging Face Hub.")
    split: Literal["", "train", "validation"] = Field("", description="Split of all its conversations, if one is set.")

    @property
    def kind(self) -> str:
        """Return the format, and the split if one is set."""
        return f"{self.format}, {self.split}" if self.split else self.format

    @property
    def content(self) -> list[Any]:
        """Return everything that determines its conversations, as it is in the corpus key."""
        unusual = {name: value for name in READING if (value := getattr(self, name))}
        columns = [list(column) for column in self.columns.items()]
        return [self.sha256, self.container, self.compression, self.format, columns, *[unusual] * bool(unusual)]


class EvaluationFacts(Facts):
    """One file of the evaluation sets in `decontaminate`."""

    path: str
    container: str
    compression: str
    format: str
    bytes: int
    sha256: str = SHA256
    items: int
    unmatched: int = Field(
        description="Items that no conversation can overlap with, because they have too few words of their own."
    )
    conversations: int = Field(description="Conversations that were left out because they overlap with an item.")

    @property
    def content(self) -> list[Any]:
        """Return everything that determines its items, as it is in the corpus key."""
        return [self.sha256, self.container, self.compression, self.format]


class MixtureFacts(Facts):
    """The contribution of one entry of `sources` to one pass over the training split."""

    path: str
    weight: float
    limit: int | None
    conversations: int
    copies: int = Field(description="Conversations, counted as often as they are packed.")
    tokens: int = Field(description="Tokens in rows, including separators.")
    trained_tokens: int
    tokens_percent: float
    trained_tokens_percent: float
    split: Literal["", "train", "validation"] = Field(
        "", description="Split of all its conversations, if one is set. A validation source has no share."
    )


class HeldOutFacts(Facts):
    """The validation split, and the prompts that the training split has, too.

    A prompt is everything before the first answer that is trained on. Conversations without a message of the user
    before it have none.
    """

    conversations: int = Field(description="Packed conversations of the validation split.")
    percent: float = Field(description="Their share of all packed conversations.")
    prompts: int = Field(description="Different prompts of these conversations.")
    shared: int = Field(description="Of these prompts, those that a conversation of the training split has, too.")
    near: int | None = Field(
        None,
        description="Of the others, those that are nearly a prompt of the training split: the Jaccard index of their "
        "runs of five tokens is at least 0.7. Absent if there are too many conversations to compare.",
    )


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
    duplicates: int | None = Field(
        None,
        description="Packed conversations with the same content as another one before them. Absent in manifests of "
        "earlier versions.",
    )


class Pieces(Facts):
    """Pieces: one per conversation, or more with overlong: split, weights, or epochs."""

    packed: int
    dropped: int
    later: int | None = Field(
        None,
        description="Pieces that lack the beginning of their conversation, because they begin at a later turn. Copies "
        "do not count. Only with `split_at: turns`, like the fields below.",
    )
    inside: int | None = Field(
        None, description="The later pieces that begin within a turn, because the turn is longer than a row."
    )
    repeated_tokens: int | None = Field(
        None,
        description="Tokens before the first user message, such as the system message and the tools, that later pieces "
        "repeat; a part of `tokens.repeated`.",
    )


class Tokens(Facts):
    """Tokens: encoded + separators + repeated = packed + shared + truncated + dropped.

    Also, packed + padding = places in rows. A row has sequence_length places or, with `padding: none`, as many as it
    needs.
    """

    encoded: int
    separators: int
    repeated: int = Field(
        description="Tokens of additional copies (from weights and later epochs), without separators, and "
        "`pieces.repeated_tokens`."
    )
    truncated: int
    dropped: int
    rejected: int = Field(description="Tokens of conversations that were rejected after tokenization.")
    packed: int
    shared: int | None = Field(
        None,
        description="Tokens of samples that are not stored again, because an earlier sample of their tree has them. "
        "Copies do not count. Only with `share`.",
    )
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
        "tools. `answers` are those of several that the data does not train on."
    )


class Apart(Facts):
    """The same conversations with `turns: apart`.

    Each run of trained tokens in a sample counts as a turn.
    """

    samples: int = Field(description="Samples, to compare with `read`.")
    tokens: int = Field(description="Tokens without separators, to compare with `encoded`.")
    repeated_prompt_tokens: int = Field(description="The tokens among them that repeat the sample before.")


class WayOut(Facts):
    """The same conversations with another setting.

    It is empty if that is not known without a run.
    """

    samples: int | None = Field(None, description="Samples, to compare with `read`.")
    tokens: int | None = Field(None, description="Tokens without separators, to compare with `encoded`.")
    rows: int | None = Field(None, description="Rows of all splits, if they are as full as now.")


class AsRendered(Facts):
    """How the one rendering of each conversation differs from inference.

    Only with `turns: as_rendered`.
    """

    other_prompts: int = Field(description="Trained answers that do not follow the prompt that the model sees.")
    other_answers: int = Field(description="Trained answers that the model writes differently.")
    without_reasoning: int = Field(description="Answers whose reasoning is not written; also counted as differing.")
    unwritten_tokens: int = Field(description="Tokens of this reasoning, which are not encoded.")


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
    repeated_percent: float | None = Field(
        None, description="Share of these tokens in `packed`: the price in compute. Absent in earlier versions."
    )
    repeated_rows: int | None = Field(None, description="Rows of all splits that these tokens fill.")
    apart: Apart | None = Field(None, description="Only if `turns: apart` would make more samples.")
    ways_out: dict[str, WayOut] = Field(
        default_factory=dict, description="Settings with which these conversations have fewer samples."
    )


class LeftOutReasoning(Facts):
    """Reasoning of accepted conversations that is in no row."""

    answers: int
    tokens: int = Field(description="Tokens of the texts alone; they are not part of `encoded`.")


class ReasoningFacts(Facts):
    """Reasoning that is in no row, although its conversation is; only if there is any."""

    dropped: LeftOutReasoning | None = Field(None, description="By `reasoning: drop`.")
    template_writes: bool = Field(False, description="True if the template could have written the dropped reasoning.")
    unwritten: LeftOutReasoning | None = Field(
        None, description="Of earlier answers, which are not trained on: the template leaves it out, as at inference."
    )


class Ledger(Facts):
    """Where every conversation and every token went."""

    conversations: Conversations
    pieces: Pieces
    tokens: Tokens
    samples: SampleFacts | None = None  # only if a conversation has several samples
    context: Context | None = None  # None in manifests of earlier versions
    reasoning: ReasoningFacts | None = None
    as_rendered: AsRendered | None = None

    @property
    def has_copies(self) -> bool:
        """Return whether a conversation is in rows more than once."""
        return self.tokens.repeated > (self.pieces.repeated_tokens or 0)

    def check(self, places: int) -> None:
        """Raise DataError unless conversations, samples, tokens, and places balance.

        `places` is rows × sequence_length, 0 without packing, or the places that rows have with `padding: none`.
        """
        of, tokens, samples = self.conversations, self.tokens, self.samples
        encoded = tokens.encoded + tokens.separators + tokens.repeated
        sums = [
            ("conversations read", of.read, of.packed + sum(of.rejected.values()) + sum(of.dropped.values())),
            ("tokens encoded", encoded, tokens.packed + (tokens.shared or 0) + tokens.truncated + tokens.dropped),
            ("places in rows", places, (tokens.packed if places else 0) + tokens.padding),
        ]
        if samples:
            accounted = samples.packed + samples.rejected + sum(samples.dropped.values())
            sums.append(("samples read", samples.read, accounted))
        if self.context:
            sums.append(("tokens without a label", tokens.packed - tokens.trained, self.context.tokens))
        wrong = [
            f"{count:,} {unit}, but {accounted:,} accounted for"
            for unit, count, accounted in sums
            if count != accounted
        ]
        alignment, trained = tokens.alignment or 0, tokens.trained_truncated or 0
        if of.packed and (of.duplicates or 0) >= of.packed:
            wrong.append(f"{of.duplicates:,} of {counted(of.packed, 'packed conversation')} are duplicates of others")
        if alignment > tokens.padding:
            wrong.append(f"{alignment:,} tokens of alignment, but {tokens.padding:,} of padding, which includes them")
        if trained > tokens.truncated:
            wrong.append(f"{trained:,} trained tokens are truncated, but only {counted(tokens.truncated, 'token')}")
        if wrong:
            raise DataError("open_ledger", f"the ledger does not balance: {wrong[0]}")


class RowShape(Facts):
    """Properties of rows that differ from format 3.0; the others are left out."""

    align: int = Field(default=1, ge=1, description="Pieces start at multiples of this number.")
    padding: Literal["row", "none"] = Field(
        default="row", description="none: rows are lists that end after their last piece."
    )
    share: Literal["none", "conversation", "all"] = Field(
        default="none", description="Whose samples are stored as trees."
    )
    lengths: list[int] | None = Field(default=None, description="The lengths of rows, ascending.")
    mix: Literal["tokens", "blocks"] | None = Field(
        default=None, description="The order of training steps of several lengths."
    )


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
    lower_bound_tokens: int | None = Field(
        None,
        description="Minimum number of tokens that trees of these samples store, in all packings. Only with "
        "`share: all`.",
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
