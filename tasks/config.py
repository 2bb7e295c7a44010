"""The config: one YAML file → `Config`, every default filled in, every unknown key refused.

    corpus.yaml ──load_config──▶ Config ──settings()──▶ what the manifest repeats and the corpus key covers

Paths in a config are relative to the folder of the config file.
"""

from __future__ import annotations

import difflib
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tasks.errors import InputMissing, UsageError

Format = Literal["auto", "messages", "sharegpt", "alpaca", "dolly", "oasst", "prompt_completion", "text"]

# Settings that cannot change the output: they are neither in the corpus key nor in the manifest.
WITHOUT_EFFECT = {"part_size"}


class Source(BaseModel):
    """One entry of `sources`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="File, glob or folder, relative to the folder of the config.")
    format: Format = Field("auto", description="Record format; auto finds it from the keys of the first records.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column names → the file's, such as {instruction: frage}."
    )


class Config(BaseModel):
    """Everything that a corpus is made from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("corpus", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="Name of the corpus.")
    sources: Annotated[list[Source], Field(min_length=1, description="Where the conversations come from, in order.")]
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="A SentencePiece model, or a tokenizer.json or folder of a Hugging Face tokenizer. "
        "Absent: a SentencePiece model is trained on the sources.",
    )
    template: str = Field(
        "chatml", min_length=1, description="Built-in name, `tokenizer` (its own chat template) or a Jinja file."
    )
    sequence_length: int = Field(1024, ge=8, le=1 << 20, description="Tokens in a row.")
    train_on: Literal["assistant", "all", "last"] = Field("assistant", description="The turns that are trained on.")
    overlong: Literal["truncate", "drop", "split", "error"] = Field(
        "truncate", description="What happens to a conversation that is longer than a row."
    )
    validation: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of conversations held out, by hash of the content."
    )
    max_rejects: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of conversations that may be rejected before the run fails."
    )
    packing: bool = Field(True, description="false: format 2.0, one conversation a row, for a trainer that tokenises.")
    seed: int = Field(42, ge=0, lt=1 << 63, description="Orders the rows.")
    eos_token: str | None = Field(None, min_length=1, description="EOS, where the tokenizer does not name it.")
    pad_token: str | None = Field(None, min_length=1, description="Pad, where the tokenizer does not name it.")
    vocab_size: int = Field(8192, ge=300, le=1 << 20, description="Pieces of a tokenizer that is trained.")
    template_date: str = Field(
        "2026-01-01", pattern=r"^\d{4}-\d{2}-\d{2}$", description="The date that a Jinja template sees as today."
    )
    part_size: int = Field(64 << 20, ge=1 << 10, description="Bytes of a source file that one task reads.")
    plan_group: int = Field(100_000_000, ge=1, description="Conversations that are packed together in one plan.")
    max_record_bytes: int = Field(16_000_000, ge=1 << 10, description="A longer line is rejected.")

    @field_validator("template_date")
    @classmethod
    def _check_date(cls, value: str) -> str:
        date.fromisoformat(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if not self.packing and self.overlong == "split":
            raise ValueError("overlong: split needs packing: true (without packing a row is a whole conversation)")
        return self

    def settings(self) -> dict[str, Any]:
        """Every setting that affects the output, in the order of the fields."""
        return self.model_dump(exclude=WITHOUT_EFFECT)


class _Loader(yaml.SafeLoader):
    """YAML without aliases (nested ones grow without bound), a key twice (the first would be lost) and dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as its parent has it
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases are not allowed here; write it out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f'the key "{key.value}" stands here twice', key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_config(path: Path, sequence_length: str = "") -> Config:
    """Read and check a config; a source may be a path by itself. `sequence_length`, where given, replaces the config's.

    Raises UsageError or InputMissing, naming the key and the nearest known one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputMissing(f"{path}: no such config; name one with --config FILE{_yaml_nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a config: {error}") from error
    try:
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader, made stricter
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(f"{path}: {_yaml_problem(error)}") from error
    if values is None:
        raise UsageError(f"{path}: is empty; it needs at least `sources:`")
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected `key: value` lines, found {type(values).__name__}")
    if sequence_length:
        values["sequence_length"] = int(sequence_length) if sequence_length.isdecimal() else sequence_length
    sources = values.get("sources")
    if isinstance(sources, str):
        sources = [sources]
    if isinstance(sources, list):
        values["sources"] = [{"path": source} if isinstance(source, str) else source for source in sources]
    try:
        return Config.model_validate(values, strict=True)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem(item)}" for item in error.errors(include_url=False))
        raise UsageError(f"{path}: the config cannot be used\n{problems}") from None


def _yaml_nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f" ({path.parent} is not a folder)"
    found = sorted(p.name for p in path.parent.glob("*.y*ml"))
    near = difflib.get_close_matches(path.name, found, 1, 0.4)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error) or type(error).__name__
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else f"is not YAML: {problem}"


def _problem(item: Any) -> str:
    """One line for one finding of pydantic: where, what, and the nearest known key."""
    where = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in item["loc"]))
    if item["type"] == "extra_forbidden":
        model = Source if len(item["loc"]) > 1 else Config
        near = difflib.get_close_matches(str(item["loc"][-1]), model.model_fields, 1, 0.5)
        hint = f"did you mean `{near[0]}`?" if near else "known keys: " + ", ".join(model.model_fields)
        return f"{where}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{where}: is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {message}, found {item['input']!r:.80}" if where else message
