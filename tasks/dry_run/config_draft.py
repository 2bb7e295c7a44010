"""Files → a commented config: what `packcorpus init` writes.

    paths ─look─▶ entries of `sources`, each with its format ─┐
    folders here ─look─▶ tokenizer ─▶ template ───────────────┴─▶ Config ─predict─▶ figures for the comments ─▶ YAML

It runs as it is, unless records cannot be used: these are named, to be mended, and no `max_rejects` lets them pass.
What cannot be read stands in the config as a comment that says why. Every setting of the model is written, with its
default and what it means, so that one that is new there is in the next config, too.
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
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer, open_encoder
from tasks.readers.containers import container_of
from tasks.sources.locate import locate
from tasks.sources.model import Source, SourceFile
from tasks.sources.sample_files import sample_files
from tasks.sources.source_files import find_files
from tasks.storage.files import write_bytes
from tasks.storage.paths import Layout
from tasks.templates.built_in import MARKERS

BUDGET = 2 << 20  # bytes of the sources that are looked at


WIDTH = 110


SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "config.schema.json"


NO_TOKENIZER = "none found here: one is trained on the sources; for your model, name its own"


OF_YOUR_MODEL = "it must be that of your model"


# By these a tokenizer is told to be made for a template.
TELLING = {name: markers[:2] for name, markers in MARKERS.items() if not markers[0].startswith("<tool")}


@dataclass
class Entry:
    """One entry of `sources`; `looked_at` records had the format, of so many. With a `problem` it is left out."""

    path: Path
    files: list[SourceFile]
    format: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    fitting: int = 0
    looked_at: int = 0
    total: float = 0.0  # records, estimated where they are not counted
    counted: bool = True
    problem: str = ""


@dataclass
class Draft:
    """A config that was put together, and what it would give."""

    entries: list[Entry]
    left_out: list[str]
    tokenizer: Path | None
    other_tokenizers: list[Path]
    template: str
    template_note: str
    values: dict[str, Any]
    found: Prediction
    skipped: list[str]  # folders of ours

    def summary(self) -> list[str]:
        """A line for each thing that was found."""
        read = sum(source.conversations for source in self.found.sources)
        size = in_bytes(self.found.bytes)
        told = [
            f"{counted(self.found.files, 'file')}, {size}, {about(read, self.found)} conversations",
            f"tokenizer: {self.tokenizer or NO_TOKENIZER}{f'; {OF_YOUR_MODEL}' * bool(self.tokenizer)}",
            f"template: {self.template} ({self.template_note})",
        ]
        told += [f"left out: {_one_line(str(entry.path))}: {entry.problem}" for entry in self.entries if entry.problem]
        if "max_rejects" in self.values:
            usual = Config.model_fields["max_rejects"].default
            told.append(f"max_rejects: {self.values['max_rejects']:g} instead of {usual:g}: {_cut_off(self.found)}")
        if broken := _broken(self.found):
            told += [f"{broken[0]}:", *(f"  {line}" for line in broken[1:])]
        if self.skipped:
            told.append(f"skipped, written by packcorpus: {_some(self.skipped)}")
        if self.left_out:
            told.append(f"left out, no known extension: {_some(self.left_out)}")
        return told


def write_draft(paths: Sequence[Path], output: Path, overwrite: bool) -> Draft:
    """Look at `paths` and write the config. Raises UsageError where it is there already, and not `overwrite`.

    Raises InputMissing or DataError where no path holds conversations that can be read.
    """
    if output.exists() and not overwrite:
        raise UsageError("config_exists", f"{output}: is there already; write another with --output, or add --force")
    draft, text = make_draft(paths, output)
    # It must load before it replaces anything.
    check_settings(Config, parse_settings(text, str(output)), str(output))
    write_bytes(output, text.encode())
    load_config(output)
    return draft


def make_draft(paths: Sequence[Path], output: Path) -> tuple[Draft, str]:
    """The draft and its YAML. Raises as `write_draft` does."""
    left_out: list[str] = []
    skipped: list[str] = []
    entries = [entry for path in paths for entry in _entries(path, left_out, skipped)]
    usable = [entry for entry in entries if not entry.problem]
    if not usable:
        problem = next((entry.problem for entry in entries), f"no file with a known extension: {_some(left_out)}")
        raise DataError("nothing_to_draft", f"{', '.join(map(str, paths))}: {problem}")
    folder = output.parent
    tokenizer, others = tokenizer_near([file.path.parent for entry in usable for file in entry.files])
    # As they are named from here: the folder of the config need not be there yet.
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
        # No fault of the data. A fifth more, for it is an estimate.
        values["max_rejects"] = min(1.0, math.ceil(120 * found.cut_off.expected / read) / 100)
    draft = Draft(entries, left_out, tokenizer, others, template, note, values, found, skipped)
    return draft, "".join(f"{line}\n" for line in _lines(draft, output))


def _source(path: str, entry: Entry) -> dict[str, Any]:
    return {"path": path, "format": entry.format} | ({"columns": entry.columns} if entry.columns else {})


def _entries(path: Path, left_out: list[str], skipped: list[str]) -> Iterator[Entry]:
    """One for all files of a path that are alike, else one for each."""
    outputs = Layout(Path()).outputs()
    for part in _known(path, left_out, skipped):
        entries = []
        for file, _ in locate(str(part), Path()):
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
    """The path itself, or, of a folder that holds more than conversations, a glob for each extension of theirs.

    Of a folder with outputs of ours in it, what lies beside them: a glob over all would take them in.
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
    if saved or all(map(container_of, names)):
        yield path
    else:
        yield from _globs(path, names, left_out)


def _names(path: Path) -> list[str]:
    """Files of a folder, hidden ones left out, as a run does."""
    found = []
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files if not name.startswith(".")]
    return sorted(found)


def _globs(path: Path, names: list[str], left_out: list[str]) -> Iterator[Path]:
    known = [name for name in names if container_of(name)]
    left_out += [name for name in names if not container_of(name)]
    deep = "**/" if any(os.sep in name for name in known) else ""
    for ending in sorted({re.sub(r"^.*?(\.[^.]+(\.(gz|zst))?)$", r"\1", name) for name in known}):
        yield Path(f"{glob.escape(str(path))}/{deep}*{ending}")


def _entry(path: Path) -> Entry:
    """What one file holds, or why it cannot be read."""
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
    except PackError as error:
        return Entry(path, [file], problem=_one_line(str(error).removeprefix(f"{path}: ")))
    told = Counter(detect(value, columns) for _, value in sample.records if not isinstance(value, Reject))
    looked_at = len(sample.records)
    return Entry(path, [file], file.format, columns, told[file.format], looked_at, sample.total, sample.counted)


def _guess_columns(path: Path) -> dict[str, str]:
    """`guess_columns` of the first record of a file; {} where it cannot be read."""
    known = Source(path=str(path), format="text")
    try:
        [file] = find_files([known], Path())
        [sample] = sample_files([file], BUDGET // 4, 1 << 24)
    except PackError:
        return {}
    record = next((value for _, value in sample.records if isinstance(value, dict)), {})
    return guess_columns(record)


def _choose_template(values: dict[str, Any], tokenizer: Path | None) -> tuple[str, str, Prediction]:
    """The template, why it is this one, and what the config gives with it."""
    if not tokenizer:
        why = "its markers become control tokens of the tokenizer that is trained"
        return "chatml", why, _predict(values | {"template": "chatml"})
    files = find_tokenizer(tokenizer)
    name, why = _built_in(open_encoder(files))
    if _has_chat_template(files):
        if find_spec("transformers") is None:
            why += "; the tokenizer has a chat template of its own: run make extras, then write template: tokenizer"
        else:
            try:
                found = _predict(values | {"template": "tokenizer"})
                refused = [reject for reason, reject in found.rejects.items() if reason.startswith("template_")]
                looked_at = sum(len(source.sample.records) for source in found.sources)
                if sum(reject.looked_at for reject in refused) <= looked_at / 10:
                    return "tokenizer", "the tokenizer's own", found
                problem = refused[0].message
            except PackError as error:
                problem = str(error)
            why += f"; the tokenizer's own cannot be used: {_one_line(problem)}"
    return name, why, _predict(values | {"template": name})


def _has_chat_template(files: TokenizerFiles) -> bool:
    try:
        return files.chat_template() is not None
    except PackError:
        return False


def _built_in(encoder: Encoder) -> tuple[str, str]:
    for name, markers in TELLING.items():
        if all(marker in encoder.controls for marker in markers):
            return name, f"the tokenizer has its control tokens {' '.join(markers)}"
    return "alpaca", "the tokenizer has no control tokens of a chat template, and this one is written with text alone"


def _predict(values: dict[str, Any]) -> Prediction:
    return predict(Config.model_validate(values | {"max_rejects": 1.0}), Path(), Path(), budget=BUDGET)


def _lines(draft: Draft, output: Path) -> Iterator[str]:
    if SCHEMA.is_file():
        root = SCHEMA.parent.parent
        folder = output.resolve().parent
        schema = os.path.relpath(SCHEMA, folder) if folder.is_relative_to(root) else SCHEMA
        yield f"# yaml-language-server: $schema={schema}"
    yield f"# What a run gives: packcorpus check --config {_one_line(str(output))}"
    yield f"# The run:          luigi --module pipeline PackCorpus --config {_one_line(str(output))}"
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
            yield from _comment(f"left out: {entry.path}: {entry.problem}", "  # ", "  # ")
            continue
        sure = "all" if entry.fitting == entry.looked_at else f"{entry.fitting:,} of"
        size = in_bytes(sum(file.bytes for file in entry.files))
        held = f"{'' if entry.counted else 'about '}{entry.total:,.0f} conversations{' (counted)' * entry.counted}"
        many = f"{len(entry.files):,} files, " if len(entry.files) > 1 else ""
        columns = "; the columns are a guess by their names" if entry.columns else ""
        note = f"{many}{size}, {held}; {entry.format}: {sure} {entry.looked_at:,} records looked at{columns}"
        yield from _comment(note, "  # ", "  # ")
        for number, (key, value) in enumerate(next(values).items()):
            yield f"  {' ' if number else '-'} {key}: {_yaml(value)}"
    if draft.left_out:
        yield from _comment(f"left out, no known extension: {_some(draft.left_out)}", "  # ", "  # ")


def _note(name: str, draft: Draft) -> str:
    """What was found that speaks for the value of a setting."""
    found = draft.found
    if name == "tokenizer":
        if draft.tokenizer is None:
            return "None was found here. For your model, name its own."
        encoder = found.encoder
        others = f"; also found: {_some(list(map(str, draft.other_tokenizers)))}" if draft.other_tokenizers else ""
        return f"Found: {encoder.kind}, {encoder.vocab_size:,} tokens{others}. {OF_YOUR_MODEL.capitalize()}."
    if name == "template":
        return f"Chosen: {draft.template_note}."
    if name == "sequence_length":
        share = 100 * found.too_long / max(found.packed + found.dropped["too_long"], 1)
        return f"{share:.1f} % of the conversations that were looked at are longer than this."
    if name == "max_rejects":
        notes = [f"Raised: {_cut_off(found)}."] * bool(found.cut_off.looked_at)
        if broken := _broken(found):
            notes.append(f"{broken[0]}: {'; '.join(broken[1:])}")
        return " ".join(notes)
    return ""


def _cut_off(found: Prediction) -> str:
    """What `max_rejects` is raised for: the over-long policy leaves conversations that are no fault of the data."""
    config = found.config
    return (
        f"{about(found.cut_off.expected, found)} conversations ({CODES['no_trained_tokens'].code}) have no trained "
        f"token within {config.sequence_length:,} tokens; a larger sequence_length keeps them"
    )


def _broken(found: Prediction) -> list[str]:
    """How many records cannot be used as they are, then for each reason its code, how many, and the first of them."""
    told, total = [], 0
    for reason, reject in sorted(found.rejects.items()):
        count = reject.looked_at - (found.cut_off.looked_at if reason == "no_trained_tokens" else 0)
        if count:
            total += count
            place = reject.place.removeprefix(f"{Path.cwd()}/")
            told.append(f"{CODES[reason].code} {reason}, {count:,}: {place} {_one_line(reject.message)}")
    looked_at = sum(len(source.sample.records) for source in found.sources)
    head = f"{total:,} of {looked_at:,} records looked at cannot be used; mend them, or raise max_rejects"
    return [head, *told] if told else []


def _comment(text: str, later: str = "# ", first: str = "# ") -> list[str]:
    return wrap(_one_line(text, strip=False), WIDTH, initial_indent=first, subsequent_indent=later) if text else []


def _one_line(text: str, strip: bool = True) -> str:
    """`text` as it can stand in a comment: nothing in it ends the line."""
    line = printable(text).replace("\n", " ")
    return line.strip() if strip else line


def _yaml(value: Any) -> str:
    style: dict[str, Any] = {"default_flow_style": True, "width": 1 << 20, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **style)
    if yaml.safe_load(text) != value:  # such as U+0085, which YAML takes for a line end
        text = yaml.safe_dump(value, **style)
    return text.removesuffix("\n").removesuffix("\n...")


def _path_in(folder: Path, path: Path) -> str:
    """As the config has it: relative where both lie below the current folder, else absolute."""
    here = Path.cwd()
    inside = all(Path(os.path.abspath(one)).is_relative_to(here) for one in (folder, path))
    text = os.path.relpath(path, folder) if inside else os.path.abspath(path)
    if text.encode("utf-8", "ignore").decode() != text:
        raise UsageError("bad_file_name", f"{text!a}: the name of this source is not UTF-8; rename it")
    return text


def _name(path: Path) -> str:
    """The name of the corpus, from that of the first path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name.split(".")[0]).strip("-._")
    return name[:100] or "corpus"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return _one_line(", ".join(names[:5]) + rest)
