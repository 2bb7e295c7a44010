"""Tiny architectures of transformers, and how each trains.

ARCHITECTURES["qwen3_moe"] = (settings besides SIZES, TRAINS, STATE or ALONE)        build(name) ─▶ a model
"""

from __future__ import annotations

from typing import Any

from support.training.tiny_training import LENGTH, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

TRAINS = "trains"
# Layers in which a token reads a state of the tokens before it run on each conversation separately.
STATE = "trains, layer by layer"
# The whole decoder runs on each conversation: its masks, positions, or states do not follow from position_ids.
ALONE = "trains, conversation by conversation"

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 24}
EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = EXPERTS | {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
LINEAR = HEAD | {
    "num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

SHARED = ["mamba", "hybrid", "hybrid"]  # layers with the same attention

# By name in transformers: settings besides SIZES, and how the model trains.
ARCHITECTURES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        name: ({}, TRAINS)
        for name in (
            "llama", "mistral", "qwen2", "phi", "olmo", "olmo2", "olmo3", "granite", "cohere", "starcoder2", "smollm3",
            "ernie4_5", "arcee", "seed_oss", "apertus", "persimmon", "nanochat", "cwm", "bitnet", "vaultgemma",
            "gpt_neox", "stablelm", "nemotron", "diffllama",
        )
    },
    "qwen3": (HEAD, TRAINS),
    "gemma": (HEAD, TRAINS),
    "gemma2": (HEAD | WINDOW | {"query_pre_attn_scalar": 16}, TRAINS),
    "gemma3_text": (HEAD | WINDOW | {"query_pre_attn_scalar": 16}, TRAINS),
    "phi3": ({"original_max_position_embeddings": LENGTH}, TRAINS),
    "cohere2": (HEAD | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, TRAINS),
    "exaone4": (WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, TRAINS),
    "glm": (HEAD, TRAINS),
    "glm4": (HEAD, TRAINS),
    "doge": (WINDOW, TRAINS),
    "gpt2": (OLD, TRAINS),
    "gptj": (OLD | {"rotary_dim": 8}, TRAINS),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 24}, TRAINS,
    ),
    "codegen": (OLD | {"rotary_dim": 8, "n_ctx": LENGTH}, TRAINS),
    "mixtral": (EXPERTS, TRAINS),
    "qwen2_moe": (EXPERTS | {"shared_expert_intermediate_size": 32}, TRAINS),
    "qwen3_moe": (EXPERTS | HEAD, TRAINS),
    "olmoe": (EXPERTS, TRAINS),
    "flex_olmo": (EXPERTS, TRAINS),
    "granitemoe": (EXPERTS, TRAINS),
    "phimoe": (EXPERTS, TRAINS),
    "deepseek_v2": (LATENT, TRAINS),
    "deepseek_v3": (LATENT, TRAINS),
    "glm4_moe": (LATENT | HEAD, TRAINS),
    "ernie4_5_moe": (EXPERTS | {"moe_num_experts": 8, "moe_k": 2}, TRAINS),
    "hunyuan_v1_moe": (EXPERTS | HEAD | {"moe_topk": 2}, TRAINS),
    "minimax_m2": (EXPERTS | HEAD, TRAINS),
    "jetmoe": (EXPERTS | {"num_local_experts": 4, "kv_channels": 16}, TRAINS),
    "gpt_oss": (EXPERTS | HEAD | WINDOW, TRAINS),
    "falcon": ({}, ALONE),
    "opt": ({"ffn_dim": 128, "word_embed_proj_dim": 64}, ALONE),
    "bloom": ({"n_layer": 2, "n_head": 4}, ALONE),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH}, ALONE),
    "biogpt": ({}, ALONE),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, STATE),
    "lfm2_moe": (EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, STATE),
    "lfm3": (HEAD | WINDOW | {"layer_types": ["conv", "sliding_attention"]}, STATE),
    "qwen3_next": (EXPERTS | LINEAR, STATE),
    "qwen3_5_text": (LINEAR, STATE),
    "qwen3_5_moe_text": (EXPERTS | LINEAR, STATE),
    "olmo_hybrid": (LINEAR, STATE),
    "kimi_linear": (
        LATENT | HEAD | {
            "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "sparse"],
        },
        STATE,
    ),
    "bailing_hybrid": (
        LATENT | HEAD | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
        STATE,
    ),
    "minimax": (EXPERTS | HEAD | {"layer_types": ["linear_attention", "full_attention"], "block_size": 32}, ALONE),
    "bamba": (MAMBA | {"attn_layer_indices": [1]}, STATE),
    "falcon_h1": (MAMBA | HEAD | {"mamba_d_ssm": 64, "mamba_n_heads": 4}, STATE),
    "granitemoehybrid": (
        MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}, STATE,
    ),
    "nemotron_h": (
        HEAD | EXPERTS | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 16,
            "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 32,
            "moe_shared_expert_intermediate_size": 32, "num_hidden_layers": 4,
        },
        STATE,
    ),
    "jamba": (
        {"mamba_d_state": 8, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}, STATE,
    ),
    "zamba": (
        {"mamba_d_state": 8, "num_key_value_heads": 4, "num_hidden_layers": 3, "layers_block_type": SHARED}, STATE,
    ),
    "zamba2": (
        {
            "mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 32, "num_key_value_heads": 4, "adapter_rank": 4,
            "num_hidden_layers": 3, "layers_block_type": SHARED,
        },
        STATE,
    ),
    "mamba": ({"state_size": 8}, STATE),
    "falcon_mamba": ({"state_size": 8}, STATE),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 32}, STATE),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"], "attention_window_size": 24}, STATE),
    "rwkv": ({"context_length": LENGTH, "attention_hidden_size": 64}, ALONE),
    "xlstm": ({"num_heads": 4, "chunk_size": 16}, ALONE),
    "zaya": (HEAD | EXPERTS | {"router_hidden_size": 16, "num_experts_per_tok": 1}, ALONE),
}  # fmt: skip


def build(name: str, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | settings))
