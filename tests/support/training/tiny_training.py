"""Real rows and tiny models for tests of training.

data/sample ─packed_rows─▶ rows of 256 tokens, as train.data.dataset returns ┐
tiny_model(family) ─▶ 2 layers, fp32, grouped-query attention ───────────────┴▶ what the tests train
plain_kernels(monkeypatch) ─▶ the kernels of a GPU in plain torch, so that calls to them can be tested here
"""

from __future__ import annotations

import inspect
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import ROOT
from support.packed_rows import folder_of
from support.small_corpus import conversations, make_recipe, pack_corpus
from torch.nn.attention import varlen
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers import modeling_flash_attention_utils as flash_utils

from packcorpus.train.model import attention

LENGTH, VOCABULARY = 256, 500
SOURCES = [{"path": str(ROOT / "data" / "sample" / name)} for name in ("alpaca.json", "questions.csv")] + [
    {"path": "chat.jsonl"}  # short ones, so that rows have several conversations
]
SETTINGS = {"overlong": "drop", "max_rejects": 1.0}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    # A window that is shorter than most conversations.
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
}
# Models that route tokens to experts.
EXPERTS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "num_hidden_layers": 4}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_hidden_layers": 4},
    ),
}

Row = dict[str, torch.Tensor]


@cache
def packed_rows() -> list[Row]:
    """Return rows of the sample: input_ids, position_ids int32[256], labels int64."""
    with tempfile.TemporaryDirectory() as folder:
        return rows_of(
            pack_corpus(
                make_recipe(Path(folder), conversations(40), sources=SOURCES, sequence_length=LENGTH, **SETTINGS)
            )
        )


def rows_of(manifest: Path) -> list[Row]:
    """Return the rows of a corpus with one shard."""
    facts = orjson.loads(manifest.read_bytes())
    assert facts["tokenizer"]["vocab_size"] == VOCABULARY
    (shard,) = facts["splits"]["train"]["shards"]
    table = pa.ipc.open_stream((folder_of(manifest) / shard["path"]).read_bytes()).read_all()
    names = ("input_ids", "labels", "position_ids")
    columns = {
        name: torch.tensor(table[name].combine_chunks().flatten().to_numpy().reshape(-1, facts["sequence_length"]))
        for name in names
    }
    columns["labels"] = columns["labels"].long()
    return [{name: column[i] for name, column in columns.items()} for i in range(table.num_rows)]


def tiny_model(family: str = "llama", adapter: bool = True, dropout: float = 0.0, **settings: Any) -> Any:
    """Build a model with seeded weights, and a LoRA adapter whose B is not zero."""
    torch.manual_seed(7)
    build, config, own = (FAMILIES | EXPERTS)[family]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = sizes | {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    # Weights ten times the usual size make attention far from uniform, so that leaks show.
    scale = {"initializer_range": 0.2, "use_cache": False, "attn_implementation": "sdpa"}
    model = build(config(**common | scale | own | settings))
    if adapter:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets))
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if "lora_B" in name:
                    weights.normal_(std=0.05)
    return model.train()


def gradients(model: Any, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the relative difference over all gradients."""
    assert one.keys() == other.keys()
    off, size = (
        torch.cat([x.flatten() for x in values]).norm() for values in ([one[n] - other[n] for n in one], one.values())
    )
    return float(off / size)


# -- the kernels of a GPU ----------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, left: int) -> torch.Tensor:
    """Attend within one segment, [T, heads, D], `left` tokens back (-1: all).

    The last query is that of the last key.
    """
    back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None, :]
    mask = (back >= 0) & ((left < 0) | (back <= left))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)


def attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    longest: Any,
    **how: Any,
) -> torch.Tensor:
    """Check the call of a segment kernel, whose int32 bounds cover queries and keys."""
    for of, tokens, most in zip(bounds, (q, k), longest, strict=True):
        assert of.dtype == torch.int32
        assert (of[0], of[-1]) == (0, len(tokens))
        assert most >= of.diff().max()
    spans = zip(*(pairwise(of.tolist()) for of in bounds), strict=True)
    return torch.cat([attend(q[a:b], k[c:d], v[c:d], **how) for (a, b), (c, d) in spans])


def plain_varlen(*args: Any, **named: Any) -> torch.Tensor:
    """Replace `varlen_attn` of torch, for every call that it accepts."""
    call = inspect.signature(varlen.varlen_attn).bind(*args, **named)
    call.apply_defaults()
    given = call.arguments
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert given["enable_gqa"] == (q.shape[1] != k.shape[1])
    left, right = given["window_size"]
    assert right == 0
    longest = (given["max_q"], given["max_k"])
    return attend_segments(q, k, v, (given["cu_seq_q"], given["cu_seq_k"]), longest, scale=given["scale"], left=left)


def plain_flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Replace `flash_attn_varlen_func` of the flash-attn package."""
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    longest = (max_seqlen_q, max_seqlen_k)
    how = {"scale": softmax_scale, "left": window_size[0]}
    return attend_segments(q, k, v, (cu_seqlens_q, cu_seqlens_k), longest, **how)


def plain_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
    """Replace `flash_attn_func`: each row separately, with all its conversations."""
    left = named.get("window_size", (-1, -1))[0]
    return torch.stack([attend(*row, named["softmax_scale"], left) for row in zip(q, k, v, strict=True)])


def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of torch and flash-attn by plain ones."""
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    functions = (plain_flash, plain_flash_varlen, None, flash_utils._pad_input, flash_utils._unpad_input)
    ways = (flash_utils._lazy_define_process_function(plain_flash_varlen), None)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *_, **__: (functions, ways))


def force_attention(model: Any, backend: str) -> None:
    """Set a backend that is not available on this machine."""
    model.config._attn_implementation_internal = attention.BACKENDS[backend]
