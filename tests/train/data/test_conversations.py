"""Format 2.0: TRL trains on exactly the tokens and labels of format 3.0."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.commands import ROOT
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, control_strings, everywhere, hostile, kind_path, records
from support.training.architectures import build
from transformers import LlamaConfig, LlamaForCausalLM

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.conversations import SFT_SETTINGS, Counts, padding_tokenizer, sft_dataset
from packcorpus.train.data.corpus import Corpus, open_corpus
from packcorpus.train.loop.feed import ConversationFeed
from packcorpus.train.loop.trainer import arguments
from packcorpus.train.model.qlora import add_adapter

IGNORED = -100

Row = tuple[list[int], list[int]]  # ids, labels
Key = tuple[int, int, int]  # source, record, and the turn of a sample or -1

SAMPLE = [{"path": str(ROOT / "data" / "sample" / name)} for name in ("alpaca.json", "sharegpt.json", "questions.csv")]


def pack(folder: Path, records: Sequence[Any], **config: Any) -> Corpus:
    return open_corpus(pack_corpus(make_recipe(folder, records, **config)))


def pack_both(folder: Path, records: Sequence[Any], **config: Any) -> tuple[Corpus, Corpus]:
    """Pack the same conversations in format 2.0 and in format 3.0."""
    common = {"max_rejects": 1.0, "overlong": "truncate", **config}
    return tuple(pack(folder, records, packing=packing, **common) for packing in (False, True))  # type: ignore[return-value]


def index_of(corpus: Corpus) -> list[dict[str, Any]]:
    return pa.ipc.open_stream((corpus.folder / "index.arrow").read_bytes()).read_all().to_pylist()


def packed_conversations(corpus: Corpus) -> dict[Key, Row]:
    """Return every conversation of a packed corpus, cut out by the index."""
    shards = {
        (split, number): pa.ipc.open_stream((corpus.folder / shard.path).read_bytes()).read_all()
        for split, found in corpus.splits.items()
        for number, shard in enumerate(found)
    }
    columns = {
        key: [np.array(table[name].to_pylist()) for name in ("input_ids", "labels")] for key, table in shards.items()
    }
    rows = {}
    for place in index_of(corpus):
        if place["row"] is None:
            continue  # overlong, dropped in both formats
        inside = slice(place["start"], place["start"] + place["length"])
        ids, labels = (column[place["row"], inside].tolist() for column in columns[place["split"], place["shard"]])
        rows[key_of(place)] = (ids, labels)
    return rows


def key_of(place: dict[str, Any]) -> Key:
    return place["source"], place["record"], place.get("turn", -1)


def check_equal(whole: Corpus, packed: Corpus) -> Counts:
    """Compare row by row; only conversations that format 3.0 rejects may be missing."""
    expected = packed_conversations(packed)
    total = Counts()
    for split in whole.splits:
        dataset, counts = sft_dataset(whole, split)
        places = sorted((p["shard"], p["row"], *key_of(p)) for p in index_of(whole) if p["split"] == split)
        wanted = [expected.pop((source, record, turn), None) for _, _, source, record, turn in places]
        assert [(row["input_ids"], row["labels"]) for row in dataset] == [row for row in wanted if row]
        kept = [row for row in wanted if row]
        assert (counts.read, counts.rows, counts.dropped) == (len(wanted), len(kept), wanted.count(None))
        assert counts.tokens == sum(len(ids) for ids, _ in kept)
        assert counts.trained == sum(label != IGNORED for _, labels in kept for label in labels)
        for name in Counts.__slots__:
            setattr(total, name, getattr(total, name) + getattr(counts, name))
    assert not expected
    ledger = packed.manifest.ledger  # type: ignore[union-attr]
    assert total.truncated == sum(place["truncated"] for place in index_of(packed))
    assert total.tokens == ledger.tokens.packed
    places = sum(place["length"] for place in index_of(whole) if place["row"] is not None)
    assert total.tokens - total.truncated + total.tokens_truncated + total.tokens_dropped == places
    return total


# -- tokens and labels -------------------------------------------------------------------------------------------------

MANY = [
    *conversations(30, longest=30),
    # Contexts, also with newlines at which content and context could have been joined.
    {"instruction": "Sum up.\n\nIn one line.", "input": "A.\n\nB.", "output": "A, B."},
    {"instruction": "", "input": "Only a context", "output": "Yes."},
    {"instruction": "Say it.", "input": "### Input:\nx", "output": "x"},
    # A question that is longer than a row leaves nothing to train on.
    {"messages": [{"role": "user", "content": "why " * 200}, {"role": "assistant", "content": "So."}]},
    {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "on " * 200}]},
    {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "5", "weight": 0},
            {"role": "user", "content": "Sure?", "train": True},
            {"role": "assistant", "content": "4"},
        ]
    },
]
TOOLS = [everywhere("town"), everywhere('1 {"a": [2]}')]


@pytest.mark.parametrize(
    ("kind", "template", "train_on"),
    [
        ("sp_bpe_chatml", "chatml", "assistant"),
        ("sp_bpe_user_defined", "alpaca", "assistant"),
        ("sp_unigram", "plain", "last"),
        ("hf_byte_level", "tokenizer", "assistant"),
        ("hf_metaspace", "llama3", "all"),
        ("hf_legacy", "mistral", "last"),
    ],
)
def test_every_conversation_equals_format_3(kind: str, template: str, train_on: str, tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"text": "The ride takes 85 minutes."}\n{"text": "<s> 9:40 </s>"}\n')
    # With train_on: all, a turn that is only a context is not trained on, but a row does not record that.
    asked = [record for record in MANY if "output" in record and (record["instruction"] or train_on != "all")]
    (tmp_path / "alpaca.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in asked))
    others = [record for record in MANY if "messages" in record]
    sources = [{"path": "chat.jsonl"}, {"path": "alpaca.jsonl"}, {"path": "plain.jsonl"}]
    common = {"tokenizer": str(kind_path(kind)), "template": template, "train_on": train_on, "validation": 0.3}
    common |= {"unknown_markers": "text"}
    counts = check_equal(*pack_both(tmp_path, [*others, *TOOLS], sources=sources, sequence_length=128, **common))
    assert counts.truncated
    assert bool(counts.dropped) == (train_on != "all")


@pytest.mark.parametrize(("kind", "template"), [("sp_bpe_chatml", "chatml"), ("hf_byte_level", "llama3")])
def test_every_turn_of_its_own_equals_format_3(kind: str, template: str, tmp_path: Path) -> None:
    common = {"tokenizer": str(kind_path(kind)), "template": template, "turns": "apart", "validation": 0.3}
    records = [*conversations(30, longest=30), *TOOLS]
    counts = check_equal(*pack_both(tmp_path, records, sequence_length=64, **common))
    assert counts.read > 40
    assert counts.truncated
    assert counts.dropped


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "settings",
    [{"empty_reasoning": "mask"}, {"train_parts": {"reasoning": False, "calls": False}}, {"train_on": "rounds"}],
)
def test_what_is_left_out_of_answers_equals_format_3(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(THINKING)
    call = {"function": {"name": "find", "arguments": "{}"}}
    records = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"a{n}", "reasoning_content": "why" * (n % 2)},
                {"role": "user", "content": f"r{n}"},
                {"role": "assistant", "content": f"b{n}", "tool_calls": [call] * (n % 3)},
            ]
        }
        for n in range(12)
    ]
    common = {"tokenizer": str(kind_path("hf_byte_level")), "template": "own.jinja", "sequence_length": 128}
    every = check_equal(*pack_both(tmp_path, records, **common))
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "own.jinja").write_text(THINKING)
    some = check_equal(*pack_both(tmp_path / "less", records, **common, **settings))
    assert (some.tokens, some.read) == (every.tokens, every.read)
    assert 0 < some.trained < every.trained


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_the_bundled_sample_equals_format_3(overlong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.tokenization.tokenize_part.BATCH_BYTES", 2000)  # several batches
    counts = check_equal(*pack_both(tmp_path, [], sources=SAMPLE, sequence_length=256, overlong=overlong))
    assert counts.rows > 40
    assert bool(counts.truncated) == (overlong == "truncate")


@settings(
    max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(records(hostile("sp_bpe_user_defined")), min_size=1, max_size=8), st.sampled_from(["assistant", "all"]))
def test_any_conversation_equals_format_3(
    tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]], train_on: str
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    always = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    common = {"tokenizer": str(kind_path("sp_bpe_user_defined")), "template": "mistral", "train_on": train_on}
    common |= {"unknown_markers": "text"}
    check_equal(*pack_both(folder, [always, *found], **common))


REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("turns", ["auto", "apart"])
@pytest.mark.parametrize("reasoning", ["keep", "drop"])
def test_reasoning_and_flags_are_those_of_format_3(reasoning: str, turns: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(REASONING)
    several = [
        {"role": "user", "content": "Why", "train": True},
        {"role": "assistant", "content": "so", "reasoning": "hm"},
        {"role": "user", "content": "And"},
        {"role": "assistant", "content": "thus", "reasoning": "well"},
    ]
    records = [*conversations(5), {"messages": several}, {"messages": [*several, {"role": "user", "content": "Ok"}]}]
    common = {"tokenizer": str(kind_path("hf_byte_level")), "template": "own.jinja"}
    counts = check_equal(*pack_both(tmp_path, records, turns=turns, reasoning=reasoning, **common))
    assert counts.rows >= 7


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_row_that_the_template_refuses_as_a_conversation_is_a_sample(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(MARKED)
    several = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    common = {"tokenizer": str(kind_path("hf_byte_level")), "template": "own.jinja"}
    counts = check_equal(*pack_both(tmp_path, [{"messages": several}], **common))
    assert counts.rows == 2


def test_the_corpus_contains_its_jinja_template(tmp_path: Path) -> None:
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "tokenizer")
    (tmp_path / "own.jinja").write_text(CHATML_JINJA)
    whole, packed = pack_both(tmp_path, conversations(5), tokenizer="tokenizer", template="own.jinja")
    (tmp_path / "own.jinja").unlink()
    check_equal(whole, packed)
    (whole.folder / "template.jinja").write_text(CHATML_JINJA.replace("assistant", "a_model__"))
    with pytest.raises(DataError, match=r"template\.jinja"):
        sft_dataset(whole)
    (whole.folder / "template.jinja").unlink()
    with pytest.raises(InputMissing, match=r"template\.jinja"):
        sft_dataset(whole)


def test_rows_with_tools_are_rendered_with_their_own_template(tmp_path: Path) -> None:
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "tokenizer")
    templates = {
        "chat_template": CHATML_JINJA,
        "additional_chat_templates/tool_use": "{{ tools | tojson }}" + CHATML_JINJA,
    }
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    for name, source in templates.items():
        (tmp_path / "tokenizer" / f"{name}.jinja").write_text(source)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    some = [{**record, "tools": [tool]} if number % 2 else record for number, record in enumerate(conversations(6))]
    whole, packed = pack_both(tmp_path, some, tokenizer="tokenizer", template="tokenizer")
    shutil.rmtree(tmp_path / "tokenizer")
    assert check_equal(whole, packed).rows == 6
    (whole.folder / "tool_use.jinja").unlink()
    with pytest.raises(InputMissing, match=r"tool_use\.jinja"):
        sft_dataset(whole)


# -- rejections --------------------------------------------------------------------------------------------------------


def test_tokens_that_differ_from_the_index_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = pack(tmp_path, conversations(5), packing=False, template="plain")
    monkeypatch.setattr("packcorpus.tasks.tokenization.samples._has_leading_space", lambda *_: False)
    with pytest.raises(DataError, match=r"row \d+ yields \d+ tokens, .* but the index records"):
        sft_dataset(corpus)


def test_a_different_rendering_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = pack(tmp_path, conversations(5), packing=False)
    monkeypatch.setattr("packcorpus.tasks.templates.families.chatml.full_text", lambda message: message.content.upper())
    with pytest.raises(DataError, match=r"row 0: template chatml does not render the text of the row"):
        sft_dataset(corpus)


def test_format_2_without_a_manifest_is_rejected(tmp_path: Path) -> None:
    corpus = pack(tmp_path, conversations(5), packing=False)
    (corpus.folder / "manifest.json").unlink()
    with pytest.raises(PackError, match="manifest"):
        sft_dataset(open_corpus(corpus.folder))


# -- training ----------------------------------------------------------------------------------------------------------


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, max_position_embeddings=128, initializer_range=0.2, **sizes))
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear"))


def loss_by_hand(model: Any, rows: Dataset) -> float:
    """Compute the cross-entropy of each conversation separately, without padding."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
            count += int((labels != IGNORED).sum())
    return total / count


def test_sft_trainer_trains_on_these_tokens(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    corpus = pack(tmp_path, conversations(40), packing=False, validation=0.2)
    train, _ = sft_dataset(corpus)
    validation, _ = sft_dataset(corpus, "validation")
    train = train.select(range(6))  # one batch, so that its order is irrelevant
    assert len({len(ids) for ids in train["input_ids"]}) > 1, "nothing would be padded"
    model = tiny_model()
    before, of_validation = loss_by_hand(model, train), loss_by_hand(model, validation)
    trainer = SFTTrainer(
        model,
        SFTConfig(
            str(tmp_path / "out"),
            **SFT_SETTINGS,
            max_length=8,  # SFTTrainer would truncate here
            per_device_train_batch_size=6,
            per_device_eval_batch_size=len(validation),  # over several batches it computes a mean of means
            max_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=validation,
        processing_class=padding_tokenizer(corpus),
    )
    assert trainer.train_dataset["labels"] == train["labels"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(of_validation, rel=1e-4)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(before, rel=1e-4)
    assert losses[1] < losses[0] - 0.01
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tiny.model").read_bytes() == kind_path("sp_bpe_chatml").read_bytes()


def test_the_loss_is_that_of_the_model_if_it_has_a_layer_before_the_head(tmp_path: Path) -> None:
    from trl import SFTTrainer

    corpus = pack(tmp_path, conversations(40), packing=False)
    feed = ConversationFeed(corpus, TrainingConfig())
    model = add_adapter(build("modernbert-decoder"), TrainingConfig(quantization="none")).eval()
    given = arguments(TrainingConfig(max_steps=1), str(tmp_path / "run"), 4, 1, "cpu", "fp32")
    batch = feed.collator("sdpa")([feed.train[number] for number in range(4)])
    with torch.no_grad():
        expected = float(model(**batch).loss)
        trainer = feed.trainer(model, given, feed.collator("sdpa"))
        trainer.measure(1.0, 1.0, None)
        assert float(trainer.compute_loss(model, batch)) == pytest.approx(expected, rel=1e-6)
        assert float(SFTTrainer.compute_loss(trainer, model, batch)) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("sp_bpe_chatml", {}),
        ("sp_bpe_chatml", {"eos_token": "<|im_end|>", "pad_token": "<unk>"}),
        ("hf_byte_level", {}),
        ("hf_unigram", {"pad_token": "<sep>"}),
        ("hf_legacy", {}),
    ],
)
def test_the_padding_tokenizer_has_the_ids_of_the_corpus(kind: str, named: dict[str, str], tmp_path: Path) -> None:
    corpus = pack(tmp_path, conversations(3), packing=False, tokenizer=str(kind_path(kind)), **named)
    tokenizer, facts = padding_tokenizer(corpus), corpus.manifest.tokenizer  # type: ignore[union-attr]
    found = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert found == (facts.bos_token_id, facts.eos_token_id, facts.pad_token_id)
    assert all(token in control_strings(kind) for token in tokenizer.all_special_tokens)
    saved = tokenizer.save_pretrained(tmp_path / "saved")
    for path in map(Path, saved):
        assert path.read_bytes() == (corpus.folder / "tokenizer" / path.name).read_bytes()
    assert saved
