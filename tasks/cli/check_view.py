"""Render the result of `packcorpus check`.

Shows the sources, a conversation of each source, rejects, the predicted figures of the manifest, costs, and steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from packcorpus.tasks.cli.console import (
    grid,
    heading,
    indented,
    plain_table,
    print_hanging,
    print_legend,
    print_remark,
    print_title,
    say,
    single,
    text_of,
)
from packcorpus.tasks.cli.corpus_view import (
    SourceLine,
    print_facts,
    print_head,
    print_ledger,
    print_mixture,
    print_noticed,
    print_sources,
)
from packcorpus.tasks.core.printable import counted, duration, in_bytes, lengths_in_words, printable, printable_lines
from packcorpus.tasks.corpus.summary import (
    NOTICED_NAMES,
    Fact,
    explain_losses,
    mixture_table,
    noticed_facts,
    setting_facts,
    waiting_line,
)
from packcorpus.tasks.dry_run.prediction import Prediction
from packcorpus.tasks.inspection.rows import Span

SHOWN_CONVERSATIONS = 12
# A long text is shortened to START and END characters, and many spans are shortened to the first and last SPANS // 2.
START, END, SPANS = 240, 100, 40


def show_prediction(run: Prediction, console: Console) -> None:
    """Render a dry run."""
    settings, about = run.settings, "" if run.whole else "about "
    sampled = f"{run.looked_at:,} of {about}{run.ledger.conversations.read:,} conversations sampled"
    size = f"{counted(run.files, 'file')}, {in_bytes(run.bytes)}"
    name = (printable(settings["name"]), "bold")
    say(console, name, f"  {sampled}, {size}", ("  nothing was written", "dim"))
    for failure in run.failures:
        indented(console, single(Text(printable_lines(failure), "bold yellow")))
    for line in explain_losses(run.ledger, "" if run.whole else "about "):
        indented(console, single(Text(line, "bold")))
    tokenizer = run.tokenizer
    origin = "trained on the sample (a run trains it on all sources)" if tokenizer.trained_here else tokenizer.name
    facts = [
        Fact("config", str(run.config)),
        Fact("tokenizer", f"{origin}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, engine {run.engine}"),
        Fact("template", settings["template"]),
        *setting_facts(settings),
    ]
    print_head(facts, run.markers_as_text, console)
    _print_sources(run, console)
    _print_conversations(run, console)
    if run.rejects:
        heading(console, "Rejects", "in the sample; the first of each reason")
        table = grid(False, False, True, False)
        for reject in run.rejects:
            expected = "" if run.whole else f"about {reject.expected:,} in all: "
            message = Text(printable(f"{expected}{reject.place} {reject.message}"))
            table.add_row(reject.code, reject.reason, f"{reject.looked_at:,}", message)
        indented(console, table)
    if any(run.rows.values()):  # otherwise, all figures are zero
        _print_figures(run, console)
        print_mixture(run.mixture, settings["weighting"], console)
        _print_steps(run, console)
        print_remark(waiting_line(run.waiting, settings["balance"]), console)
    for warning in run.warnings[len(run.failures) :]:
        console.print()
        indented(console, single(Text(printable(warning), "yellow")))


def _print_sources(run: Prediction, console: Console) -> None:
    lines = []
    for source in run.sources:
        count = "" if source.counted and source.stands_for == 1 else "~ "
        other = "" if source.whole else "~ "
        counts = [source.conversations, source.rejected, source.tokens, source.trained_tokens]
        remark = f"{source.format}{f', {source.split}' * bool(source.split)}, {source.looked_at:,} sampled"
        lines.append(SourceLine(source.path, remark, counts, (count, other, other, other)))
    print_sources(lines, run.ledger, bool(mixture_table(run.mixture, run.settings["weighting"])), console)
    if others := run.files - len(run.sources):
        text = (
            f"  {counted(others, 'file')} not read: each is assumed to resemble a file above and is included in the "
            "figures of that file"
        )
        say(console, (text, "dim"))


def _print_conversations(run: Prediction, console: Console) -> None:
    shown = [(source.shown, *source.other_samples) for source in run.sources if source.shown]
    if not shown:
        return
    heading(console, "Conversations", "one per source, as rendered")
    print_legend(console)
    for samples in shown[:SHOWN_CONVERSATIONS]:
        for number, example in enumerate(samples, 1):
            console.print()
            facts = [counted(example.tokens, "token"), f"{example.trained_tokens:,} trained"]
            facts += [f"sample {number} of {len(samples)}"] * (len(samples) > 1)
            print_title(console, "", printable(example.place), facts)
            print_hanging(console, _shortened(example.spans))
    if (rest := len(shown) - SHOWN_CONVERSATIONS) > 0:
        console.print(Text(f"\n… {rest:,} more sources", "dim"))


def _shortened(spans: Sequence[Span]) -> Text:
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


def _print_figures(run: Prediction, console: Console) -> None:
    remark = "exact: all data was read" if run.whole else "estimated from the sample"
    heading(console, "Prediction", "for a run that does not fail" if run.run_fails else remark)
    settings, mark = run.settings, "" if run.whole else "~ "
    print_ledger(run.ledger, settings, sum(run.rows.values()), console, mark)
    lengths, note = run.recipe.config.row_lengths, "one conversation each"
    if settings["packing"]:
        note = f"of {lengths_in_words(lengths)} tokens"
    note += f", in each of {settings['epochs']} epochs" if settings["epochs"] > 1 else ""
    facts = []
    for kind, title in (("train", "rows"), ("validation", "validation")):
        names = run.recipe.config.rows.splits(kind)
        rows = sum(run.rows[name] for name in names)
        if rows or kind == "train":
            is_part = kind != "train"
            facts.append(Fact(title, f"{mark}{rows:,}", note="" if is_part else note, is_part=is_part))
        further = names if len(names) > 1 and rows else ()
        facts += [Fact(name, f"{mark}{run.rows[name]:,}", is_part=True) for name in further]
    if run.packing_efficiency is not None:
        facts.append(Fact("efficiency", f"{mark}{run.packing_efficiency:.2f} %"))
    sizes = ", ".join(f"{name.replace('_', ' ')} {in_bytes(size)}" for name, size in run.bytes_on_disk.items())
    free = "" if run.disk_free_bytes is None else f"; {in_bytes(run.disk_free_bytes)} free"
    limit = f"; it may use {in_bytes(run.memory_limit_bytes)}" if run.memory_limit_bytes else ""
    facts += [
        Fact("on disk", f"~ {in_bytes(sum(run.bytes_on_disk.values()))}", note=f"{sizes}{free}"),
        Fact("memory", f"~ {in_bytes(run.peak_memory_bytes)}", note=f"of the largest process{limit}"),
        Fact("time", f"~ {duration(run.seconds)}", note=_workers(run)),
    ]
    print_facts(facts, console)
    if noticed_facts(run.noticed) or run.noticed.keys() & NOTICED_NAMES:
        heading(console, "Noticed", "in the sample")
        print_noticed(run.noticed, console)


def _workers(run: Prediction) -> str:
    cores = "core" if run.cores == 1 else "cores"
    return f"with {counted(run.workers, 'worker')} on {run.cores:,} usable {cores}, if idle"


def _print_steps(run: Prediction, console: Console) -> None:
    heading(console, "Steps", "of the optimizer in one epoch, by rows per step")
    table, last = plain_table(), "samples" if run.ledger.samples else "conversations"
    for name in ("steps", "rows", "tokens", "trained tokens", last):
        table.add_column(name, justify="right", no_wrap=True)
    for one in run.steps:
        tokens = one.rows_per_step * run.recipe.config.sequence_length
        counts = one.steps, one.rows_per_step, tokens, one.trained_tokens_per_step, one.conversations_per_step
        cells = [f"{count:,}" for count in counts]
        cells[2] *= run.settings["packing"]
        table.add_row(*cells)
    indented(console, table)
