"""Measure `datasets.map` with `apply_chat_template`, two processes: rendering and tokenizing, without packing.

    python bench/preparation/datasets_map.py CONVERSATIONS.jsonl TOKENIZER_FOLDER OUTPUT_FOLDER

`messages` and `tools` of a conversation may be lists, or JSON text of them: a table gives all tools the same keys.

Prints one JSON object. The seconds include loading the conversations, and exclude the imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(conversations: str, folder: str, output: str) -> None:
    os.environ["HF_DATASETS_CACHE"] = str(Path(output) / "cache")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def encode(record: dict[str, Any]) -> dict[str, Any]:
        messages, tools = record["messages"], record.get("tools") or None
        messages = json.loads(messages) if isinstance(messages, str) else messages
        tools = json.loads(tools) if isinstance(tools, str) else tools
        ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        return {"input_ids": ids}

    start = time.perf_counter()
    data = load_dataset("json", data_files=conversations, split="train", cache_dir=str(Path(output) / "cache"))
    data = data.map(encode, num_proc=2, remove_columns=data.column_names, load_from_cache_file=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(chunk.values) for chunk in data.with_format("arrow")[:]["input_ids"].chunks)
    print(json.dumps({"seconds": round(seconds, 2), "conversations": len(data), "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
