"""Render the result of `packcorpus check`.

Shows the sources, a conversation of each source, rejects, figures, and optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tasks.cli.views.console import grid, heading, indented, plain_table, print_remark, single
from tasks.cli.views.corpus_view import SHOWN_SOURCES, print_content_tokens, print_facts, print_mixture, print_unused
from tasks.cli.views.token_text import print_hanging, print_legend, print_title, text_of
from tasks.core.printable import (
    common_folder,
    counted,
    duration,
    in_bytes,
    lengths_in_words,
    printable,
    printable_lines,
)
from tasks.corpus.mixture_table import mixture_table
from tasks.inspection.dry_run import DryRun
from tasks.inspection.labels import (
    DROPPED,
    NOTICED,
    SHARE_NOTE,
    TRAINED_TURNS,
    explain_left_out,
    explain_samples,
    weighting,
)
from tasks.inspection.token_runs import Span
from tasks.inspection.waiting import waiting_line
from tasks.storage.layout import RowLayout
from tasks.templates.sections import explain_sections, sections_of_config

SHOWN_CONVERSATIONS = 12
# A long text is shortened to START and END characters, and many spans are shortened to the first and last SPANS // 2.
START, END, SPANS = 240, 100, 40


def show_dry_run(run: DryRun, console: Console) -> None:
    """Render a dry run."""
    looked_at = sum(source.looked_at for source in run.sources)
    read = run.ledger["conversations"]["read"]
    console.print(
        Text.assemble(
            (printable(run.settings["name"]), "bold"),
            f"  {looked_at:,} of {'' if run.whole else 'about '}{read:,} conversations sampled, "
            f"{counted(run.files, 'file')}, {in_bytes(run.bytes)}",
            ("  nothing was written", "dim"),
        ),
        soft_wrap=True,
    )
    for failure in run.failures:
        indented(console, single(Text(printable_lines(failure), "bold yellow")))
    tokenizer = run.tokenizer
    name = "trained on the sample (a run trains it on all sources)" if tokenizer.trained_here else tokenizer.name
    facts = [
        ("config", str(run.config)),
        ("tokenizer", f"{name}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, engine {run.engine}"),
        ("template", run.settings["template"]),
        ("trained on", TRAINED_TURNS[run.settings["train_on"]] + explain_sections(sections_of_config(run.settings))),
        ("overlong", run.settings["overlong"]),
        *weighting(run.settings),
    ]
    print_facts(facts, run.markers_as_text, console)
    _print_sources(run, console)
    _print_conversations(run, console)
    _print_rejects(run, console)
    if any(run.rows.values()):  # otherwise, all figures are zero
        _print_figures(run, console)
        print_mixture(run.mixture, run.settings["weighting"], console)
        _print_steps(run, console)
        print_remark(waiting_line(run.waiting, run.settings["balance"]), console)
    for warning in run.warnings[len(run.failures) :]:
        console.print()
        indented(console, single(Text(printable(warning), "yellow")))


def _number(value: int, run: DryRun) -> str:
    return f"{'' if run.whole else '~ '}{value:,}"


def _print_sources(run: DryRun, console: Console) -> None:
    folder = common_folder([source.path for source in run.sources])
    notes = [f"below {printable(folder)}"] * bool(folder)
    wide = console.width >= 120
    notes += [SHARE_NOTE] * (wide and bool(mixture_table(run.mixture, run.settings["weighting"])))
    heading(console, "Sources", "; ".join(notes))
    table = plain_table()
    table.add_column("file", overflow="fold")
    names = ("format", "sampled", "conversations", "rejected", "tokens", "trained", "share")
    for name in names if wide else names[2:-1]:
        table.add_column(name, justify="right" if name != "format" else "left", no_wrap=True)
    total = max(run.ledger["tokens"]["encoded"], 1)
    for source in run.sources[:SHOWN_SOURCES]:
        count = "" if source.counted and source.stands_for == 1 else "~ "
        other = "" if source.whole else "~ "
        file = Text(printable(source.path.removeprefix(folder)))
        cells = [
            Text(source.format, "dim"),
            Text(f"{source.looked_at:,}"),
            Text(f"{count}{source.conversations:,}"),
            Text(f"{other if source.rejected else ''}{source.rejected:,}", "" if source.rejected else "dim"),
            Text(f"{other}{source.tokens:,}"),
            Text(f"{other}{source.trained_tokens:,}"),
            Text(f"{100 * source.tokens / total:.1f} %"),
        ]
        if wide:
            table.add_row(file, *cells)
        else:
            remark = f"{source.format}, {source.looked_at:,} sampled"
            table.add_row(Text.assemble(file, "\n", (remark, "dim")), *cells[2:-1])
    indented(console, table)
    if rest := len(run.sources[SHOWN_SOURCES:]):
        console.print(Text(f"  … {rest:,} more", "dim"))
    if others := run.files - len(run.sources):
        text = (
            f"  {counted(others, 'file')} not read: each is assumed to resemble a file above and is included in the "
            "figures of that file"
        )
        console.print(Text(text, "dim"), soft_wrap=True)


def _print_conversations(run: DryRun, console: Console) -> None:
    shown = [(source.shown, *source.other_samples) for source in run.sources if source.shown]
    if not shown:
        return
    heading(console, "Conversations", "one per source, as rendered")
    print_legend(console)
    examples = [
        (one, number, samples) for samples in shown[:SHOWN_CONVERSATIONS] for number, one in enumerate(samples, 1)
    ]
    for example, number, samples in examples:
        console.print()
        facts = [counted(example.tokens, "token"), f"{example.trained_tokens:,} trained"]
        facts += [f"sample {number} of {len(samples)}"] * (len(samples) > 1)
        print_title(console, "", printable(example.place), facts)
        print_hanging(console, _shortened(example.spans))
    if (rest := len(shown) - SHOWN_CONVERSATIONS) > 0:
        console.print(Text(f"\n… {rest:,} more sources", "dim"))


def _shortened(spans: Sequence[Span]) -> Text:
    """Render spans, without the middle of long texts and the middle of many spans."""
    text = Text()
    pending: list[Span] = []

    def gap(left_out: str) -> None:
        text.append_text(text_of(pending))
        text.append(f" … {left_out} … ", "cyan")
        pending.clear()

    for number, span in enumerate(spans):
        if SPANS // 2 <= number < len(spans) - SPANS // 2:
            if number == SPANS // 2:
                gap(counted(sum(len(one.ids) for one in spans[SPANS // 2 : len(spans) - SPANS // 2]), "token"))
        elif len(span.text) > START + END + 80:
            pending.append(Span(span.text[:START], span.trained, span.control, []))
            gap(counted(len(span.text) - START - END, "character"))
            pending.append(Span(span.text[-END:], span.trained, span.control, []))
        else:
            pending.append(span)
    return text.append_text(text_of(pending))


def _print_rejects(run: DryRun, console: Console) -> None:
    if not run.rejects:
        return
    heading(console, "Rejects", "in the sample; the first of each reason")
    table = grid(False, False, True, False)
    for reject in run.rejects:
        expected = "" if run.whole else f"about {reject.expected:,} in all: "
        message = Text(printable(f"{expected}{reject.place} {reject.message}"))
        table.add_row(reject.code, reject.reason, f"{reject.looked_at:,}", message)
    indented(console, table)


def _print_figures(run: DryRun, console: Console) -> None:
    remark = "exact: all data was read" if run.whole else "estimated from the sample"
    heading(console, "Prediction", "for a run that does not fail" if run.run_fails else remark)
    settings, conversations, tokens = run.settings, run.ledger["conversations"], run.ledger["tokens"]
    table = grid(False, True, False)
    table.add_row("conversations", _number(conversations["read"], run), "")
    for label, value, remark in (
        ("  rejected", sum(source.rejected for source in run.sources), ""),
        *(("  dropped", count, _reason(run, reason)) for reason, count in conversations["dropped"].items()),
        ("  packed", conversations["packed"], ""),
        ("    split" if settings["overlong"] == "split" else "    truncated", conversations["truncated_or_split"], ""),
    ):
        if value or label == "  packed":
            table.add_row(label, _number(value, run), Text(remark, "dim"))
    table.add_row("tokens", _number(tokens["packed"], run), Text("packed, including separators", "dim"))
    share = 100 * tokens["trained"] / max(tokens["packed"], 1)
    table.add_row("  trained", _number(tokens["trained"], run), Text(f"{share:.1f} %", "dim"))
    lengths = _lengths(settings)
    remark = f"of {lengths_in_words(lengths)} tokens" if settings["packing"] else "one conversation each"
    remark += f", in each of {settings['epochs']} epochs" if settings["epochs"] > 1 else ""
    for kind, title in (("train", "rows"), ("validation", "  validation")):
        names = RowLayout(tuple(lengths)).splits(kind)
        rows = sum(run.rows[name] for name in names)
        if rows or kind == "train":
            table.add_row(title, _number(rows, run), Text(remark, "dim") if kind == "train" else "")
        for name in names if len(names) > 1 and rows else ():
            table.add_row(f"{'  ' if kind == 'train' else '    '}{name}", _number(run.rows[name], run), "")
    if run.packing_efficiency is not None:
        table.add_row("efficiency", f"{'' if run.whole else '~ '}{run.packing_efficiency:.2f} %", "")
    sizes = ", ".join(f"{name.replace('_', ' ')} {in_bytes(size)}" for name, size in run.bytes_on_disk.items())
    table.add_row("on disk", f"~ {in_bytes(sum(run.bytes_on_disk.values()))}", Text(sizes, "dim"))
    table.add_row("memory", f"~ {in_bytes(run.peak_memory_bytes)}", Text("of the largest process", "dim"))
    with_workers = f"with {counted(run.workers, 'worker')} on idle cores"
    table.add_row("time", f"~ {duration(run.seconds)}", Text(with_workers, "dim"))
    indented(console, table)
    if run.ledger.get("samples"):
        console.print(Text(f"  {explain_samples(run.ledger)}", "dim"), soft_wrap=True)
    if left_out := explain_left_out(run.ledger["context"]["left_out"]):
        console.print(Text(f"  {left_out}", "dim"), soft_wrap=True)
    for name, count in run.noticed_in_sample.items():
        if isinstance(count, int) and count:
            noun, meaning = NOTICED.get(name, ("", name))
            line = f"  noticed in the sample: {counted(count, noun or 'time')} {meaning}"
            console.print(Text(line, "dim"), soft_wrap=True)
    written = run.noticed_in_sample.get("content_tokens", {})
    print_content_tokens(written if isinstance(written, dict) else {}, console, " in the sample")
    print_unused(run.unused_keys_in_sample, console, " in the sample")


def _reason(run: DryRun, reason: str) -> str:
    setting = run.settings.get(reason)
    return f"{DROPPED.get(reason, reason)}{f': {setting:,}' if isinstance(setting, int) else ''}"


def _print_steps(run: DryRun, console: Console) -> None:
    heading(console, "Steps", "of the optimizer in one epoch, by rows per step")
    table = plain_table()
    for name in (
        "steps",
        "rows",
        "tokens",
        "trained tokens",
        "samples" if "samples" in run.ledger else "conversations",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in run.steps:
        tokens = f"{one.rows_per_step * _lengths(run.settings)[-1]:,}" if run.settings["packing"] else ""
        counts = (f"{one.trained_tokens_per_step:,}", f"{one.conversations_per_step:,}")
        table.add_row(f"{one.steps:,}", f"{one.rows_per_step:,}", tokens, *counts)
    indented(console, table)


def _lengths(settings: Mapping[str, Any]) -> list[int]:
    given = settings["sequence_length"]
    return given if isinstance(given, list) else [given]
