"""Draft the config of data, for `init`, and for `pack` and `check` without one.

    paths ─sample─▶ entries of `sources`, each with its format ─┐
    given, or nearby ─▶ tokenizer ─▶ template ─▶ row length ────┴─▶ Config ─predict─▶ figures for the comments ─▶ YAML

The config has about ten lines or, with `full`, every setting of the model `Config` with its description and default. A
draft leaves out no data by a setting: it reports records that cannot be used, and reasoning that the template cannot
write, with the choices. Files that cannot be read are comments with the reason.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

import numpy as np
import yaml
from pydantic import BaseModel

from packcorpus.tasks.config import KEYS, LONGEST_ROW, Config, config_from, length_of
from packcorpus.tasks.conversations.formats import guess_roles
from packcorpus.tasks.conversations.tokens import TOKENS
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, Reject, UsageError
from packcorpus.tasks.core.printable import counted, from_here, in_bytes, printable_lines
from packcorpus.tasks.core.yaml_settings import check_settings, defaults_of, parse_settings
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.dry_run.given import Choose, Given
from packcorpus.tasks.dry_run.nearby_tokenizers import context_of, is_model, model_files, tokenizers_near
from packcorpus.tasks.dry_run.prediction import Prediction, Rejected
from packcorpus.tasks.dry_run.sample import count_unused_keys
from packcorpus.tasks.encoders.tokenizer_files import TokenizerFiles, open_encoder
from packcorpus.tasks.inspection.sources import guess_columns_of
from packcorpus.tasks.packing.ledger import SAVES
from packcorpus.tasks.readers.containers import container_by_extension
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.locate import find_paths
from packcorpus.tasks.sources.model import Source, SourceFile, found_layouts
from packcorpus.tasks.sources.sample_files import sample_files
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.urls import check_url, hub_name, is_url, refuse_url
from packcorpus.tasks.templates.built_in import MARKERS
from packcorpus.tasks.tokenization.checks import first_failure

WIDTH = 110
BUDGET = 2 << 20  # bytes of the sources that are sampled
DEFAULTS = {name: Config.model_fields[name].default for name in ("max_rejects", "sequence_length")}
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.schema.json"

FITTING = 0.99  # share of the conversations that the rows fit, if the model can read as much
SHARES = {"share: conversation", "share: all"}  # of which one may be proposed
FULL, GAIN = 80.0, 5.0  # percent; rows that are less full are doubled, if that gains as much
STEP = 1024  # lengths of rows are multiples, and so is the shortest

ALL_SETTINGS = "All settings: docs/reference/config.md, or packcorpus init --full"
OF_YOUR_MODEL = "make sure that it is the tokenizer of your model"
UNNAMED = "none is nearby: name that of your model; without one, a new one is trained on the data"
REASONING = (
    "for a model that reasons, use its tokenizer and template; to train without the reasoning, set reasoning: drop"
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

    path: str
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

    def describe(self, full: bool) -> str:
        """Return what was found in the files, for a comment."""
        share = "all" if self.fitting == self.looked_at else f"{self.fitting:,} of"
        noun = "conversations" if self.fitting == self.looked_at else "records"
        count = f"{'' if self.counted else 'about '}{self.total:,.0f} {noun}"
        many = f"{len(self.files):,} files, " if len(self.files) > 1 else ""
        further = "; columns guessed by their names" * self.guessed
        further += "; roles guessed by their names" * bool(self.roles)
        further += "".join(f"; {from_here(line)}" for line in found_layouts(self.files, [Source(path="x")]))
        if not full:
            usable = f", {self.fitting:,} of {self.looked_at:,} sampled can be used" * (share != "all")
            return f"{many}{count}, {self.format}{usable}{further}"
        size = in_bytes(sum(file.bytes for file in self.files))
        how = " (counted)" * self.counted
        return f"{many}{size}, {count}{how}; {self.format}: {share} {self.looked_at:,} sampled records{further}"


@dataclass
class Draft:
    """A drafted config, and the findings behind it.

    Paths in `values` are relative to `folder`, that of the config. `choices` are what a check will report, with what
    the user can do.
    """

    given: Given
    folder: Path
    layout: Layout
    entries: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # files with an unknown extension
    skipped: list[str] = field(default_factory=list)  # folders with outputs of packcorpus
    models: list[str] = field(default_factory=list)  # folders and files of models
    outputs: set[Path] = field(default_factory=set)  # folders with outputs of packcorpus in the paths
    seen: set[Path] = field(default_factory=set)  # files
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # the findings behind values, for comments
    choices: list[str] = field(default_factory=list)
    will_fail: bool = False
    found: Prediction = field(init=False)

    def summary(self) -> list[str]:
        """Return one line per finding."""
        found = self.found
        read, rejected = _read_and_rejected(found)
        count = f"{found.about(read)} conversations"
        if rejected:
            count = f"{found.about(read)} records, {found.about(read - rejected)} can be packed"
        lines = [f"{counted(found.files, 'file')}, {in_bytes(found.bytes)}, {count}"]
        lines += [f"{name}: {self._shown(name)}" for name in ("tokenizer", "template", "sequence_length")]
        files = [file for entry in self.entries if not entry.problem for file in entry.files]
        lines += map(from_here, found_layouts(files, [Source(path="x")]))
        lines += [
            f"left out: {one_line(from_here(entry.path))}: {entry.problem}" for entry in self.entries if entry.problem
        ]
        guesses = {one_line(from_here(entry.path)): entry.roles for entry in self.entries if entry.roles}
        lines += [f"{path}: guessed roles: {_yaml(roles)}" for path, roles in guesses.items()]
        broken = _broken(found)
        lines += [*self.choices, *(f"{line}:" for line in broken[:1]), *(f"  {line}" for line in broken[1:])]
        lines += [f"skipped, written by packcorpus: {_some(self.skipped)}"] * bool(self.skipped)
        lines += [f"left out, belongs to a model: {_some(self.models)}"] * bool(self.models)
        return lines + [f"left out, unknown extension: {_some(self.left_out)}"] * bool(self.left_out)

    def _shown(self, name: str) -> str:
        if name not in self.values:
            return self.notes[name]
        return f"{one_line(str(self.values[name]))}" + f" ({self.notes[name]})" * bool(self.notes[name])

    def text(self, full: bool = False, title: str = "") -> str:
        """Return the YAML of the config, checked; `title` is its first comment."""
        lines = [*([f"# {title}"] if title else []), *(_full_lines(self) if full else _short_lines(self))]
        text = "".join(f"{line}\n" for line in lines)
        config_from(parse_settings(text, "draft", {}), "draft")
        return text


def write_draft(
    paths: Sequence[str],
    output: Path,
    overwrite: bool,
    given: Given,
    full: bool = False,
    choose: Choose | None = None,
) -> Draft:
    """Draft a config for `paths` and write it to `output`.

    Raises UsageError if `output` exists and `overwrite` is false, and the errors of `make_draft`.
    """
    refuse_url(output, "name a file, then copy it", "writes")
    if output.exists() and not overwrite:
        raise UsageError(
            "config_exists", f"{output}: already exists; choose another path with --output, or replace it with --force"
        )
    try:
        draft = make_draft(paths, output.parent, given, choose=choose)
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
    shown = one_line(str(output))
    title = f"Dry run: packcorpus check {shown}. Run: packcorpus pack {shown}" if full else ""
    write_bytes(output, draft.text(full, title).encode())
    return draft


def settings_of_sources(
    format: str = "auto", columns: Sequence[str] = (), roles: Sequence[str] = (), ignore: Sequence[str] = ()
) -> dict[str, Any]:
    """Return options of `init` as settings of a source; mappings are OURS=YOURS."""
    names: dict[str, list[str]] = {}
    for ours, theirs in _pairs(roles, "--roles user=customer"):
        names.setdefault(ours, []).append(theirs)
    given = {"columns": dict(_pairs(columns, "--columns instruction=ticket")), "roles": names, "ignore": list(ignore)}
    return {"format": format} | {name: value for name, value in given.items() if value}


def _pairs(mappings: Sequence[str], example: str) -> list[tuple[str, str]]:
    pairs = [(ours, theirs) for ours, _, theirs in (mapping.partition("=") for mapping in mappings)]
    for mapping, pair in zip(mappings, pairs, strict=True):
        if not all(pair):
            raise UsageError(
                "bad_command_line", f"{example.split()[0]} {mapping}: expected OURS=YOURS, such as {example}"
            )
    return pairs


def make_draft(
    paths: Sequence[str],
    folder: Path,
    given: Given,
    root: Path = Path(),
    choose: Choose | None = None,
    trains: bool = True,
) -> Draft:
    """Return the draft of a config in `folder` for data.

    `paths` are files, folders, globs, and URLs. The tokenizer is the given one, one among the paths, or the only one
    nearby; of several, `choose` names one. Without any, a new one is trained, or UsageError is raised unless `trains`.
    Copies of remote files are written to `root`. Raises UsageError for a wrong setting or a choice that is left to the
    user, and InputMissing or DataError if no path contains conversations that can be read.
    """
    draft = Draft(given, folder, Layout(root))
    _check_given(given)
    data, tokenizer = _apart(paths, given.tokenizer)
    for path in data:
        draft.entries += _find_entries(path, draft)
    where, usable = ", ".join(data), [entry for entry in draft.entries if not entry.problem]
    if not usable:
        if len(draft.entries) == 1 and draft.entries[0].error:
            raise draft.entries[0].error
        problems = [entry.problem for entry in draft.entries]
        problems.append(f"no file has a known extension: {_some(draft.left_out)}" if draft.left_out else "no data")
        raise DataError("nothing_to_draft", f"{where}: {problems[0]}")
    draft.notes["tokenizer"] = "" if tokenizer else f"found nearby; {OF_YOUR_MODEL}"
    if not tokenizer:
        near = tokenizers_near([file.path.parent for entry in usable for file in entry.files if not is_url(file.name)])
        tokenizer = _only_one(list(map(str, near)), choose)
    if not tokenizer:
        draft.notes["tokenizer"] = UNNAMED
        if recorded := next((entry.path for entry in usable if entry.format == TOKENS.name), None):
            raise UsageError(
                "tokenizer_unnamed",
                f"{recorded}: has recorded token ids, and there is no tokenizer near it; name the one that recorded "
                "the ids with --tokenizer",
            )
        if not trains:
            words = shlex.join(paths)
            raise UsageError(
                "tokenizer_unnamed",
                [
                    "no tokenizer is named, and none is nearby; name that of your model:",
                    f"  packcorpus pack {words} --tokenizer Qwen/Qwen3-8B",
                    "only for a model that is trained from scratch, train a new tokenizer on the data; this takes a "
                    "config:",
                    f"  packcorpus init {words}",
                ],
            )
    _decide(draft, usable, tokenizer, where)
    draft.values = {"name": name_of(data, given)} | draft.values
    return draft


def name_of(paths: Sequence[str], given: Given) -> str:
    """Return the name of a corpus: the given one, or that of its first data."""
    path = next((path for path in paths if not _is_model(path)), paths[0])
    last = path.rstrip("/").rpartition("/")[2] if is_url(path) else Path(path).resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last.split(".")[0]).strip("-._")[:100]
    return given.name or name or "corpus"


def _is_model(path: str) -> bool:
    return not is_url(path) and is_model(Path(os.path.expanduser(path)))


def _check_given(given: Given) -> None:
    for name, value in given.of_sources.items():
        check_settings(Source, {"path": "x", name: value}, f"--{name}")
    length = length_of(given.sequence_length) if given.sequence_length else None
    for option, name, chosen in (("--name", "name", given.name), ("--sequence-length", "sequence_length", length)):
        if chosen:
            check_settings(Config, {"sources": [Source(path="x")], name: chosen}, option)


def _apart(paths: Sequence[str], tokenizer: str) -> tuple[list[str], str]:
    """Return the paths of data, and the tokenizer: the given one, or one of the paths."""
    models = [path for path in paths if _is_model(path)]
    data = [path for path in paths if path not in models]
    named = list(dict.fromkeys(filter(None, [tokenizer, *models])))
    if len({os.path.realpath(os.path.expanduser(path)) for path in named}) > 1:
        raise UsageError(
            "tokenizer_unnamed", f"{' and '.join(named)} are tokenizers, not data; keep one of them, as --tokenizer"
        )
    if not data:
        raise UsageError("bad_command_line", f"{models[0]}: is a tokenizer, not data; name files with conversations")
    return data, next(iter(named), "")


def _only_one(found: Sequence[str], choose: Choose | None) -> str:
    """Return the tokenizer, or "" without any; `choose` names one of several."""
    if len(found) < 2:
        return next(iter(found), "")
    if choose:
        return choose(found)
    lines = [f"  --tokenizer {from_here(path)}" for path in found]
    raise UsageError("tokenizer_unnamed", ["several tokenizers are nearby; name the one of your model:", *lines])


def _decide(draft: Draft, usable: Sequence[Entry], tokenizer: str, where: str) -> None:
    """Set the values of a draft except for its name, their notes, and the choices."""
    given, here = draft.given, os.path.expanduser(tokenizer)

    def values_with(path_of: Callable[[str], str]) -> dict[str, Any]:
        sources = [
            {"path": entry.path if is_remote(entry.path) else path_of(entry.path), "format": entry.format}
            | {name: getattr(entry, name) for name in ("columns", "roles") if getattr(entry, name)}
            | {name: given.of_sources[name] for name in ("roles", "ignore") if name in given.of_sources}
            for entry in usable
        ]
        named = path_of(here) if os.path.exists(here) else tokenizer
        return {"sources": sources} | ({"tokenizer": named} if tokenizer else {})

    # For the prediction, paths are relative to the working directory, because the folder of the config may not exist.
    values, template = values_with(str), given.template
    if given.sequence_length:
        values["sequence_length"] = length_of(given.sequence_length)
    files = Recipe(Config.model_validate(values), Path(), draft.layout, (), ()).tokenizer_files if tokenizer else None
    if template:
        found, without = _predict(values | {"template": template}, draft)
        draft.notes["template"] = ""
        template = _path_in(draft.folder, template) if os.path.isfile(template) else template
    else:
        template, draft.notes["template"], (found, without) = _choose_template(values, files, draft)
        values["template"] = template
    if not given.sequence_length:
        length, draft.notes["sequence_length"] = _choose_length(found, files)
        values |= {"template": given.template or template, "sequence_length": length}
        if length != DEFAULTS["sequence_length"]:
            found, without = _predict(values, draft)
        found, without = _fill_rows(values, (found, without), files, draft)
    else:
        fitting = found.lengths <= found.recipe.config.sequence_length
        share = 100 * np.count_nonzero(fitting) / max(len(fitting), 1)
        draft.notes["sequence_length"] = f"{share:.1f} % of the conversations fit"
    draft.found = found
    draft.values = values_with(lambda path: _path_in(draft.folder, path))
    draft.values |= {"template": template, "sequence_length": values["sequence_length"]}
    if found.failures:
        problem = next(iter(_broken(found)[1:]), found.failures[0])
        raise DataError("nothing_to_draft", f"{where}: no conversation can be packed: {problem}")
    read, rejected = _read_and_rejected(found)
    allowed = DEFAULTS["max_rejects"]
    if without and without.expected > allowed * read:
        draft.will_fail = True
    if without:
        draft.choices.append(
            f"{'check will fail' if draft.will_fail else 'check will reject conversations'}: the template writes no "
            f"reasoning, which {found.about(without.expected)} conversations have ({without.code}); {REASONING}"
        )
    if rejected > allowed * read:
        draft.will_fail = True
        # The share of rejects, rounded up to a percent; an estimate is increased by a fifth.
        enough = min(1.0, math.ceil(round((100 if found.whole else 120) * rejected / max(read, 1), 6)) / 100)
        if first_failure(found.recipe):  # a smaller share would stop the run
            enough = 1.0
        draft.choices.append(
            f"check will fail: {100 * rejected / read:.1f} % of the records are rejected, and max_rejects allows "
            f"{100 * allowed:g} %; fix the records, or set max_rejects: {enough:g} to leave them out"
        )
    draft.choices += _cut_off(found)
    way = found.ledger.samples and found.ledger.samples.ways_out.get("share: conversation")
    tokens, left = found.ledger.tokens, {"share: conversation": 1.0, "share: all": 1.0}  # parts of all tokens
    if way and way.tokens is not None:
        left["share: conversation"] = way.tokens / max(1, tokens.encoded)
    if found.share_all_tokens is not None:
        left["share: all"] = found.share_all_tokens / max(1, tokens.packed)
    setting = "share: all" if left["share: all"] < left["share: conversation"] - SAVES else "share: conversation"
    if left[setting] < 1:
        fewer = f"{100 * (1 - left[setting]):.0f} % fewer tokens"
        draft.notes[setting] = f"{fewer}: what samples begin with is stored once"


def _choose_length(found: Prediction, files: TokenizerFiles | None) -> tuple[int, str]:
    """Return the length of rows that 99 % of the conversations fit, and why."""
    longest = int(found.lengths.max(initial=0))
    needed = int(np.quantile(found.lengths, FITTING, method="inverted_cdf")) if longest else 0
    length = min(max(1, -(-needed // STEP)) * STEP, LONGEST_ROW)
    limit, note = context_of(files) if files else None, ""
    if limit and limit < length:
        length = limit // STEP * STEP or 1 << (limit.bit_length() - 1)
        note = f"; the model reads {limit:,}"
    share = 100 * np.count_nonzero(found.lengths <= length) / max(len(found.lengths), 1)
    fitting = "all conversations fit" if longest <= length else f"{share:.1f} % of the conversations fit"
    return length, f"{fitting}; the longest{'' if found.whole else ' of the sample'} has {longest:,} tokens{note}"


def _fill_rows(values: dict[str, Any], predicted: Predicted, files: TokenizerFiles | None, draft: Draft) -> Predicted:
    """Double the length of rows while that makes them much fuller.

    Conversations of 600 tokens fill rows of 1,024 by 59 %, and longer ones by nearly all.
    """
    longest = min((context_of(files) if files else None) or LONGEST_ROW, LONGEST_ROW)
    while (full := predicted[0].packing_efficiency or 100) < FULL and 2 * values["sequence_length"] <= longest:
        longer = {"sequence_length": 2 * values["sequence_length"]}
        tried = _predict(values | longer, draft)
        if (tried[0].packing_efficiency or 0) < full + GAIN:
            break
        draft.notes["sequence_length"] = f"rows of {values['sequence_length']:,} would be {full:.0f} % full"
        values |= longer
        predicted = tried
    return predicted


def _read_and_rejected(found: Prediction) -> tuple[int, int]:
    return found.ledger.conversations.read, sum(source.rejected for source in found.sources)


def _path_in(folder: Path, path: str) -> str:
    """Return a path, relative if it and `folder` are below the working directory."""
    here = Path.cwd()
    inside = all(Path(os.path.abspath(one)).is_relative_to(here) for one in (folder, path))
    text = os.path.relpath(path, folder) if inside else os.path.abspath(path)
    if text.encode("utf-8", "ignore").decode() != text:
        raise UsageError("bad_file_name", f"{text!a}: the name of this source is not UTF-8; rename it")
    return text


# A prediction, and the rejects for reasoning that the template cannot write, which the prediction is without.
Predicted = tuple[Prediction, Rejected | None]


def _choose_template(values: dict[str, Any], files: TokenizerFiles | None, draft: Draft) -> tuple[str, str, Predicted]:
    if not files:
        note = "its markers become control tokens of the trained tokenizer"
        return "chatml", note, _predict(values | {"template": "chatml"}, draft)
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
            found, without = _predict(values | {"template": "tokenizer"}, draft)
            refused = [reject for reject in found.rejects if reject.reason == "template_refused"]
            failed = [reject for reject in found.rejects if reject.reason in ("template_failed", "turn_not_located")]
            not_written = [sum(reject.looked_at for reject in rejects) for rejects in (failed, refused)]
            # What the template refuses cannot be read at inference, either. If it is all, the template is broken.
            if not_written[0] <= found.looked_at / 10 and sum(not_written) < found.looked_at:
                draft.choices += [_refused(reject, found, name) for reject in refused]
                return "tokenizer", "the tokenizer's own template", (found, without)
            problem = [*failed, *refused][0].message
        except PackError as error:
            problem = str(error)
        note += f"; the tokenizer's own template cannot be used: {one_line(problem)}"
    return name, note, _predict(values | {"template": name}, draft)


def _refused(reject: Rejected, found: Prediction, built_in: str) -> str:
    said = one_line(reject.message.removeprefix("the template refuses the conversation: "))
    return (
        f"the tokenizer's own template refuses {reject.looked_at:,} of {found.looked_at:,} sampled conversations: "
        f"{said}; the model cannot read them at inference. Change the data, or set template: "
        f"{built_in}, which writes them, but in another form than the model's own"
    )


def _predict(values: dict[str, Any], draft: Draft) -> Predicted:
    config = Config.model_validate(values | {"max_rejects": 1.0})
    found = predict(config, Path(), draft.layout.root, budget=BUDGET)
    without = next((reject for reject in found.rejects if reject.reason == "reasoning_not_written"), None)
    if without:
        found = predict(config.model_copy(update={"reasoning": "drop"}), Path(), draft.layout.root, budget=BUDGET)
    return found, without


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


def _short_lines(draft: Draft) -> Iterator[str]:
    """Yield the settings that were decided, each with its reason."""
    yield from _comment(ALL_SETTINGS)
    for line in draft.choices:
        yield from _comment(f"{line[0].upper()}{line[1:]}.")
    yield f"name: {_yaml(draft.values['name'])}"
    yield "sources:"
    values = iter(draft.values["sources"])
    for entry in draft.entries:
        if entry.problem:
            why = entry.problem.partition("; ")[0]
            yield f"  {_comment(from_here(f'Left out: {entry.path}: {why}'))[0]}"
            continue
        source = {key: value for key, value in next(values).items() if key != "format"}
        if (format := draft.given.of_sources.get("format", "auto")) != "auto":
            source["format"] = format
        path = source.pop("path")
        yield from _commented(f"  - {'path: ' * bool(source)}{_yaml(path)}", entry.describe(full=False), "  ")
        yield from (f"    {key}: {_yaml(value)}" for key, value in source.items())
    for name in ("tokenizer", "template", "sequence_length"):
        line = f"{name}: {_yaml(draft.values[name])}" if name in draft.values else f"# {name}: Qwen/Qwen3-8B"
        yield from _commented(line, draft.notes[name])
    for name in draft.notes.keys() & SHARES:
        yield from _commented(f"# {name}", draft.notes[name])


def _commented(line: str, comment: str, indent: str = "") -> list[str]:
    """Return a line with a comment behind it or, if both are too long, above it."""
    comment = one_line(comment)
    together = f"{line}  # {comment}"
    if not comment or len(together) <= WIDTH:
        return [together if comment else line]
    return [*_comment(comment, f"{indent}# ", f"{indent}# "), line]


def _full_lines(draft: Draft) -> Iterator[str]:
    root, folder = SCHEMA.parents[2], draft.folder.resolve()
    if SCHEMA.is_file() and folder.is_relative_to(root):  # in a clone; an absolute path would be of this machine only
        yield f"# yaml-language-server: $schema={os.path.relpath(SCHEMA, folder)}"
    for line in draft.choices:
        yield from _comment(f"{line[0].upper()}{line[1:]}.")
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
        if note := draft.notes.get(name, ""):
            yield from _comment(f"Chosen: {note}." if name in draft.values else f"{note[0].upper()}{note[1:]}.")
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
        yield from _comment(entry.describe(full=True), "  # ", "  # ")
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


def is_remote(path: str) -> bool:
    """Return whether a path is a URL, or can only be the name of a dataset on the Hub."""
    if is_url(path):
        return check_url(path) != "file"
    return not os.path.exists(os.path.expanduser(path)) and hub_name(path) is not None and not _has_extension(path)


def _has_extension(name: str) -> bool:
    return container_by_extension(name) is not None


def _find_entries(path: str, draft: Draft) -> Iterator[Entry]:
    """Yield one entry for all files of a path, or one per file.

    There is one entry if all files can be read and have the same format and columns. Files that were found before are
    skipped. Raises UsageError if the columns are invalid, or if a file is an output of packcorpus.
    """
    if is_remote(path):
        yield _entry(path, draft)
        return
    for part in _known(Path(os.path.expanduser(path)), draft):
        files = [file for file, *_ in find_paths(str(part), Path())]
        if any(file.resolve().is_relative_to(output) for file in files for output in Layout(Path()).outputs()):
            raise UsageError("own_output", f"{part}: is an output of packcorpus, not a source")
        entries = []
        for file in files:
            if file.resolve() not in draft.seen:
                draft.seen.add(file.resolve())
                entries.append(_entry(str(file), draft))
        first = entries[0] if entries else Entry(str(part), [])
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
        yield replace(first, path=str(part))


def _known(path: Path, draft: Draft) -> Iterator[Path]:
    """Yield the path itself, or a glob per known extension.

    The globs are for a folder that also contains other files. If a folder contains outputs of packcorpus or files of a
    model, yield the paths next to them instead, because a glob would include them.
    """
    if not path.is_dir():
        yield path
        return
    outputs = draft.outputs = draft.outputs | _outputs(path, draft)
    children: list[Path] = []
    mixed = any(output.is_dir() and path.resolve() in output.parents for output in outputs) or _has_model(path)
    if mixed:
        children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
        names = [child.name for child in children if child.is_file()]
        of_model = model_files(names)
        draft.models += [str(path / name) for name in sorted(of_model)]
        names = [name for name in names if name not in of_model]
    else:
        names, of_model = _names(path), set()
        saved = any(os.path.basename(name) in ("state.json", "dataset_dict.json") for name in names)
        if saved or all(map(_has_extension, names)):
            yield path
            return
    known = [name for name in names if _has_extension(name)]
    draft.left_out += [name for name in names if not _has_extension(name)]
    deep = "**/" if any(os.sep in name for name in known) else ""
    if of_model:
        yield from (path / name for name in known)
    else:
        for extension in sorted({re.sub(r"^.*?(\.[^.]+(\.(gz|zst))?)$", r"\1", name) for name in known}):
            yield Path(f"{glob.escape(str(path))}/{deep}*{extension}")
    for child in children:
        if child.resolve() in outputs:
            draft.skipped.append(f"{child}/")
        elif child.is_dir() and is_model(child):
            draft.models.append(f"{child}/")
        elif child.is_dir() and _names(child):
            yield from _known(child, draft)


def _outputs(path: Path, draft: Draft) -> set[Path]:
    """Return the folders with outputs of packcorpus, also of other roots below a path."""
    below = [found.parent for found in path.rglob("manifests") if (found.parent / "data" / "corpora").is_dir()]
    return {folder for root in (Path(), draft.layout.root, *below) for folder in Layout(root).outputs()}


def _has_model(folder: Path) -> bool:
    """Return whether files of a model are in a folder or below it."""
    return any(
        model_files(files) and not any(part.startswith(".") for part in Path(where).relative_to(folder).parts)
        for where, _, files in os.walk(folder)
    )


def _names(path: Path) -> list[str]:
    found = []
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(where, name), path) for name in files if not name.startswith(".")]
    return sorted(found)


def _entry(path: str, draft: Draft) -> Entry:
    """Sample one file, or the files of a remote path, and return the entry."""
    given, layout = draft.given.of_sources, draft.layout if is_remote(path) else None
    guessed, columns = False, given.get("columns", {})
    files: list[SourceFile] = []
    try:
        try:
            files = find_files([Source(**{"path": path, **given})], Path(), layout)
        except DataError as error:
            guessed = error.reason == "unknown_format" and not columns
            columns = guess_columns_of(path, layout) if guessed else columns
            files = find_files([Source(**{"path": path, **given, "columns": columns})], Path(), layout)
        samples = sample_files(files, BUDGET // 4, 1 << 24)
        for sample in samples:
            count_unused_keys(sample)
    except PackError as error:
        if not files and not isinstance(error, DataError):
            if layout and hub_name(path) and isinstance(error, InputMissing):
                error.message += f"; to name a model's tokenizer, write --tokenizer {path}"
            raise
        kind = error if error.reason in ("media_data", "preference_data") else None
        return Entry(path, files, problem=one_line(str(error).removeprefix(f"{path}: ")), error=kind)
    records = [(record, sample.file) for sample in samples for _, record in sample.records]
    fitting, first = _count_fitting(records)
    looked_at, roles = len(records), dict[str, list[str]]()
    guesses = fitting < looked_at and "roles" not in given
    if guesses and (guess := guess_roles((record for record, _ in records), columns)):
        names = tuple(Source.model_validate({"path": path, "roles": guess}).role_names.items())
        more, other = _count_fitting([(record, replace(file, roles=names)) for record, file in records])
        if more > fitting:
            fitting, first, roles = more, other, guess
    problem = f"none of its first {looked_at:,} records can be used; the first problem: {first}"
    counted = all(sample.counted and sample.stands_for == 1 for sample in samples)
    counts = fitting, looked_at, sum(sample.expected for sample in samples), counted
    formats = {file.format for file in files}
    format = formats.pop() if len(formats) == 1 else "auto"
    return Entry(path, files, format, columns, roles, guessed, *counts, "" if fitting else one_line(problem))


def _count_fitting(records: Sequence[tuple[Any, SourceFile]]) -> tuple[int, str]:
    """Return the number of conversations, and the first problem of another record."""
    problems = []
    for record, file in records:
        try:
            file.conversation(record)
        except Reject as reject:
            problems.append(reject.message)
    return len(records) - len(problems), next(iter(problems), "")
