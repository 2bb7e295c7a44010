"""Measure the minimum work of any preparation: parse, encode, write.

This is the floor in bench/preparation/whole_command.py.

    python bench/preparation/floor.py CONFIG ROOT MANIFEST

    the conversations as JSON lines ─orjson.loads─▶ discarded              CPU seconds
    their texts as rendered by the template ─encode─▶ discarded
    the bytes of the shards ─write, sha256─▶ a file

Prints one JSON object. Uses one process and the encoder of the config. All data is loaded into memory before the clock
starts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from read_conversations import conversations_of

from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.spans import trained_turns
from packcorpus.tasks.tokenization.checks import choose_engines
from packcorpus.tasks.tokenization.samples import segments_of
from packcorpus.tasks.tokenization.tokenize_part import BATCH_BYTES


def encoder_of(recipe: Recipe) -> Encoder:
    return choose_engines(recipe).encoder(recipe.encoder)


def batches(recipe: Recipe) -> Iterator[tuple[list[bytes], list[str]]]:
    """Group records (as JSON lines) and their texts into encoder batches."""
    lines: list[bytes] = []
    texts: list[str] = []
    size = 0
    for record, conversation in conversations_of(recipe.parts):
        try:
            if isinstance(conversation, Reject):
                raise conversation
            spans = recipe.template.spans(conversation, trained_turns(conversation, recipe.config.train_on))
            segments = segments_of(spans, encoder_of(recipe))
        except Reject:
            continue
        lines.append(orjson.dumps(record))
        texts += segments.texts
        size += sum(len(text.encode()) for text in segments.texts)
        if size >= BATCH_BYTES:
            yield lines, texts
            lines, texts, size = [], [], 0
    yield lines, texts


def cpu_of(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main(config: str, root: str, manifest: str) -> None:
    recipe = resolve(Path(config), Path(root))
    seconds = {"parse": 0.0, "encode": 0.0, "write": 0.0}
    for lines, texts in batches(recipe):
        seconds["parse"] += cpu_of(lambda lines=lines: [orjson.loads(line) for line in lines])
        seconds["encode"] += cpu_of(lambda texts=texts: encoder_of(recipe).encode(texts))
    published = load_manifest(Path(manifest))
    folder = corpus_folder(published, Path(manifest))
    for split in published.splits.values():
        for shard in split.shards:
            data = (folder / shard.path).read_bytes()
            with tempfile.TemporaryFile() as file:
                seconds["write"] += cpu_of(lambda data=data, file=file: (file.write(data), hashlib.sha256(data)))
    print(json.dumps(seconds | {"engine": encoder_of(recipe).engine}))


if __name__ == "__main__":
    main(*sys.argv[1:])
