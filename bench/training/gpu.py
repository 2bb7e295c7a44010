"""Diagnose training on a GPU with a random model, and compare it with TRL.

    python bench/training/gpu.py FOLDER MANIFEST [--whole MANIFEST] [--layers 32 --hidden 4096] [options of diagnose]

The model is a Llama with random weights, built in FOLDER. By default, it has the shape of Llama 3.1 8B. `--whole` names
a manifest of the same conversations with `packing: false`. TRL's SFTTrainer receives their tokens and labels, and packs
them itself. It uses the attention backend and the micro-batch of the diagnosis; if that micro-batch does not fit, it is
halved until it fits. If TRL fails for another reason, the end of its output is shown and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

# Exit code of a process of TRL that ran out of memory.
SHORTAGE = 3
# Lines of its errors that are shown for any other failure.
SHOWN = 30


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
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            LlamaForCausalLM(config).save_pretrained(path)
    return path


def trl(manifest: Path, model: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Run SFTTrainer on the same data and model, with its own packing and loop."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from train import measures
    from train.config import TrainingConfig
    from train.data.conversations import padding_tokenizer, sft_dataset
    from train.data.corpus import open_corpus
    from train.machine import devices
    from train.model import qlora

    corpus, config = open_corpus(manifest), TrainingConfig()
    device = devices.resolve(config)
    loaded = qlora.load_model(model, config, device.kind, device.dtype, case["attention"])
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.kind == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    trainer = SFTTrainer(
        model=loaded,
        args=SFTConfig(
            output_dir=str(model.parent / "trl"), max_length=case["length"], packing=True, packing_strategy="bfd",
            per_device_train_batch_size=case["micro_batch"], max_steps=case["steps"],
            gradient_accumulation_steps=max(1, case["tokens_per_step"] // case["length"] // case["micro_batch"]),
            learning_rate=2e-4, bf16=device.precision == "bf16", fp16=device.precision == "fp16",
            use_cpu=device.kind == "cpu", save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=sft_dataset(corpus)[0],
        processing_class=padding_tokenizer(corpus),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    rows = trainer.train_dataset["seq_lengths"]
    per_step = sum(map(sum, rows)) / len(rows) * case["micro_batch"] * trainer.args.gradient_accumulation_steps
    seconds = sorted(b - a for a, b in pairwise(marks))
    rate = per_step / seconds[len(seconds) // 2]
    peak = measures.peak_flops(device.name, device.dtype)
    typical = next((row for row in rows if sum(row) == case["length"]), [case["length"]])
    work = measures.flops_per_token(loaded, torch.cat([torch.arange(size) for size in typical])[None])
    return {
        "tokens_per_second": rate,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.kind == "cuda" else 0,
        **({"mfu": rate * work / peak} if peak else {}),
    }


def trl_or_exit(manifest: Path, model: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Run TRL in this process; if it runs out of memory, end with the code SHORTAGE."""
    from train.machine.process import is_shortage

    try:
        return trl(manifest, model, case)
    except Exception as error:
        traceback.print_exc()
        sys.exit(SHORTAGE if is_shortage(error) else 1)


def trl_that_fits(manifest: Path, model: Path, case: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run TRL in separate processes until it fits: the micro-batch and the figures.

    Only a shortage of memory halves the micro-batch, because nothing else would change. Exits if TRL fails.
    """
    size = case["micro_batch"]
    while size:
        words = [sys.executable, __file__, str(model), str(manifest), "--trl", json.dumps(case | {"micro_batch": size})]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if not done.returncode:
            return size, json.loads(done.stdout.splitlines()[-1])
        if done.returncode != SHORTAGE:
            end = "\n".join(done.stderr.strip().splitlines()[-SHOWN:])
            sys.exit(f"{end}\nTRL, micro-batch {size}: failed with exit code {done.returncode}")
        print(f"TRL, micro-batch {size}: out of memory")
        size //= 2
    sys.exit("TRL: out of memory with one row per pass")


def main() -> None:
    ours = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours.add_argument("folder", type=Path)
    ours.add_argument("manifest", type=Path)
    ours.add_argument("--whole", type=Path)
    ours.add_argument("--layers", type=int, default=32)
    ours.add_argument("--hidden", type=int, default=4096)
    ours.add_argument("--steps", type=int, default=12)
    ours.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    given, others = ours.parse_known_args()
    if given.trl:
        print(json.dumps(trl_or_exit(given.manifest, given.folder, given.trl)))
        return
    facts = json.loads(given.manifest.read_text())
    length, vocabulary = facts["sequence_length"], facts["tokenizer"]["vocab_size"]
    # Twice the length, so that longer rows can be tried, too.
    model = build_model(given.folder, vocabulary, given.layers, given.hidden, 2 * length)
    words = [sys.executable, "-m", "train", "diagnose", "--manifest", str(given.manifest), "--base-model", str(model)]
    done = subprocess.run([*words, "--steps", str(given.steps), *others], stdout=subprocess.PIPE, text=True, check=True)
    diagnosis = Path(done.stdout.splitlines()[-1])
    print(diagnosis.with_suffix(".md").read_text())
    if not given.whole:
        return
    found = json.loads(diagnosis.read_text())
    choices, bases = found["choices"], found["baselines"]
    rate = sum(base["tokens_per_second"] for base in bases) / len(bases)
    case = {
        "length": length, "steps": given.steps, "micro_batch": choices["micro_batch"],
        "tokens_per_step": bases[0]["rows_per_step"] * length, "attention": choices["attention"],
    }  # fmt: skip
    size, beside = trl_that_fits(given.whole, model, case)
    beside_rate = beside["tokens_per_second"]
    print(
        f"TRL, micro-batch {size}: {beside_rate * found['trained_share']:,.0f} trained tokens/s, "
        f"{beside['peak_memory_bytes'] / 1e9:.2f} GB; the current settings: "
        f"{rate * found['trained_share']:,.0f}, {rate / beside_rate:.2f}×"
    )


if __name__ == "__main__":
    main()
