"""Write the sample corpus: 300 conversations in all record formats and containers.

    Desk (seed 42) → makers → Dialogue → record format → file

A maker (makers/) invents one small task and works out its answer. Every sum, date, conversion and program in the corpus
is therefore computed here, and tests/test_sample.py checks them again. A `Dialogue` is independent of formats;
record_formats.py converts it to records.

    python data/sample/generator/generate.py [FOLDER]        # default: data/sample

The output is a function of this folder alone: no clock, no network, no set order. `Random.random` is the only method of
the generator in use, because it is the only one whose sequence Python promises to keep between versions. Parquet and
Arrow files name the pyarrow that wrote them, and gzip and zstd output depends on the version of zlib and zstd; the
records inside do not.

Conventions that the test relies on: an arithmetic sign between two numbers belongs to a claim that holds, `=` means
equal and `≈` rounded; a day is written "14 March 2026 is a Saturday" or "Saturday, 14 March 2026"; code blocks run.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from desk import Desk, Dialogue, Maker, Record
from makers.days import day_of_week, plan
from makers.explanations import concept
from makers.languages import foreign
from makers.medleys import LONG, SHORT, marathon, medley
from makers.programs import code
from makers.texts import csv_to_table, extract_contact, log_lines, sort_people
from makers.units import conversion
from notes import note
from record_formats import alpaca_record, chat_record, dolly_record, message, oasst_record, sharegpt_record
from tool_use import sharegpt_tools_record, tools_record
from writing import SYSTEMS


def jsonl(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


def json_array(records: Iterable[Record]) -> bytes:
    return ("[\n" + ",\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n]\n").encode()


def gzipped(data: bytes) -> bytes:
    """Return a header without name and time."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=out, mtime=0) as file:
        file.write(data)
    return out.getvalue()


def csv_bytes(records: Sequence[Record]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def parquet_bytes(records: list[Record]) -> bytes:
    """Several row groups, because packcorpus cuts Parquet files there."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), out, row_group_size=12, compression="snappy", version="2.6")
    return out.getvalue()


def arrow_bytes(records: list[Record]) -> bytes:
    out = io.BytesIO()
    rows = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)
    return out.getvalue()


CATEGORIES = (
    "closed_qa",
    "closed_qa",
    "summarization",
    "classification",
    "information_extraction",
    "open_qa",
    "open_qa",
)


def records(d: Desk) -> dict[str, list[Record]]:
    """All records, file by file."""

    def talks(n: int, name: str, *makers: Maker) -> list[Dialogue]:
        return [d.deal(name, makers)(d) for _ in range(n)]

    def pair(talk: Dialogue, ask: str, answer: str) -> Record:
        return dict(zip((ask, answer), talk.turns[0], strict=True))

    def as_messages(talk: Dialogue) -> Record:
        *before, (ask, answer) = talk.turns
        history = [
            message(role, text) for pair in before for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        return {
            "prompt": [message("system", d.pick(SYSTEMS)), *history, message("user", ask)],
            "completion": [message("assistant", answer)],
        }

    chats = (
        talks(17, "chat", *SHORT, concept)
        + talks(7, "abroad", foreign)
        + talks(14, "long chat", *LONG)
        + talks(10, "chat+", concept, code, foreign)
    )
    gpts = talks(19, "gpt", *SHORT, concept, code, foreign) + talks(5, "gpt+", *LONG) + talks(6, "gpt++", medley)
    return {
        "chat.jsonl": [
            chat_record(d, t) for t in d.shuffled(chats + talks(12, "medley+", medley) + talks(4, "marathon", marathon))
        ],
        "tools.jsonl": [tools_record(d) for _ in range(30)],
        "sharegpt.json": d.shuffled(
            [sharegpt_record(d, t) for t in gpts] + [sharegpt_tools_record(d) for _ in range(8)]
        ),
        "alpaca.json": [
            alpaca_record(d, t)
            for t in talks(
                44,
                "alpaca",
                *SHORT,
                *LONG,
                log_lines,
                csv_to_table,
                extract_contact,
                sort_people,
                concept,
                code,
                code,
                foreign,
                foreign,
            )
        ],
        "dolly.parquet": [dolly_record(d, CATEGORIES[i % len(CATEGORIES)]) for i in range(30)],
        "oasst.jsonl.gz": [
            oasst_record(d, t, i)
            for i, t in enumerate(talks(20, "oasst", *SHORT[:6], concept, concept, code, foreign, foreign, plan))
        ],
        "questions.csv": [pair(t, "question", "answer") for t in talks(26, "questions", *SHORT, *LONG)],
        "prompts.jsonl.zst": [
            pair(t, "prompt", "completion") for t in talks(24, "prompts", *SHORT, code, code, code, foreign)
        ],
        "prompts_as_messages.jsonl": [
            as_messages(t) for t in talks(6, "as messages", conversion, concept, day_of_week, code)
        ],
        "notes.arrow": [{"text": note(d, i)} for i in range(18)],
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in records(Desk(42)).items():
        if name.endswith(".json"):
            data = json_array(rows)
        elif name.endswith(".csv"):
            data = csv_bytes(rows)
        elif name.endswith(".parquet"):
            data = parquet_bytes(rows)
        elif name.endswith(".arrow"):
            data = arrow_bytes(rows)
        else:
            data = jsonl(rows)
        if name.endswith(".gz"):
            data = gzipped(data)
        if name.endswith(".zst"):
            data = zstandard.ZstdCompressor(level=19).compress(data)
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
