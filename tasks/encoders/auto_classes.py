"""Choose the class with which AutoTokenizer loads a tokenizer.

The class follows from `tokenizer_class` of tokenizer_config.json or config.json, and from the type of the model. For
some types of models, Transformers ignores the class that the files name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# The release of Transformers whose rules these are. It is part of the key of each tokenizer that they change.
VERSION = "5.23"

# The class that uses tokenizer.json as it is.
AS_IS = "TokenizersBackend"

# Other names of classes.
ALIASES = {
    "PreTrainedTokenizer": AS_IS,
    "PythonBackend": AS_IS,
    "BloomTokenizer": AS_IS,
    "Phi3Tokenizer": "LlamaTokenizer",
}

# Types of models by their class. A type that is missing has no class of its own.
_TYPES = {
    AS_IS: "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 "
    "ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode "
    "gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
    "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 "
    "minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 "
    "mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
    "olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts "
    "smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl",
    "LlamaTokenizer": "idefics idefics2",
    "CodeLlamaTokenizer": "code_llama",
    "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
    "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
    "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo "
    "jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma "
    "shieldgemma2 t5gemma zaya",
    "CohereTokenizer": "aya_vision cohere cohere2",
    # Classes without a rule here.
    "of its model": "aimv2 albert align bark bart barthez bartpho bert bert-generation bert-japanese bertweet "
    "big_bird biogpt blenderbot blenderbot-small blip bridgetower bros byt5 camembert canine chinese_clip clap clip "
    "clipseg clvp convbert cpm cpmant ctrl data2vec-audio data2vec-text deberta deberta-v2 dia distilbert dpr electra "
    "ernie esm esmc esmfold2 fastspeech2_conformer flaubert flava florence2 fnet fsmt funnel git gpt-sw3 "
    "gpt_neox_japanese granite_speech5_ctc grounding-dino groupvit gte herbert hubert ibert jina_embeddings_v3 "
    "lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm led lilt longformer luke lxmert m2m_100 marian "
    "markuplm mbart mbart50 mega megatron-bert metaclip_2 mgp-str mluke mm-grounding-dino mobilebert mpnet mra mt5 "
    "musicgen musicgen_melody mvp myt5 nemotron3_5_asr nemotron_asr_streaming nezha nllb nllb-moe nomic_bert nougat "
    "omdet-turbo oneformer openai-gpt owlv2 owlvit parakeet_ctc parakeet_rnnt parakeet_tdt pegasus perceiver phobert "
    "plbart pp_formulanet prophetnet qdqbert rag realm reformer rembert retribert roberta roberta-prelayernorm "
    "roc_bert roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip siglip2 speech_to_text speecht5 splinter "
    "squeezebert switch_transformers t5 tapas tipsv2 trocr tvp udop unispeech unispeech-sat videoprism vilt "
    "visual_bert vits wav2vec2 wav2vec2-bert wav2vec2-conformer wav2vec2_phoneme whisper xclip xglm xlm xlm-roberta "
    "xlnet xmod yoso",
}
CLASS_OF_TYPE = {model_type: name for name, types in _TYPES.items() for model_type in types.split()}

# Types of models whose files name a wrong class; the class of the type replaces it.
_WRONG = (
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax hyperclovax_vlm "
    "hyperclovax_vision_v2 internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 minicpmv minimax_m2 "
    "modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v phimoe qwen2 "
    "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava"
)
WRONG_CLASS = frozenset(_WRONG.split())

# Types of models whose LlamaTokenizer is never looked at.
_MISTRAL = "ministral ministral3 mistral mistral3 mistral_large4 mixtral pixtral voxtral voxtral_realtime"
MISTRAL = frozenset(_MISTRAL.split())


def class_of(config: Mapping[str, Any], model: Mapping[str, Any], is_byte_level: Callable[[], bool]) -> str:
    """Return the name of the class, without "Fast" at its end.

    `config` is tokenizer_config.json, and `model` is config.json. `is_byte_level` returns whether a tokenizer.json
    encodes bytes.
    """
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    model_type, is_wrong = model.get("model_type"), not WRONG_CLASS.isdisjoint(_names(model))
    of_type = CLASS_OF_TYPE.get(model_type) if isinstance(model_type, str) else None
    if not isinstance(named, str):
        return of_type or AS_IS
    named = named.removesuffix("Fast")
    if named == "LlamaTokenizer" and model_type not in MISTRAL and not is_wrong and is_byte_level():
        return AS_IS
    if of_type not in (None, named) and (of_type == AS_IS or is_wrong):
        return str(of_type)
    return ALIASES.get(named, named)


def _names(model: Mapping[str, Any]) -> list[str]:
    return [name for key in ("model_type", "model_name") if isinstance(name := model.get(key), str)]
