"""What `packcorpus check` shows: the sources, a conversation of each as it will be rendered, rejects, and figures.

Prediction ─show─▶ tables and text          Prediction ─as_object─▶ the same for JSON
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.cli.console import grid, heading, indented, single
from tasks.cli.corpus_view import SHOWN_SOURCES, print_mixture
from tasks.cli.token_text import print_conversation_head, print_hanging, print_legend, text_of
from tasks.core.error_codes import CODES
from tasks.core.printable import common_folder, counted, duration, in_bytes, printable
from tasks.corpus.mixture_table import mixture_table
from tasks.dry_run.model import Prediction, Shown, about, in_a_row, steps
from tasks.inspection.labels import BATCH_ROWS, BEFORE_MIXTURE, FEW_STEPS, NOTICED, TRAINED_TURNS
from tasks.inspection.token_runs import Run, runs_of
from tasks.storage.schemas import IGNORED

SHOWN_CONVERSATIONS = 12
# Of a longer run of text its begin and its end are shown, in tokens; and of more runs the first and the last.
BEGIN, END, RUNS = 60, 25, 40
# The gradient of fewer tokens is that of a handful of answers. 65,536 tokens a step are usual, a third of them trained.
FEW_TRAINED = 1000
# Nobody would train on the same more often, for want of steps.
MOST_EPOCHS = 10


def show(found: Prediction, config_file: Path, batches: list[int], console: Console) -> None:
    """`batches`: rows a step, of each batch that steps are told for."""
    config, recipe = found.config, found.recipe
    looked_at = sum(len(source.sample.records) for source in found.sources)
    read = sum(source.conversations for source in found.sources)
    console.print(
        Text.assemble(
            (printable(config.name), "bold"),
            f"  {looked_at:,} of {about(read, found)} conversations looked at, {counted(found.files, 'file')}, "
            f"{in_bytes(found.bytes)}",
            ("  nothing was written", "dim"),
        ),
        soft_wrap=True,
    )
    for failure in found.failures:
        indented(console, single(Text(printable(failure), "bold yellow")))
    trained_here = config.tokenizer is None
    name = "trained on the sources, here on the sample" if trained_here else recipe.tokenizer_files.main.name
    facts = [
        ("config", str(config_file)),
        ("tokenizer", f"{name} ({found.encoder.kind}, {found.encoder.vocab_size:,} tokens), read by {found.engine}"),
        ("template", config.template),
        ("trained on", TRAINED_TURNS[config.train_on]),
        ("over-long", config.overlong),
    ]
    table = grid(False, False)
    for label, value in facts:
        table.add_row(Text(label, "dim"), printable(value))
        if label == "template" and recipe.template.markers_as_text:
            markers = " ".join(map(printable, recipe.template.markers_as_text))
            table.add_row("", Text(f"{markers}: no tokens of this tokenizer, written as text", "yellow"))
    indented(console, table)
    _print_sources(found, console)
    _print_conversations(found, console)
    _print_rejects(found, console)
    _print_figures(found, console)
    print_mixture(found.mixture, config.weighting, console)
    _print_steps(found, batches, console)
    for warning in found.warnings + step_warnings(found, batches):
        console.print()
        indented(console, single(Text(printable(warning), "yellow")))


def _number(value: float, found: Prediction) -> str:
    return f"{'' if found.whole else '~ '}{value:,.0f}"


def _print_sources(found: Prediction, console: Console) -> None:
    folder = common_folder([source.sample.file.name for source in found.sources])
    notes = [f"below {printable(folder)}"] * bool(folder)
    wide = console.width >= 120
    notes += [BEFORE_MIXTURE] * (wide and bool(mixture_table(found.mixture, found.config.weighting)))
    heading(console, "Sources", "; ".join(notes))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("file", overflow="fold")
    names = ("format", "looked at", "conversations", "rejected", "tokens", "trained", "share")
    for name in names if wide else names[2:-1]:
        table.add_column(name, justify="right" if name != "format" else "left", no_wrap=True)
    total = max(found.tokens["encoded"], 1)
    for source in found.sources[:SHOWN_SOURCES]:
        sample = source.sample
        count = "" if sample.counted and sample.stands_for == 1 else "~ "
        other = "" if sample.whole else "~ "
        file = Text(printable(sample.file.name.removeprefix(folder)))
        cells = [
            Text(sample.file.format, "dim"),
            Text(f"{len(sample.records):,}"),
            Text(f"{count}{source.conversations:,.0f}"),
            Text(f"{other if source.rejected else ''}{source.rejected:,.0f}", "" if source.rejected else "dim"),
            Text(f"{other}{source.tokens:,.0f}"),
            Text(f"{other}{source.trained:,.0f}"),
            Text(f"{100 * source.tokens / total:.1f} %"),
        ]
        if wide:
            table.add_row(file, *cells)
        else:
            remark = f"{sample.file.format}, {len(sample.records):,} looked at"
            table.add_row(Text.assemble(file, "\n", (remark, "dim")), *cells[2:-1])
    indented(console, table)
    if rest := len(found.sources[SHOWN_SOURCES:]):
        console.print(Text(f"  … {rest:,} more", "dim"))
    if others := found.files - len(found.sources):
        text = f"  {counted(others, 'file')} not read: each is taken to be like one above, and stands in its figures"
        console.print(Text(text, "dim"), soft_wrap=True)


def _print_conversations(found: Prediction, console: Console) -> None:
    shown = [source.shown for source in found.sources if source.shown]
    if not shown:
        return
    heading(console, "Conversations", "one of each source, as it will be rendered")
    print_legend(console)
    for one in shown[:SHOWN_CONVERSATIONS]:
        console.print()
        facts = [counted(len(one.ids), "token"), f"{int(one.trained.sum()):,} trained"]
        print_conversation_head(console, "", printable(one.place), facts)
        print_hanging(console, _shortened(found, one))
    if (rest := len(shown) - SHOWN_CONVERSATIONS) > 0:
        console.print(Text(f"\n… {rest:,} more sources", "dim"))


def _runs(found: Prediction, one: Shown) -> list[Run]:
    labels = one.ids.copy()
    labels[~one.trained] = IGNORED
    return runs_of(found.encoder, one.ids, labels)


def _shortened(found: Prediction, one: Shown) -> Text:
    """Long texts without their middle, and of many turns the first and the last."""
    runs = _runs(found, one)
    text = Text()
    pending: list[Run] = []

    def gap(tokens: int) -> None:
        text.append_text(text_of(found.encoder, pending, as_ids=False))
        text.append(f" … {counted(tokens, 'token')} … ", "cyan")
        pending.clear()

    for number, run in enumerate(runs):
        if RUNS // 2 <= number < len(runs) - RUNS // 2:
            if number == RUNS // 2:
                gap(sum(len(run.ids) for run in runs[RUNS // 2 : len(runs) - RUNS // 2]))
        elif len(run.ids) > BEGIN + END + 20:
            pending.append(Run(run.ids[:BEGIN], run.trained, run.control))
            gap(len(run.ids) - BEGIN - END)
            pending.append(Run(run.ids[-END:], run.trained, run.control))
        else:
            pending.append(run)
    return text.append_text(text_of(found.encoder, pending, as_ids=False))


def _print_rejects(found: Prediction, console: Console) -> None:
    if not found.rejects:
        return
    heading(console, "Rejects", "in what was looked at; the first of each reason")
    table = grid(False, False, True, False)
    for reason, reject in sorted(found.rejects.items()):
        expected = "" if found.whole else f"about {reject.expected:,.0f} in all: "
        table.add_row(
            CODES[reason].code,
            reason,
            f"{reject.looked_at:,}",
            Text(printable(f"{expected}{reject.place} {reject.message}")),
        )
    indented(console, table)


def _print_figures(found: Prediction, console: Console) -> None:
    remark = "as the run will have it" if found.whole else "estimated from the sample"
    heading(console, "Prediction", "of a run that does not fail" if found.fails else remark)
    config = found.config
    rejected = sum(source.rejected for source in found.sources)
    table = grid(False, True, False)
    read = sum(source.conversations for source in found.sources)
    table.add_row("conversations", _number(read, found), "")
    for label, value, remark in (
        ("  rejected", rejected, ""),
        *(("  dropped", count, _reason(found, reason)) for reason, count in found.dropped.items()),
        ("  packed", found.packed, ""),
        ("    split" if config.overlong == "split" else "    truncated", found.cut, ""),
    ):
        if value or label == "  packed":
            table.add_row(label, _number(value, found), Text(remark, "dim"))
    table.add_row("tokens", _number(found.tokens["packed"], found), Text("packed, separators included", "dim"))
    share = 100 * found.tokens["trained"] / max(found.tokens["packed"], 1)
    table.add_row("  trained", _number(found.tokens["trained"], found), Text(f"{share:.1f} %", "dim"))
    remark = f"of {config.sequence_length:,} tokens" if config.packing else "one conversation each"
    remark += f", in each of {config.epochs} epochs" if config.epochs > 1 else ""
    table.add_row("rows", _number(found.rows["train"], found), Text(remark, "dim"))
    if found.rows["validation"]:
        table.add_row("  validation", _number(found.rows["validation"], found), "")
    if found.efficiency is not None:
        table.add_row("efficiency", f"{'' if found.whole else '~ '}{found.efficiency:.2f} %", "")
    parts = {
        "shards": "shards",
        "token_files": "token files",
        "index": "index",
        "plan": "plan",
        "tokenizer": "tokenizer",
    }
    sizes = ", ".join(f"{label} {in_bytes(round(found.disk[key]))}" for key, label in parts.items())
    table.add_row("on disk", f"~ {in_bytes(round(sum(found.disk.values())))}", Text(sizes, "dim"))
    table.add_row("memory", f"~ {in_bytes(round(found.memory))}", Text("of the largest process", "dim"))
    with_workers = f"with {counted(found.workers, 'worker')} on idle cores"
    table.add_row("time", f"~ {duration(found.seconds)}", Text(with_workers, "dim"))
    indented(console, table)
    for name, count in found.noticed.items():
        if count:
            noun, meaning = NOTICED.get(name, ("", name))
            line = f"  noticed in what was looked at: {counted(count, noun or 'time')} {meaning}"
            console.print(Text(line, "dim"), soft_wrap=True)


def _reason(found: Prediction, reason: str) -> str:
    """Why conversations are dropped, in words."""
    words = {"too_long": "longer than a row", "duplicate": "duplicates", "limit": "over the limit of their source"}
    words |= {"weight": "by the weight of their source"}
    return words.get(reason) or f"by {reason}: {getattr(found.config, reason):,}"


def _print_steps(found: Prediction, batches: list[int], console: Console) -> None:
    heading(console, "Steps", "of the optimizer in one epoch, and what one of them takes")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("steps", "rows", "tokens", "trained tokens", "conversations"):
        table.add_column(name, justify="right", no_wrap=True)
    length = found.config.sequence_length
    for rows in batches or BATCH_ROWS:
        count, trained = steps(found, rows)
        tokens = f"{rows * length:,}" if found.config.packing else ""
        held = in_a_row(found) * min(rows, found.rows["train"])
        table.add_row(f"{count:,}", f"{rows:,}", tokens, f"{trained:,.0f}", f"{held:,.0f}")
    indented(console, table)


def step_warnings(found: Prediction, batches: list[int]) -> list[str]:
    """What speaks against the batches; without any, against the one in the middle of those that are shown."""
    said = []
    held = in_a_row(found)
    for rows in batches or BATCH_ROWS[1:2]:
        count, trained = steps(found, rows)
        if 0 < count < FEW_STEPS:
            alone = math.ceil(held * found.rows["train"] / rows)
            apart = f" One conversation a row would give {alone:,}." if held > 1.05 and alone > count else ""
            fewer, epochs = found.rows["train"] // FEW_STEPS, -(-FEW_STEPS // count)
            ways = [f"{counted(fewer, 'row')} a step"] * (fewer > 0) + [f"{epochs} epochs"] * (epochs <= MOST_EPOCHS)
            advice = f"Take {', or '.join(ways)}." if ways else "Only more conversations make more of them."
            said.append(
                f"An epoch at {counted(rows, 'row')} a step is {counted(count, 'step')}, fewer than {FEW_STEPS}."
                f"{apart} {advice}"
            )
        if 0 < trained < FEW_TRAINED:
            more = -(-rows * FEW_TRAINED // max(1, round(trained)))
            advice = f" Take {more:,} rows a step." if more < found.rows["train"] else ""
            said.append(
                f"A step of {counted(rows, 'row')} has {trained:,.0f} trained tokens, fewer than {FEW_TRAINED:,}: its "
                f"gradient is that of a handful of answers.{advice}"
            )
    return said


def as_object(found: Prediction, config_file: Path, batches: list[int]) -> dict[str, Any]:
    """All figures, for JSON. A run's manifest has the same names for what it has, too."""
    rejected = {reason: round(reject.expected) for reason, reject in found.rejects.items()}
    return {
        "config": str(config_file),
        "settings": found.config.model_dump(mode="json"),
        "whole": found.whole,
        "files": found.files,
        "bytes": found.bytes,
        "engine": found.engine,
        "sources": [_source(found, number) for number in range(len(found.sources))],
        "rejects": [
            {"code": CODES[reason].code, "reason": reason} | asdict(reject) | {"expected": round(reject.expected)}
            for reason, reject in sorted(found.rejects.items())
        ],
        "noticed_in_sample": found.noticed,
        "ledger": {
            "conversations": {
                "read": round(sum(source.conversations for source in found.sources)),
                "packed": round(found.packed),
                "rejected": rejected,
                "dropped": {reason: round(count) for reason, count in found.dropped.items()},
                "truncated_or_split": round(found.cut),
            },
            "pieces": {"packed": round(found.pieces)},
            "tokens": {name: round(value) for name, value in found.tokens.items()},
        },
        "mixture": [facts.model_dump() for facts in found.mixture],
        "rows": found.rows,
        "packing_efficiency": None if found.efficiency is None else round(found.efficiency, 4),
        "bytes_on_disk": {name: round(value) for name, value in found.disk.items()},
        "peak_memory_bytes": round(found.memory),
        "seconds": round(found.seconds, 1),
        "workers": found.workers,
        "steps": [
            {"rows_per_step": rows, "steps": count, "trained_tokens_per_step": round(trained)}
            for rows in batches or BATCH_ROWS
            for count, trained in [steps(found, rows)]
        ],
        "run_fails": found.fails,
        "warnings": found.failures + found.warnings + step_warnings(found, batches),
    }


def _source(found: Prediction, number: int) -> dict[str, Any]:
    source = found.sources[number]
    sample, file = source.sample, source.sample.file
    told = {
        "path": file.name,
        "format": file.format,
        "bytes": file.bytes,
        "looked_at": len(sample.records),
        "reach": round(sample.reach, 4),
        "conversations": round(source.conversations),
        "counted": sample.counted,
        "rejected": round(source.rejected),
        "tokens": round(source.tokens),
        "trained_tokens": round(source.trained),
        "shown": None,
    }
    if one := source.shown:
        runs = [
            {"text": found.encoder.decode(run.ids), "trained": run.trained, "control": run.control, "ids": run.ids}
            for run in _runs(found, one)
        ]
        told["shown"] = {"place": one.place, "tokens": len(one.ids), "spans": runs}
    return told
