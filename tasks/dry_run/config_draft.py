"""Write the commented config of `packcorpus init` from source files.

    paths ─sample─▶ entries of `sources`, each with its format ─┐
    folders nearby ─search─▶ tokenizer ─▶ template ─────────────┴─▶ Config ─predict─▶ figures for the comments ─▶ YAML

The config runs without changes. Records that cannot be used are listed for the user to fix, and `max_rejects` is just
high enough for the other records to be packed. Files that cannot be read are comments with the reason. Every setting
of the model `Config` is written with its default and description, so new settings appear without changes here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from tasks.config import Config, load_config
from tasks.conversations.tokens import TOKENS
from tasks.core.error_codes import CODES
from tasks.core.errors import DataError, InputMissing, PackError, UsageError
from tasks.core.printable import counted, from_here, in_bytes
from tasks.core.yaml_settings import check_settings, parse_settings
from tasks.dry_run.draft_entries import BUDGET, Entry, Search, find_entries, one_line, tokenizer_near
from tasks.dry_run.dry_run import predict
from tasks.dry_run.prediction import Prediction
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from tasks.sources.model import Source, found_layouts
from tasks.storage.files import write_bytes
from tasks.stores.urls import refuse_url
from tasks.templates.built_in import MARKERS
from tasks.tokenization.first_conversations import first_failure

WIDTH = 110

MAX_REJECTS: float = Config.model_fields["max_rejects"].default

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.schema.json"

NO_TOKENIZER = "none found, so one will be trained on the sources; to fine-tune a model, set its tokenizer"

OF_YOUR_MODEL = "make sure that it is the tokenizer of your model"

# Control tokens that show that a tokenizer was made for a template.
TYPICAL = {name: markers[:2] for name, markers in MARKERS.items() if not markers[0].startswith("<tool")}

NO_REASONING = (
    "the template does not write all reasoning, so keep would reject conversations; to train on it, set the "
    "tokenizer of a model for reasoning, template: tokenizer, and reasoning: keep"
)

# Settings of a source in a message, which `init` has options for.
_SETTINGS = re.compile(r"(columns|ignore): [{\[](.*?)[}\]]")

# Mistral's templates write system messages with this token from version 7 on. Version 3 does not.
LATER_MISTRAL = "[SYSTEM_PROMPT]"


@dataclass
class Draft:
    """A drafted config and the prediction for it."""

    entries: list[Entry]
    left_out: list[str]
    tokenizer: Path | None
    other_tokenizers: list[Path]
    template: str
    template_note: str
    values: dict[str, Any]
    found: Prediction
    skipped: list[str]  # folders with outputs of packcorpus

    def summary(self) -> list[str]:
        """Return one line per finding."""
        read, rejected = _read_and_rejected(self.found)
        count = f"{self.found.about(read)} conversations"
        if rejected:
            count = f"{self.found.about(read)} records, {self.found.about(read - rejected)} can be packed"
        lines = [
            f"{counted(self.found.files, 'file')}, {in_bytes(self.found.bytes)}, {count}",
            f"tokenizer: {self.tokenizer or NO_TOKENIZER}{f'; {OF_YOUR_MODEL}' * bool(self.tokenizer)}",
            f"template: {self.template} ({self.template_note})",
        ]
        files = [file for entry in self.entries if not entry.problem for file in entry.files]
        lines += map(from_here, found_layouts(files, [Source(path="x")]))
        lines += [f"left out: {one_line(str(entry.path))}: {entry.problem}" for entry in self.entries if entry.problem]
        guesses = {one_line(from_here(str(entry.path))): entry.roles for entry in self.entries if entry.roles}
        lines += [f"{path}: guessed roles: {_yaml(roles)}" for path, roles in guesses.items()]
        if "reasoning" in self.values:
            lines.append(f"reasoning: {self.values['reasoning']}: {NO_REASONING}")
        if "max_rejects" in self.values:
            why = "; ".join(_cut_off(self.found) + _broken(self.found)[:1])
            lines.append(f"max_rejects: {self.values['max_rejects']:g} instead of {MAX_REJECTS:g}: {why}")
        if broken := _broken(self.found):
            lines += [f"{broken[0]}:", *(f"  {line}" for line in broken[1:])]
        if self.skipped:
            lines.append(f"skipped, written by packcorpus: {_some(self.skipped)}")
        if self.left_out:
            lines.append(f"left out, unknown extension: {_some(self.left_out)}")
        return lines


def write_draft(
    paths: Sequence[Path],
    output: Path,
    overwrite: bool,
    format: str = "auto",
    columns: Sequence[str] = (),
    roles: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Draft:
    """Draft a config for `paths` and write it to `output`.

    `columns` and `roles` are mappings, each OURS=YOURS. Raises UsageError if `output` exists and `overwrite` is false,
    and InputMissing or DataError if no path contains readable conversations.
    """
    refuse_url(output, "name a file, then copy it", "writes")
    if output.exists() and not overwrite:
        raise UsageError(
            "config_exists", f"{output}: already exists; choose another path with --output, or replace it with --force"
        )
    names: dict[str, list[str]] = {}
    for ours, theirs in _pairs(roles, "--roles user=customer"):
        names.setdefault(ours, []).append(theirs)
    given = {"columns": dict(_pairs(columns, "--columns instruction=frage")), "roles": names, "ignore": list(ignore)}
    try:
        draft, text = make_draft(paths, output, format, {key: value for key, value in given.items() if value})
    except DataError as error:
        error.message = _with_options(error.message)
        raise
    # The text must be a valid config before it replaces a file.
    check_settings(Config, parse_settings(text, str(output), {}), str(output))
    write_bytes(output, text.encode())
    load_config(output)
    return draft


def _with_options(message: str) -> str:
    """Return a message with options of `init` in place of settings of a source."""
    before, advice, settings = message.rpartition(", add  ")
    if not settings.endswith("  to its entry of sources"):
        return message
    found = (
        f"--{name} {item.replace(': ', '=')}"
        for name, items in _SETTINGS.findall(settings)
        for item in items.split(", ")
    )
    return f"{before}{advice}{' '.join(found)}"


def _pairs(mappings: Sequence[str], example: str) -> list[tuple[str, str]]:
    pairs = [mapping.partition("=") for mapping in mappings]
    for mapping, (ours, _, theirs) in zip(mappings, pairs, strict=True):
        if not ours or not theirs:
            raise UsageError(
                "bad_command_line", f"{example.split()[0]} {mapping}: expected OURS=YOURS, such as {example}"
            )
    return [(ours, theirs) for ours, _, theirs in pairs]


def make_draft(
    paths: Sequence[Path], output: Path, format: str = "auto", given: dict[str, Any] | None = None
) -> tuple[Draft, str]:
    """Return the draft and its YAML.

    `given` has other settings of all sources. Raises the errors of `write_draft`.
    """
    settings = {"format": format, **(given or {})}
    for name, value in settings.items():
        check_settings(Source, {"path": "x", name: value}, f"--{name}")
    for path in paths:
        refuse_url(path, "download a file, draft a config for it, and write the URL as the path of its source")
    search = Search(settings)
    entries = [entry for path in paths for entry in find_entries(path, search)]
    usable = [entry for entry in entries if not entry.problem]
    if not usable:
        if len(entries) == 1 and entries[0].error:
            raise entries[0].error
        problem = next((entry.problem for entry in entries), f"no file has a known extension: {_some(search.left_out)}")
        raise DataError("nothing_to_draft", f"{', '.join(map(str, paths))}: {problem}")
    folder = output.parent
    tokenizer, others = tokenizer_near([file.path.parent for entry in usable for file in entry.files])
    recorded = next((entry.path for entry in usable if entry.format == TOKENS.name), None)
    if recorded and not tokenizer:
        raise InputMissing(
            "tokenizer_missing",
            f"{recorded}: has recorded token ids, and there is no tokenizer near it; put the folder or file of the "
            "tokenizer that recorded the ids next to it",
        )
    # These paths are relative to the working directory, because the folder of the config may not exist yet.
    further = {name: settings[name] for name in ("roles", "ignore") if name in settings}
    values: dict[str, Any] = {"sources": [_source(str(entry.path), entry) | further for entry in usable]}
    if tokenizer:
        values["tokenizer"] = str(tokenizer)
    template, note, found = _choose_template(values, tokenizer)
    values = {"name": _name(paths[0])}
    values["sources"] = [_source(_path_in(folder, entry.path), entry) | further for entry in usable]
    if tokenizer:
        values["tokenizer"] = _path_in(folder, tokenizer)
    values["template"] = template
    if found.settings["reasoning"] == "drop":
        values["reasoning"] = "drop"
    if found.failures:
        problem = next(iter(_broken(found)[1:]), found.failures[0])
        raise DataError("nothing_to_draft", f"{', '.join(map(str, paths))}: no conversation can be packed: {problem}")
    # The share of rejects, rounded up to a percent; an estimate is increased by a fifth.
    read, rejected = _read_and_rejected(found)
    enough = min(1.0, math.ceil(round((100 if found.whole else 120) * rejected / max(read, 1), 6)) / 100)
    if first_failure(found.recipe):  # a smaller share would stop the run
        enough = 1.0
    if enough > MAX_REJECTS:
        values["max_rejects"] = enough
    draft = Draft(entries, search.left_out, tokenizer, others, template, note, values, found, search.skipped)
    return draft, "".join(f"{line}\n" for line in _lines(draft, output))


def _read_and_rejected(found: Prediction) -> tuple[int, int]:
    return found.ledger.conversations.read, sum(source.rejected for source in found.sources)


def _source(path: str, entry: Entry) -> dict[str, Any]:
    further = {"columns": entry.columns, "roles": entry.roles}
    return {"path": path, "format": entry.format} | {name: value for name, value in further.items() if value}


def _choose_template(values: dict[str, Any], tokenizer: Path | None) -> tuple[str, str, Prediction]:
    """Return the template, the reason for it, and the prediction with it."""
    if not tokenizer:
        note = "its markers become control tokens of the trained tokenizer"
        return "chatml", note, _predict(values | {"template": "chatml"})
    files = find_tokenizer(tokenizer)
    name, note = _built_in(open_encoder(files))
    has_template = False
    with suppress(PackError):
        has_template = files.chat_template() is not None
    if has_template:
        try:
            found = _predict(values | {"template": "tokenizer"})
            refused = [
                reject
                for reject in found.rejects
                if reject.reason.startswith("template_") or reject.reason == "turn_not_located"
            ]
            if sum(reject.looked_at for reject in refused) <= found.looked_at / 10:
                return "tokenizer", "the tokenizer's own template", found
            problem = refused[0].message
        except PackError as error:
            problem = str(error)
        note += f"; the tokenizer's own template cannot be used: {one_line(problem)}"
    return name, note, _predict(values | {"template": name})


def _built_in(encoder: Encoder) -> tuple[str, str]:
    for name, markers in TYPICAL.items():
        if all(map(encoder.is_token, markers)):
            note = f"the tokenizer has its control tokens {' '.join(markers)}"
            if name == "mistral" and encoder.is_token(LATER_MISTRAL):
                note += f", but {LATER_MISTRAL} belongs to later versions; use the model's own template, a .jinja file"
            return name, note
    return "alpaca", "the tokenizer has no control tokens of a chat template, and this one needs only text"


def _predict(values: dict[str, Any]) -> Prediction:
    """Return the prediction, without the reasoning if the template does not write it."""
    config = Config.model_validate(values | {"max_rejects": 1.0})
    found = predict(config, Path(), Path(), budget=BUDGET)
    if not any(reject.reason == "reasoning_not_written" for reject in found.rejects):
        return found
    return predict(config.model_copy(update={"reasoning": "drop"}), Path(), Path(), budget=BUDGET)


def _lines(draft: Draft, output: Path) -> Iterator[str]:
    if SCHEMA.is_file():
        root = SCHEMA.parents[2]
        folder = output.resolve().parent
        schema = os.path.relpath(SCHEMA, folder) if folder.is_relative_to(root) else SCHEMA
        yield f"# yaml-language-server: $schema={schema}"
    yield f"# Dry run: packcorpus check {one_line(str(output))}"
    yield f"# Run:     packcorpus pack {one_line(str(output))}"
    for name, setting in Config.model_fields.items():
        yield ""
        yield from _comment(setting.description or "")
        if name == "sources":
            yield from _source_lines(draft)
            continue
        if choices := get_args(setting.annotation) if get_origin(setting.annotation) is Literal else ():
            yield from _comment(f"One of: {', '.join(choices)}.")
        yield from _comment(_note(name, draft))
        if name in draft.values:
            yield f"{name}: {_yaml(draft.values[name])}"
        elif (default := setting.get_default(call_default_factory=True)) is None:
            yield f"# {name}:"
        else:
            yield f"{name}: {_yaml(default.model_dump() if isinstance(default, BaseModel) else default)}"


def _source_lines(draft: Draft) -> Iterator[str]:
    yield from _comment("Paths are relative to the folder of this file. Keys of an entry:")
    for name, setting in Source.model_fields.items():
        yield from _comment(f"  {name}: {setting.description}", "#         ")
    yield "sources:"
    values = iter(draft.values["sources"])
    for entry in draft.entries:
        if entry.problem:
            yield from _comment(f"Left out: {entry.path}: {entry.problem}", "  # ", "  # ")
            continue
        share = "all" if entry.fitting == entry.looked_at else f"{entry.fitting:,} of"
        size = in_bytes(sum(file.bytes for file in entry.files))
        noun = "conversations" if entry.fitting == entry.looked_at else "records"
        count = f"{'' if entry.counted else 'about '}{entry.total:,.0f} {noun}{' (counted)' * entry.counted}"
        many = f"{len(entry.files):,} files, " if len(entry.files) > 1 else ""
        further = "; columns guessed by their names" * entry.guessed
        further += "; roles guessed by their names" * bool(entry.roles)
        further += "".join(f"; {from_here(line)}" for line in found_layouts(entry.files, [Source(path="x")]))
        note = f"{many}{size}, {count}; {entry.format}: {share} {entry.looked_at:,} sampled records{further}"
        yield from _comment(note, "  # ", "  # ")
        for number, (key, value) in enumerate(next(values).items()):
            yield f"  {' ' if number else '-'} {key}: {_yaml(value)}"
    if draft.left_out:
        yield from _comment(f"Left out, unknown extension: {_some(draft.left_out)}", "  # ", "  # ")


def _note(name: str, draft: Draft) -> str:
    """Return the finding behind the value of a setting."""
    found = draft.found
    if name == "tokenizer":
        if draft.tokenizer is None:
            return "None was found. To fine-tune a model, set its tokenizer."
        others = f"; also found: {_some(list(map(str, draft.other_tokenizers)))}" if draft.other_tokenizers else ""
        kind = f"{found.tokenizer.kind}, {found.tokenizer.vocab_size:,} tokens"
        return f"Found: {kind}{others}. {OF_YOUR_MODEL.capitalize()}."
    if name == "template":
        return f"Chosen: {draft.template_note}."
    if name == "reasoning" and name in draft.values:
        return f"Chosen: {NO_REASONING}."
    if name == "sequence_length":
        counts = found.ledger.conversations
        share = 100 * found.too_long / max(counts.packed + counts.dropped["too_long"], 1)
        return f"{share:.1f} % of the sampled conversations are longer."
    if name == "max_rejects":
        notes = [f"Raised: {line}." for line in _cut_off(found) if name in draft.values]
        if broken := _broken(found):
            notes.append(f"{broken[0]}: {'; '.join(broken[1:])}")
        return " ".join(notes)
    return ""


def _cut_off(found: Prediction) -> list[str]:
    """Explain why `max_rejects` is raised although the data has no fault."""
    count = sum(reject.cut_off for reject in found.rejects)
    return [
        f"{found.about(count)} conversations ({CODES['no_trained_tokens'].code}) have no trained token within "
        f"{found.recipe.config.sequence_length:,} tokens; a larger sequence_length keeps them"
    ] * bool(count)


def _broken(found: Prediction) -> list[str]:
    """Return a summary of the records that cannot be used, and a line per reason.

    A line has the code of the reason, the number of records, and the first record.
    """
    lines, total = [], 0
    for reject in found.rejects:
        if reject.in_data:
            total += reject.in_data
            place = reject.place.removeprefix(f"{Path.cwd()}/")
            lines.append(f"{reject.code} {reject.reason}, {reject.in_data:,}: {place} {one_line(reject.message)}")
    return [f"{total:,} of {found.looked_at:,} sampled records cannot be used and are rejected", *lines] * bool(lines)


def _comment(text: str, later: str = "# ", first: str = "# ") -> list[str]:
    return wrap(one_line(text, strip=False), WIDTH, initial_indent=first, subsequent_indent=later) if text else []


def _yaml(value: Any) -> str:
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **style)
    if yaml.safe_load(text) != value:  # such as U+0085, a line break in YAML
        text = yaml.safe_dump(value, **style)
    return text.removesuffix("\n").removesuffix("\n...")


def _path_in(folder: Path, path: Path) -> str:
    """Return a path for the config, relative to its folder or absolute.

    The path is relative if the folder and the file are both below the working directory.
    """
    here = Path.cwd()
    inside = all(Path(os.path.abspath(one)).is_relative_to(here) for one in (folder, path))
    text = os.path.relpath(path, folder) if inside else os.path.abspath(path)
    if text.encode("utf-8", "ignore").decode() != text:
        raise UsageError("bad_file_name", f"{text!a}: the name of this source is not UTF-8; rename it")
    return text


def _name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name.split(".")[0]).strip("-._")
    return name[:100] or "corpus"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return one_line(", ".join(names[:5]) + rest)
