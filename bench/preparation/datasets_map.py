"""Measure `datasets.map` with `apply_chat_template` in two processes.

    python bench/preparation/datasets_map.py CONVERSATIONS.jsonl TOKENIZER_FOLDER OUTPUT_FOLDER [turns]

The conversations are rendered and tokenized, but not packed. `messages` and `tools` of a conversation may be lists, or
JSON text of lists, because a table gives all tools the same keys. With `turns`, each answer is a separate sample, after
the history that the model sees. Templates need this if they leave reasoning out of the history, or write an end token
only at the very end.

Prints one JSON object. The seconds include loading the conversations, but not the imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(conversations: str, folder: str, output: str, samples: str = "") -> None:
    os.environ["HF_DATASETS_CACHE"] = str(Path(output) / "cache")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def read(record: dict[str, Any]) -> tuple[list[Any], Any]:
        messages, tools = record["messages"], record.get("tools") or None
        messages = json.loads(messages) if isinstance(messages, str) else messages
        return messages, json.loads(tools) if isinstance(tools, str) else tools

    def ids_of(messages: list[Any], tools: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)

    def encode(record: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": ids_of(*read(record))}

    def encode_turns(batch: dict[str, list[Any]]) -> dict[str, Any]:
        found = []
        for values in zip(*batch.values(), strict=True):
            messages, tools = read(dict(zip(batch, values, strict=True)))
            answers = [k for k, message in enumerate(messages, 1) if message["role"] == "assistant"]
            found += [ids_of(messages[:end], tools) for end in answers]
        return {"input_ids": found}

    start = time.perf_counter()
    data = load_dataset("json", data_files=conversations, split="train", cache_dir=str(Path(output) / "cache"))
    given: Any = {"num_proc": 2, "remove_columns": data.column_names, "load_from_cache_file": False}
    data = data.map(encode_turns, batched=True, **given) if samples == "turns" else data.map(encode, **given)
    seconds = time.perf_counter() - start
    tokens = sum(len(chunk.values) for chunk in data.with_format("arrow")[:]["input_ids"].chunks)
    print(json.dumps({"seconds": round(seconds, 2), "samples": len(data), "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
