"""Compare training on a GPU with TRL and Unsloth.

The model has random weights and the shape of Llama 3.1 8B.

    python bench/training/gpu.py FOLDER --packed MANIFEST … --whole MANIFEST … [--unsloth-python PYTHON]
        [--layers 32 --hidden 4096 --steps 12] [settings of training]

Each manifest of `--packed` is one row length, such as 2,048 and 8,192. The manifest of `--whole` at the same place has
the same conversations with `packing: false`; TRL and Unsloth receive their tokens and labels, and pack them themselves.
packcorpus runs with its defaults and the given settings. The others have the same adapter, quantization, and tokens per
step, and use whichever is the fastest of: activation checkpointing on or off, and every micro-batch that fits. TRL uses
FlashAttention and Liger's kernels if they are installed. Unsloth runs with PYTHON, because it needs versions of its
own.

Every trial is a process. The table, with the goals, is printed and written to FOLDER/gpu.json. MFU counts the same
useful work for all. If a process fails for another reason than memory, its output is shown and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

SHORTAGE = 3  # exit code of a process that ran out of memory
SHOWN = 30  # lines of the errors of any other failure
FASTER = 0.03  # a larger micro-batch must be faster by this share
OTHERS = ("TRL", "Unsloth")
# At 2,048 tokens: how much faster than the faster of the others; on an H100: the MFU.
SPEEDUP, LENGTH, MFU = 1.3, 2048, 0.45

Case = dict[str, Any]
Figures = dict[str, Any]


def build_model(folder: Path, vocab_size: int, layers: int, hidden: int, positions: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / f"llama-{layers}x{hidden}-{vocab_size}-{positions}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden, intermediate_size=hidden * 7 // 2 // 256 * 256 or 4 * hidden,
            num_hidden_layers=layers, num_attention_heads=max(1, hidden // 128),
            num_key_value_heads=max(1, hidden // 512), max_position_embeddings=positions,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            LlamaForCausalLM(config).save_pretrained(path)
    return path


# -- the trainers, each in a process of its own ------------------------------------------------------------------------


def packcorpus(manifest: Path, model: Path, steps: int, settings: list[str]) -> Figures:
    """Train with the defaults of packcorpus and the given settings."""
    output = model.parent / f"packcorpus-{time.time_ns()}"
    words = [sys.executable, "-m", "packcorpus.train", "--manifest", str(manifest), "--base-model", str(model)]
    words += ["--output", str(output), "--max-steps", str(steps), *settings]
    record = json.loads(Path(run(words, "packcorpus").stdout.splitlines()[-1]).read_text())
    log = [entry for entry in record["log"] if "step_seconds" in entry][1:]  # the first step is slower
    chosen, corpus = record["choices"], record["corpus"]
    rate = statistics.median(entry["non_pad_tokens_per_second"] for entry in log)
    return {
        "tokens_per_second": rate,
        # As for the others, the share of the corpus counts: rows of a few steps may have another one.
        "trained_tokens_per_second": rate * corpus["trained"] / corpus["tokens"],
        "memory_bytes": max(entry["memory_bytes"] for entry in log),
        "micro_batch": chosen["micro_batch"],
        "setting": ", ".join(
            [f"attention: {chosen['attention']}", *(n for n, used in chosen["options"].items() if used)]
        ),
        "record": record,
    }


def trl(case: Case) -> Figures:
    """Run SFTTrainer on the same data and model, with its own packing and loop."""
    import torch
    from transformers.utils import is_liger_kernel_available

    from packcorpus.train.config import TrainingConfig
    from packcorpus.train.data.conversations import padding_tokenizer, sft_dataset
    from packcorpus.train.data.corpus import open_corpus
    from packcorpus.train.machine import devices
    from packcorpus.train.model import attention, qlora

    corpus = open_corpus(Path(case["manifest"]))
    config = TrainingConfig(**case["config"] | {"activation_checkpointing": False})  # TRL sets it
    device = devices.resolve(config)
    lacking = attention.unavailable_backends(torch.device(device.kind), device.dtype)
    backend = next((name for name in ("flash3", "flash2") if name not in lacking), "sdpa")
    liger = device.kind == "cuda" and is_liger_kernel_available()
    loaded = qlora.load_model(Path(case["model"]), config, device.kind, device.dtype, backend)
    data = sft_dataset(corpus)[0]
    found = sft(case, loaded, data, padding_tokenizer(corpus), device.precision, use_liger_kernel=liger)
    return found | {"setting": f"attention: {backend}{', Liger' * liger}"}


def unsloth(case: Case) -> Figures:
    """Run Unsloth's model in SFTTrainer; nothing of packcorpus is imported."""
    from unsloth import FastLanguageModel  # first, because it changes the libraries  # isort: skip
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    model, _ = FastLanguageModel.from_pretrained(
        case["model"], max_seq_length=case["length"], load_in_4bit=case["config"]["quantization"] == "nf4"
    )
    model = FastLanguageModel.get_peft_model(
        model, r=case["config"]["lora_r"], lora_alpha=case["config"]["lora_alpha"], lora_dropout=0, bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth" if case["checkpointing"] else False, random_state=0,
    )  # fmt: skip
    data = load_dataset("json", data_files=case["data"], split="train")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(case["model"])
    return sft(case, model, data, tokenizer, "bf16") | {"setting": "its own kernels"}


def sft(case: Case, model: Any, data: Any, tokenizer: Any, precision: str, **own: Any) -> Figures:
    """Measure SFTTrainer; `data` has input_ids and labels."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    marks: list[float] = []
    on_gpu = precision != "fp32" and torch.cuda.is_available()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    args = SFTConfig(
        output_dir=f"{case['folder']}/sft", max_length=case["length"], packing=True, packing_strategy="bfd",
        per_device_train_batch_size=case["micro_batch"], max_steps=case["steps"],
        gradient_accumulation_steps=max(1, case["rows"] // case["micro_batch"]), learning_rate=2e-4,
        bf16=precision == "bf16", fp16=precision == "fp16", use_cpu=not on_gpu, save_strategy="no",
        report_to="none", disable_tqdm=True, gradient_checkpointing=case["checkpointing"], **own,
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    rows = trainer.train_dataset
    labels = [label for row in rows["labels"] for label in row]
    per_step = len(labels) / len(rows) * case["micro_batch"] * args.gradient_accumulation_steps
    rate = per_step / statistics.median(b - a for a, b in pairwise(marks))
    trained = sum(label != -100 for label in labels) / len(labels)
    peak = torch.cuda.max_memory_allocated() if on_gpu else process_memory()
    return {"tokens_per_second": rate, "trained_tokens_per_second": rate * trained, "memory_bytes": peak}


def process_memory() -> int:
    """Return the peak memory of this process, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_or_exit(trainer: Callable[[Case], Figures], case: Case) -> Figures:
    """Run a trainer here; if it runs out of memory, exit with the code SHORTAGE."""
    try:
        return trainer(case)
    except Exception as error:
        traceback.print_exc()
        import torch

        # bitsandbytes and cuBLAS report a shortage with errors of their own.
        short = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error) or "ALLOC_FAILED" in str(error)
        sys.exit(SHORTAGE if short else 1)


# -- the best of a trainer ---------------------------------------------------------------------------------------------


def run(words: list[str], name: str) -> subprocess.CompletedProcess[str]:
    """Run a process; exit with the end of its errors unless it ran out of memory."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode not in (0, SHORTAGE) or (done.returncode and name == "packcorpus"):
        end = "\n".join((done.stderr or "").strip().splitlines()[-SHOWN:])
        sys.exit(f"{end}\n{name}: failed with exit code {done.returncode}")
    return done


def trial(python: str, name: str, case: Case) -> Figures | None:
    """Run one trial of a trainer; None if it runs out of memory."""
    done = run([python, __file__, "--trial", name, json.dumps(case)], f"{name}, micro-batch {case['micro_batch']}")
    if done.returncode:
        return None
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found | {"micro_batch": case["micro_batch"], "checkpointing": case["checkpointing"]}


def best(python: str, name: str, case: Case) -> Figures:
    """Return the fastest trial, with or without activation checkpointing.

    From `case["micro_batch"]`, the size is halved until it fits, and then doubled while it fits and is faster. It never
    exceeds the rows of a step. Exits if nothing fits.
    """
    found: list[Figures] = []

    def tried(size: int, checkpointing: bool) -> Figures | None:
        figures = trial(python, name, case | {"micro_batch": size, "checkpointing": checkpointing})
        said = f"{figures['trained_tokens_per_second']:,.0f} trained tokens/s" if figures else "out of memory"
        print(f"{name}, micro-batch {size}, activation checkpointing {checkpointing}: {said}", flush=True)
        return figures

    for checkpointing in (True, False):
        size = min(case["micro_batch"], case["rows"])
        figures = tried(size, checkpointing)
        is_largest = figures is None
        while figures is None and size > 1:
            size //= 2
            figures = tried(size, checkpointing)
        while figures and not is_largest and 2 * size <= case["rows"]:
            size *= 2
            larger = tried(size, checkpointing)
            bound = figures["trained_tokens_per_second"] * (1 + FASTER)
            if larger is None or larger["trained_tokens_per_second"] <= bound:
                break
            figures = larger
        found += [figures] if figures else []
    if not found:
        sys.exit(f"{name}: out of memory with one row per pass")
    return max(found, key=lambda figures: figures["trained_tokens_per_second"])


# -- the comparison ----------------------------------------------------------------------------------------------------


def for_unsloth(model: Path, corpus: Path, folder: Path) -> tuple[Path, Path]:
    """Write what Unsloth reads: a model with a tokenizer, and tokens with labels."""
    from packcorpus.train.data.conversations import padding_tokenizer, sft_dataset
    from packcorpus.train.data.corpus import open_corpus

    opened, beside, data = open_corpus(corpus), folder / f"{model.name}-with-tokenizer", folder / f"{corpus.stem}.jsonl"
    beside.mkdir(exist_ok=True)
    for path in model.iterdir():
        if not (beside / path.name).exists():
            (beside / path.name).symlink_to(path.resolve())
    tokenizer = padding_tokenizer(opened)
    tokenizer.backend_tokenizer.save(str(beside / "tokenizer.json"))
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **{name: text for name, text in named.items() if text}}
    (beside / "tokenizer_config.json").write_text(json.dumps(settings))
    sft_dataset(opened)[0].to_json(data)
    return beside, data


def compare(given: argparse.Namespace, settings: list[str], packed: Path, whole: Path) -> dict[str, Any]:
    """Measure all trainers on one row length."""
    facts = json.loads(packed.read_text())
    length, vocabulary = facts["sequence_length"], facts["tokenizer"]["vocab_size"]
    given.folder.mkdir(parents=True, exist_ok=True)
    model = build_model(given.folder, vocabulary, given.layers, given.hidden, 2 * length)
    ours = packcorpus(packed, model, given.steps, settings)
    record = ours.pop("record")
    case: Case = {
        "folder": str(given.folder), "model": str(model), "manifest": str(whole), "length": length,
        "steps": given.steps, "micro_batch": ours["micro_batch"], "config": record["config"],
        "rows": record["choices"]["micro_batch"] * record["choices"]["accumulation"],
    }  # fmt: skip
    runs = {"packcorpus": ours, "TRL": best(sys.executable, "TRL", case)}
    if given.unsloth_python:
        beside, data = for_unsloth(model, whole, given.folder)
        case |= {"model": str(beside), "data": str(data)}
        runs["Unsloth"] = best(given.unsloth_python, "Unsloth", case)
    else:
        print("Unsloth: skipped; give the Python of an environment that has it as --unsloth-python")

    import torch

    from packcorpus.train.measures import peak_flops

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(record["choices"]["precision"], torch.float32)
    peak = peak_flops(name, dtype)
    for figures in runs.values():
        figures["mfu"] = figures["tokens_per_second"] * record["flops_per_token"] / peak if peak else None
    return {"length": length, "device": name, "runs": runs, "goals": goals(length, name, runs)}


def goals(length: int, device: str, runs: dict[str, Figures]) -> dict[str, bool | None]:
    """Return which goals are met; None for those that were not measured."""
    ours = runs["packcorpus"]
    other = max((runs[name] for name in OTHERS if name in runs), key=lambda run: run["trained_tokens_per_second"])
    ratio = ours["trained_tokens_per_second"] / other["trained_tokens_per_second"]
    on_h100 = "H100" in device and ours["mfu"] is not None
    return {
        f"{SPEEDUP} times the better of the others at {LENGTH:,}": ratio >= SPEEDUP if length == LENGTH else None,
        "no more memory than the better of the others": ours["memory_bytes"] <= other["memory_bytes"],
        f"MFU of {MFU:.0%} or more on an H100": ours["mfu"] >= MFU if on_h100 else None,
    }


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures and the goals as Markdown."""
    lines = ["| length | trainer | trained tokens/s | packcorpus is faster by | MFU | peak memory, GB | micro-batch |"]
    lines += ["|---:|---|---:|---:|---:|---:|---:|"]
    for one in found:
        ours = one["runs"]["packcorpus"]["trained_tokens_per_second"]
        for name, figures in one["runs"].items():
            rate, mfu = figures["trained_tokens_per_second"], figures["mfu"]
            share = "–" if mfu is None else f"{mfu:.1%}"
            lines.append(
                f"| {one['length']:,} | {name} ({figures['setting']}) | {rate:,.0f} | {ours / rate:.2f} | {share} | "
                f"{figures['memory_bytes'] / 1e9:.2f} | {figures['micro_batch']} |"
            )
    lines.append("")
    words = {True: "met", False: "not met", None: "not measured here"}
    lines += [f"{one['length']:,}: {goal}: {words[met]}" for one in found for goal, met in one["goals"].items()]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--trial"]:
        name, case = sys.argv[2:]
        print(json.dumps(run_or_exit({"TRL": trl, "Unsloth": unsloth}[name], json.loads(case))))
        return
    ours = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_argument("folder", type=Path)
    ours.add_argument("--packed", type=Path, nargs="+", required=True)
    ours.add_argument("--whole", type=Path, nargs="+", required=True)
    ours.add_argument("--unsloth-python")
    ours.add_argument("--layers", type=int, default=32)
    ours.add_argument("--hidden", type=int, default=4096)
    ours.add_argument("--steps", type=int, default=12)
    given, settings = ours.parse_known_args()
    pairs = zip(given.packed, given.whole, strict=True)
    found = [compare(given, settings, packed, whole) for packed, whole in pairs]
    (given.folder / "gpu.json").write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
