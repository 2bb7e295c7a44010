"""Write the commented config of `packcorpus init` from source files.

    paths ─sample─▶ entries of `sources`, each with its format ─┐
    folders nearby ─search─▶ tokenizer ─▶ template ─────────────┴─▶ Config ─predict─▶ figures for the comments ─▶ YAML

The config runs as it is unless records cannot be used: these are listed for the user to fix, and `max_rejects` is not
raised for them. Files that cannot be read are comments with the reason. Every setting of the model is written with its
default and description, so that a new setting appears in the next config.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

import yaml

from tasks.config import Config, load_config
from tasks.conversations.formats import detect, guess_columns
from tasks.core.error_codes import CODES
from tasks.core.errors import DataError, PackError, Reject, UsageError
from tasks.core.printable import counted, in_bytes, printable
from tasks.core.yaml_settings import check_settings, parse_settings
from tasks.dry_run.dry_run import predict
from tasks.dry_run.find_tokenizer import tokenizer_near
from tasks.dry_run.model import Prediction, about
from tasks.dry_run.sample_tokens import count_unused_keys
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer, open_encoder
from tasks.readers.containers import container_by_extension
from tasks.sources.locate import find_paths
from tasks.sources.model import Source, SourceFile
from tasks.sources.sample_files import sample_files
from tasks.sources.source_files import find_files
from tasks.storage.files import write_bytes
from tasks.storage.paths import Layout
from tasks.templates.built_in import MARKERS

BUDGET = 2 << 20  # bytes of the sources that are sampled


WIDTH = 110


SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.schema.json"


NO_TOKENIZER = "none found, so one will be trained on the sources; to fine-tune a model, set its tokenizer"


OF_YOUR_MODEL = "make sure that it is the tokenizer of your model"


# Control tokens by which a tokenizer is recognized as made for a template.
TYPICAL = {name: markers[:2] for name, markers in MARKERS.items() if not markers[0].startswith("<tool")}


@dataclass
class Entry:
    """One entry of `sources`: `fitting` of `looked_at` records have its format. One with a `problem` is left out."""

    path: Path
    files: list[SourceFile]
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    fitting: int = 0
    looked_at: int = 0
    total: float = 0.0  # records, estimated unless `counted`
    counted: bool = True
    problem: str = ""


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
        read = sum(source.conversations for source in self.found.sources)
        size = in_bytes(self.found.bytes)
        lines = [
            f"{counted(self.found.files, 'file')}, {size}, {about(read, self.found)} conversations",
            f"tokenizer: {self.tokenizer or NO_TOKENIZER}{f'; {OF_YOUR_MODEL}' * bool(self.tokenizer)}",
            f"template: {self.template} ({self.template_note})",
        ]
        lines += [f"left out: {_one_line(str(entry.path))}: {entry.problem}" for entry in self.entries if entry.problem]
        if "max_rejects" in self.values:
            default = Config.model_fields["max_rejects"].default
            lines.append(f"max_rejects: {self.values['max_rejects']:g} instead of {default:g}: {_cut_off(self.found)}")
        if broken := _broken(self.found):
            lines += [f"{broken[0]}:", *(f"  {line}" for line in broken[1:])]
        if self.skipped:
            lines.append(f"skipped, written by packcorpus: {_some(self.skipped)}")
        if self.left_out:
            lines.append(f"left out, unknown extension: {_some(self.left_out)}")
        return lines


def write_draft(paths: Sequence[Path], output: Path, overwrite: bool) -> Draft:
    """Draft a config for `paths` and write it.

    Raises UsageError if it exists and `overwrite` is false, and InputMissing or DataError if no path contains readable
    conversations.
    """
    if output.exists() and not overwrite:
        raise UsageError(
            "config_exists", f"{output}: already exists; choose another path with --output, or replace it with --force"
        )
    draft, text = make_draft(paths, output)
    # It must load before it replaces anything.
    check_settings(Config, parse_settings(text, str(output)), str(output))
    write_bytes(output, text.encode())
    load_config(output)
    return draft


def make_draft(paths: Sequence[Path], output: Path) -> tuple[Draft, str]:
    """Return the draft and its YAML. Raises as `write_draft` does."""
    left_out: list[str] = []
    skipped: list[str] = []
    entries = [entry for path in paths for entry in _entries(path, left_out, skipped)]
    usable = [entry for entry in entries if not entry.problem]
    if not usable:
        problem = next((entry.problem for entry in entries), f"no file has a known extension: {_some(left_out)}")
        raise DataError("nothing_to_draft", f"{', '.join(map(str, paths))}: {problem}")
    folder = output.parent
    tokenizer, others = tokenizer_near([file.path.parent for entry in usable for file in entry.files])
    # Relative to the working directory: the folder of the config may not exist yet.
    values: dict[str, Any] = {"sources": [_source(str(entry.path), entry) for entry in usable]}
    if tokenizer:
        values["tokenizer"] = str(tokenizer)
    template, note, found = _choose_template(values, tokenizer)
    values = {"name": _name(paths[0])}
    values["sources"] = [_source(_path_in(folder, entry.path), entry) for entry in usable]
    if tokenizer:
        values["tokenizer"] = _path_in(folder, tokenizer)
    values["template"] = template
    read = sum(source.conversations for source in found.sources)
    if found.cut_off.looked_at:
        # The data is not at fault. A fifth more, because it is an estimate.
        values["max_rejects"] = min(1.0, math.ceil(120 * found.cut_off.expected / read) / 100)
    draft = Draft(entries, left_out, tokenizer, others, template, note, values, found, skipped)
    return draft, "".join(f"{line}\n" for line in _lines(draft, output))


def _source(path: str, entry: Entry) -> dict[str, Any]:
    return {"path": path, "format": entry.format} | ({"columns": entry.columns} if entry.columns else {})


def _entries(path: Path, left_out: list[str], skipped: list[str]) -> Iterator[Entry]:
    """Yield one entry for all files of a path if they have one format, else one per file."""
    outputs = Layout(Path()).outputs()
    for part in _known(path, left_out, skipped):
        entries = []
        for file, _ in find_paths(str(part), Path()):
            if any(file.resolve().is_relative_to(output) for output in outputs):
                raise UsageError("own_output", f"{part}: is an output of packcorpus, not a source")
            entries.append(_entry(file))
        first = entries[0]
        if len(entries) > 1 and all(
            not entry.problem and (entry.format, entry.columns) == (first.format, first.columns) for entry in entries
        ):
            files = [file for entry in entries for file in entry.files]
            fitting, looked_at, total = (
                sum(getattr(entry, name) for entry in entries) for name in ("fitting", "looked_at", "total")
            )
            exact = all(entry.counted for entry in entries)
            yield Entry(part, files, first.format, first.columns, fitting, looked_at, total, exact)
        else:
            yield from entries


def _known(path: Path, left_out: list[str], skipped: list[str]) -> Iterator[Path]:
    """Yield the path itself, or a glob per known extension for a folder that contains other files, too.

    For a folder that contains outputs of packcorpus, yield what is next to them: a glob would include them.
    """
    if not path.is_dir():
        yield path
        return
    here, outputs = path.resolve(), Layout(Path()).outputs()
    if any(output.is_dir() and here in output.parents for output in outputs):
        children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
        yield from _globs(path, [child.name for child in children if child.is_file()], left_out)
        for child in children:
            if child.resolve() in outputs:
                skipped.append(f"{child}/")
            elif child.is_dir() and _names(child):
                yield from _known(child, left_out, skipped)
        return
    names = _names(path)
    saved = any(os.path.basename(name) in ("state.json", "dataset_dict.json") for name in names)
    if saved or all(map(container_by_extension, names)):
        yield path
    else:
        yield from _globs(path, names, left_out)


def _names(path: Path) -> list[str]:
    """Return the files of a folder without hidden ones, as a run does."""
    found = []
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files if not name.startswith(".")]
    return sorted(found)


def _globs(path: Path, names: list[str], left_out: list[str]) -> Iterator[Path]:
    known = [name for name in names if container_by_extension(name)]
    left_out += [name for name in names if not container_by_extension(name)]
    deep = "**/" if any(os.sep in name for name in known) else ""
    for extension in sorted({re.sub(r"^.*?(\.[^.]+(\.(gz|zst))?)$", r"\1", name) for name in known}):
        yield Path(f"{glob.escape(str(path))}/{deep}*{extension}")


def _entry(path: Path) -> Entry:
    """Sample one file; `problem` is the reason why it cannot be read."""
    try:
        [file] = find_files([Source(path=str(path))], Path())
        columns: dict[str, str] = {}
    except DataError as error:
        columns = _guess_columns(path) if error.reason == "unknown_format" else {}
        try:
            [file] = find_files([Source(path=str(path), columns=columns)], Path())
        except DataError as again:
            return Entry(path, [], problem=_one_line(str(again).removeprefix(f"{path}: ")))
    try:
        [sample] = sample_files([file], BUDGET // 4, 1 << 24)
        count_unused_keys(sample)
    except PackError as error:
        return Entry(path, [file], problem=_one_line(str(error).removeprefix(f"{path}: ")))
    formats = Counter(detect(value, columns) for _, value in sample.records if not isinstance(value, Reject))
    looked_at = len(sample.records)
    return Entry(path, [file], file.format, columns, formats[file.format], looked_at, sample.total, sample.counted)


def _guess_columns(path: Path) -> dict[str, str]:
    """Return `guess_columns` of the first record of a file, or {} if it cannot be read."""
    known = Source(path=str(path), format="text")
    try:
        [file] = find_files([known], Path())
        [sample] = sample_files([file], BUDGET // 4, 1 << 24)
    except PackError:
        return {}
    record = next((value for _, value in sample.records if isinstance(value, dict)), {})
    return guess_columns(record)


def _choose_template(values: dict[str, Any], tokenizer: Path | None) -> tuple[str, str, Prediction]:
    """Return the template, the reason for it, and the prediction for the config with it."""
    if not tokenizer:
        note = "its markers become control tokens of the trained tokenizer"
        return "chatml", note, _predict(values | {"template": "chatml"})
    files = find_tokenizer(tokenizer)
    name, note = _built_in(open_encoder(files))
    if _has_chat_template(files):
        if find_spec("transformers") is None:
            note += "; the tokenizer has its own chat template: to use it, run make extras and set template: tokenizer"
        else:
            try:
                found = _predict(values | {"template": "tokenizer"})
                refused = [reject for reason, reject in found.rejects.items() if reason.startswith("template_")]
                looked_at = sum(len(source.sample.records) for source in found.sources)
                if sum(reject.looked_at for reject in refused) <= looked_at / 10:
                    return "tokenizer", "the tokenizer's own template", found
                problem = refused[0].message
            except PackError as error:
                problem = str(error)
            note += f"; the tokenizer's own template cannot be used: {_one_line(problem)}"
    return name, note, _predict(values | {"template": name})


def _has_chat_template(files: TokenizerFiles) -> bool:
    try:
        return files.chat_template() is not None
    except PackError:
        return False


def _built_in(encoder: Encoder) -> tuple[str, str]:
    for name, markers in TYPICAL.items():
        if all(marker in encoder.controls for marker in markers):
            return name, f"the tokenizer has its control tokens {' '.join(markers)}"
    return "alpaca", "the tokenizer has no control tokens of a chat template, and this one needs only text"


def _predict(values: dict[str, Any]) -> Prediction:
    return predict(Config.model_validate(values | {"max_rejects": 1.0}), Path(), Path(), budget=BUDGET)


def _lines(draft: Draft, output: Path) -> Iterator[str]:
    if SCHEMA.is_file():
        root = SCHEMA.parents[2]
        folder = output.resolve().parent
        schema = os.path.relpath(SCHEMA, folder) if folder.is_relative_to(root) else SCHEMA
        yield f"# yaml-language-server: $schema={schema}"
    yield f"# Dry run: packcorpus check {_one_line(str(output))}"
    yield f"# Run:     packcorpus pack {_one_line(str(output))}"
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
            yield f"{name}: {_yaml(default)}"


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
        count = f"{'' if entry.counted else 'about '}{entry.total:,.0f} conversations{' (counted)' * entry.counted}"
        many = f"{len(entry.files):,} files, " if len(entry.files) > 1 else ""
        columns = "; columns guessed by their names" if entry.columns else ""
        note = f"{many}{size}, {count}; {entry.format}: {share} {entry.looked_at:,} sampled records{columns}"
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
        encoder = found.encoder
        others = f"; also found: {_some(list(map(str, draft.other_tokenizers)))}" if draft.other_tokenizers else ""
        return f"Found: {encoder.kind}, {encoder.vocab_size:,} tokens{others}. {OF_YOUR_MODEL.capitalize()}."
    if name == "template":
        return f"Chosen: {draft.template_note}."
    if name == "sequence_length":
        share = 100 * found.too_long / max(found.packed + found.dropped["too_long"], 1)
        return f"{share:.1f} % of the sampled conversations are longer."
    if name == "max_rejects":
        notes = [f"Raised: {_cut_off(found)}."] * bool(found.cut_off.looked_at)
        if broken := _broken(found):
            notes.append(f"{broken[0]}: {'; '.join(broken[1:])}")
        return " ".join(notes)
    return ""


def _cut_off(found: Prediction) -> str:
    """Explain a raised `max_rejects`: the overlong policy rejects conversations without a fault in the data."""
    config = found.config
    return (
        f"{about(found.cut_off.expected, found)} conversations ({CODES['no_trained_tokens'].code}) have no trained "
        f"token within {config.sequence_length:,} tokens; a larger sequence_length keeps them"
    )


def _broken(found: Prediction) -> list[str]:
    """Return how many records cannot be used; then a line per reason: its code, how many, and the first record."""
    lines, total = [], 0
    for reason, reject in sorted(found.rejects.items()):
        count = reject.looked_at - (found.cut_off.looked_at if reason == "no_trained_tokens" else 0)
        if count:
            total += count
            place = reject.place.removeprefix(f"{Path.cwd()}/")
            lines.append(f"{CODES[reason].code} {reason}, {count:,}: {place} {_one_line(reject.message)}")
    looked_at = sum(len(source.sample.records) for source in found.sources)
    summary = f"{total:,} of {looked_at:,} sampled records cannot be used; fix them, or raise max_rejects"
    return [summary, *lines] if lines else []


def _comment(text: str, later: str = "# ", first: str = "# ") -> list[str]:
    return wrap(_one_line(text, strip=False), WIDTH, initial_indent=first, subsequent_indent=later) if text else []


def _one_line(text: str, strip: bool = True) -> str:
    """Make `text` safe for a comment: nothing in it ends the line."""
    line = printable(text).replace("\n", " ")
    return line.strip() if strip else line


def _yaml(value: Any) -> str:
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **style)
    if yaml.safe_load(text) != value:  # such as U+0085, a line break in YAML
        text = yaml.safe_dump(value, **style)
    return text.removesuffix("\n").removesuffix("\n...")


def _path_in(folder: Path, path: Path) -> str:
    """Return a path for the config: relative if both are below the working directory, else absolute."""
    here = Path.cwd()
    inside = all(Path(os.path.abspath(one)).is_relative_to(here) for one in (folder, path))
    text = os.path.relpath(path, folder) if inside else os.path.abspath(path)
    if text.encode("utf-8", "ignore").decode() != text:
        raise UsageError("bad_file_name", f"{text!a}: the name of this source is not UTF-8; rename it")
    return text


def _name(path: Path) -> str:
    """Derive the name of the corpus from the first path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name.split(".")[0]).strip("-._")
    return name[:100] or "corpus"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return _one_line(", ".join(names[:5]) + rest)
