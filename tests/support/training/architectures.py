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

# Words of an error, and its code: a decoder that fails on conversations.
NOT_CAUSAL, NOT_RUN = "see later tokens", "E631"

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 24}
WINDOWED = ["sliding_attention", "full_attention"]
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

# The indexer of sparse attention chooses fewer tokens than a conversation has. It has many heads, because tokens that
# none of them scores are equal.
INDEXED = {
    "index_topk": 8, "index_n_heads": 32, "index_head_dim": 16, "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["indexed_attention", "indexed_attention"],
}  # fmt: skip
INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 24,
    "d_rel": 8, "rel_extent": 32, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip
CHUNKED = ["chunked_attention", "full_attention"]
# The decoder of an encoder-decoder model.
DECODER = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
IS_DECODER = {"is_decoder": True}  # without it, tokens see later tokens
PART_OF_BLT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH, "hidden_size_global": 64,
    "initializer_range": 0.2,
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
    "cohere2": (HEAD | WINDOW | {"layer_types": WINDOWED}, TRAINS),
    "exaone4": (WINDOW | {"layer_types": WINDOWED}, TRAINS),
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
    # With noise, its router draws experts at random in training.
    "phimoe": (EXPERTS | {"router_jitter_noise": 0.0}, TRAINS),
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
    "afmoe": (EXPERTS | HEAD | {"num_dense_layers": 1}, TRAINS),
    "aria_text": (EXPERTS | {"moe_num_experts": 4, "moe_num_shared_experts": 1}, TRAINS),
    "axk1": (LATENT, TRAINS),
    "axk2": (LATENT | INDEXED, TRAINS),
    "beam": (HEAD, TRAINS),
    "cohere2_moe": (EXPERTS | HEAD, TRAINS),
    "cohere_compass_text": (
        HEAD | WINDOW | {
            "layer_types": WINDOWED,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in WINDOWED},
        },
        TRAINS,
    ),
    "dbrx": (
        {
            "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        TRAINS,
    ),
    "deepseek_v32": (LATENT | INDEXED, TRAINS),
    "deepseek_v4": (
        LATENT | HEAD | INDEXED | {
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "o_groups": 2,
            "mlp_layer_types": ["hash_moe", "moe"], "o_lora_rank": 16, "sliding_window": 24, "hc_mult": 2,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        },
        ALONE,
    ),
    "dots1": (LATENT | {"n_shared_experts": 1}, TRAINS),
    "dots3_note_text": (
        LATENT | HEAD | INDEXED | WINDOW | {
            "layer_types": ["indexed_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
            "shared_experts_intermediate_size": 32, "per_layer_config": {},
        },
        TRAINS,
    ),
    "exaone_moe": (EXPERTS | HEAD | WINDOW, TRAINS),
    "flint": (HEAD, TRAINS),
    "gemma3n_text": (
        HEAD | WINDOW | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
            "vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [128] * 4, "layer_types": WINDOWED * 2,
        },
        TRAINS,
    ),
    "gemma4_text": (
        HEAD | WINDOW | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY, "layer_types": WINDOWED * 2,
        },
        TRAINS,
    ),
    "gemma4_unified_text": (
        HEAD | WINDOW | {"layer_types": WINDOWED, "hidden_size_per_layer_input": 0},
        TRAINS,
    ),
    "glm4_moe_lite": (LATENT, TRAINS),
    "glm_moe_dsa": (LATENT | INDEXED, TRAINS),
    "gpt-sw3": (OLD, TRAINS),
    "gpt_bigcode": (OLD, TRAINS),
    "gpt_neox_japanese": ({}, TRAINS),
    "granite_swa": (WINDOW, TRAINS),
    "granitemoe_swa": (EXPERTS | WINDOW, TRAINS),
    "granitemoeshared": (EXPERTS | {"shared_intermediate_size": 32}, TRAINS),
    "helium": (HEAD, TRAINS),
    "hrm_text": (HEAD, TRAINS),
    "hunyuan_v1_dense": (HEAD, TRAINS),
    "hy_v3": (EXPERTS | HEAD, TRAINS),
    "hy_v4": (LATENT | INDEXED | {"hc_mult": 2, "indexer_types": ["full", "shared"]}, TRAINS),
    "hyperclovax": (HEAD, TRAINS),
    "inkling_text": (EXPERTS | HEAD | INKLING | {"mlp_layer_types": ["dense", "sparse"]}, STATE),
    "inkling2_text": (EXPERTS | HEAD | INKLING | {"unpadded_vocab_size": VOCABULARY}, ALONE),
    "internlm3": (HEAD, TRAINS),
    "iquestcoder": (HEAD, TRAINS),
    "jais2": (HEAD, TRAINS),
    "kolibri1": (EXPERTS | HEAD, TRAINS),
    "laguna": (EXPERTS | HEAD, TRAINS),
    "llama4_text": (
        EXPERTS | HEAD | {"intermediate_size_mlp": 64, "attention_chunk_size": 32, "layer_types": CHUNKED}, TRAINS,
    ),
    "longcat_flash": (
        LATENT | {
            "num_layers": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2,
            "head_dim": 8,
        },
        TRAINS,
    ),
    "mellum": (EXPERTS | HEAD, TRAINS),
    "mimo_v2_flash": (EXPERTS | HEAD | {"v_head_dim": 16}, TRAINS),
    "minicpm3": (LATENT, TRAINS),
    "minimax_m3_vl_text": (
        EXPERTS | HEAD | {
            "dense_intermediate_size": 64, "shared_intermediate_size": 32, "rotary_dim": 8, "index_n_heads": 2,
            "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
        },
        ALONE,
    ),
    "ministral": (HEAD | WINDOW, TRAINS),
    "ministral3": (HEAD, TRAINS),
    "modernbert-decoder": ({}, TRAINS),
    "moshi": (HEAD | {"ffn_dim": 128}, TRAINS),
    "qwen4_exp_text": (
        EXPERTS | LINEAR | {
            "layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 8,
            "ple_embed_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 8, "indexer_compress_ratio": 2,
        },
        STATE,
    ),
    "solar_open": (EXPERTS | HEAD, TRAINS),
    "youtu": (LATENT, TRAINS),
    "bart": (DECODER, ALONE),
    "bert": (IS_DECODER, ALONE),
    "bert-generation": (IS_DECODER, ALONE),
    "big_bird": (IS_DECODER, ALONE),
    "bigbird_pegasus": (DECODER, ALONE),
    "blenderbot": (DECODER, ALONE),
    "blenderbot-small": (DECODER, ALONE),
    "blt": (
        {
            "encoder_hash_byte_group_vocab": 100,
            **{f"{part}_config": PART_OF_BLT for part in ("patcher", "encoder", "decoder", "global")},
        },
        ALONE,
    ),
    "camembert": (IS_DECODER, ALONE),
    "cpmant": ({"dim_head": 16, "dim_ff": 128, "prompt_types": 4, "segment_types": 4, "prompt_length": 4}, NOT_CAUSAL),
    "ctrl": (OLD | {"dff": 128}, TRAINS),
    "data2vec-text": (IS_DECODER, ALONE),
    "electra": (IS_DECODER | {"embedding_size": 64}, ALONE),
    "ernie": (IS_DECODER, ALONE),
    "marian": (DECODER, ALONE),
    "mbart": (DECODER, ALONE),
    "megatron-bert": (IS_DECODER, ALONE),
    "mvp": (DECODER, ALONE),
    "openai-gpt": (OLD, ALONE),
    "pegasus": (DECODER, ALONE),
    "plbart": (DECODER, ALONE),
    "prophetnet": (
        {
            "num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2, "decoder_ffn_dim": 128,
            "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "encoder_ffn_dim": 128,
        },
        NOT_RUN,
    ),
    "reformer": (
        IS_DECODER | {
            "attention_head_size": 16, "attn_layers": ["local", "local"], "axial_pos_embds_dim": [32, 32],
            "axial_pos_shape": [16, 16], "local_attn_chunk_length": 16, "feed_forward_size": 128,
        },
        NOT_RUN,
    ),
    "rembert": (IS_DECODER | {"input_embedding_size": 64, "output_embedding_size": 64}, ALONE),
    "roberta": (IS_DECODER, ALONE),
    "roberta-prelayernorm": (IS_DECODER, ALONE),
    "roc_bert": (
        IS_DECODER | {
            "pronunciation_vocab_size": 10, "shape_vocab_size": 10, "pronunciation_embed_dim": 16,
            "shape_embed_dim": 16,
        },
        ALONE,
    ),
    "roformer": (IS_DECODER, ALONE),
    "trocr": (DECODER, ALONE),
    "whisper": (DECODER | {"max_target_positions": LENGTH, "max_source_positions": 16}, TRAINS),
    "xglm": (DECODER | {"num_layers": 2, "attention_heads": 4, "ffn_dim": 128}, ALONE),
    "xlm": ({"emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": True}, ALONE),
    "xlm-roberta": (IS_DECODER, ALONE),
    "xlm-roberta-xl": (IS_DECODER, ALONE),
    "xlnet": ({"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "max_position_embeddings": None}, NOT_CAUSAL),
    "xmod": (IS_DECODER | {"languages": ["en_XX"], "default_language": "en_XX"}, ALONE),
}  # fmt: skip


def build(name: str, **settings: Any) -> Any:
    """Build a tiny model; a size that is None in `settings` is left out."""
    given = {key: value for key, value in (SIZES | settings).items() if value is not None or key.endswith("_token_id")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **given))
