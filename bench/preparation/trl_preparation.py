"""Measure TRL's own preparation: SFTTrainer with packing and two processes.

    python bench/preparation/trl_preparation.py CONVERSATIONS.jsonl TOKENIZER LENGTH OUTPUT_FOLDER [own]

TOKENIZER is a SentencePiece model or the folder of a Hugging Face tokenizer. The template is ChatML or, with `own`, the
template of the tokenizer. Prints one JSON object. Measures the wait before the first training step: the construction of
SFTTrainer (template, tokenization, truncation, packing), with a model of a few thousand parameters and an empty cache.
Imports are not included.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)


def main(conversations: str, tokenizer_path: str, length: int, output: str, template: str = "chatml") -> None:
    os.environ["HF_DATASETS_CACHE"] = str(Path(output) / "cache")
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizerFast, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    if Path(tokenizer_path).is_dir():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path)
    else:
        # The class reads the vocabulary from `vocab_file` in some releases and from a folder in others.
        folder = Path(output) / "tokenizer"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(Path(tokenizer_path).read_bytes())
        tokenizer = LlamaTokenizerFast.from_pretrained(str(folder), add_bos_token=False, add_eos_token=False)
        tokenizer.pad_token = tokenizer.eos_token
    if template == "chatml":
        tokenizer.chat_template = CHATML
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    settings = SFTConfig(
        output_dir=output,
        max_length=length,
        packing=True,
        packing_strategy="bfd",
        dataset_num_proc=2,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    data = load_dataset("json", data_files=conversations, split="train", cache_dir=str(Path(output) / "cache"))
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu_start
    packed = trainer.train_dataset.with_format("arrow")
    rows = len(packed)
    tokens = sum(len(chunk.values) for chunk in packed[:]["input_ids"].chunks) if rows else 0
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
    print(
        json.dumps(
            {
                "seconds": round(seconds, 2),
                "cpu_seconds": round(cpu, 2),
                "conversations": len(data),
                "rows": rows,
                "tokens": tokens,
                "efficiency": round(100 * tokens / (rows * length), 2),
                "peak_memory_bytes": peak,
            }
        )
    )


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
