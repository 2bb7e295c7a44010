"""The whole command, checked on real conversations by an independent count.

    source files ── read and rendered here, by hand ──▶ [(text, trained), …] of each conversation
         └ luigi … PackCorpus ▶ shards, index.arrow ── decoded here ──▶ the same, place by place

Some corpora use Hugging Face tokenizers. The count does not use tasks.packing.plan, tasks.corpus.shards, or
tasks.verification.verify, except in tests of `verify` itself.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import yaml
from datasets import Dataset, disable_progress_bars, load_dataset
from support.commands import SHARED, needs_shared, pack, write_chats
from support.tokenizer_kinds import control_strings, everywhere, kind_path, open_kind, reference

from packcorpus.tasks.verification.verify import verify

COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")
IGNORED = -100


# -- what the command wrote -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A corpus as pyarrow reads it, and its manifest as plain JSON."""

    manifest: Path

    @property
    def facts(self) -> dict[str, Any]:
        return orjson.loads(self.manifest.read_bytes())

    @property
    def folder(self) -> Path:
        return self.manifest.parent.parent / self.facts["corpus"]

    def shards(self, split: str = "train") -> list[Path]:
        return [self.folder / shard["path"] for shard in self.facts["splits"][split]["shards"]]

    def rows(self, split: str = "train") -> list[dict[str, np.ndarray]]:
        """Return the columns of each shard, [rows, sequence_length]."""
        length, found = self.facts["sequence_length"], []
        for path in self.shards(split):
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            chunks = {name: [chunk.flatten().to_numpy() for chunk in table[name].chunks] for name in COLUMNS}
            found.append({name: np.concatenate(chunks[name]).reshape(-1, length) for name in COLUMNS})
        return found

    def index(self) -> dict[str, np.ndarray]:
        """Return the columns of index.arrow.

        For a dropped conversation, places are -1 and the split is None.
        """
        table = pa.ipc.open_stream(pa.memory_map(str(self.folder / "index.arrow"))).read_all()
        texts = ("split", "dropped")
        columns = {name: table[name] for name in table.schema.names if name not in texts}
        found = {
            name: (column.fill_null(-1) if column.null_count else column).to_numpy() for name, column in columns.items()
        }
        return found | {name: np.array(table[name].to_pylist(), object) for name in texts}

    def conversations(self) -> Iterator[tuple[tuple[int, int], list[int], list[int]]]:
        """Yield ((source, record), ids, labels) of every packed conversation."""
        index = self.index()
        rows = {split: self.rows(split) for split in ("train", "validation")}
        keys = ("source", "record", "split", "shard", "row", "start", "length")
        for source, record, split, shard, row, start, length in zip(*(index[key] for key in keys), strict=True):
            if split is not None:
                place, columns = slice(start, start + length), rows[split][shard]
                ids, labels = columns["input_ids"][row, place], columns["labels"][row, place]
                yield (int(source), int(record)), ids.tolist(), labels.tolist()


# -- what it must have written: real data with Mistral's SentencePiece model, as chatml -------------------------------

LENGTHS = (512, 1024, 4096)
# Rows of plain best-fit-decreasing above ceil(tokens / length), on these conversations, in percent.
BEST_FIT = {512: 1.04, 1024: 0.60, 4096: 0.17}

Run = tuple[str, bool]  # text, and whether it is trained on


def chatml(turns: Iterable[tuple[str, str]]) -> list[Run]:
    """Render turns as ChatML, as Mistral's model reads it.

    The model has no token for the markers, so they are text. It puts a space before the first text.
    """
    runs: list[Run] = []
    role = ""
    for role, text in turns:
        header = f"{chr(10) if runs else ' '}<|im_start|>{role}\n"
        runs += [(header, False), (f"{text}<|im_end|>", role == "assistant")]
    runs.append(("</s>", role == "assistant"))
    return [("".join(text for text, _ in group), trained) for trained, group in groupby(runs, key=lambda run: run[1])]


def question_answer(record: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("user", record["question"]), ("assistant", record["answer"])]


def prompt_completion(record: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("user", record["prompt"]), ("assistant", record["completion"])]


def alpaca(record: Mapping[str, str]) -> list[tuple[str, str]]:
    asked = record["instruction"] + ("\n\n" + record["input"] if record["input"] else "")
    return [("user", asked), ("assistant", record["output"])]


def sharegpt(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    if tools := json.loads(record.get("tools") or "[]"):
        turns.append(
            (
                "system",
                TOOLS_BEFORE
                + "\n".join(spaced({"type": "function", "function": tool}) for tool in tools)
                + TOOLS_AFTER,
            )
        )
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "user"}
    before = ""
    for message in record["conversations"]:
        text = message["value"]
        if message["from"] == "function_call":
            call = json.loads(text)
            named = f'{{"name": {spaced(call["name"])}, "arguments": {spaced(call["arguments"])}}}'
            text = f"<tool_call>\n{named}\n</tool_call>"
        if message["from"] == "observation":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if before == "observation":
                text = f"{turns.pop()[1]}\n{text}"
        before = message["from"]
        turns.append((roles[before], text))
    return turns


def spaced(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


READERS: dict[str, Callable[[Any], list[tuple[str, str]]]] = {
    "fastchat_dummy.json": sharegpt,
    "gpteacher_roleplay.json": alpaca,
    "gsm8k_train.jsonl": question_answer,
    "llamafactory_alpaca_en_demo.json": alpaca,
    "llamafactory_glaive_toolcall_en_demo.json": sharegpt,
    "t0_prompts.jsonl.gz": prompt_completion,
}


@cache
def real_runs() -> list[list[list[Run]]]:
    """Return the conversations of each source as runs, in the order of the sources."""
    found = []
    for name, read in sorted(READERS.items()):
        data = (SHARED / "corpora" / name).read_bytes()
        data = gzip.decompress(data) if name.endswith(".gz") else data
        lines = [line for line in data.split(b"\n") if line.strip()]
        records = json.loads(data) if name.endswith(".json") else map(json.loads, lines)
        found.append([chatml(read(record)) for record in records])
    return found


class Mistral:
    """Mistral's piece strings as bytes, by SentencePiece's rules, not its decoder."""

    def __init__(self) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model = SentencePieceProcessor(model_file=str(SHARED / "tokenizers" / "mistral_v3_32k.model"))
        numbers = range(self.model.vocab_size())
        self.eos = self.model.eos_id()
        self.is_control = np.array([self.model.is_control(n) or self.model.is_unknown(n) for n in numbers])
        names = [self.model.id_to_piece(n) for n in numbers]
        self.bytes = [
            bytes([int(name[3:5], 16)]) if self.model.is_byte(n) else name.replace("▁", " ").encode()
            for n, name in enumerate(names)
        ]
        self.sizes = np.array([len(piece) for piece in self.bytes])


@cache
def mistral() -> Mistral:
    return Mistral()


def decoded_runs(ids: np.ndarray, trained: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Iterator[list[Run]]:
    """Yield the text of each conversation, cut wherever training begins or ends.

    A conversation is at [start, stop) of the flat `ids`.
    """
    model = mistral()
    content = b"".join(map(model.bytes.__getitem__, ids.tolist()))
    ends = np.concatenate([[0], np.cumsum(model.sizes[ids])])
    flips = np.flatnonzero(np.diff(trained)) + 1
    inside = zip(np.searchsorted(flips, starts, "right"), np.searchsorted(flips, stops, "left"), strict=True)
    for start, stop, (low, high) in zip(starts.tolist(), stops.tolist(), inside, strict=True):
        edges = [start, *flips[low:high].tolist(), stop]
        yield [(content[ends[left] : ends[right]].decode(), bool(trained[left])) for left, right in pairwise(edges)]


@dataclass(frozen=True)
class Real:
    """One corpus for each length, all made in one folder.

    `token_files` has the time when each token file was written, after each run.
    """

    corpora: dict[int, Corpus]
    token_files: list[dict[Path, int]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    folder = tmp_path_factory.mktemp("real")
    (folder / "corpora").symlink_to(SHARED / "corpora")
    write_config(
        folder,
        name="real",
        sources=[{"path": "corpora/*.json*"}],
        tokenizer=str(SHARED / "tokenizers" / "mistral_v3_32k.model"),
        template="chatml",
        unknown_markers="text",
        train_on="assistant",
        overlong="drop",
    )
    corpora, written = {}, []
    for length in LENGTHS:
        words = ("--config", "corpus.yaml", "--workers", "2", "--sequence-length", str(length))
        corpora[length] = Corpus(pack(folder, *words))
        written.append({path: path.stat().st_mtime_ns for path in (folder / "data" / "tokens").rglob("*.arrow")})
    return Real(corpora, written)


def write_config(folder: Path, **settings: Any) -> None:
    (folder / "corpus.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


@needs_shared
def test_every_length_packs_the_same_token_files(real: Real) -> None:
    assert real.token_files[0]
    assert real.token_files == [real.token_files[0]] * len(LENGTHS)
    lengths = [corpus.index()["length"].tolist() for corpus in real.corpora.values()]
    assert lengths == [lengths[0]] * len(LENGTHS), "a conversation is as long for every sequence length"


@needs_shared
def test_gigatoken_and_the_reference_give_the_same_bytes(real: Real, tmp_path: Path) -> None:
    (tmp_path / "corpora").symlink_to(SHARED / "corpora")
    fast = real.corpora[1024].facts
    write_config(tmp_path, **(fast["config"] | {"engine": "reference", "tokenizer": str(kind_path("mistral_v3"))}))
    slow = Corpus(pack(tmp_path, "--config", "corpus.yaml", "--workers", "2")).facts
    assert fast == slow, "one key, one manifest"
    for made, engine in ((real.corpora[1024].manifest.parent.parent, "gigatoken"), (tmp_path, "sentencepiece")):
        receipts = [orjson.loads(path.read_bytes()) for path in (made / "data" / "tokens").rglob("*.json")]
        assert {receipt["engine"] for receipt in receipts} == {engine}
        record = orjson.loads((made / fast["corpus"] / "run.json").read_bytes())
        assert record["encoder"]["engine"] == engine
        assert record["encoder"]["differs"] is None
        assert (record["encoder"]["texts"] >= 2000) == (engine == "gigatoken")


@needs_shared
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_at_most_those_of_plain_best_fit(real: Real, length: int) -> None:
    corpus = real.corpora[length]
    verify(corpus.manifest)
    facts = corpus.facts
    ledger, packing = facts["ledger"], facts["packing_metadata"]
    conversations, tokens = ledger["conversations"], ledger["tokens"]
    assert conversations["read"] == 26_067
    assert conversations["rejected"] == {}
    assert conversations["read"] == conversations["packed"] + sum(conversations["dropped"].values())
    assert tokens["encoded"] + tokens["separators"] == tokens["packed"] + tokens["truncated"] + tokens["dropped"]
    assert tokens["packed"] + tokens["padding"] == packing["rows"] * length
    assert packing["packing_efficiency"] == pytest.approx(100 * tokens["packed"] / packing["rows"] / length, abs=1e-4)
    fewest = -(-tokens["packed"] // length)
    assert packing["rows"] >= packing["lower_bound_rows"] >= fewest
    assert 100 * (packing["rows"] / fewest - 1) <= BEST_FIT[length]


@needs_shared
@pytest.mark.parametrize("length", LENGTHS)
def test_an_independent_count_finds_every_conversation(real: Real, length: int) -> None:
    """Every conversation is in one place and reads as in its source.

    It trains on its answers and on their stop tokens, and on nothing else.
    """
    corpus, expected, model = real.corpora[length], real_runs(), mistral()
    index, facts = corpus.index(), corpus.facts
    conversations = list(zip(index["source"].tolist(), index["record"].tolist(), strict=True))
    assert conversations == [(s, r + 1) for s, source in enumerate(expected) for r in range(len(source))]
    packed = index["row"] >= 0
    assert (packed == (index["length"] <= length)).all(), "dropped is what is longer than a row, and nothing else"
    assert set(index["split"][packed]) == {"train"}
    total = {"packed": 0, "trained": 0, "rows": 0}
    for number, columns in enumerate(corpus.rows()):
        ids, labels, mask, positions = (
            columns[name].reshape(-1) for name in ("input_ids", "labels", "attention_mask", "position_ids")
        )
        here = np.flatnonzero(packed & (index["shard"] == number))
        here = here[np.lexsort((index["start"][here], index["row"][here]))]
        starts = index["row"][here].astype(np.int64) * length + index["start"][here]
        stops = starts + index["length"][here]
        # Each place of the shard belongs to one conversation, or is a pad at the end of its row.
        owners = np.zeros(len(ids) + 1, np.int64)
        np.add.at(owners, starts, 1)
        np.add.at(owners, stops, -1)
        assert np.array_equal(np.cumsum(owners)[:-1], mask), "conversations overlap, or a gap is between them"
        assert (index["start"][here] + index["length"][here] <= length).all()
        assert (np.diff(mask.reshape(-1, length).astype(np.int8), axis=1) <= 0).all(), "a pad before a token"
        # Positions count from the last place where a conversation, or the pads of a row, began.
        places = np.arange(len(ids))
        begins = np.diff(mask, prepend=1) == -1
        begins |= (places % length == 0) & (mask == 0)
        begins[starts] = True
        assert np.array_equal(positions, places - np.maximum.accumulate(np.where(begins, places, 0)))
        trained = labels != IGNORED
        assert (labels[trained] == ids[trained]).all()
        assert not trained[mask == 0].any()
        assert not trained[starts].any()
        assert trained.reshape(-1, length).any(axis=1).all(), "a row without a trained token"
        controls = np.flatnonzero(model.is_control[ids] & (mask == 1))
        assert np.array_equal(controls, stops - 1), "a control token other than the EOS behind each conversation"
        assert (ids[controls] == model.eos).all()
        for conversation, found in zip(here.tolist(), decoded_runs(ids, trained, starts, stops), strict=True):
            source, record = conversations[conversation]
            assert found == expected[source][record - 1], f"{facts['sources'][source]['path']}: record {record}"
        total["packed"] += int(mask.sum())
        total["trained"] += int(trained.sum())
        total["rows"] += len(ids) // length
    ledger = facts["ledger"]
    assert total["rows"] == facts["packing_metadata"]["rows"] == facts["splits"]["train"]["rows"]
    assert total["packed"] == ledger["tokens"]["packed"] == int(index["length"][packed].sum())
    assert total["trained"] == ledger["tokens"]["trained"]
    # An EOS that the template did not write follows every conversation.
    assert ledger["tokens"]["encoded"] == int((index["length"] - 1).sum())
    assert ledger["tokens"]["dropped"] == int((index["length"][~packed] - 1).sum())
    assert ledger["tokens"]["separators"] == ledger["conversations"]["packed"] == int(packed.sum())
    assert ledger["conversations"]["dropped"] == {"too_long": int((~packed).sum())}
    for number, source in enumerate(facts["sources"]):
        own = index["source"] == number
        assert source["path"].endswith(sorted(READERS)[number])
        assert source["conversations"] == source["accepted"] == len(expected[number])
        assert source["tokens"] == int((index["length"][own] - 1).sum())
        assert source["trained_tokens"] == int(index["trained"][own & packed].sum())


@needs_shared
def test_prompts_have_the_ids_that_sentencepiece_gives_them(real: Real) -> None:
    """Equal bytes are not enough: the IDs of prompts equal SentencePiece's own.

    The stock model adds the leading space itself.
    """
    model, expected = mistral().model, real_runs()
    found = list(real.corpora[1024].conversations())[::20]
    assert len(found) > 1000
    for (source, record), ids, labels in found:
        prompt = ids[: next(place for place, label in enumerate(labels) if label != IGNORED)]
        assert prompt == model.encode(expected[source][record - 1][0][0][1:])


@needs_shared
def test_datasets_opens_the_shards_without_a_copy(real: Real, tmp_path: Path) -> None:
    disable_progress_bars()
    corpus = real.corpora[1024]
    paths, shards = [str(path) for path in corpus.shards()], corpus.rows()
    assert len(paths) > 1
    loaded = load_dataset("arrow", data_files=paths, cache_dir=str(tmp_path / "cache"), split="train")
    loaded = loaded.with_format("arrow")[:]
    for name in COLUMNS:
        both = np.concatenate([shard[name] for shard in shards])
        copied = np.concatenate([chunk.flatten().to_numpy() for chunk in loaded[name].chunks])
        assert copied.dtype == both.dtype
        assert np.array_equal(copied.reshape(both.shape), both), name
    for path, shard in zip(paths, shards, strict=True):
        before = pa.total_allocated_bytes()
        mapped = Dataset.from_file(path)
        assert mapped.column_names == list(COLUMNS)
        assert len(mapped) == len(shard["input_ids"])
        for name in COLUMNS:
            row = 0
            for chunk in mapped.data.column(name).chunks:
                view = chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, 1024)
                assert not view.flags.owndata
                assert np.array_equal(view, shard[name][row : row + len(view)]), name
                row += len(view)
            assert row == len(mapped)
        copied_bytes = pa.total_allocated_bytes() - before
        assert copied_bytes < 1 << 20, "the shard was not mapped but read, or a column copied"
        some = mapped.select(range(3)).with_format("numpy")
        assert np.array_equal(np.stack([one["labels"] for one in some]), shard["labels"][:3])


# -- the same conversations are held out ------------------------------------------------------------------------------


@needs_shared
def test_the_same_conversations_are_held_out_of_a_larger_corpus_and_for_other_rows(tmp_path: Path) -> None:
    for name in ("gsm8k_train.jsonl", "llamafactory_alpaca_en_demo.json"):
        (tmp_path / name).symlink_to(SHARED / "corpora" / name)
    settings = {"tokenizer": str(SHARED / "tokenizers" / "mistral_v3_32k.model"), "validation": 0.05}
    settings["unknown_markers"] = "text"  # ChatML with the tokenizer of Mistral
    gsm8k, other = {"path": "gsm8k_train.jsonl"}, {"path": "llamafactory_alpaca_en_demo.json"}
    held_out = []
    for sources, length in (([gsm8k], 1024), ([gsm8k], 2048), ([other, gsm8k], 1024)):
        write_config(tmp_path, name="held", sources=sources, sequence_length=length, **settings)
        corpus = Corpus(pack(tmp_path, "--config", "corpus.yaml", "--workers", "2"))
        verify(corpus.manifest)
        facts, index = corpus.facts, corpus.index()
        paths = [Path(source["path"]).name for source in facts["sources"]]
        own = index["source"] == paths.index("gsm8k_train.jsonl")
        held_out.append(set(index["record"][own & (index["split"] == "validation")].tolist()))
        assert int(own.sum()) == 7473
        for split in ("train", "validation"):
            assert facts["splits"][split]["rows"] == sum(len(rows["labels"]) for rows in corpus.rows(split)) > 0
    assert held_out[0] == held_out[1] == held_out[2]
    assert len(held_out[0]) / 7473 == pytest.approx(0.05, abs=0.01)


# -- Hugging Face tokenizers ------------------------------------------------------------------------------------------

SAID = [
    "Wie viel ist 2 · 21? Und   warum?",
    "It is 42 \u2014 see:\n\n    def area(w, h):\n        return w * h\n",
    "🙂 漢字 Привет, is 0.9 > 0.11?",
    "Yes: 0.90 > 0.11, and that's all.  ",
]


Messages = Sequence[Mapping[str, str]]


def with_chatml(messages: Messages) -> str:
    return "\n".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in messages)


def with_llama3(messages: Messages) -> str:
    turns = (f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>" for m in messages)
    return "<|begin_of_text|>" + "".join(turns)


def with_mistral(messages: Messages) -> str:
    forms = {"user": "[INST] {}[/INST]", "assistant": " {}</s>"}
    said = (m["content"].rstrip(" ") if m["role"] == "assistant" else m["content"] for m in messages)
    return "<s>" + "".join(forms[m["role"]].format(text) for m, text in zip(messages, said, strict=True))


def without_calls(record: Mapping[str, Any]) -> dict[str, Any]:
    said = [message for message in record["messages"] if message["role"] != "tool"]
    return {"messages": [{name: m[name] for name in m if name != "tool_calls"} for m in said]}


@dataclass(frozen=True)
class Case:
    """A tokenizer with a template.

    `render` writes a conversation; if it is None, the tokenizer's own template does. `stop` ends an answer. If `stop`
    is not EOS, a separator follows the conversation.
    """

    kind: str
    template: str
    render: Callable[[Messages], str] | None
    stop: str
    eos: str
    eos_token: str | None = None
    file: str = ""


CASES = {
    "own template": Case("hf_byte_level", "tokenizer", None, "<|im_end|>", "<|im_end|>"),
    "another EOS": Case("hf_byte_level", "tokenizer", None, "<|im_end|>", "<|endoftext|>", "<|endoftext|>"),
    "llama3": Case("hf_byte_level", "llama3", with_llama3, "<|eot_id|>", "<|im_end|>"),
    "mistral": Case("hf_metaspace", "mistral", with_mistral, "</s>", "</s>"),
    "file alone": Case("hf_metaspace", "mistral", with_mistral, "</s>", "</s>", "</s>", "tokenizer.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hugging_face_tokenizer_gives_the_ids_of_its_own_library(name: str, tmp_path: Path) -> None:
    """Ordinary conversations have the IDs of the tokenizer's own library.

    A conversation with every control string in all its fields has no additional control token.
    """
    case = CASES[name]
    write_chats(tmp_path / "chats.jsonl", 200)
    roles = ("user", "assistant") * 2
    odd = {"messages": [{"role": role, "content": text} for role, text in zip(roles, SAID, strict=True)]}
    strings = control_strings(case.kind)
    with (tmp_path / "chats.jsonl").open("ab") as file:
        for record in (odd, everywhere("x"), everywhere(" ".join(strings) + "".join(strings))):
            # The tokenizer's own template writes no calls, and a conversation with calls would be rejected.
            given = without_calls(record) if case.render is None else record
            file.write(orjson.dumps(given) + b"\n")
    shutil.copytree(kind_path(case.kind), tmp_path / "tokenizer")
    write_config(
        tmp_path,
        name="chats",
        sources=[{"path": "chats.jsonl"}],
        tokenizer=str(Path("tokenizer") / case.file),
        template=case.template,
        eos_token=case.eos_token,
        sequence_length=8192,
        overlong="error",
        part_size=4096,
        unknown_markers="text",
    )
    # The environment asks for threads of the tokenizers library, which would hang in forked workers.
    threads = {"TOKENIZERS_PARALLELISM": "true"} if name in ("own template", "file alone") else {}  # of each tokenizer
    corpus = Corpus(pack(tmp_path, "--config", "corpus.yaml", "--workers", "2", **threads))
    verify(corpus.manifest)
    assert len(list((tmp_path / "data" / "tokens").rglob("*.arrow"))) > 4, "one part does not show a hanging fork"
    found = {record: (ids, labels) for (_, record), ids, labels in corpus.conversations()}
    assert sorted(found) == list(range(1, 204))

    library = reference(case.kind)
    eos, stop = library.convert_tokens_to_ids([case.eos, case.stop])
    separator = [eos] * (eos != stop)
    assert corpus.facts["tokenizer"]["eos_token_id"] == eos
    lines = (tmp_path / "chats.jsonl").read_bytes().splitlines()
    for number, messages in enumerate((orjson.loads(line)["messages"] for line in lines[:201]), start=1):
        if case.render is None:
            expected = library.apply_chat_template(messages, tokenize=True, return_dict=False)
        else:
            expected = library.encode(case.render(messages), add_special_tokens=False)
        ids, labels = found[number]
        assert ids == expected + separator, f"record {number}"
        assert labels[len(expected) :] == separator, "EOS behind an answer is trained on"
        answered = groupby(labels[: len(expected)], key=lambda label: label != IGNORED)
        runs = [list(run) for trained, run in answered if trained]
        assert all(run[-1] == stop for run in runs)
        answers = [message["content"].strip() for message in messages if message["role"] == "assistant"]
        said = [library.decode(run[:-1], clean_up_tokenization_spaces=False).strip() for run in runs]
        assert said == answers, f"record {number}"

    controls = set(open_kind(case.kind).controls.values())
    harmless, attacked = ([token for token in found[record][0] if token in controls] for record in (202, 203))
    assert len(found[203][0]) > 2 * len(found[202][0]), "the fields are in it"
    assert attacked == harmless, "text of a conversation became a control token"
