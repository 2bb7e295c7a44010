"""Tiny multimodal models of transformers, and how each trains on text.

MULTIMODAL["qwen3_vl"] = (settings of its parts besides TEXT and TOWER, TRAINS or STATE or ALONE, or why it is refused)
build("qwen3_vl") ─▶ a model with random weights, of the class that its checkpoints have

The settings of a part are those of its default config that have a name in TEXT or TOWER, replaced by these.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.training.architectures import ALONE, EXPERTS, LATENT, SIZES, STATE, TRAINS
from support.training.tiny_training import LENGTH, VOCABULARY
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

TEXT: dict[str, Any] = SIZES | EXPERTS | {
    "head_dim": 16, "moe_num_experts": 8, "moe_k": 2, "sliding_window": 24, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "intermediate_size_mlp": 128, "attention_chunk_size": LENGTH // 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "image_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32,
    "num_heads": 2, "mlp_dim": 64, "num_layers": 2, "encoder_layers": 2, "encoder_attention_heads": 2, "d_model": 32,
    "encoder_ffn_dim": 64, "num_position_embeddings": 16, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
    "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
PARTS = ("text_config", "thinker_config", "llm_config", "language_config", "decoder")
# Settings with a value for each layer.
OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers")

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
ROPE = {"rope_parameters": DEFAULT}
AXES = {"text_config": {"rope_parameters": DEFAULT | {"mrope_section": [4, 2, 2]}}}
INDEXED = LATENT | {"head_dim": 16, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
CODES = {"base_channels": 32, "embed_dim": 4, "latent_channels": 4}
SPEECH = {"hidden_dim": 32, "dim_head": 16, "input_dim": 16, "context_size": 16, "max_pos_emb": 16}
QUERIES = {"encoder_hidden_size": 32}
KOSMOS = {"embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 128}
NOT_CAUSAL = "is not a causal language model"
NO_TEXT = "cannot read text alone"

MULTIMODAL: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    **{
        name: ({}, TRAINS)
        for name in (
            "aria", "aya_vision", "cohere2_vision", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid",
            "exaone4_5", "fuyu", "gemma3", "gemma4", "gemma4_unified", "glmasr", "got_ocr2", "granite_docling",
            "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "lighton_ocr", "llama4", "llava",
            "llava_next", "llava_next_video", "llava_onevision", "minimax_m3_vl", "mistral3", "mllama",
            "moss_transcribe_diarize", "muse_glimmer", "ovis2", "pp_chart2table", "qianfan_ocr", "qwen2_audio",
            "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "unlimited_ocr",
            "video_llama_3", "video_llava", "vipllava", "voxtral",
        )
    },
    **dict.fromkeys(
        (
            "cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl",
            "qwen2_vl",
        ),
        (AXES, TRAINS),
    ),
    **{
        name: ({}, STATE)
        for name in ("lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe")
    },
    "chameleon": ({"": {"hidden_size": 64, "vocabulary_map": {"<image>": 5}}, "vq_config": CODES}, TRAINS),
    "cohere_compass": (
        {"text_config": {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}}}, TRAINS,
    ),
    "deepseek_ocr2": (
        {
            "text_config": {"mlp_layer_types": ["dense", "sparse"]},
            "vision_config.sam_config": {"output_channels": 16, "downsample_channels": [16, 32]},
        },
        TRAINS,
    ),
    "emu3": ({"": {"vocabulary_map": {"<image>": 5}}, "vq_config": CODES | {"codebook_size": 32}}, TRAINS),
    "ernie4_5_vl_moe": (
        {
            "text_config": {
                "moe_intermediate_size": [32, 32], "rope_parameters": DEFAULT | {"mrope_section": [3, 3, 2]},
            }
        },
        TRAINS,
    ),
    "fun_asr_nano": (
        {
            "adaptor_config": {"hidden_size": 64, "intermediate_size": 16},
            "audio_config": {"num_timestamp_prediction_layers": 1},
        },
        TRAINS,
    ),
    "glm4v_moe": (
        {"text_config": {"rope_parameters": DEFAULT | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}}},
        TRAINS,
    ),
    "glm5_next": (
        {
            "text_config": INDEXED | {
                "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "head_dim": 0, "linear_head_dim": 16,
                "linear_num_heads": 4, "index_kpool": 4, "layer_types": ["linear_attention", "indexed_attention"],
                "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"], "hc_mult": 2,
            }
        },
        ALONE,
    ),
    "granite4_vision": (
        {
            "": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 1]},
            "vision_config": {"hidden_size": 64},
            "qformer_config": {"hidden_size": 64, "num_attention_heads": 1, "encoder_hidden_size": 64},
        },
        TRAINS,
    ),
    "hunyuan_vl": (
        {
            "text_config": {"rope_parameters": DEFAULT | {"xdrope_section": [2, 2, 2, 2]}},
            "vision_config": {"text_hidden_size": 64},
        },
        ALONE,
    ),
    "inkling2": ({"vision_config": {"text_hidden_size": 64}}, ALONE),
    "kimi_k25": ({"text_config": LATENT | {"head_dim": 8}}, TRAINS),
    "lfm2_vl": ({"text_config": {"layer_types": ["conv", "full_attention"]}}, STATE),
    "mistral4": ({"": LATENT}, TRAINS),
    "mistral_large4": (
        {"text_config": INDEXED | ROPE | {"kv_source_layers": [0, 1], "head_dim": 8, "no_rope_layers": [1, 0]}}, TRAINS,
    ),
    "molmo2": (
        {
            "text_config": {"rope_scaling_layers": [0, 1], "additional_vocab_size": 8},
            "vision_config": {"image_size": [32, 32]},
            "adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
        },
        TRAINS,
    ),
    "muse_spark": (
        {
            "": {"out_hidden_size": 64, "projector_hidden_size": 32},
            "audio_config": {
                "num_hidden_layers": 4, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4, "out_hidden_size": 64,
            },
            "text_config": {
                "layer_rope_theta": [5e5, 0], "moe_hidden_size": 32, "mlp_layer_types": ["dense", "sparse"],
            },
        },
        TRAINS,
    ),
    "nemotron_h_omni": ({}, STATE),
    "qwen4_exp": (
        {
            "text_config": {
                "indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
            }
        },
        STATE,
    ),
    "dots3_note": (
        {
            "text_config": LATENT | INDEXED | {
                "layer_types": ["indexed_attention", "sliding_attention"], "shared_experts_intermediate_size": 32,
                "mlp_layer_types": ["dense", "sparse"], "per_layer_config": {},
            },
            "vision_config": {
                "adapter_in_dim": 32, "adapter_out_dim": 64, "moe_intermediate_size": 32, "num_local_experts": 4,
            },
            "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 16},
        },
        TRAINS,
    ),
    "evolla": (
        {
            "": {
                "hidden_size": 64, "resampler_depth": 1, "resampler_dim_head": 16, "resampler_heads": 2,
                "resampler_num_latents": 4, "aligner_num_add_layers": 1,
            }
        },
        "cannot be loaded by the auto classes",
    ),
    "granite_speech": ({"encoder_config": SPEECH, "projector_config": QUERIES}, TRAINS),
    "granite_speech_plus": ({"encoder_config": SPEECH, "projector_config": QUERIES}, TRAINS),
    "idefics": ({"": {"hidden_size": 64}}, NO_TEXT),
    "inkling_mm_model": (
        {
            "text_config": {
                "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 8,
                "sliding_window_size": 24, "rel_extent": 32, "layer_types": ["hybrid_sliding", "hybrid"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": {"text_hidden_size": 64, "num_hidden_layers": 4, "patch_size": 2},
            "audio_config": {"text_hidden_size": 64},
        },
        STATE,
    ),
    "instructblip": ({}, NO_TEXT),
    "instructblipvideo": ({}, NO_TEXT),
    "janus": (
        {
            "vision_config": {"projection_dim": 64},
            "vq_config": CODES | {"num_embeddings": 16, "projection_dim": 64, "image_token_embed_dim": 64},
        },
        TRAINS,
    ),
    "kosmos-2": ({"": {"latent_query_num": 4}, "text_config": KOSMOS}, NO_TEXT),
    "kosmos-2.5": (
        {
            "": {"latent_query_num": 4}, "text_config": KOSMOS,
            "vision_config": {"patch_embed_hidden_size": 32, "max_num_patches": 16},
        },
        ALONE,
    ),
    "nemo_speechlm": (
        {
            "text_config": {
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "ssm_state_size": 16,
                "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 32, "num_hidden_layers": 4,
                "moe_shared_expert_intermediate_size": 32,
            },
            "audio_config.diarization_config.head_config": {"audio_hidden_size": 32},
        },
        STATE,
    ),
    "phi4_multimodal": (
        {
            "": {"hidden_size": 64, "original_max_position_embeddings": LENGTH},
            "audio_config": {
                "num_blocks": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 32,
            },
        },
        TRAINS,
    ),
    "vibevoice_asr": (
        {
            f"{kind}_tokenizer_encoder_config": {"num_filters": 2, "depths": [1] * 7}
            for kind in ("acoustic", "semantic")
        },
        TRAINS,
    ),
    # Refused.
    "git": ({"": {"hidden_size": 64}}, NO_TEXT),
    "florence2": (
        {
            "vision_config": {
                name: [size] * 4 for name, size in
                {"patch_size": 3, "embed_dim": 16, "num_heads": 2, "num_groups": 2, "depths": 1}.items()
            },
            "text_config": {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64},
        },
        NOT_CAUSAL,
    ),
    "pp_formulanet": (
        {"text_config": {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64, "encoder_layers": 1}}, NOT_CAUSAL,
    ),
    "pi0": ({}, NOT_CAUSAL),
    "qwen2_5_omni": (
        {
            "talker_config": {"hidden_size": 32, "embedding_size": 32},
            "token2wav_config.bigvgan_config": {"upsample_initial_channel": 64},
        },
        NOT_CAUSAL,
    ),
    "qwen3_omni_moe": (
        {
            "talker_config": {"spatial_merge_size": 2},
            "talker_config.text_config": {"shared_expert_intermediate_size": 32},
        },
        NOT_CAUSAL,
    ),
    "shieldgemma2": ({}, NOT_CAUSAL),
    "udop": (
        {"": {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}},
        NOT_CAUSAL,
    ),
    "blip": ({}, NO_TEXT),
    "blip-2": ({}, NO_TEXT),
    "diffusion_gemma": ({}, NOT_CAUSAL),
    "kyutai_speech_to_text": (
        {"": {"hidden_size": 64, "ffn_dim": 128, "codebook_vocab_size": 16}, "codec_config": {"hidden_size": 512}},
        NOT_CAUSAL,
    ),
    "paligemma": ({}, NOT_CAUSAL),
    "pix2struct": ({}, NOT_CAUSAL),
    "t5gemma2": ({}, NOT_CAUSAL),
    "vision-encoder-decoder": ({}, NOT_CAUSAL),
    "voxtral_realtime": ({}, NO_TEXT),
}  # fmt: skip


# Classes of published checkpoints that the auto class does not build.
CLASSES = {"evolla": "EvollaForProteinText2Text", "shieldgemma2": "ShieldGemma2ForImageClassification"}


def build(name: str) -> Any:
    torch.manual_seed(3)
    config = config_of(name)
    if name in CLASSES:
        return getattr(transformers, CLASSES[name])._from_config(config)
    return AutoModelForMultimodalLM.from_config(config)


def config_of(name: str) -> Any:
    kind = CONFIG_MAPPING[name]
    return kind.from_dict(_tiny(kind().to_dict(), MULTIMODAL[name][0]))


def _tiny(values: dict[str, Any], settings: dict[str, dict[str, Any]], place: str = "") -> dict[str, Any]:
    parts = {key: value for key, value in values.items() if isinstance(value, dict) and "model_type" in value}
    sizes = TEXT if not place or place.rpartition(".")[2] in PARTS else TOWER
    if parts and not place:
        sizes = {key: value for key, value in sizes.items() if key != "hidden_size"}
    own = settings.get(place, {})
    tiny = {key: sizes.get(key, value) for key, value in values.items() if key != "per_layer_config"} | own
    count = tiny.get("num_hidden_layers")
    for key in set(OF_LAYERS) - own.keys():
        if count and isinstance(kinds := tiny.get(key), list) and len(kinds) != count:
            tiny[key] = (list(dict.fromkeys(kinds)) * count)[:count]
    if isinstance(layers := tiny.get("moe_layers"), list):
        tiny["moe_layers"] = [layer for layer in layers if layer < count]
    for key, value in tiny.items():  # tokens of images must be in the vocabulary
        if type(value) is int and value >= VOCABULARY and key.endswith(("_id", "_token_index")):
            tiny[key] = 10 + sum(map(ord, key)) % 400
    return tiny | {key: _tiny(value, settings, f"{place}.{key}".lstrip(".")) for key, value in parts.items()}
