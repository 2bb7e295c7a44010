"""Read the config of a corpus from one YAML file.

    corpus.yaml ──load_config──▶ Config ──settings()──▶ recorded in the manifest and covered by the corpus key

Defaults are filled in, and unknown keys are refused. Paths in a config are relative to the folder of the config file; ~
is the home folder.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from tasks.conversations.names import Roles, with_roles
from tasks.core.errors import UsageError
from tasks.core.yaml_settings import Removed, canonical_json, check_removed, check_settings, defaults_of, read_settings
from tasks.readers.containers import container_by_extension
from tasks.row_settings import (
    LONGEST_ROW,
    SHORTEST_ROW,
    Balance,
    check_align,
    check_lengths,
    check_packing,
    lengths_of,
    or_lengths,
)
from tasks.sources.model import Source
from tasks.storage.keys import KEY_NAMES, ONE_PLAN, SHAPE_SETTINGS
from tasks.storage.layout import RowLayout
from tasks.templates.adjust import GIVEN_TO_TEMPLATES
from tasks.templates.sections import Sections, TrainParts, check_sections

# Settings that are neither in the corpus key nor in the manifest, because they cannot change the output or because
# (`roles`) they are part of each of the `sources`.
NOT_IN_KEY = {"part_size", "engine", "roles"}

# Settings that are neither in the corpus key nor in the manifest at their default, so that older corpora keep their
# keys. These settings change texts, and therefore tokens:
TEXTS_IF_SET = (
    *("turns", "reasoning", "template_options", "default_system", "content_tokens"),
    *("empty_reasoning", "train_parts"),
)
# These settings do not change texts (but see settings_of_texts):
ROWS_IF_SET = ("company", "loss_weight", "balance", *SHAPE_SETTINGS, "mix")

# Settings of earlier versions, and what to use instead.
REMOVED: Removed = {
    "plan_group": "remove it: every corpus has one plan",
    "plan_chunk": "remove it: every corpus has one plan",
    "company_by": "remove it: `company` compares the token IDs of conversations",
}

# Removed settings that manifests record with a value that had no effect. A config may have them, too, because it may be
# a copy of a recorded config.
WITHOUT_EFFECT = {"plan_group": ONE_PLAN}

# How the folder of a tokenizer is loaded: like AutoTokenizer, or its tokenizer.json or .model file as it is.
WAYS_TO_LOAD = ("transformers", "files")

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]


def _or_paths(schema: dict[str, Any]) -> None:
    """Allow a path instead of a source, or of all sources, in the JSON Schema.

    load_config accepts such paths.
    """
    entries = dict(schema)
    schema.clear()
    path = {"type": "string", "minLength": 1}
    entries["items"] = {"anyOf": [path, entries["items"]]}
    schema.update(anyOf=[path, {key: entries.pop(key) for key in ("type", "items", "minItems")}], **entries)


def _or_loaded_as(schema: dict[str, Any]) -> None:
    """Allow a path with a way to load it in the JSON Schema."""
    path = {"type": "string", "minLength": 1}
    properties = {"path": path, "as": {"enum": list(WAYS_TO_LOAD)}}
    both = {"type": "object", "properties": properties, "required": ["path"], "additionalProperties": False}
    schema["anyOf"].insert(1, both)


class Config(BaseModel):
    """Everything that determines a corpus, except the bytes of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("corpus", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the corpus.")
    sources: Annotated[
        list[Source],
        Field(min_length=1, description="Files with conversations, in order.", json_schema_extra=_or_paths),
    ]
    roles: Roles = Field(
        default_factory=dict,
        description="Map of roles to their names in all sources, such as {user: [customer], assistant: [agent]}. Case "
        "is ignored. Common names are recognized without this setting.",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="A SentencePiece model, or a tokenizer.json or folder of a Hugging Face tokenizer. "
        "If absent, a SentencePiece model is trained on the sources. A folder is loaded like AutoTokenizer of "
        "Transformers loads it. {path: FOLDER, as: files} uses its tokenizer.json or .model file as it is.",
        json_schema_extra=_or_loaded_as,
    )
    template: str = Field(
        "chatml",
        min_length=1,
        description="Built-in name, `tokenizer` (its own chat template), `tokenizer:NAME` "
        "(one of several), or a Jinja file.",
    )
    sequence_length: int = Field(
        1024,
        ge=SHORTEST_ROW,
        le=LONGEST_ROW,
        description="Tokens in a row, or a list of lengths, such as [512, 1024]. Each conversation goes to the length "
        "that gives the fullest rows overall. Each length has its own splits, such as `train-512`.",
        json_schema_extra=or_lengths,
    )
    mix: Literal["tokens", "blocks"] = Field(
        "tokens",
        description="Order of the steps if rows have several lengths. Each step has rows of one length. tokens: steps "
        "of all lengths are spread evenly, in proportion to their tokens; blocks: each epoch starts with all steps of "
        "the shortest length and continues with the next length.",
    )
    align: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="Conversations start at multiples of this number within a row, for context and sequence "
        "parallelism; padding fills the gaps. sequence_length must be a multiple of it.",
    )
    padding: Literal["row", "none"] = Field(
        "row",
        description="row: rows are filled up to sequence_length; none: rows end after their last conversation, for "
        "trainers without padding.",
    )
    train_on: Literal["assistant", "all", "last", "rounds"] = Field(
        "assistant",
        description="Turns that are trained on, unless a message has a flag: `train` or `training`, true or false, or "
        "`weight: 0`. last: the last answer; rounds: all answers of the last round, that is, after the last user "
        "message that has an answer.",
    )
    train_parts: TrainParts = Field(
        default_factory=TrainParts,
        description="Parts of the trained answers that are trained on, such as {reasoning: false}. All parts are in "
        "the rows. A conversation whose parts cannot be separated is rejected.",
    )
    turns: Literal["auto", "together", "apart"] = Field(
        "auto",
        description="together: one sample for each conversation; apart: one sample for each trained turn, after the "
        "prompt that the model sees at inference; auto: the fewest samples in which each trained turn follows this "
        "prompt.",
    )
    reasoning: Literal["keep", "drop"] = Field(
        "keep",
        description="Reasoning of answers (`reasoning_content`, `reasoning`, `thinking`, or <think> at the start). "
        "keep: if the template writes no reasoning, the run fails, and if it leaves out that of a trained turn, the "
        "conversation is rejected; drop: it is removed.",
    )
    empty_reasoning: Literal["train", "mask"] = Field(
        "train",
        description="An empty block of reasoning that a template writes for an answer without reasoning, such as "
        "<think> and </think>. train: the model learns to write it, and so not to reason; mask: it stays in the row "
        "and is not trained on.",
    )
    template_options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Variables of a Jinja template, such as {enable_thinking: false}. Other tools call them "
        "chat_template_kwargs.",
    )
    default_system: str | None = Field(
        None, min_length=1, description="System message for conversations without one; never trained on."
    )
    loss_weight: Literal["none", "data", "conversation", "both"] = Field(
        "none",
        description="Weight of a trained token in the loss. none: all tokens have the same weight; data: the "
        "`loss_weight` of the record or message; conversation: all conversations have the same total weight, "
        "regardless of length; both: the product of data and conversation. The weights are in the column `loss_weight` "
        "of the rows.",
    )
    overlong: Literal["truncate", "turns", "drop", "split", "error"] = Field(
        "truncate",
        description="Policy for a conversation that is longer than a row. truncate: it is cut at the end of the row; "
        "turns: it is cut after its last trained turn that fits whole, and dropped if no turn fits; drop: it is left "
        "out; split: every piece of it is packed; error: the run fails.",
    )
    validation: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of conversations held out, by hash of the content."
    )
    max_rejects: float = Field(
        0.01, ge=0.0, le=1.0, description="Share of conversations that may be rejected before the run fails."
    )
    weighting: Literal["repeat", "subsample", "token_share"] = Field(
        "repeat",
        description="Meaning of the weights of sources. repeat: 2.5 packs each conversation twice and a seeded half of "
        "them a third time; subsample: 0.5 keeps a seeded half, and no weight may be above 1; token_share: sources are "
        "downsampled until their trained tokens match the weights, and no conversation is repeated.",
    )
    duplicates: Literal["keep", "drop"] = Field(
        "keep",
        description="drop: if several conversations have the same content, even in different sources, only the first "
        "one is kept.",
    )
    min_tokens: int | None = Field(None, ge=1, description="Drop conversations with fewer tokens.")
    max_tokens: int | None = Field(None, ge=1, description="Drop conversations with more tokens.")
    min_turns: int | None = Field(None, ge=1, description="Drop conversations with fewer turns; system is not a turn.")
    max_turns: int | None = Field(None, ge=1, description="Drop conversations with more turns.")
    company: Literal["random", "similar", "apart"] = Field(
        "random",
        description="Which conversations share a row, among conversations of equal length. random: chosen by the seed; "
        "similar: conversations about the same topic; apart: no near-duplicates. The choice does not change how full "
        "the rows are.",
    )
    epochs: int = Field(
        1,
        ge=1,
        le=100,
        description="Number of packings of the training split. Each packing is a separate split, for one pass.",
    )
    balance: Balance | None = Field(
        None,
        description="Order rows so that all ranks of a step have equal work, such as {ranks: 8}. The rows themselves "
        "stay the same, and the order also suits any divisor of `ranks`. `rows_per_rank` is the number of rows that a "
        "rank processes before it waits for the other ranks, or a divisor of this number (default: 1).",
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
    eos_token: str | None = Field(None, min_length=1, description="EOS token, if the tokenizer does not name it.")
    pad_token: str | None = Field(None, min_length=1, description="Padding token, if the tokenizer does not name it.")
    content_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Added tokens that content may become. By default, these are all added tokens that are not "
        "special. `<x>` adds a special token, `-<think>` removes a token that is not special, and `-*` removes all.",
    )
    vocab_size: int = Field(8192, ge=300, le=1 << 20, description="Vocabulary size of a tokenizer that is trained.")
    template_date: str = Field(
        "2026-01-01", pattern=r"^\d{4}-\d{2}-\d{2}$", description="Date that a Jinja template sees as today."
    )
    engine: Literal["auto", "gigatoken", "reference"] = Field(
        "auto",
        description="Encoder. auto: gigatoken, if it gives the same tokens as the reference on texts of this corpus; "
        "gigatoken: like auto, but an error if gigatoken cannot read the tokenizer; reference: the tokenizer's own "
        "library.",
    )
    part_size: int = Field(4 << 20, ge=1 << 10, description="Bytes of a source file that one step tokenizes.")
    max_record_bytes: int = Field(16_000_000, ge=1 << 10, description="Reject longer lines.")

    # Lengths of rows, ascending; empty if there is only one. `sequence_length` is the longest length.
    _lengths: tuple[int, ...] = PrivateAttr(())
    _tokenizer_as: str = PrivateAttr(WAYS_TO_LOAD[0])

    @model_validator(mode="wrap")
    @classmethod
    def _take_other_forms(cls, values: Any, check: ModelWrapValidatorHandler[Config]) -> Config:
        """Accept several lengths of rows, and a tokenizer with a way to load it."""
        lengths: tuple[int, ...] = ()
        tokenizer = values.get("tokenizer") if isinstance(values, dict) else None
        if isinstance(tokenizer, dict):
            _check_tokenizer(tokenizer)
            values = {**values, "tokenizer": tokenizer["path"]}
        given = values.get("sequence_length") if isinstance(values, dict) else None
        if isinstance(given, str) and "," in given:
            raise ValueError(f"sequence_length: several lengths are a list, such as [512, 1024], found {given!r}")
        if isinstance(given, list):
            lengths = lengths_of(given)
            values = {**values, "sequence_length": lengths[-1]}
        config = check(values)
        if len(lengths) > 1:
            config._lengths = lengths
        if isinstance(tokenizer, dict):
            config._tokenizer_as = tokenizer.get("as", WAYS_TO_LOAD[0])
        check_lengths(config._lengths, config.packing, config._set_among(ROWS_IF_SET))
        return config

    @model_serializer(mode="wrap")
    def _write_other_forms(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write several lengths, and an unusual way to load a tokenizer."""
        values: dict[str, Any] = dump(self)
        if self._lengths and "sequence_length" in values:
            values["sequence_length"] = list(self._lengths)
        if self._tokenizer_as != WAYS_TO_LOAD[0] and "tokenizer" in values:
            values["tokenizer"] = {"path": values["tokenizer"], "as": self._tokenizer_as}
        return values

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, values: Any) -> Any:
        """Accept a setting by its alias."""
        if not isinstance(values, dict):
            return values
        for name, other in KEY_NAMES.items():
            if name in values and other in values:
                raise ValueError(f"{name} and {other} are the same setting; keep only {name}")
        today = {other: name for name, other in KEY_NAMES.items()}
        return {today.get(name, name): value for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _pass_roles_on(cls, values: Any) -> Any:
        """Add the roles of the config to each source, whose files are read with them."""
        if not isinstance(values, dict) or not values.get("roles") or not isinstance(values.get("sources"), list):
            return values
        return {**values, "sources": [with_roles(source, values["roles"]) for source in values["sources"]]}

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
        check_packing(self.packing, self._set_among(ROWS_IF_SET))
        check_sections(self.train_on, self.sections, self.reads_loss_weights, self.overlong)
        check_align(self.sequence_length, self.align)
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

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return the lengths of rows, ascending; the last one is `sequence_length`."""
        return self._lengths or (self.sequence_length,)

    @property
    def tokenizer_as(self) -> str:
        """Return how the tokenizer is loaded, one of WAYS_TO_LOAD."""
        return self._tokenizer_as

    @property
    def rows(self) -> RowLayout:
        """Return the layout of rows."""
        mix = self.mix if len(self.row_lengths) > 1 else None
        return RowLayout(self.row_lengths, self.align, self.padding, mix, self.loss_weight)

    def settings(self) -> dict[str, Any]:
        """Return every setting that affects the output, in the order of the fields.

        `plan_group`, which was removed, is among them with its value without effect, so that corpora keep their keys.
        """
        optional = {*TEXTS_IF_SET, *ROWS_IF_SET}
        settings = self.model_dump(exclude=NOT_IN_KEY | (optional - set(self._set_among(optional))))
        last = settings.pop("max_record_bytes")
        return settings | {"plan_group": ONE_PLAN, "max_record_bytes": last}

    def _set_among(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the settings among `names` that are not at their default."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != defaults_of(type(self))[name]}

    def settings_of_texts(self) -> dict[str, Any]:
        """Return the settings that change token files and are not at their default."""
        values = self.model_dump(include=set(self._set_among(TEXTS_IF_SET)))
        return values | ({"loss_weight": "data"} if self.reads_loss_weights else {})

    @property
    def sections(self) -> Sections:
        """Return the sections of answers that are trained on."""
        return Sections(**self.train_parts.model_dump(), empty=self.empty_reasoning != "mask")

    @property
    def reads_loss_weights(self) -> bool:
        """Return whether token files contain the loss weights in the data."""
        return self.loss_weight in ("data", "both")

    @property
    def weighs_conversations(self) -> bool:
        """Return whether all conversations have the same weight, before data weights."""
        return self.loss_weight in ("conversation", "both")


def _check_tokenizer(given: dict[str, Any]) -> None:
    """Raise ValueError if a tokenizer is not a path with a way to load it."""
    is_known = {*given} <= {"path", "as"} and given.get("as", WAYS_TO_LOAD[0]) in WAYS_TO_LOAD
    if not isinstance(given.get("path"), str) or not is_known:
        ways = " | ".join(WAYS_TO_LOAD)
        raise ValueError(f"tokenizer: expected a path, or {{path: FOLDER, as: {ways}}}, found {given!r}")


def path_in(folder: Path, named: str) -> Path:
    """Return the path that a config in `folder` names."""
    return folder / os.path.expanduser(named)


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a config.

    Raises UsageError or InputMissing. The error for a data file says that it is a data file.
    """
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
        given = [int(part) if part.strip().isdecimal() else part for part in sequence_length.split(",")]
        values["sequence_length"] = given if len(given) > 1 else given[0]
    sources = values.get("sources")
    if isinstance(sources, str):
        sources = [sources]
    if isinstance(sources, list):
        values["sources"] = [{"path": source} if isinstance(source, str) else source for source in sources]
    return check_settings(Config, values, str(path))


def check_recorded(recorded: dict[str, Any], where: Path) -> None:
    """Raise UsageError if a recorded config has a removed setting that had an effect.

    `where` names the manifest in messages.
    """
    with_effect = {name: value for name, value in recorded.items() if (name, value) not in WITHOUT_EFFECT.items()}
    check_removed(with_effect, REMOVED, str(where))


def config_of(recorded: dict[str, Any], part_size: int) -> Config:
    """Return a recorded config that has passed `check_recorded`.

    Raises ValueError if it is invalid.
    """
    kept = {name: value for name, value in recorded.items() if name not in REMOVED}
    return Config.model_validate(kept | {"part_size": part_size})
