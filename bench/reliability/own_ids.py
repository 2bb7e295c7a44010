"""Compare rows packed with a model's own template with the ids of transformers.

    python bench/reliability/own_ids.py CONFIG [--turns together apart] [--solutions FILE [--inline]] [--count N]

CONFIG names a Hugging Face tokenizer with a chat template. Its conversations are written as JSON lines of messages. The
real command packs these lines, and transformers reads them:

    messages.jsonl ─┬─ luigi … PackCorpus ▶ shards, index.arrow ── ids and labels of each sample ──┬─ equal
                    └─ apply_chat_template(messages[:k], add_generation_prompt=True) ── each turn ─┘

For each trained turn k, the ids before the turn must be equal to the ids of its prompt. The ids of the turn must be
equal to the ids of the text that the template writes after the prompt: the answer, with its reasoning and its calls,
and the token that ends it. All of these ids must be trained on, and no others. Every conversation must be packed,
rejected, or dropped. If a content has the text of a special token, the text must be encoded like with
`split_special_tokens=True`, because only the template may write special tokens.

--solutions adds questions and answers that end with `#### result`, as in GSM8K, with the solution as reasoning. The
reasoning is in a field or in the content (with --inline, only in the content). Conversations of two turns are added,
too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from read_conversations import conversations_of

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
IGNORED = -100
LENGTH = 32768
BREAK = "\ue000"  # a private character

Record = dict[str, Any]  # messages, and tools if there are any
Place = tuple[int, int]  # record, and the turn that is trained on, or -1 if the sample is a whole conversation


@dataclass
class Tally:
    """Counts of a comparison, and its problems.

    A problem is the line of a conversation, its turn, and a description.
    """

    conversations: int = 0
    samples: int = 0
    turns: int = 0
    trained_tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, int, str]] = field(default_factory=list)


class Reference:
    """Ids that transformers returns for the turns of conversations."""

    def __init__(self, records: Sequence[Record], tokenizer: Path):
        from transformers import AutoTokenizer

        self.records = records
        self._library = AutoTokenizer.from_pretrained(str(tokenizer))
        added = self._library.added_tokens_decoder.items()
        self.special = {token.content: number for number, token in added if token.special}
        self._turns: dict[Place, tuple[np.ndarray, np.ndarray]] = {}
        self._has_special: dict[int, bool] = {}

    def turn(self, record: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the prompt of a turn, and the ids of the turn."""
        if (record, k) not in self._turns:
            prompt = self._rendered(record, k, True)
            whole = self._rendered(record, k + 1, False)
            if not whole.startswith(prompt):
                raise ValueError(f"messages[{k}]: what the template writes does not start with the prompt")
            answer = self._ids(whole[len(prompt) :])
            # White space after the token that ends the turn belongs to the next turn.
            ends = np.flatnonzero(np.isin(answer, list(self.special.values())))
            if len(ends) and not self.text(answer[ends[-1] + 1 :]).strip():
                answer = answer[: ends[-1] + 1]
            self._turns[record, k] = self._ids(prompt), answer
        return self._turns[record, k]

    def text(self, ids: np.ndarray) -> str:
        return str(self._library.decode(ids.tolist(), clean_up_tokenization_spaces=False))

    def _rendered(self, record: int, stop: int, prompt: bool) -> str:
        """Render messages, with BREAK in special tokens of their texts.

        BREAK is inserted after the first character of the token.
        """
        given = self.records[record]
        if record not in self._has_special:
            text = json.dumps(given, ensure_ascii=False)
            self._has_special[record] = any(token in text for token in self.special)
        messages = given["messages"][:stop]
        if self._has_special[record]:
            pattern = re.compile("|".join(map(re.escape, self.special)))
            messages = [
                {**message, "content": pattern.sub(lambda m: f"{m[0][0]}{BREAK}{m[0][1:]}", message["content"])}
                for message in messages
            ]
        return str(
            self._library.apply_chat_template(
                messages, tools=given.get("tools"), add_generation_prompt=prompt, tokenize=False
            )
        )

    def _ids(self, text: str) -> np.ndarray:
        """Encode a text.

        If the text has BREAK, only the template's special tokens become special tokens.
        """
        if BREAK not in text:
            return np.array(self._library.encode(text, add_special_tokens=False), np.int32)
        found = []
        for piece in re.split(f"({'|'.join(map(re.escape, self.special))})", text):
            if piece in self.special:
                found.append(self.special[piece])
            else:
                whole = piece.replace(BREAK, "")
                found += self._library.encode(whole, add_special_tokens=False, split_special_tokens=True)
        return np.array(found, np.int32)


def compare(manifest: Path, reference: Reference) -> Tally:
    """Compare every sample of a corpus, and account for every conversation."""
    facts = orjson.loads(manifest.read_bytes())
    folder = manifest.parent.parent / facts["corpus"]
    tally, records = Tally(conversations=len(reference.records)), reference.records
    found: dict[int, list[int]] = defaultdict(list)
    for line in (folder / "rejects.jsonl").read_bytes().splitlines():
        reject = orjson.loads(line)
        found[reject["line"]] = []
        tally.left_out[f"rejected: {reject['reason']}"] += 1
    for (line, turn), dropped, ids, trained in samples(folder, facts):
        record = records[line - 1]
        answers = [k for k, message in enumerate(record["messages"]) if is_trained(message)]
        turns = answers if turn < 0 else [turn]
        found[line] += turns
        if dropped:
            tally.left_out[dropped] += turn in (-1, answers[-1])
            continue
        tally.samples += 1
        tally.turns += len(turns)
        tally.trained_tokens += int(trained.sum())
        try:
            problem = difference(ids, trained, [reference.turn(line - 1, k) for k in turns], reference)
        except ValueError as error:
            problem = str(error)
        if problem:
            tally.wrong.append((line, turn, problem))
    for line, record in enumerate(records, 1):
        answers = [k for k, message in enumerate(record["messages"]) if is_trained(message)]
        if line not in found or (found[line] and sorted(found[line]) != answers):
            tally.wrong.append((line, -1, f"turns {answers} are trained on at inference, {found.get(line)} here"))
    return tally


def samples(folder: Path, facts: Record) -> Iterator[tuple[Place, str | None, np.ndarray, np.ndarray]]:
    """Yield each sample: its place, the reason if it was dropped, its ids, and labels.

    A label is whether the id is trained on. A separator that was added after the template's tokens is left out.
    """
    rows = {
        (split, number): columns(folder / shard["path"], facts["sequence_length"])
        for split, found in facts["splits"].items()
        for number, shard in enumerate(found["shards"])
    }
    index = pa.ipc.open_stream(pa.memory_map(str(folder / "index.arrow"))).read_all()
    for place in index.to_pylist():
        key = place["record"], place.get("turn", -1)
        if place["row"] is None:
            yield key, f"dropped: {place['dropped']}", np.zeros(0, np.int32), np.zeros(0, bool)
            continue
        ids, labels = rows[place["split"], place["shard"]]
        inside = slice(place["start"], place["start"] + place["length"] - place["separator"])
        yield key, None, ids[place["row"], inside], labels[place["row"], inside] != IGNORED


def columns(path: Path, length: int) -> tuple[np.ndarray, np.ndarray]:
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    ids, labels = (
        np.concatenate([chunk.flatten().to_numpy() for chunk in table[name].chunks]).reshape(-1, length)
        for name in ("input_ids", "labels")
    )
    return ids, labels


def is_trained(message: Record) -> bool:
    says = message.get("tool_calls") or (message.get("content") or message.get("reasoning_content") or "").strip()
    return message["role"] == "assistant" and bool(says)


def difference(
    ids: np.ndarray, trained: np.ndarray, turns: Sequence[tuple[np.ndarray, np.ndarray]], reference: Reference
) -> str | None:
    """Describe how a sample differs from its turns; None if it does not.

    A turn is the ids of its prompt, and the ids that must follow.
    """
    expected = np.zeros(len(ids), bool)
    stop = 0
    for prompt, answer in turns:
        start, stop = len(prompt), len(prompt) + len(answer)
        if not np.array_equal(ids[:start], prompt):
            return f"prompt: {parted(ids, prompt, reference)}"
        if not np.array_equal(ids[start:stop], answer):
            return f"turn: {parted(ids[start:], answer, reference)}"
        if int(answer[-1]) not in reference.special.values():
            return f"turn: ends with {reference.text(answer[-1:])!r}, which is not a special token"
        expected[start:stop] = True
    if not np.array_equal(trained, expected):
        at = int(np.flatnonzero(trained != expected)[0])
        return f"token {at}, {reference.text(ids[at : at + 1])!r}: {'is' if trained[at] else 'is not'} trained on"
    rest = reference.text(ids[stop:])
    return f"after the last turn: {rest!r}" if rest.strip() else None


def parted(found: np.ndarray, expected: np.ndarray, reference: Reference) -> str:
    size = min(len(found), len(expected))
    differs = np.flatnonzero(found[:size] != expected[:size])
    at = int(differs[0]) if len(differs) else size
    there, here = (reference.text(ids[at : at + 6]) for ids in (expected, found))
    return f"token {at}: {there!r} at inference, {here!r} here, after {reference.text(found[max(0, at - 6) : at])!r}"


# -- conversations -----------------------------------------------------------------------------------------------------


def records_of(config: Path, folder: Path) -> tuple[list[Record], int]:
    """Return the conversations of a config as messages, and the number of rejects."""
    from packcorpus.tasks.conversations.model import as_openai
    from packcorpus.tasks.core.errors import Reject
    from packcorpus.tasks.recipe import resolve

    found, unreadable = [], 0
    for _, conversation in conversations_of(resolve(config, folder).parts):
        if isinstance(conversation, Reject):
            unreadable += 1
            continue
        record: Record = {"messages": [as_openai(message) for message in conversation.messages]}
        if conversation.tools:
            record["tools"] = [orjson.loads(tool) for tool in conversation.tools]
        found.append(record)
    return found, unreadable


def with_reasoning(solutions: Path, inline: bool) -> list[Record]:
    """Return a conversation for each problem, and one for each pair of problems.

    The solution of a problem is the reasoning of the answer.
    """
    problems = []
    for number, line in enumerate(solutions.read_bytes().splitlines()):
        problem = orjson.loads(line)
        solution, _, result = problem["answer"].partition("\n#### ")
        answer: Record = {"role": "assistant", "content": f"The answer is {result}."}
        if inline or number % 2:
            answer["content"] = f"<think>\n{solution}\n</think>\n\n{answer['content']}"
        else:
            answer["reasoning_content"] = solution
        problems.append([{"role": "user", "content": problem["question"]}, answer])
    pairs = [{"messages": one + two} for one, two in pairwise(problems)][::2]
    return [{"messages": messages} for messages in problems] + pairs


def pack(records: Sequence[Record], settings: Record, folder: Path) -> Path | str:
    """Pack records with the real command; return the manifest, or its error output."""
    folder.mkdir()
    with (folder / "messages.jsonl").open("wb") as file:
        file.writelines(orjson.dumps(record) + b"\n" for record in records)
    common = {"name": "own-ids", "sources": ["messages.jsonl"], "sequence_length": LENGTH, "overlong": "drop"}
    # If a template writes the date, transformers uses today's date.
    common |= {"max_rejects": 1.0, "template_date": date.today().isoformat()}
    (folder / "corpus.yaml").write_text(yaml.safe_dump(common | settings))
    words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "corpus.yaml", "--workers", "2"]
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else folder / done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--turns", nargs="+", default=["together", "apart"], choices=["auto", "together", "apart"])
    parser.add_argument("--solutions", type=Path, help="JSON lines of question and answer, to add with reasoning")
    parser.add_argument("--inline", action="store_true", help="reasoning in contents only")
    parser.add_argument("--count", type=int, help="number of conversations to compare, spread evenly over all")
    given = parser.parse_args()
    from packcorpus.tasks.config import load_config
    from packcorpus.tasks.recipe import resolve

    config = load_config(given.config.resolve())
    failed = False
    with tempfile.TemporaryDirectory() as name:
        tokenizer = resolve(given.config.resolve(), Path(name)).tokenizer_files.main
        tokenizer = tokenizer if tokenizer.is_dir() else tokenizer.parent
        records, unreadable = records_of(given.config.resolve(), Path(name))
        print(f"{len(records):,} conversations of {given.config}, {unreadable:,} records cannot be read")
        if given.solutions:
            more = with_reasoning(given.solutions, given.inline)
            print(f"{len(more):,} conversations with reasoning of {given.solutions}")
            records += more
        if given.count:
            records = records[:: max(1, len(records) // given.count)][: given.count]
        reference = Reference(records, tokenizer)
        for turns in given.turns:
            settings = {"tokenizer": str(tokenizer), "template": config.template, "turns": turns}
            made = pack(records, settings, Path(name) / turns)
            if isinstance(made, str):
                print(f"{turns}: {made}")
                continue
            tally = compare(made, reference)
            failed |= bool(tally.wrong)
            print(
                f"{turns}: {tally.conversations:,} conversations, {tally.samples:,} samples, {tally.turns:,} turns, "
                f"{tally.trained_tokens:,} tokens trained on; {len(tally.wrong):,} wrong",
                *(f"{reason} {count:,}" for reason, count in tally.left_out.items()),
                sep="; ",
            )
            tokens = orjson.loads(made.read_bytes())["noticed"].get("content_tokens", {})
            print(f"    tokens of content: {', '.join(f'{token} {sum(n.values()):,}' for token, n in tokens.items())}")
            for line, turn, problem in tally.wrong[:10]:
                print(f"    conversation {line}, turn {turn}: {problem}: {str(records[line - 1])[:300]}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
