"""Measure how long two ranks wait for each other, with and without `balance`.

    python bench/training/balance.py SOURCE.jsonl [--length 4096] [--steps 40]

SOURCE has records of GSM8K (`question`, `answer`). Neighbors are joined to conversations of log-normal lengths, and
packed with and without `balance: {ranks: 2}`. A small Llama (hidden size 256, 2 layers) trains on them in two processes
with DistributedDataParallel and gloo. Attention is computed conversation by conversation, like in GPU kernels. Seconds
are CPU seconds of each rank's own passes, so other work on the machine and the wait itself do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent.parent))


def write_joined(source: Path, path: Path, length: int) -> None:
    """Write conversations of several exchanges; one exchange has about 180 tokens."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    sizes = np.random.default_rng(0).lognormal(np.log(length / 8 / 180), 1.3, len(records)).round().clip(1)
    with path.open("w") as out:
        first = 0
        for size in sizes.astype(int):
            some = records[first : first + size]
            if not some:
                return
            turns = [(role, r[key]) for r in some for role, key in (("user", "question"), ("assistant", "answer"))]
            messages = [{"role": role, "content": text} for role, text in turns]
            out.write(json.dumps({"messages": messages}) + "\n")
            first += size


def pack(folder: Path, length: int, **settings: Any) -> Path:
    from packcorpus.tasks.recipe import resolve
    from packcorpus.tasks.work import Publish, run_all

    config = {"sources": [{"path": "joined.jsonl"}], "sequence_length": length, "vocab_size": 2000, **settings}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(config))
    recipe = resolve(folder / "corpus.yaml", folder)
    run_all(Publish(recipe))
    return recipe.published


def rank(manifest: Path, steps: int, folder: Path) -> None:
    """Train as one of the ranks, and write the CPU seconds of each step."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    from packcorpus.tasks.core.numbers import shuffle
    from packcorpus.train.data.corpus import open_corpus
    from packcorpus.train.data.dataset import PackedDataset
    from packcorpus.train.data.steps import balance_of, line_of_rows

    torch.set_num_threads(1)
    me, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=me, world_size=ranks)
    corpus = open_corpus(manifest)
    rows, balance = PackedDataset(corpus), balance_of(corpus.manifest)
    order = shuffle(len(rows), 0, 0) if balance is None else line_of_rows([len(rows)], balance, 0, 0)
    bounds: list[int] = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **others: Any) -> tuple[Any, None]:
        own = []
        for first, last in pairwise(bounds):
            own_q, own_k, own_v = (x[:, :, first:last] for x in (q, k, v))
            own.append(scaled_dot_product_attention(own_q, own_k, own_v, is_causal=True))
        return torch.cat(own, dim=2).transpose(1, 2), None

    AttentionInterface.register("by_conversation", attend)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=2000, max_position_embeddings=corpus.sequence_length, **sizes)
    config._attn_implementation = "by_conversation"
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seconds = []
    for step in range(steps):
        row = rows[int(order[step * ranks + me])]
        positions = row["position_ids"]
        bounds[:] = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        batch = {name: values[None].long() for name, values in row.items()}
        start = time.thread_time()
        with model.no_sync():
            out = model(**batch)
            out.loss.backward()
        seconds.append(time.thread_time() - start)
        for weights in model.parameters():
            torch.distributed.all_reduce(weights.grad)
        optimizer.step()
        optimizer.zero_grad()
    (folder / f"{me}.json").write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def run(manifest: Path, steps: int) -> np.ndarray:
    """Train in two processes; return the CPU seconds of each rank in each step."""
    with tempfile.TemporaryDirectory() as name:
        words = [sys.executable, str(HERE), "--rank", str(manifest), "--steps", str(steps), "--folder", name]
        environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen(words, env=environment | {"RANK": str(number)}) for number in range(2)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
        return np.array([json.loads((Path(name) / f"{number}.json").read_text()) for number in range(2)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long two ranks wait for each other in training.")
    parser.add_argument("source", nargs="?", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.rank:
        rank(given.rank, given.steps, given.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_joined(given.source, folder / "joined.jsonl", given.length)
        for title, settings in (("random order", {}), ("balance: {ranks: 2}", {"balance": {"ranks": 2}})):
            seconds = run(pack(folder, given.length, **settings), given.steps)[:, 3:]  # the first ones load libraries
            ratio = (seconds.max(axis=0) / seconds.mean(axis=0)).mean()
            idle = 1 - seconds.sum() / (2 * seconds.max(axis=0).sum())
            print(f"{title}: {seconds.shape[1]} steps, slowest / mean {ratio:.4f}, idle {100 * idle:.2f} %", flush=True)


if __name__ == "__main__":
    main()
