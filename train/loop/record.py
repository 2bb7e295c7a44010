"""Write the results of a run: adapter, tokenizer, picture, and record.

model, log of the steps ─write_results─▶ adapter_model.safetensors, tokenizer, training.svg, then training.json
"""

from __future__ import annotations

import io
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from tasks.encoders.tokenizer_files import TokenizerFiles
from tasks.storage.files import give_usual_mode, sha256_of, to_json, write_bytes
from train.measures.phases import PHASES

# Colors of the phases in the picture: two for data, two for the model, and one for the optimizer.
COLORS = ("#b8500f", "#e8a871", "#1f5fa8", "#8fb4dc", "#7a7a7a")
LIBRARIES = ("packcorpus", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "trl", "numpy")


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the log of a run; rates are means weighted by the time of a step.

    `phases` are shares of the time. The phase `data` includes `data_wait` and the exchange of the number of trained
    tokens with the other ranks; see train.measures.phases. The losses of single steps are noisy, so the first and the
    last loss are means over `loss_steps` steps, a tenth of all steps.
    """
    steps = [entry for entry in log if "step_seconds" in entry]
    seconds = sum(entry["step_seconds"] for entry in steps)
    names = ("tokens_per_second", "non_pad_tokens_per_second", "trained_tokens_per_second", "mfu", "gpu_share")
    shares = [entry["memory_share"] for entry in steps if "memory_share" in entry]
    losses, averaged = [entry["loss"] for entry in steps], max(1, len(steps) // 10)
    return {
        "steps": len(steps),
        "loss_steps": averaged,
        "first_loss": fmean(losses[:averaged]),
        "last_loss": fmean(losses[-averaged:]),
        "seconds": round(seconds, 3),
        "data_wait": round(sum(entry["data_wait"] * entry["step_seconds"] for entry in steps) / seconds, 6),
        # Steps that an earlier version logged may lack phases.
        "phases": {
            phase: round(sum(entry.get(f"{phase}_seconds", 0.0) for entry in steps) / seconds, 6) for phase in PHASES
        },
        "peak_memory_bytes": int(max(entry["memory_bytes"] for entry in steps)),
        **({"memory_share": max(shares)} if len(shares) == len(steps) else {}),
        "skipped_steps": int(sum(entry.get("skipped", 0) for entry in steps)),
    } | {
        name: round(sum(entry[name] * entry["step_seconds"] for entry in steps) / seconds, 4)
        for name in names
        if all(name in entry for entry in steps)  # a run may continue on another device
    }


def data_wait(result: dict[str, Any]) -> float:
    """Return the share of the time in which a rank waited for its own batches.

    `result` is the summary of the rank's log. Its phase `data` may include waiting for other ranks. On a GPU,
    `data_wait` may include time in which the GPU still computes. The smaller of the two is returned.
    """
    return float(min(result["data_wait"], result["phases"]["data"]))


@cache  # reading them takes as long as a few steps of a small model
def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect training."""
    return {name: metadata.version(name) for name in LIBRARIES}


def write_results(
    folder: Path, model: Any, tokenizer: TokenizerFiles | None, record: dict[str, Any], log: list[dict[str, Any]]
) -> None:
    """Write all results; `training.json` is last, because it marks the end of the run."""
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = record["base_model"]
    model.save_pretrained(folder, safe_serialization=True)
    give_usual_mode(folder / "adapter_model.safetensors")
    for file in tokenizer.files if tokenizer else ():
        if file.name != "config.json":  # of a model, which an adapter is not
            shutil.copyfile(file, folder / file.name)
    write_bytes(folder / "training.svg", picture(log, record["corpus"]["name"], record["result"]["kept_step"]))
    record = record | {"adapter_sha256": sha256_of(folder / "adapter_model.safetensors"), "log": log}
    write_bytes(folder / "training.json", to_json(record))


def picture(log: list[dict[str, Any]], title: str, kept_step: int) -> bytes:
    """Return an SVG plot of loss, tokens/s, and seconds of each phase over the steps.

    If the kept adapter is not from the last step, its step is marked.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [entry for entry in log if "step_seconds" in entry]
    evaluations = [entry for entry in log if "eval_loss" in entry]
    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure, (above, below, last) = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
        at = [entry["step"] for entry in steps]
        above.plot(at, [entry["loss"] for entry in steps], color="#1f5fa8", label="training")
        if evaluations:
            points = [entry["step"] for entry in evaluations], [entry["eval_loss"] for entry in evaluations]
            above.plot(*points, "o--", color="#b8500f", label="validation")
            if kept_step < at[-1]:
                above.axvline(kept_step, color="#b8500f", linestyle=":", label=f"kept: step {kept_step}")
        above.set_ylabel("loss")
        above.legend(frameon=False)
        for name, label, style in (
            ("tokens_per_second", "all", "-"),
            ("non_pad_tokens_per_second", "without padding", "--"),
            ("trained_tokens_per_second", "trained on", ":"),
        ):
            if name in steps[0]:
                below.plot(at, [entry[name] for entry in steps], style, color="#333333", label=label)
        below.set_ylim(bottom=0)
        below.set_ylabel("tokens/s")
        below.legend(frameon=False)
        spent = [[entry.get(f"{phase}_seconds", 0.0) for entry in steps] for phase in PHASES]
        last.stackplot(at, spent, labels=PHASES, colors=COLORS)
        last.set_ylabel("seconds per step")
        last.set_xlabel("optimizer step")
        last.legend(frameon=False, ncols=len(PHASES), loc="lower right")
        shares = [(entry["step"], 100 * entry["gpu_share"]) for entry in steps if "gpu_share" in entry]
        if shares:
            share = last.twinx()
            share.plot(*zip(*shares, strict=True), ":", color="#000000")
            share.set_ylim(0, 105)
            share.set_ylabel("% of the time on the GPU (dotted)")
            share.spines["top"].set_visible(False)
        for axes in (above, below, last):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        above.set_title(title)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()
