"""Enlarge a corpus: combine every prompt with other completions of its source.

    python bench/enlarge.py CONFIG FOLDER [--times 10]

    a.jsonl   p0 c0 · p1 c1 · p2 c2      ──▶   FOLDER/00-a.jsonl   p0 c0 · p1 c1 · p2 c2 · p0 c1 · p1 c2 · p2 c0 · …
    config    sources, tokenizer, …      ──▶   FOLDER/config.yaml  the same settings over these files

A completion is the last assistant turn; a prompt is everything before it. Conversations without a completion, such as
conversations in the text format, are left out. Each source is written as uncompressed JSONL in the messages format. The
output is deterministic.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
from read_conversations import valid_conversations

from packcorpus.tasks.config import load_config
from packcorpus.tasks.conversations.model import Message, full_text
from packcorpus.tasks.recipe import resolve


def row(message: Message) -> dict[str, Any]:
    """Convert a message to the messages format."""
    found: dict[str, Any] = {"role": message.role, "content": full_text(message)}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def enlarge(config: Path, folder: Path, times: int) -> None:
    """Write sources enlarged `times` times, and a config for them, to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = resolve(config, folder)
    names = []
    for number, file in enumerate(recipe.files):
        prompts, completions, tools = [], [], []
        for conversation in valid_conversations(part for part in recipe.parts if part.file is file):
            rows = [row(message) for message in conversation.messages]
            last = max((i for i, message in enumerate(rows) if message["role"] == "assistant"), default=0)
            if last:
                prompts.append(rows[:last])
                completions.append(rows[last])
                tools.append([orjson.loads(tool) for tool in conversation.tools])
        names.append(f"{number:02}-{file.path.name.split('.')[0]}.jsonl")
        with (folder / names[-1]).open("wb") as out:
            for copy in range(times):
                shift = copy * len(prompts) // times
                for index, prompt in enumerate(prompts):
                    record: dict[str, Any] = {"messages": [*prompt, completions[(index + shift) % len(prompts)]]}
                    if tools[index]:
                        record["tools"] = tools[index]
                    out.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
    settings = load_config(config).model_dump(mode="json", exclude_unset=True) | {"sources": names}
    for key, is_path in (("tokenizer", Path.exists), ("template", Path.is_file)):
        if settings.get(key) and is_path(config.parent / settings[key]):
            settings[key] = str((config.parent / settings[key]).resolve())
    (folder / "config.yaml").write_bytes(orjson.dumps(settings, option=orjson.OPT_INDENT_2))  # JSON is YAML


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    enlarge(options.config.resolve(), options.folder, options.times)


if __name__ == "__main__":
    main()
