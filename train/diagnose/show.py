"""Show the results of a diagnosis: a table, a conclusion, and three files."""

from __future__ import annotations

import io
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.files import to_json, write_bytes
from packcorpus.train.config import TrainingConfig
from packcorpus.train.diagnose.compare import (
    Conclusion,
    Outcome,
    Speedup,
    baselines_of,
    deviation,
    is_comparable,
    mean_of,
    noise_of,
)
from packcorpus.train.diagnose.factors import as_word
from packcorpus.train.diagnose.trials import UNTIMED
from packcorpus.train.measures import Advice

HEADS = (
    "trial", "runs", "trained tokens/s", "rows/s", "speed", "MFU", "memory", "data", "forward", "backward", "optimizer",
    "Δ loss", "Δ gradient",
)  # fmt: skip

LABEL = 40  # most characters in a line of a bar's label


@dataclass(frozen=True)
class Results:
    """Everything that is shown of a diagnosis."""

    config: TrainingConfig
    record: dict[str, Any]  # training.json of the first run
    runs: list[Outcome]  # in order, with at least one run of the baseline
    outcomes: list[Outcome]  # of each trial, without the baseline
    untried: list[str]
    reference: Outcome | None
    chosen: dict[str, Any]  # values of settings that are `auto`
    speeds: dict[str, Speedup]
    verdict: Conclusion
    steps: int  # of a run
    stopped: bool

    @property
    def trained_share(self) -> float:
        """Return the share of the corpus's tokens that is trained on."""
        return float(self.record["corpus"]["trained"] / self.record["corpus"]["tokens"])

    @property
    def advice(self) -> list[dict[str, Any]]:
        """Return the advice of the first run, which has few steps."""
        return [advice for advice in self.record["advice"] if advice["name"] != "optimizer steps"]

    @property
    def commands(self) -> list[str]:
        """Return the recommended changes, one line each."""
        corpus, options = self.verdict.corpus, self.verdict.options
        lines = [f"in the config of the corpus: {corpus}; then pack it again"] if corpus else []
        return [*lines, f"options of the training: {options}"] if options else lines

    @property
    def fewest_steps(self) -> int:
        """Return the steps of the shortest run that the budget ended; 0 if there is none."""
        return min((made for run in self.runs if 0 < (made := len(run.losses)) < self.steps), default=0)

    @property
    def not_compared(self) -> str:
        """Return why losses could not be compared; "" if they could."""
        if self.reference:
            return f"{self.reference.trial.name}: {self.reference.reason}" if self.reference.reason else ""
        if self.stopped:
            return "the diagnosis was interrupted before the run in fp32 with eager attention"
        return "the budget has no time for a run in fp32 with eager attention; raise --budget"

    def rows(self) -> list[list[str]]:
        """Return the texts of the table; a trial without figures has only its reason."""
        baselines = baselines_of(self.runs)
        return [self._cells(outcome, len(baselines)) for outcome in (mean_of(baselines), *self.outcomes)]

    def _cells(self, outcome: Outcome, baselines: int) -> list[str]:
        if outcome.reason:
            return [outcome.trial.name, outcome.reason]
        phases, speed, reference = outcome.phases or {}, self.speeds.get(outcome.trial.name), self.reference
        off = ["–", "–"]
        if reference and is_comparable(outcome, reference):
            loss = deviation(outcome.losses, reference.losses)
            gradient = deviation(outcome.gradient_norms, reference.gradient_norms)
            off = [f"{value:.0e}" if value else "0" for value in (loss, gradient)]
        size = outcome.micro_batch
        is_other = outcome.trial.factor != "micro_batch" and size != baselines_of(self.runs)[0].micro_batch
        return [
            f"{outcome.trial.name}, {counted(size, 'row')} per pass" if is_other else outcome.trial.name,
            str(speed.runs if speed else baselines),
            f"{outcome.tokens_per_second * self.trained_share:,.0f}",
            f"{outcome.rows_per_second:,.2f}",
            str(speed) if speed else "1",
            f"{100 * outcome.mfu:.1f} %" if outcome.mfu is not None else "–",
            f"{outcome.peak_memory_bytes / 1e9:.2f} GB",
            f"{100 * (phases['data'] + phases['copy']):.2f} %",
            *(f"{100 * phases[name]:.1f} %" for name in ("forward", "backward", "optimizer")),
            *off,
        ]


def print_results(results: Results, console: Console) -> None:
    """Print the table and the conclusion."""

    def say(line: str, style: str | None = None) -> None:
        console.print(line, markup=False, soft_wrap=True, style=style)

    if results.chosen:
        text = ", ".join(f"{name}: {as_word(value)}" for name, value in results.chosen.items())
        say(f"chosen by auto, and the same in all trials: {text}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="right" if number else "left", no_wrap=number > 0)
    for row in results.rows():
        if len(row) == len(HEADS):
            table.add_row(*map(Text, row))
    console.print(table)
    for outcome in results.outcomes:
        if outcome.reason:
            say(f"{outcome.trial.name}: {outcome.reason}", "dim")
    if made := results.fewest_steps:
        say(f"runs ended after {made} or more of {counted(results.steps, 'step')}, to keep the budget; raise --budget")
    if results.untried:
        why, fix = ("of the interruption", "") if results.stopped else ("the budget ended", "; raise --budget")
        say(f"not tried, because {why}: {', '.join(results.untried)}{fix}")
    if results.not_compared:
        say(f"Δ loss and Δ gradient are missing: {results.not_compared}")
    for advice in results.advice:
        say(f"advice: {Advice(**advice)}", "yellow")
    say(results.verdict.sentence, "bold")
    for line in results.commands:
        say(f"  {line}")


def write_results(results: Results, path: Path) -> None:
    """Write diagnosis.json, .md, and .svg."""
    record, runs, speeds = results.record, results.runs, results.speeds
    lines = [f"| {' | '.join(HEADS)} |", f"|---|{'---:|' * (len(HEADS) - 1)}"]
    for row in results.rows():
        escaped = [text.replace("|", "\\|") for text in row]
        lines.append(f"| {' | '.join(escaped)} |{' |' * (len(HEADS) - len(row))}")
    write_bytes(path.with_suffix(".md"), "\n".join([*lines, "", results.verdict.sentence, ""]).encode())
    tried = [outcome.trial for outcome in results.outcomes if not outcome.reason]
    bars = [(trial.name, speeds[trial.name], trial.same_training) for trial in tried]
    title = f"{record['corpus']['name']}: speed of {counted(len(bars), 'trial')}"
    write_bytes(path.with_suffix(".svg"), picture(bars, title))
    facts = {
        "corpus": record["corpus"],
        "device": record["in_effect"]["device"],
        "choices": record["choices"],
        "settings": results.config.model_dump() | results.chosen,
        "chosen_by_auto": sorted(results.chosen),
        "steps": results.steps,
        "fewest_steps": results.fewest_steps or results.steps,
        "untimed_steps": UNTIMED,
        "trained_share": results.trained_share,
        "reference": results.reference.trial.name if results.reference else None,
        "not_compared": results.not_compared or None,
        "noise": asdict(noise_of(runs)),
        "baselines": [asdict(run) for run in baselines_of(runs)],
        "trials": [
            asdict(outcome) | {"speedup": None if outcome.reason else asdict(speeds[outcome.trial.name])}
            for outcome in results.outcomes
        ],
        "runs": [
            {"trial": run.trial.name, "tokens_per_second": run.tokens_per_second, "reason": run.reason, "at": run.at}
            for run in runs
        ],
        "untried": results.untried,
        "advice": results.advice,
        "conclusion": asdict(results.verdict) | {"commands": results.commands},
        "versions": record["versions"],
    }
    write_bytes(path, to_json(facts))


def picture(bars: list[tuple[str, Speedup, bool]], title: str) -> bytes:
    """Return an SVG plot of speeds; a bar is (name, speed, trains the same)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=(9, 1.2 + 0.4 * len(bars)), layout="constrained")
        for place, (_, speed, same) in enumerate(reversed(bars)):
            color: Any = "#9a9a9a" if not speed.differs else "#1f5fa8" if same else "#e8a871"
            axes.barh(place, speed.ratio - 1, left=1, xerr=speed.error, color=color, height=0.6, ecolor="#333333")
        axes.set_yticks(range(len(bars)), [textwrap.fill(name, LABEL) for name, _, _ in reversed(bars)])
        axes.axvline(1, color="#333333", linewidth=0.8)
        axes.set_xlabel(
            "speed, 1 = current settings; blue: trains the same, orange: something else, gray: no difference"
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_title(title)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()
