"""Inputs of a corpus: the tokenizer, the template, the sources, and the mixture."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tasks.storage.facts.model import SHA256, Facts

# Facts about how a source was read, recorded only if they are unusual.
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

    @property
    def reading(self) -> dict[str, Any]:
        """Return the facts named in READING that are unusual for this file."""
        facts = {name: getattr(self, name) for name in READING}
        return {name: value for name, value in facts.items() if value}


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
