"""Read the config of a corpus from one YAML file.

    corpus.yaml ──load_config──▶ Config ──settings()──▶ recorded in the manifest and covered by the corpus key

Settings that few need are in the object `advanced` of the file; a Config, a key, and a manifest have one level.
Defaults are filled in, and unknown keys are refused. Paths in a config are relative to the folder of the config file;
~ is the home folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from packcorpus.tasks.conversations.names import Roles, with_roles
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.other_tools import Place
from packcorpus.tasks.core.yaml_settings import (
    Removed,
    canonical_json,
    check_removed,
    check_settings,
    defaults_of,
    read_settings,
)
from packcorpus.tasks.readers.containers import container_by_extension
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.keys import KEY_NAMES, ONE_PLAN, with_current_names
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.templates.adjust import GIVEN_TO_TEMPLATES
from packcorpus.tasks.templates.built_in import BUILT_IN
from packcorpus.tasks.templates.sections import Sections, TrainParts, check_sections


@dataclass(frozen=True)
class Key:
    """The keys that a setting enters; a setting without it enters that of the corpus.

    `keys` are "corpus" (and the manifest), "tokens" (all texts), "tokens tokenizer" and "tokens template" (a list of
    this name in the key of tokens), and "tokenizer" (that is trained). With `if_set`, the setting enters them only if
    it is not at its default, so that older corpora keep their keys. Without `is_used`, it does not enter them at all.
    With `advanced`, the setting is in the object `advanced` of the file.
    """

    keys: tuple[str, ...]
    if_set: bool = False
    advanced: bool = False
    is_used: Callable[[Config], bool] = lambda config: True


KEYLESS = Key(())  # it cannot change the output, or (`roles`) is part of each of the `sources`
ADVANCED_KEYLESS = Key((), advanced=True)
ADVANCED = Key(("corpus",), advanced=True)
IF_SET = Key(("corpus",), if_set=True, advanced=True)
# Corpora that earlier versions split have no such setting: they were cut at any token.
OF_SPLIT = Key(("corpus",), is_used=lambda config: config.splits_at_turns, advanced=True)
TOKENS = Key(("corpus", "tokens"))
TOKENS_IF_SET = Key(("corpus", "tokens"), if_set=True)
ADVANCED_TOKENS = Key(("corpus", "tokens"), if_set=True, advanced=True)
OF_TOKENIZER = Key(("corpus", "tokens tokenizer"), advanced=True)
IF_TRAINED = Key(("corpus", "tokenizer"), is_used=lambda config: config.tokenizer is None, advanced=True)
IF_JINJA = Key(("corpus", "tokens template"), is_used=lambda config: config.template not in BUILT_IN, advanced=True)
OF_RECORDS = Key(("corpus", "tokens", "tokenizer"), advanced=True)
OF_RECORDS_IF_SET = Key(("corpus", "tokens", "tokenizer"), if_set=True)

# Shortest and longest row, in tokens, and the maximum number of lengths in a corpus.
SHORTEST_ROW, LONGEST_ROW, MOST_LENGTHS = 8, 1 << 20, 8

# Settings that need packed rows, and the reason why they have no meaning without packing.
WITHOUT_PACKING = {
    "neighbors": "no row is shared",
    "loss_weight": "rows have no column for it",
    "share": "the trainer tokenizes the conversations",
    "balance": "the trainer creates and orders the batches",
    "order": "the trainer orders the conversations",
    "align": "a row has text instead of tokens",
    "padding": "a row has text instead of tokens",
}

# Settings that exclude several lengths of rows, and the reason.
NOT_WITH_LENGTHS = {
    "align": "the row of a conversation is chosen by its number of tokens, without alignment",
    "balance": "all rows of a balanced step have one length",
    "order": "rows of each length are a split of their own",
    "padding": "rows without padding have no length",
}

# Pairs of settings that exclude each other, and the reason.
NOT_TOGETHER = (
    ("padding", "loss_weight", "rows without padding have no column for weights"),
    ("padding", "balance", "rows of a balanced order are equally long"),
    ("share", "padding", "trees need rows of one length"),
    ("share", "align", "the pieces of a tree follow one another without gaps"),
    ("order", "balance", "both order the rows"),
    ("order", "neighbors", "both choose which conversations share a row"),
    ("order", "epochs", "neighbors in the data would share rows in each packing"),
)

# Settings of earlier versions, and what to use instead.
REMOVED: Removed = {
    "plan_group": "remove it: every corpus has one plan",
    "plan_chunk": "remove it: every corpus has one plan",
    "company_by": "remove it: `neighbors` compares the token IDs of conversations",
}

# Removed settings that manifests record with a value that had no effect. A config may have them, too, because it may be
# a copy of a recorded config.
WITHOUT_EFFECT = {"plan_group": ONE_PLAN}

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]


class Balance(BaseModel):
    """Steps that rows are ordered for, with about equal work for all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(ge=2, le=1 << 16, description="Number of ranks (GPUs with a copy of the model) in a step.")
    rows_per_rank: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Rows that each rank processes before the ranks wait for each other, or a divisor of this number.",
    )


class RowLengths(int):
    """The lengths of rows; as a number, it is the longest."""

    several: tuple[int, ...] = ()  # ascending

    @staticmethod
    def read(value: Any, check: ValidatorFunctionWrapHandler) -> int:
        """Return one length, or several. Raises ValueError."""
        if isinstance(value, str) and "," in value:
            raise ValueError("several lengths are a list, such as [512, 1024]")
        if not isinstance(value, list):
            return int(check(value))
        for length in value:
            if type(length) is not int or not SHORTEST_ROW <= length <= LONGEST_ROW:
                raise ValueError(f"{length!r} in {value!r} must be an integer from {SHORTEST_ROW} to {LONGEST_ROW:,}")
        if not value or len(set(value)) != len(value) or len(value) > MOST_LENGTHS:
            raise ValueError(f"expected 1 to {MOST_LENGTHS} lengths, each once, such as [512, 1024]")
        lengths = RowLengths(max(value))
        lengths.several = tuple(sorted(value)) if len(value) > 1 else ()
        return lengths

    @staticmethod
    def write(value: int) -> int | list[int]:
        return list(getattr(value, "several", ())) or int(value)

    @staticmethod
    def describe(schema: dict[str, Any]) -> None:
        """Allow several lengths in the JSON Schema."""
        one = {"type": schema.pop("type"), "minimum": schema.pop("minimum"), "maximum": schema.pop("maximum")}
        several = {"type": "array", "items": one, "minItems": 1, "maxItems": MOST_LENGTHS, "uniqueItems": True}
        schema["anyOf"] = [one, several]


class TokenizerPath(str):
    """The path of a tokenizer, and how its folder is loaded: one of WAYS."""

    WAYS = ("transformers", "files")  # like AutoTokenizer, or its tokenizer.json or .model file as it is
    loaded_as = WAYS[0]

    @staticmethod
    def read(value: Any, check: ValidatorFunctionWrapHandler) -> str | None:
        """Return a path, perhaps with a way to load it. Raises ValueError."""
        if not isinstance(value, dict):
            return None if (path := check(value)) is None else str(path)
        way = value.get("as", TokenizerPath.WAYS[0])
        if not {*value} <= {"path", "as"} or not isinstance(value.get("path"), str) or way not in TokenizerPath.WAYS:
            raise ValueError(f"expected a path, or {{path: FOLDER, as: {' | '.join(TokenizerPath.WAYS)}}}")
        path = TokenizerPath(check(value["path"]))
        path.loaded_as = way
        return path

    @staticmethod
    def write(value: str | None) -> str | dict[str, str] | None:
        way = getattr(value, "loaded_as", TokenizerPath.WAYS[0])
        return value if value is None or way == TokenizerPath.WAYS[0] else {"path": str(value), "as": way}

    @staticmethod
    def describe(schema: dict[str, Any]) -> None:
        """Allow a path with a way to load it in the JSON Schema."""
        properties = {"path": {"type": "string", "minLength": 1}, "as": {"enum": list(TokenizerPath.WAYS)}}
        both = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
        schema["anyOf"].insert(1, both)


def _or_paths(schema: dict[str, Any]) -> None:
    """Allow a path instead of a source, or of all sources, in the JSON Schema."""
    entries = dict(schema)
    schema.clear()
    path = {"type": "string", "minLength": 1}
    entries["items"] = {"anyOf": [path, entries["items"]]}
    schema.update(anyOf=[path, {key: entries.pop(key) for key in ("type", "items", "minItems")}], **entries)


def _with_advanced(schema: dict[str, Any]) -> None:
    of_file = schema["properties"]
    advanced = {name: of_file.pop(name) for name in list(of_file) if KEYS[name].advanced}
    of_file["advanced"] = {
        "type": "object",
        "properties": advanced,
        "additionalProperties": False,
        "description": "Settings that few need.",
    }


class Config(BaseModel):
    """Everything that determines a corpus, except the bytes of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_with_advanced)
    place: ClassVar[Place] = "config"

    # Settings of `advanced` that the file has outside of it, as earlier versions require.
    _moved: tuple[str, ...] = ()
    _old_words: tuple[str, ...] = ()
    # The config of a corpus that exists, perhaps of a version that did not know `unknown_markers`.
    _is_recorded: bool = False

    name: str = Field("corpus", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the corpus.")
    sources: Annotated[
        list[Source],
        Field(min_length=1, description="Files with conversations, in order.", json_schema_extra=_or_paths),
    ]
    roles: Annotated[Roles, KEYLESS] = Field(
        default_factory=dict,
        description="Names of roles in all sources, such as {user: [customer], assistant: [agent]}, in any case. "
        "Common names are recognized without it.",
    )
    tokenizer: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        WrapValidator(TokenizerPath.read),
        PlainSerializer(TokenizerPath.write),
    ] = Field(
        None,
        description="A name on the Hugging Face Hub, such as Qwen/Qwen3-8B or Qwen/Qwen3-8B@REVISION, or a path, "
        "which takes precedence: a folder, a tokenizer.json, or a SentencePiece model. A folder is loaded like "
        "AutoTokenizer of Transformers loads it; {path: FOLDER, as: files} uses its file as it is. Absent: a "
        "SentencePiece model is trained on the sources.",
        json_schema_extra=TokenizerPath.describe,
    )
    template: str = Field(
        "chatml",
        min_length=1,
        description="Built-in name, `tokenizer` (its own chat template), `tokenizer:NAME` "
        "(one of several), or a Jinja file.",
    )
    sequence_length: Annotated[
        int,
        Field(ge=SHORTEST_ROW, le=LONGEST_ROW),
        WrapValidator(RowLengths.read),
        PlainSerializer(RowLengths.write),
    ] = Field(
        1024,
        description="Tokens in a row, or a list of lengths, such as [512, 1024]: each conversation goes to the length "
        "that gives the fullest rows overall, and each length has its own splits, such as `train-512`.",
        json_schema_extra=RowLengths.describe,
    )
    mix: Annotated[Literal["tokens", "blocks"], IF_SET] = Field(
        "tokens",
        description="Order of the steps if rows have several lengths; all rows of a step have one. tokens: steps of "
        "all lengths are spread evenly, by their tokens; blocks: each epoch has all steps of the shortest length "
        "first, then those of the next.",
    )
    align: Annotated[int, IF_SET] = Field(
        1,
        ge=1,
        le=1 << 20,
        description="Conversations start at multiples of this number within a row, for context and sequence "
        "parallelism; padding fills the gaps. sequence_length must be a multiple of it.",
    )
    padding: Annotated[Literal["row", "none"], IF_SET] = Field(
        "row",
        description="row: rows are filled up to sequence_length; none: rows end after their last conversation, for "
        "trainers without padding.",
    )
    train_on: Annotated[Literal["assistant", "all", "last", "rounds"], TOKENS] = Field(
        "assistant",
        description="Turns that are trained on, unless a message has a flag: `train` or `training`, true or false, or "
        "`weight: 0`. last: the last answer; rounds: all answers of the last round, that is, after the last user "
        "message that has an answer.",
    )
    pairs: Annotated[Literal["chosen", "both"], OF_RECORDS_IF_SET] = Field(
        "chosen",
        description="Answers that are trained on if a record has `chosen` and `rejected`. chosen: only this one; both: "
        "each after the prompt, as samples of one conversation.",
    )
    train_parts: Annotated[TrainParts, ADVANCED_TOKENS] = Field(
        default_factory=TrainParts,
        description="Parts of the trained answers that are trained on, such as {reasoning: false}. All parts are in "
        "the rows. A conversation whose parts cannot be separated is rejected.",
    )
    turns: Annotated[Literal["auto", "together", "apart", "as_rendered"], ADVANCED_TOKENS] = Field(
        "auto",
        description="together: one sample for each conversation; apart: one for each trained turn, after the prompt "
        "that the model sees at inference; auto: the fewest in which each trained turn follows this prompt; "
        "as_rendered: one for each conversation, its one rendering, as other trainers do, even where that differs "
        "from inference.",
    )
    reasoning: Annotated[Literal["keep", "drop"], TOKENS_IF_SET] = Field(
        "keep",
        description="Reasoning of answers (`reasoning_content`, `reasoning`, `thinking`, or <think> at the start). "
        "keep: if the template writes no reasoning, the run fails, and if it leaves out that of a trained turn, the "
        "conversation is rejected; drop: it is removed.",
    )
    empty_reasoning: Annotated[Literal["train", "mask"], ADVANCED_TOKENS] = Field(
        "train",
        description="Whether the model learns to write the empty block of reasoning, such as <think> and </think>, "
        "that a template writes for an answer without reasoning. mask: it stays in the row and is not trained on.",
    )
    unknown_markers: Annotated[Literal["error", "text"], IF_SET] = Field(
        "error",
        description="A marker of the template that looks like a control token, such as <|im_end|>, and that the "
        "tokenizer lacks. error: the run stops, because the template is probably that of another model; text: it "
        "is encoded as text, and counted.",
    )
    template_options: Annotated[dict[str, JsonValue], ADVANCED_TOKENS] = Field(
        default_factory=dict,
        description="Variables of a Jinja template, such as {enable_thinking: false}. Other tools call them "
        "chat_template_kwargs.",
    )
    default_system: Annotated[str | None, ADVANCED_TOKENS] = Field(
        None, min_length=1, description="System message for conversations without one; never trained on."
    )
    share: Annotated[Literal["none", "conversation", "all"], Key(("corpus",), if_set=True)] = Field(
        "none",
        description="Whose samples share the tokens that they begin with, in rows that are trees. none: each sample is "
        "stored whole; conversation: the samples of a conversation store what they share once; all: so do samples of "
        "different conversations, such as their system prompt and tools.",
    )
    loss_weight: Annotated[Literal["none", "data", "conversation", "both"], IF_SET] = Field(
        "none",
        description="Weight of a trained token in the loss, a column of the rows. none: all count alike; data: the "
        "`loss_weight` of the record or message; conversation: all conversations have the same total weight, "
        "regardless of length; both: the product.",
    )
    overlong: Literal["truncate", "turns", "drop", "split", "error"] = Field(
        "split",
        description="What happens to a conversation that is longer than a row. split: it is cut between its turns, "
        "and every piece with a trained token is packed; truncate: it is cut at the end of the row; turns: it is "
        "cut after its last trained turn that fits whole, or dropped if none does; drop: it is left out; error: "
        "the run fails. Without packing, the default is truncate, which leaves conversations whole.",
    )
    split_at: Annotated[Literal["turns", "tokens"], OF_SPLIT] = Field(
        "turns",
        description="Where `overlong: split` cuts. turns: between turns, and within a turn only if it is longer than "
        "a row; later pieces repeat, untrained, what precedes the first user message, such as the system message "
        "and the tools; tokens: at the end of each row, without repetition.",
    )
    validation: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of conversations held out, by hash of the content; see `validation_by`."
    )
    validation_by: Annotated[str, Key(("corpus",), if_set=True)] = Field(
        "conversation",
        min_length=1,
        description="What is held out together. conversation: equal conversations; prompt: all conversations with the "
        "same prompt, which is everything before the first trained answer; any other value is a key of the records, "
        "such as user.id: all conversations with the same value.",
    )
    max_rejects: float = Field(
        0.01, ge=0.0, le=1.0, description="Share of conversations that may be rejected before the run fails."
    )
    weighting: Literal["repeat", "subsample", "proportions", "token_share"] = Field(
        "repeat",
        description="Meaning of the weights of sources. repeat: 2.5 packs each conversation twice and a seeded half "
        "of them a third time; subsample: 0.5 keeps a seeded half, and no weight may be above 1; proportions: "
        "shares of the packed conversations, such as 0.7 and 0.3, or 70 and 30; small sources are repeated, and "
        "nothing is left out; token_share: shares of the trained tokens; large sources are downsampled, and "
        "nothing is repeated.",
    )
    duplicates: Literal["keep", "exact", "near"] = Field(
        "keep",
        description="exact: of conversations with the same content, even in different sources, only the first is kept; "
        "near: a conversation that is nearly the same as an earlier one is left out, too.",
    )
    decontaminate: Annotated[list[Annotated[str, Field(min_length=1)]], Key(("corpus",), if_set=True)] = Field(
        default_factory=list,
        description="Files of evaluation sets, such as [mmlu/*.jsonl, gsm8k_test.parquet, questions.txt]: a "
        "conversation that has 13 words in a row of one of their items is left out and listed. Any format of a "
        "source, or a .txt file with an item in each line.",
    )
    min_tokens: int | None = Field(None, ge=1, description="Drop conversations with fewer tokens.")
    max_tokens: int | None = Field(None, ge=1, description="Drop conversations with more tokens.")
    min_turns: Annotated[int | None, ADVANCED] = Field(
        None, ge=1, description="Drop conversations with fewer turns; system is not a turn."
    )
    max_turns: Annotated[int | None, ADVANCED] = Field(None, ge=1, description="Drop conversations with more turns.")
    neighbors: Annotated[Literal["random", "similar", "distinct"], IF_SET] = Field(
        "random",
        description="Which conversations of equal length share a row. random: chosen by the seed; similar: about the "
        "same topic; distinct: no near-duplicates. Rows are equally full.",
    )
    order: Annotated[Literal["random", "source"], IF_SET] = Field(
        "random",
        description="Order of the rows of each split. random: chosen by the seed; source: the order of the data, for a "
        "curriculum: conversations that are near each other share rows, and each row comes before those whose first "
        "conversation is later. Rows are equally full. Training keeps the order.",
    )
    epochs: int = Field(
        1,
        ge=1,
        le=100,
        description="Number of packings of the training split. Each packing is a separate split, for one pass.",
    )
    balance: Annotated[Balance | None, IF_SET] = Field(
        None,
        description="Order rows so that all ranks of a step have equal work, such as {ranks: 8, rows_per_rank: "
        "1}; it also suits any divisor of `ranks`. The rows themselves stay the same.",
    )
    license: list[Identifier] = Field(
        default_factory=list,
        description="Licenses of the sources, such as [cc-by-4.0]; for the dataset card. Alias: `licence`.",
    )
    language: list[Identifier] = Field(
        default_factory=list, description="Languages of the conversations, such as [en, de]; for the dataset card."
    )
    packing: bool = Field(
        True, description="false: format 2.0, one conversation per row, for a trainer that tokenizes."
    )
    seed: int = Field(42, ge=0, lt=1 << 63, description="Seed of the order of rows and of every random choice.")
    eos_token: Annotated[str | None, OF_TOKENIZER] = Field(
        None, min_length=1, description="EOS token, if the tokenizer does not name it."
    )
    pad_token: Annotated[str | None, OF_TOKENIZER] = Field(
        None, min_length=1, description="Padding token, if the tokenizer does not name it."
    )
    content_tokens: Annotated[list[Annotated[str, Field(min_length=1)]], ADVANCED_TOKENS] = Field(
        default_factory=list,
        description="Added tokens that content may become. By default, all that are not special. `<x>` adds a special "
        "token, `-<think>` removes one that is not special, and `-*` removes all.",
    )
    vocab_size: Annotated[int, IF_TRAINED] = Field(
        8192, ge=300, le=1 << 20, description="Vocabulary size of a tokenizer that is trained."
    )
    template_date: Annotated[str, IF_JINJA] = Field(
        "2026-01-01", pattern=r"^\d{4}-\d{2}-\d{2}$", description="Date that a Jinja template sees as today."
    )
    engine: Annotated[Literal["auto", "gigatoken", "reference"], ADVANCED_KEYLESS] = Field(
        "auto",
        description="Encoder. auto: gigatoken, if it gives the same tokens as the reference on texts of this corpus; "
        "gigatoken: like auto, but an error if gigatoken cannot read the tokenizer; reference: the tokenizer's own "
        "library.",
    )
    part_size: Annotated[int, ADVANCED_KEYLESS] = Field(
        4 << 20, ge=1 << 10, description="Bytes of a source file that one step tokenizes."
    )
    max_record_bytes: Annotated[int, OF_RECORDS] = Field(16_000_000, ge=1 << 10, description="Reject longer lines.")

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        advanced = {} if values.get("advanced") is None else values["advanced"]
        if isinstance(advanced, dict):
            if outside := [name for name in with_current_names(advanced) if name in KEYS and not KEYS[name].advanced]:
                raise ValueError(f"{outside[0]} belongs outside of `advanced`")
            if twice := values.keys() & advanced.keys():
                raise ValueError(f"{min(map(str, twice))} is set twice; keep the one in `advanced`")
            values = {name: value for name, value in values.items() if name != "advanced"} | advanced
        else:
            raise ValueError(f"advanced: must be `key: value` pairs, found {advanced!r:.80}")
        for name, other in KEY_NAMES.items():
            if name in values and other in values:
                raise ValueError(f"{name} and {other} are the same setting; keep only {name}")
        values = with_current_names(values)
        if values.get("packing") is False:
            values.setdefault("overlong", "truncate")
        if values.get("roles") and isinstance(values.get("sources"), list):
            values["sources"] = [with_roles(source, values["roles"]) for source in values["sources"]]
        return values

    @field_validator("template_date")
    @classmethod
    def _check_date(cls, value: str) -> str:
        try:
            date.fromisoformat(value)
        except ValueError:  # its message depends on the version of Python
            raise ValueError("must be a valid date") from None
        return value

    @field_validator("template_options")
    @classmethod
    def _check_options(cls, values: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in GIVEN_TO_TEMPLATES:
            if name in values:
                raise ValueError(f"{name} comes from the conversations and cannot be an option; remove it")
        options: dict[str, JsonValue] = canonical_json(values)
        return options

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if not self.packing and self.overlong in ("split", "turns"):
            raise ValueError(
                f"overlong: {self.overlong} requires packing: true; without packing, each row is one whole conversation"
            )
        if self.overlong == "turns" and self.train_on == "all":
            raise ValueError(
                "overlong: turns and train_on: all cannot be combined: if everything is trained on, no untrained token "
                "shows where a turn ends; set overlong: truncate, drop, or split"
            )
        if not self.packing and self.epochs > 1:
            raise ValueError(
                "epochs: more than 1 requires packing: true; without packing, all epochs have the same rows"
            )
        self._check_rows()
        self._check_splits()
        check_sections(self.train_on, self.sections, self.reads_loss_weights, self.overlong)
        for name in ("tokens", "turns"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"min_{name} ({least}) is greater than max_{name} ({most}); every conversation would be dropped"
                )
        if self.weighting == "subsample":
            for number, source in enumerate(self.sources):
                if source.weight > 1:
                    raise ValueError(
                        f"sources[{number}].weight: {source.weight:g} is above 1, but 1 already keeps all of "
                        f"{source.path}; to pack conversations more than once, set weighting: repeat instead of "
                        "subsample"
                    )
        return self

    def _check_splits(self) -> None:
        splits = [source.split for source in self.sources]
        if self.validation_by != "conversation" and not self.validation and "validation" not in splits:
            raise ValueError(
                f"validation_by: {self.validation_by} has no effect, because nothing is held out; set validation, such "
                "as 0.05, or split: validation for a source, or remove validation_by"
            )
        if "validation" in splits and set(splits) == {"validation"}:
            raise ValueError("sources: all have split: validation, so nothing is trained on; remove it from one")
        if self.validation and None not in splits:
            raise ValueError(
                f"validation: {self.validation:g} has no source to choose from, because each has a split; remove "
                "validation, or the split of a source"
            )
        for number, source in enumerate(self.sources):
            if source.split == "validation" and source.weight != 1:
                raise ValueError(
                    f"sources[{number}].weight: {source.weight:g} has no effect, because a source with split: "
                    "validation is packed once and has no share of the mixture; remove weight"
                )

    def _check_rows(self) -> None:
        chosen = {
            name: getattr(self, name) for name, mark in KEYS.items() if mark.if_set and not self._is_default(name)
        }
        if not self.packing:
            for name, why in WITHOUT_PACKING.items():
                if name in chosen:
                    given = name if isinstance(chosen[name], Balance) else f"{name}: {chosen[name]}"
                    raise ValueError(f"{given} requires packing: true; without packing, {why}; remove {name}")
        for one, other, why in NOT_TOGETHER:
            if not self._is_default(one) and not self._is_default(other):
                raise ValueError(f"{one} and {other} cannot be set together: {why}; remove one of them")
        length, several = self.sequence_length, f"sequence_length: {list(self.row_lengths)}"
        if len(self.row_lengths) > 1:
            if not self.packing:
                raise ValueError(f"{several} requires packing: true; without packing, rows have no length")
            for name in [name for name in NOT_WITH_LENGTHS if name in chosen]:
                raise ValueError(
                    f"{several} and {name} cannot be combined: {NOT_WITH_LENGTHS[name]}; remove {name}, or keep one "
                    "length"
                )
        elif "mix" in chosen:
            raise ValueError(
                f"mix: {self.mix} requires several lengths, such as sequence_length: [512, 1024]; for a single "
                "length, remove mix"
            )
        if length % self.align:
            below = length // self.align * self.align
            nearest = [f"{near:,}" for near in (below, below + self.align) if SHORTEST_ROW <= near <= LONGEST_ROW]
            raise ValueError(
                f"sequence_length: {length:,} is not a multiple of align: {self.align:,}; "
                f"the nearest {'multiples are' if len(nearest) > 1 else 'multiple is'} {' and '.join(nearest)}"
            )

    @property
    def notes(self) -> list[str]:
        """Return lines about settings with former names or places."""
        moved = f"config: {', '.join(self._moved)}: now a part of `advanced`; both places work"
        return [*self._old_words, *[moved] * bool(self._moved)]

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return the lengths of rows, ascending; the last one is `sequence_length`."""
        return getattr(self.sequence_length, "several", ()) or (self.sequence_length,)

    @property
    def tokenizer_as(self) -> str:
        """Return how the tokenizer is loaded, one of TokenizerPath.WAYS."""
        return getattr(self.tokenizer, "loaded_as", TokenizerPath.WAYS[0])

    @property
    def checked_tokenizer(self) -> str:
        """Return the name of the tokenizer that the template must fit, or ""."""
        if self.unknown_markers == "text" or self._is_recorded:
            return ""
        if self.tokenizer is None:  # a tokenizer that a run trains has the markers of its built-in template
            return "" if self.template in BUILT_IN else "that the run trains"
        return Path(self.tokenizer).name

    @property
    def can_share(self) -> bool:
        """Return whether rows can be trees."""
        return self.packing and self.padding == "row" and self.align == 1

    @property
    def rows(self) -> RowLayout:
        """Return the layout of rows."""
        mix = self.mix if len(self.row_lengths) > 1 else None
        return RowLayout(self.row_lengths, self.align, self.padding, mix, self.loss_weight, self.share)

    def in_key(self, key: str) -> dict[str, Any]:
        """Return the settings that enter a key, in the order of the fields."""
        return self.model_dump(
            include={
                name
                for name, mark in KEYS.items()
                if key in mark.keys and mark.is_used(self) and not (mark.if_set and self._is_default(name))
            }
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting that affects the output, as the manifest records them.

        `plan_group`, which was removed, is among them with its value without effect, so that corpora keep their keys.
        """
        settings = self.in_key("corpus")
        last = settings.pop("max_record_bytes")
        return settings | {"plan_group": ONE_PLAN, "max_record_bytes": last}

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == defaults_of(type(self))[name])

    @property
    def group_key(self) -> str:
        """Return the key of records that `validation_by` names, or ""."""
        return "" if self.validation_by in ("conversation", "prompt") else self.validation_by

    @property
    def is_grouped(self) -> bool:
        """Return whether conversations are held out by something else than their content."""
        return self.validation_by != "conversation"

    @property
    def grouped_by(self) -> str:
        """Return the column of token files that decides the split of a conversation."""
        return {"conversation": "digest", "prompt": "prompt"}.get(self.validation_by, "group")

    @property
    def sections(self) -> Sections:
        """Return the sections of answers that are trained on."""
        return Sections(**self.train_parts.model_dump(), empty=self.empty_reasoning != "mask")

    @property
    def splits_at_turns(self) -> bool:
        """Return whether conversations longer than a row are cut between their turns."""
        return self.overlong == "split" and self.split_at == "turns"

    @property
    def lists_dropped(self) -> bool:
        """Return whether the corpus has a file that lists what the run cleaned away."""
        return self.duplicates == "near" or bool(self.decontaminate)

    @property
    def reads_loss_weights(self) -> bool:
        """Return whether token files contain the loss weights in the data."""
        return self.loss_weight in ("data", "both")

    @property
    def weighs_conversations(self) -> bool:
        """Return whether all conversations have the same weight, before data weights."""
        return self.loss_weight in ("conversation", "both")


KEYS = {
    name: next((mark for mark in field.metadata if isinstance(mark, Key)), Key(("corpus",)))
    for name, field in Config.model_fields.items()
}


def path_in(folder: Path, named: str) -> Path:
    """Return the path that a config in `folder` names."""
    return folder / os.path.expanduser(named)


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a config."""
    found = container_by_extension(path.name) if os.path.isfile(path) else None
    try:
        if found is None or path.suffix.lower() == ".json":  # YAML includes JSON
            return read_settings(path, REMOVED, WITHOUT_EFFECT)
    except UsageError as error:
        if found is None or error.reason == "removed_setting":
            raise
    raise UsageError(
        "bad_config_file",
        f"{path}: is a data file, not a config; a config is a YAML file that lists data files under `sources:`. "
        f"Write one with: packcorpus init {shlex.quote(str(path))}",
    )


def load_config(path: Path, sequence_length: str = "") -> Config:
    """Read and check a config.

    Unless `sequence_length` is empty, it replaces the value in the config: one length, or several such as 512,1024. A
    source may be a plain path. Raises UsageError or InputMissing, naming the key and the closest known key.
    """
    values = _read(path)
    if not values:
        raise UsageError("bad_config_file", f"{path}: is empty; add at least `sources:`")
    if sequence_length:
        values["sequence_length"] = length_of(sequence_length)
    return config_from(values, str(path))


def length_of(text: str) -> Any:
    """Return the value of `sequence_length` that a command line gives, unchecked."""
    given = [int(part) if part.strip().isdecimal() else part for part in text.split(",")]
    return given if len(given) > 1 else given[0]


def config_from(values: dict[str, Any], where: str) -> Config:
    """Return the values of a file as a config; `where` names the file in messages."""
    sources = values.get("sources")
    if isinstance(sources, str):
        sources = [sources]
    if isinstance(sources, list):
        values["sources"] = [{"path": source} if isinstance(source, str) else source for source in sources]
    config = check_settings(Config, values, where)
    config._moved = tuple(name for name in with_current_names(values) if name in KEYS and KEYS[name].advanced)
    flat = values | (values.get("advanced") or {})
    neighbors = "config: `company` is now `neighbors`, and its value `apart` is `distinct`; the old words work, too"
    duplicates = "config: `duplicates: drop` is now `duplicates: exact`; the old word works, too"
    has_old_name = "company" in flat or flat.get("neighbors") == "apart"
    config._old_words = (*[neighbors] * has_old_name, *[duplicates] * (flat.get("duplicates") == "drop"))
    return config


def check_recorded(recorded: dict[str, Any], where: Path) -> None:
    """Raise UsageError if a recorded config has a removed setting that had an effect."""
    with_effect = {name: value for name, value in recorded.items() if (name, value) not in WITHOUT_EFFECT.items()}
    check_removed(with_effect, REMOVED, str(where))


def config_of(recorded: dict[str, Any], part_size: int) -> Config:
    """Return a recorded config that has passed `check_recorded`."""
    kept = {name: value for name, value in recorded.items() if name not in REMOVED}
    if recorded.get("overlong") == "split":
        kept.setdefault("split_at", "tokens")  # as earlier versions did
    return Config.model_validate(kept | {"part_size": part_size})
