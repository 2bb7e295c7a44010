"""Compare attention backends and options on a GPU, and TRL's SFTTrainer.

    python bench/training/gpu.py FOLDER MANIFEST … [--whole MANIFEST] [--layers 16 --hidden 2048] [--steps 12]

MANIFESTs are packed corpora, for example with rows of 1024 and of 4096. `--whole` names the same conversations with
`packing: false`; TRL receives their tokens and labels and packs them itself. The model is a Llama with random weights,
built in FOLDER (about 1B parameters by default; `--layers 32 --hidden 4096` gives about 7B). Every row of the table is
a separate process: the real command, `python -m train`, which proves isolation or reports why it cannot train.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

BACKENDS = ("eager", "sdpa", "flex", "varlen", "flash2", "flash3")


def build_model(folder: Path, vocab_size: int, layers: int, hidden: int, positions: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / f"llama-{layers}x{hidden}-{vocab_size}-{positions}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden, intermediate_size=hidden * 7 // 2 // 256 * 256,
            num_hidden_layers=layers, num_attention_heads=max(1, hidden // 128),
            num_key_value_heads=max(1, hidden // 512), max_position_embeddings=positions,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def ours(folder: Path, manifest: Path, model: Path, steps: int, **settings: Any) -> dict[str, Any]:
    """Run the real command once. Returns its figures, or {"refused": reason}."""
    output = folder / f"run-{time.time_ns()}"
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value).lower())]
    command = [sys.executable, "-m", "train", "--manifest", str(manifest), "--base-model", str(model), *options]
    done = subprocess.run(
        [*command, "--max-steps", str(steps), "--output", str(output)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"refused": next((x for x in done.stderr.splitlines() if "error: " in x), done.stderr[-200:])}
    record = json.loads((output / "training.json").read_text())
    return record["result"] | {"micro_batch": record["choices"]["micro_batch"], "isolation": record["isolation"]}


def trl(manifest: Path, model: Path, length: int, steps: int, micro_batch: int, tokens_per_step: int) -> dict[str, Any]:
    """Run SFTTrainer on the same data and model, with its own packing and loop."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from train.config import TrainingConfig
    from train.data.conversations import padding_tokenizer, sft_dataset
    from train.data.corpus import open_corpus
    from train.machine import devices
    from train.model import flops, qlora

    corpus, config = open_corpus(manifest), TrainingConfig()
    device = devices.resolve(config)
    attention = "flash2" if devices.version_of("flash-attn") else "sdpa"
    loaded = qlora.load_model(model, config, device.kind, device.dtype, attention)
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.kind == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    trainer = SFTTrainer(
        model=loaded,
        args=SFTConfig(
            output_dir=str(model.parent / "trl"), max_length=length, packing=True, packing_strategy="bfd",
            per_device_train_batch_size=micro_batch, max_steps=steps,
            gradient_accumulation_steps=max(1, tokens_per_step // length // micro_batch), learning_rate=2e-4,
            bf16=device.precision == "bf16", fp16=device.precision == "fp16", use_cpu=device.kind == "cpu",
            save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=sft_dataset(corpus)[0],
        processing_class=padding_tokenizer(corpus),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    rows = trainer.train_dataset["seq_lengths"]
    per_step = sum(map(sum, rows)) / len(rows) * micro_batch * trainer.args.gradient_accumulation_steps
    seconds = sorted(b - a for a, b in pairwise(marks))
    rate = per_step / seconds[len(seconds) // 2]
    peak = flops.peak_flops(device.name, device.dtype)
    typical = next((row for row in rows if sum(row) == length), [length])
    work = flops.flops_per_token(loaded, torch.cat([torch.arange(size) for size in typical])[None])
    return {
        "non_pad_tokens_per_second": rate,
        "micro_batch": micro_batch,
        "data_wait": None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.kind == "cuda" else 0,
        **({"mfu": rate * work / peak} if peak else {}),
    }


def show(length: int, how: str, figures: dict[str, Any]) -> None:
    if "refused" in figures:
        print(f"| {length} | {how} | {figures['refused'].rpartition('error: ')[2]} |", flush=True)
        return
    mfu = f"{100 * figures['mfu']:.1f} %" if "mfu" in figures else "–"
    wait = f"{100 * figures['data_wait']:.2f} %" if figures["data_wait"] is not None else "–"
    print(
        f"| {length} | {how} | {figures['micro_batch']} | {figures['non_pad_tokens_per_second']:,.0f} | {mfu} | "
        f"{figures['peak_memory_bytes'] / 1e9:.1f} GB | {wait} |",
        flush=True,
    )


def main() -> None:
    ours_ = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours_.add_argument("folder", type=Path)
    ours_.add_argument("manifests", type=Path, nargs="+")
    ours_.add_argument("--whole", type=Path)
    ours_.add_argument("--layers", type=int, default=16)
    ours_.add_argument("--hidden", type=int, default=2048)
    ours_.add_argument("--steps", type=int, default=12)
    ours_.add_argument("--tokens-per-step", type=int, default=65536)
    ours_.add_argument("--backends", nargs="+", default=BACKENDS)
    ours_.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    given = ours_.parse_args()
    if given.trl:
        print(json.dumps(trl(given.whole, given.folder, **given.trl)))
        return
    facts = [json.loads(path.read_text()) for path in given.manifests]
    longest = max(fact["sequence_length"] for fact in facts)
    vocab_size = facts[0]["tokenizer"]["vocab_size"]
    model = build_model(given.folder, vocab_size, given.layers, given.hidden, longest)
    print("| length | attention, options | micro-batch | tokens/s (no padding) | MFU | peak memory | data wait |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for path, fact in zip(given.manifests, facts, strict=True):
        length = fact["sequence_length"]
        for backend, compiled, fused in product(given.backends, (False, True), (False, True)):
            settings = {"attention": backend, "compile": compiled, "fused_loss": fused}
            found = ours(given.folder, path, model, given.steps, tokens_per_step=given.tokens_per_step, **settings)
            how = backend + ", compile" * compiled + ", fused loss" * fused
            show(length, how, found)
        size = 1
        while given.whole and size * length <= given.tokens_per_step:  # TRL does not search for the best size itself
            case = {
                "length": length, "steps": given.steps, "micro_batch": size, "tokens_per_step": given.tokens_per_step
            }  # fmt: skip
            words = [sys.executable, __file__, str(model), str(path), "--whole", str(given.whole)]
            done = subprocess.run([*words, "--trl", json.dumps(case)], capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            show(length, "TRL", json.loads(lines[-1]) if not done.returncode else {"refused": done.stderr[-200:]})
            if done.returncode:
                break
            size *= 2


if __name__ == "__main__":
    main()
