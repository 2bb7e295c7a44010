"""Write the commented config of `packcorpus init` from source files.

    paths ─sample─▶ entries of `sources`, each with its format ─┐
    folders nearby ─search─▶ tokenizer ─▶ template ─────────────┴─▶ Config ─predict─▶ figures for the comments ─▶ YAML

The config runs without changes. Records that cannot be used are listed for the user to fix, and `max_rejects` is just
high enough for the other records to be packed. Files that cannot be read are comments with the reason. Every setting
of the model `Config` is written with its default, so new settings appear without changes here.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from packcorpus.tasks.config import KEYS, Config, load_config
from packcorpus.tasks.conversations.formats import guess_roles
from packcorpus.tasks.conversations.tokens import TOKENS
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, Reject, UsageError
from packcorpus.tasks.core.printable import counted, from_here, in_bytes, printable_lines
from packcorpus.tasks.core.yaml_settings import check_settings, defaults_of, parse_settings
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.dry_run.prediction import Prediction
from packcorpus.tasks.dry_run.sample import count_unused_keys
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.inspection.sources import guess_columns_of
from packcorpus.tasks.readers.container import Record
from packcorpus.tasks.readers.containers import container_by_extension
from packcorpus.tasks.sources.locate import find_paths
from packcorpus.tasks.sources.model import Source, SourceFile, found_layouts
from packcorpus.tasks.sources.sample_files import sample_files
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.urls import refuse_url
from packcorpus.tasks.templates.built_in import MARKERS
from packcorpus.tasks.tokenization.checks import first_failure

WIDTH = 110
BUDGET = 2 << 20  # bytes of the sources that are sampled
MAX_REJECTS: float = Config.model_fields["max_rejects"].default
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.schema.json"

# Limits of the search for a tokenizer: levels below a start folder, folders per start folder, and bytes of a file.
DEPTH, MOST_FOLDERS, LARGEST = 2, 500, 64 << 20
OTHERS = 4  # further tokenizers to mention

OF_YOUR_MODEL = "make sure that it is the tokenizer of your model"
NO_REASONING = (
    "the template does not write all reasoning, so keep would reject conversations; to train on it, set the "
    "tokenizer of a model for reasoning, template: tokenizer, and reasoning: keep"
)

# Control tokens that show that a tokenizer was made for a template.
TYPICAL = {name: markers[:2] for name, markers in MARKERS.items() if not markers[0].startswith("<tool")}
# Mistral's templates write system messages with this token from version 7 on. Version 3 does not.
LATER_MISTRAL = "[SYSTEM_PROMPT]"


@dataclass
class Entry:
    """One entry of `sources`.

    `fitting` of `looked_at` sampled records can be used. An entry with a `problem` is left out of the config.
    """

    path: Path
    files: list[SourceFile]
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    roles: dict[str, list[str]] = field(default_factory=dict)  # guessed from their names
    guessed: bool = False  # whether the columns were guessed from their names
    fitting: int = 0
    looked_at: int = 0
    total: float = 0.0  # records, estimated unless `counted`
    counted: bool = True
    problem: str = ""
    error: PackError | None = None  # the error behind `problem`, if it is about the kind of data

    def describe(self) -> str:
        """Return what was found in the files, for a comment."""
        share = "all" if self.fitting == self.looked_at else f"{self.fitting:,} of"
        noun = "conversations" if self.fitting == self.looked_at else "records"
        count = f"{'' if self.counted else 'about '}{self.total:,.0f} {noun}{' (counted)' * self.counted}"
        many = f"{len(self.files):,} files, " if len(self.files) > 1 else ""
        further = "; columns guessed by their names" * self.guessed
        further += "; roles guessed by their names" * bool(self.roles)
        further += "".join(f"; {from_here(line)}" for line in found_layouts(self.files, [Source(path="x")]))
        size = in_bytes(sum(file.bytes for file in self.files))
        return f"{many}{size}, {count}; {self.format}: {share} {self.looked_at:,} sampled records{further}"


@dataclass
class Draft:
    """A drafted config, and the findings behind it."""

    given: dict[str, Any]  # format, columns, roles, and ignore, for all sources
    entries: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # files with an unknown extension
    skipped: list[str] = field(default_factory=list)  # folders with outputs of packcorpus
    seen: set[Path] = field(default_factory=set)  # files
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # the findings behind values, for comments
    found: Prediction = field(init=False)

    def summary(self) -> list[str]:
        """Return one line per finding."""
        found, values = self.found, self.values
        read, rejected = _read_and_rejected(found)
        count = f"{found.about(read)} conversations"
        if rejected:
            count = f"{found.about(read)} records, {found.about(read - rejected)} can be packed"
        tokenizer = "none found, so one will be trained on the sources; to fine-tune a model, set its tokenizer"
        if "tokenizer" in values:
            tokenizer = f"{self.notes['found tokenizer']}; {OF_YOUR_MODEL}"
        lines = [
            f"{counted(found.files, 'file')}, {in_bytes(found.bytes)}, {count}",
            f"tokenizer: {tokenizer}",
            f"template: {values['template']} ({self.notes['template']})",
        ]
        files = [file for entry in self.entries if not entry.problem for file in entry.files]
        lines += map(from_here, found_layouts(files, [Source(path="x")]))
        lines += [f"left out: {one_line(str(entry.path))}: {entry.problem}" for entry in self.entries if entry.problem]
        guesses = {one_line(from_here(str(entry.path))): entry.roles for entry in self.entries if entry.roles}
        lines += [f"{path}: guessed roles: {_yaml(roles)}" for path, roles in guesses.items()]
        lines += [f"reasoning: {values[name]}: {NO_REASONING}" for name in ("reasoning",) if name in values]
        broken = _broken(found)
        if "max_rejects" in values:
            why = "; ".join(_cut_off(found) + broken[:1])
            lines.append(f"max_rejects: {values['max_rejects']:g} instead of {MAX_REJECTS:g}: {why}")
        lines += [f"{line}:" for line in broken[:1]] + [f"  {line}" for line in broken[1:]]
        lines += [f"skipped, written by packcorpus: {_some(self.skipped)}"] * bool(self.skipped)
        return lines + [f"left out, unknown extension: {_some(self.left_out)}"] * bool(self.left_out)


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
        before, advice, settings = error.message.rpartition(", add  ")
        if settings.endswith("  to its entry of sources"):  # name the options of `init` instead of the settings
            options = [
                f"--{name} {item.replace(': ', '=')}"
                for name, items in re.findall(r"(columns|ignore): [{\[](.*?)[}\]]", settings)
                for item in items.split(", ")
            ]
            error.message = f"{before}{advice}{' '.join(options)}"
        raise
    # The text must be a valid config before it replaces a file.
    check_settings(Config, parse_settings(text, str(output), {}), str(output))
    write_bytes(output, text.encode())
    load_config(output)
    return draft


def _pairs(mappings: Sequence[str], example: str) -> list[tuple[str, str]]:
    pairs = [(ours, theirs) for ours, _, theirs in (mapping.partition("=") for mapping in mappings)]
    for mapping, pair in zip(mappings, pairs, strict=True):
        if not all(pair):
            raise UsageError(
                "bad_command_line", f"{example.split()[0]} {mapping}: expected OURS=YOURS, such as {example}"
            )
    return pairs


def make_draft(
    paths: Sequence[Path], output: Path, format: str = "auto", given: dict[str, Any] | None = None
) -> tuple[Draft, str]:
    """Return the draft and its YAML."""
    draft = Draft({"format": format, **(given or {})})
    for name, value in draft.given.items():
        check_settings(Source, {"path": "x", name: value}, f"--{name}")
    for path in paths:
        refuse_url(path, "download a file, draft a config for it, and write the URL as the path of its source")
    for path in paths:
        draft.entries += _find_entries(path, draft)
    where, usable = ", ".join(map(str, paths)), [entry for entry in draft.entries if not entry.problem]
    if not usable:
        if len(draft.entries) == 1 and draft.entries[0].error:
            raise draft.entries[0].error
        problems = [entry.problem for entry in draft.entries]
        problems.append(f"no file has a known extension: {_some(draft.left_out)}")
        raise DataError("nothing_to_draft", f"{where}: {problems[0]}")
    tokenizer, others = _tokenizer_near([file.path.parent for entry in usable for file in entry.files])
    recorded = next((entry.path for entry in usable if entry.format == TOKENS.name), None)
    if recorded and not tokenizer:
        raise InputMissing(
            "tokenizer_missing",
            f"{recorded}: has recorded token ids, and there is no tokenizer near it; put the folder or file of the "
            "tokenizer that recorded the ids next to it",
        )

    def values_with(path_of: Callable[[Path], str]) -> dict[str, Any]:
        sources = [
            {"path": path_of(entry.path), "format": entry.format}
            | {name: getattr(entry, name) for name in ("columns", "roles") if getattr(entry, name)}
            | {name: draft.given[name] for name in ("roles", "ignore") if name in draft.given}
            for entry in usable
        ]
        return {"sources": sources} | ({"tokenizer": path_of(tokenizer)} if tokenizer else {})

    # For the prediction, paths are relative to the working directory, because the folder of the config may not exist.
    template, note, found = _choose_template(values_with(str), tokenizer)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", paths[0].resolve().name.split(".")[0]).strip("-._")[:100]
    draft.found, draft.values = found, {"name": name or "corpus"}
    draft.values |= values_with(lambda path: _path_in(output.parent, path)) | {"template": template}
    if found.settings["reasoning"] == "drop":
        draft.values["reasoning"] = "drop"
    if found.failures:
        problem = next(iter(_broken(found)[1:]), found.failures[0])
        raise DataError("nothing_to_draft", f"{where}: no conversation can be packed: {problem}")
    # The share of rejects, rounded up to a percent; an estimate is increased by a fifth.
    read, rejected = _read_and_rejected(found)
    enough = min(1.0, math.ceil(round((100 if found.whole else 120) * rejected / max(read, 1), 6)) / 100)
    if first_failure(found.recipe):  # a smaller share would stop the run
        enough = 1.0
    if enough > MAX_REJECTS:
        draft.values["max_rejects"] = enough
    kind = f"{found.tokenizer.kind}, {found.tokenizer.vocab_size:,} tokens"
    kind += f"; also found: {_some(list(map(str, others)))}" if others else ""
    too_long, counts = found.too_long, found.ledger.conversations
    share = 100 * too_long / max(counts.packed + counts.dropped["too_long"], 1)
    broken = _broken(found)
    draft.notes = {
        "found tokenizer": str(tokenizer),
        "tokenizer": f"Found: {kind}. {OF_YOUR_MODEL.capitalize()}."
        if tokenizer
        else "None was found. To fine-tune a model, set its tokenizer.",
        "template": note,
        "reasoning": f"Chosen: {NO_REASONING}." * ("reasoning" in draft.values),
        "sequence_length": f"{share:.1f} % of the sampled conversations are longer.",
        "max_rejects": " ".join(
            [f"Raised: {line}." for line in _cut_off(found) if "max_rejects" in draft.values]
            + [f"{line}: {'; '.join(broken[1:])}" for line in broken[:1]]
        ),
    }
    return draft, "".join(f"{line}\n" for line in _lines(draft, output))


def _read_and_rejected(found: Prediction) -> tuple[int, int]:
    return found.ledger.conversations.read, sum(source.rejected for source in found.sources)


def _path_in(folder: Path, path: Path) -> str:
    """Return a path, relative if it and `folder` are below the working directory."""
    here = Path.cwd()
    inside = all(Path(os.path.abspath(one)).is_relative_to(here) for one in (folder, path))
    text = os.path.relpath(path, folder) if inside else os.path.abspath(path)
    if text.encode("utf-8", "ignore").decode() != text:
        raise UsageError("bad_file_name", f"{text!a}: the name of this source is not UTF-8; rename it")
    return text


def _choose_template(values: dict[str, Any], tokenizer: Path | None) -> tuple[str, str, Prediction]:
    if not tokenizer:
        note = "its markers become control tokens of the trained tokenizer"
        return "chatml", note, _predict(values | {"template": "chatml"})
    files = find_tokenizer(tokenizer)
    encoder = open_encoder(files)
    name = next((name for name, markers in TYPICAL.items() if all(map(encoder.is_token, markers))), "alpaca")
    note = "the tokenizer has no control tokens of a chat template, and this one needs only text"
    if name != "alpaca":
        note = f"the tokenizer has its control tokens {' '.join(TYPICAL[name])}"
        if name == "mistral" and encoder.is_token(LATER_MISTRAL):
            note += f", but {LATER_MISTRAL} belongs to later versions; use the model's own template, a .jinja file"
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


def _predict(values: dict[str, Any]) -> Prediction:
    config = Config.model_validate(values | {"max_rejects": 1.0})
    found = predict(config, Path(), Path(), budget=BUDGET)
    if not any(reject.reason == "reasoning_not_written" for reject in found.rejects):
        return found
    return predict(config.model_copy(update={"reasoning": "drop"}), Path(), Path(), budget=BUDGET)


def _cut_off(found: Prediction) -> list[str]:
    count = sum(reject.cut_off for reject in found.rejects)
    return [
        f"{found.about(count)} conversations ({CODES['no_trained_tokens'].code}) have no trained token within "
        f"{found.recipe.config.sequence_length:,} tokens; a larger sequence_length keeps them"
    ] * bool(count)


def _broken(found: Prediction) -> list[str]:
    """Return a summary of the records that cannot be used, and a line per reason."""
    lines = [
        f"{reject.code} {reject.reason}, {reject.in_data:,}: {reject.place.removeprefix(f'{Path.cwd()}/')} "
        f"{one_line(reject.message)}"
        for reject in found.rejects
        if reject.in_data
    ]
    total = sum(reject.in_data for reject in found.rejects)
    return [f"{total:,} of {found.looked_at:,} sampled records cannot be used and are rejected", *lines] * bool(lines)


# -- the text ----------------------------------------------------------------------------------------------------------


def _lines(draft: Draft, output: Path) -> Iterator[str]:
    if SCHEMA.is_file():
        root, folder = SCHEMA.parents[2], output.resolve().parent
        schema = os.path.relpath(SCHEMA, folder) if folder.is_relative_to(root) else SCHEMA
        yield f"# yaml-language-server: $schema={schema}"
    yield f"# Dry run: packcorpus check {one_line(str(output))}"
    yield f"# Run:     packcorpus pack {one_line(str(output))}"
    defaults = defaults_of(Config)
    for name, setting in Config.model_fields.items():
        if KEYS[name].advanced:
            continue
        yield ""
        yield from _comment(setting.description or "")
        if name == "sources":
            yield from _source_lines(draft)
            continue
        if get_origin(setting.annotation) is Literal:
            yield from _comment(f"One of: {', '.join(get_args(setting.annotation))}.")
        note = draft.notes.get(name, "")
        yield from _comment(f"Chosen: {note}." if name == "template" else note)
        value = draft.values.get(name, defaults[name])
        yield f"# {name}:" if value is None else f"{name}: {_yaml(value)}"
    yield ""
    yield from _comment("Settings that few need, with their defaults; the reference describes them.")
    yield "# advanced:"
    for name in filter(lambda name: KEYS[name].advanced, defaults):
        value = defaults[name].model_dump() if isinstance(defaults[name], BaseModel) else defaults[name]
        yield f"#   {name}:" if value is None else f"#   {name}: {_yaml(value)}"


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
        yield from _comment(entry.describe(), "  # ", "  # ")
        for number, (key, value) in enumerate(next(values).items()):
            yield f"  {' ' if number else '-'} {key}: {_yaml(value)}"
    if draft.left_out:
        yield from _comment(f"Left out, unknown extension: {_some(draft.left_out)}", "  # ", "  # ")


def _comment(text: str, later: str = "# ", first: str = "# ") -> list[str]:
    return wrap(one_line(text, strip=False), WIDTH, initial_indent=first, subsequent_indent=later) if text else []


def _yaml(value: Any) -> str:
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **style)
    if yaml.safe_load(text) != value:  # such as U+0085, a line break in YAML
        text = yaml.safe_dump(value, **style)
    return text.removesuffix("\n").removesuffix("\n...")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return one_line(", ".join(names[:5]) + rest)


def one_line(text: str, strip: bool = True) -> str:
    """Make `text` safe for a comment by replacing everything that ends a line."""
    line = printable_lines(text).replace("\n", " ")
    return line.strip() if strip else line


# -- the sources -------------------------------------------------------------------------------------------------------


def _find_entries(path: Path, draft: Draft) -> Iterator[Entry]:
    """Yield one entry for all files of a path, or one per file.

    There is one entry if all files can be read and have the same format and columns. Files that were found before are
    skipped. Raises UsageError if the columns are invalid, or if a file is an output of packcorpus.
    """
    for part in _known(path, draft):
        files = [file for file, *_ in find_paths(str(part), Path())]
        if any(file.resolve().is_relative_to(output) for file in files for output in Layout(Path()).outputs()):
            raise UsageError("own_output", f"{part}: is an output of packcorpus, not a source")
        entries = []
        for file in files:
            if file.resolve() not in draft.seen:
                draft.seen.add(file.resolve())
                entries.append(_entry(file, draft.given))
        first = entries[0] if entries else Entry(part, [])
        differ = any(
            entry.problem or (entry.format, entry.columns) != (first.format, first.columns) for entry in entries
        )
        if differ or len(entries) < len(files) or len(entries) < 2:
            yield from entries
            continue
        for entry in entries[1:]:
            for name in ("files", "fitting", "looked_at", "total"):
                setattr(first, name, getattr(first, name) + getattr(entry, name))
            first.counted &= entry.counted
            first.guessed |= entry.guessed
            for role, names in entry.roles.items():
                known = first.roles.setdefault(role, [])
                known += [name for name in names if name not in known]
        yield replace(first, path=part)


def _known(path: Path, draft: Draft) -> Iterator[Path]:
    """Yield the path itself, or a glob per known extension.

    The globs are for a folder that also contains other files. If a folder contains outputs of packcorpus, yield paths
    next to these outputs instead, because a glob would include the outputs.
    """
    if not path.is_dir():
        yield path
        return
    outputs = Layout(Path()).outputs()
    children: list[Path] = []
    if any(output.is_dir() and path.resolve() in output.parents for output in outputs):
        children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
        names = [child.name for child in children if child.is_file()]
    else:
        names = _names(path)
        saved = any(os.path.basename(name) in ("state.json", "dataset_dict.json") for name in names)
        if saved or all(map(container_by_extension, names)):
            yield path
            return
    known = [name for name in names if container_by_extension(name)]
    draft.left_out += [name for name in names if not container_by_extension(name)]
    deep = "**/" if any(os.sep in name for name in known) else ""
    for extension in sorted({re.sub(r"^.*?(\.[^.]+(\.(gz|zst))?)$", r"\1", name) for name in known}):
        yield Path(f"{glob.escape(str(path))}/{deep}*{extension}")
    for child in children:
        if child.resolve() in outputs:
            draft.skipped.append(f"{child}/")
        elif child.is_dir() and _names(child):
            yield from _known(child, draft)


def _names(path: Path) -> list[str]:
    found = []
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files if not name.startswith(".")]
    return sorted(found)


def _entry(path: Path, given: dict[str, Any]) -> Entry:
    """Sample one file and return its entry."""
    guessed, columns = False, given.get("columns", {})
    files: list[SourceFile] = []
    try:
        try:
            files = find_files([Source(**{"path": str(path), **given})], Path())
        except DataError as error:
            guessed = error.reason == "unknown_format" and not columns
            columns = guess_columns_of(path) if guessed else columns
            files = find_files([Source(**{"path": str(path), **given, "columns": columns})], Path())
        [file], [sample] = files, sample_files(files, BUDGET // 4, 1 << 24)
        count_unused_keys(sample)
    except PackError as error:
        if not files and not isinstance(error, DataError):
            raise
        kind = error if error.reason in ("media_data", "preference_data") else None
        return Entry(path, files, problem=one_line(str(error).removeprefix(f"{path}: ")), error=kind)
    fitting, first = _count_fitting(sample.records, file)
    looked_at, roles = len(sample.records), dict[str, list[str]]()
    guesses = fitting < looked_at and "roles" not in given
    if guesses and (guess := guess_roles((record for _, record in sample.records), columns)):
        names = Source.model_validate({"path": str(path), "roles": guess}).role_names
        more, other = _count_fitting(sample.records, replace(file, roles=tuple(names.items())))
        if more > fitting:
            fitting, first, roles = more, other, guess
    problem = f"none of its first {looked_at:,} records can be used; the first problem: {first}"
    counts = fitting, looked_at, sample.total, sample.counted
    return Entry(path, files, file.format, columns, roles, guessed, *counts, "" if fitting else one_line(problem))


def _count_fitting(records: Sequence[Record], file: SourceFile) -> tuple[int, str]:
    """Count the records of a file that are conversations."""
    problems = []
    for _, record in records:
        try:
            file.conversation(record)
        except Reject as reject:
            problems.append(reject.message)
    return len(records) - len(problems), next(iter(problems), "")


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def _tokenizer_near(folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Return the nearest tokenizer that loads, and the next candidates.

    Searches the folders of the sources, the working directory, and the folders below them. Does not search the folders
    above, because their files may belong to another project or person.
    """
    starts = dict.fromkeys(folder.resolve() for folder in (*folders, Path()))
    candidates = [*dict.fromkeys(candidate for start in starts for candidate in _candidates(start))]
    outputs = Layout(Path()).outputs()
    candidates = [path for path in candidates if not any(path.resolve().is_relative_to(output) for output in outputs)]
    for number, candidate in enumerate(candidates, 1):
        with suppress(PackError):
            open_encoder(find_tokenizer(candidate))
            return candidate, candidates[number:][:OTHERS]
    return None, []


def _candidates(start: Path) -> Iterator[Path]:
    """Yield folders and files that may be tokenizers, the nearest first."""
    level, seen = [start], 0
    for _ in range(DEPTH + 1):
        below = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            names = {entry.name for entry in entries}
            if names & {"manifest.json", "index.arrow"}:  # a corpus, with its own copy of a tokenizer
                continue
            if names & {"tokenizer.json", "tokenizer.model"}:
                yield folder
            else:
                yield from (
                    Path(entry.path)
                    for entry in entries
                    if entry.name.endswith(".model") and entry.is_file() and 0 < entry.stat().st_size <= LARGEST
                )
            below += [
                Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__"))
            ]
        level = below
