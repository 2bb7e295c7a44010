"""Attention backends that keep conversations apart, and their batches.

    rows of PackedDataset ─Collator(backend)─▶ input_ids, labels, position_ids      [B, L]
                                               + cu_seq_lens_q, cu_seq_lens_k       [n + 1] if the backend needs them
                                               + max_length_q, max_length_k         tokens of the longest segment
                                               + key_places                         if tokens are shared
    backend ─use_attention(model, backend)─▶ the model uses it

For sdpa, eager, and flex, transformers turns the restarting `position_ids` into a mask. This works at any batch size,
as long as there is no `attention_mask` and no cache. flash2, flash3, and varlen have no mask. They see the batch as one
sequence of B × L tokens, cut into segments at `cu_seq_lens`. transformers finds the segments itself only if a batch has
one row, so the Collator adds them. A segment is a conversation or the padding of a row.

Rows without padding differ in length, so the Collator joins the rows of a batch into one row, [1, tokens].

If rows store shared tokens once, a segment is a piece: a run of tokens whose positions grow by 1. varlen compares its
queries with the keys of its path, which are gathered: those before it in its sample, and its own. All of a piece has
the same path before it, because `end` is always the start of a piece. The kernel aligns queries and keys at their ends,
so it counts windows along the path.

`varlen` is torch's own kernel and needs no other package. Importing this module registers it with transformers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, default_data_collator
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.tasks.storage.schemas import END
from packcorpus.train.data.paths import paths_of
from packcorpus.train.model.checkpoint import classes_of, towers_of

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch is older than unavailable_reason() requires
    varlen_attn = None

# Our names → names in transformers, by expected speed on a GPU.
BACKENDS = {
    "flash3": "flash_attention_3",
    "flash2": "flash_attention_2",
    "varlen": "varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "eager": "eager",
}
BY_SEGMENTS = ("flash2", "flash3", "varlen")

# Attributes of transformers' models that show which backends their code supports.
FLAGS = {
    "flash3": "_supports_flash_attn",
    "flash2": "_supports_flash_attn",
    "flex": "_supports_flex_attn",
    "sdpa": "_supports_sdpa",
}

# Kernels outside torch's own operators. If one fails, it may crash the process or the GPU.
APART = ("flash3", "flash2", "varlen", "flex")

PACKAGES = {"flash2": ("flash-attn", is_flash_attn_2_available), "flash3": ("flash-attn-3", is_flash_attn_3_available)}


def unavailable_reason(backend: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why a backend cannot train here, as far as known; None if it can."""
    if backend in ("sdpa", "eager"):
        return None
    if device.type != "cuda":
        # On a CPU, flex has a forward pass but no backward pass.
        return f"{backend} needs a GPU"
    if backend == "flex":
        return None
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{backend} needs `precision: bf16` or `fp16`"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{backend} needs a GPU of compute capability 8.0 (Ampere) or later"
    if backend == "varlen":
        return None if torch.__version__ >= (2, 13) else f"varlen needs torch 2.13 or later, not {torch.__version__}"
    package, is_there = PACKAGES[backend]
    # Without the package, transformers would download a kernel from a hub.
    return None if is_there() else f"{backend} needs the {package} package"


def unavailable_backends(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    """Return the backends that are known not to train here, with reasons."""
    reasons = {name: unavailable_reason(name, device, dtype) for name in BACKENDS}
    return {name: reason for name, reason in reasons.items() if reason}


def require_available(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise PartMissing if a backend is known not to train here."""
    if reason := unavailable_reason(backend, device, dtype):
        raise PartMissing("no_attention", f"{reason}; use `attention: sdpa`")


def backend_to_load(config: Any, wanted: str) -> tuple[str, str]:
    """Return the backend to load a model with, and a note if the settings differ."""
    missing = missing_backends(config)
    if wanted == "auto":  # starts with sdpa, or with eager, which every model has
        return ("eager" if "sdpa" in missing else "sdpa"), ""
    if wanted not in missing:
        return wanted, ""
    if wanted == "sdpa":  # the default
        return "eager", f"attention: eager, because transformers has no sdpa for {config.model_type} models"
    known = ", ".join(name for name in BACKENDS if name not in missing)
    raise PartMissing(
        "no_attention",
        f"attention: {wanted}: transformers has no {wanted} for {config.model_type} models; set auto or one of {known}",
    )


def missing_backends(config: Any) -> list[str]:
    """Return the backends that the code of a model lacks, by the model's config."""
    kinds = classes_of(config).values()
    missing = [name for name, flag in FLAGS.items() if not all(getattr(kind, flag, True) for kind in kinds)]
    if "sdpa" not in missing and any(not kind._supports_sdpa for kind in towers_of(config)):
        missing.append("sdpa")  # transformers asks every part of a model
    return missing


def autocast(device: torch.device, dtype: torch.dtype) -> Any:
    """Return a context in which a model computes in `dtype`; no effect for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def dtype_of(args: Any) -> torch.dtype:
    """Return the precision that TrainingArguments set."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def precision_of(model: Any) -> torch.dtype:
    """Return the precision of autocast if it is enabled, or else of the model."""
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def decoder_of(model: Any) -> Any:
    """Return the text decoder of a model, with or without an adapter.

    It contains the embeddings but not the head, and its first output has the hidden states that the head reads.
    """
    decoder, head, embeddings = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    # get_decoder() of some classes returns the whole model, as in Llama 4, or the head, as in ModernBERT's decoder.
    if _contains(decoder, head):
        decoder = model
    while _contains(decoder, head):
        decoder = next(child for child in decoder.children() if _contains(child, embeddings))
    return decoder


def without_adapter(model: Any) -> Any:
    """Return the model that PEFT wraps, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _contains(module: Any, part: Any) -> bool:
    return any(inner is part for inner in module.modules())


def use_attention(model: Any, backend: str) -> None:
    """Make a model, with or without an adapter, use an attention backend."""
    require_available(backend, model.device, precision_of(model))
    try:
        model.set_attn_implementation(BACKENDS[backend])
        refusal = ""
    except (ImportError, ValueError) as error:
        refusal = f" ({str(error).splitlines()[0]})"
    # If transformers considers the model fixed to a backend, it only warns and keeps that backend.
    if refusal or model.config._attn_implementation != BACKENDS[backend]:
        name = model.config.model_type
        raise PartMissing(
            "no_attention", f"attention `{backend}` cannot be used with a {name} model{refusal}; use sdpa"
        )


def segments(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bounds of a batch's segments, and the length of the longest.

    The bounds are int32[n + 1], for the batch as one sequence. `position_ids` is int[B, L]. A segment starts wherever a
    position is 0, and at the start of every row.

        bounds, longest = packcorpus.segments(batch["position_ids"])
    """
    is_start = position_ids == 0
    is_start[:, 0] = True
    starts = is_start.flatten().nonzero().flatten().to(torch.int32)
    bounds = torch.nn.functional.pad(starts, (0, 1), value=position_ids.numel())
    return bounds, int(bounds.diff().max())


def along_paths(rows: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bounds of pieces and of their paths, and the places of these.

    The bounds are int32[n + 1]: of the pieces in the batch as one sequence, and of the paths one after another. The
    places, int64[tokens of the paths], are those in the batch as one sequence.
    """
    paths, first = list[np.ndarray](), 0
    for row in rows:
        columns = {name: np.asarray(row[name]) for name in ("input_ids", "position_ids", END)}
        paths += [first + path.places for path in paths_of(columns)]
        first += len(columns[END])
    stops = torch.tensor([0, *(path[-1] + 1 for path in paths)], dtype=torch.int32)
    bounds = torch.tensor([0, *map(len, paths)]).cumsum(0, dtype=torch.int32)
    return stops, bounds, torch.from_numpy(np.concatenate(paths))


@dataclass(frozen=True, slots=True)
class Collator:
    """Join rows to a batch: `default_data_collator`, plus segment bounds if needed.

    `backend` is the attention of the model: sdpa, eager, flex, flash2, flash3, or varlen. The last three need the
    bounds of segments (`cu_seq_lens_q` and others). Rows of different lengths are joined into one row, in which
    restarting positions separate them. The bounds are valid only for the unchanged batch: accelerate keeps it if the
    dataset has a length and every rank reads its own batches; torch's DataParallel would split it. If rows store shared
    tokens once, varlen needs the places of keys (`key_places`) instead of `end`, and flash2 and flash3 raise
    PartMissing.

        collate = packcorpus.Collator("sdpa")
        batch = collate([rows[0], rows[1]])
    """

    backend: str
    longest: int = 0  # tokens of a segment, or more; a constant, so that compiled layers fit every batch

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if END in rows[0] and self.backend in ("flash2", "flash3"):  # transformers gathers no keys for them
            raise PartMissing(
                "no_attention",
                f"attention `{self.backend}` cannot follow the paths of rows with shared tokens; use `attention: "
                "varlen`, `flex`, or `sdpa`, or pack the corpus with `share: none`",
            )
        if len({len(row["input_ids"]) for row in rows}) > 1:
            batch = {name: torch.cat([torch.as_tensor(row[name]) for row in rows])[None] for name in rows[0]}
        else:
            batch = default_data_collator(list(rows))
        if self.backend in BY_SEGMENTS:
            if batch.pop(END, None) is not None:
                of_queries, of_keys, batch["key_places"] = along_paths(rows)
            else:
                ids = batch["input_ids"]
                # Rows without positions, if allowed, count as one conversation each.
                of_queries, _ = segments(batch.get("position_ids", torch.arange(ids.shape[1]).expand(ids.shape)))
                of_keys = of_queries
            for part, bounds in (("q", of_queries), ("k", of_keys)):
                batch[f"cu_seq_lens_{part}"] = bounds
                batch[f"max_length_{part}"] = max(int(bounds.diff().max()), self.longest)
        return batch


def batch_of(dataset: Any, rows: Iterable[int], collator: Any, device: torch.device) -> dict[str, Any]:
    """Build a batch on the device; row numbers beyond the last wrap around."""
    batch = collator([dataset[row % len(dataset)] for row in rows])
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items()}


def run_pass(model: Any, batch: dict[str, Any], dtype: torch.dtype, converted: Any = lambda outputs: outputs) -> float:
    """Run a forward and backward pass to completion, and return its seconds."""
    start = time.perf_counter()
    with autocast(model.device, dtype):
        loss = converted(model(**batch))["loss"]
    loss.backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start


def varlen_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within the segments of a batch, or along paths.

    This is the interface of transformers: [B, H, L, D] → [B, L, H, D]. `key` and `value` may have fewer heads. `inputs`
    contains the bounds from the Collator, and the places of keys if tokens are shared. Raises PartMissing if the model
    needs a feature that torch's kernel lacks.
    """
    missing = [name for name in ("softcap", "s_aux", "position_bias") if inputs.get(name) is not None]
    missing += ["dropout"] * (dropout > 0) + ["attention_mask"] * (attention_mask is not None)
    missing += ["batches without cu_seq_lens"] * (inputs.get("cu_seq_lens_q") is None)
    if missing:
        raise PartMissing(
            "no_attention",
            f"attention `varlen` does not support {', '.join(missing)}, which this model needs; try `attention: sdpa`",
        )
    batch, heads, length, _ = query.shape
    # Under autocast, positions are rotated in fp32; the kernel computes in the precision of the values.
    flat = [x.transpose(1, 2).reshape(batch * length, x.shape[1], -1).to(value.dtype) for x in (query, key, value)]
    if (places := inputs.get("key_places")) is not None:
        flat[1:] = (x[places] for x in flat[1:])
    out = varlen_attn(
        *flat,
        *(inputs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")),
        scale=scaling,
        # A window of n tokens reaches n - 1 back; -1 means no bound, 0 means nothing ahead.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    return out.view(batch, length, heads, -1), None


# No mask is registered under this name, so transformers builds none.
AttentionInterface.register("varlen", varlen_forward)


# Models whose decoders accept finished masks, and otherwise build masks from everything but the positions.
WITHOUT_POSITIONS = ("afmoe", "gpt_oss", "granitemoehybrid")


AXES = ("time", "height", "width")  # of the positions of an image


def separate_by_positions(model: Any) -> None:
    """Derive the masks of a model from the positions of each batch."""
    config, decoder = model.config.get_text_config(), decoder_of(model)
    if config.model_type in WITHOUT_POSITIONS:
        decoder.register_forward_pre_hook(_add_masks, with_kwargs=True)
    if len((getattr(config, "rope_parameters", None) or {}).get("mrope_section") or ()) == len(AXES):
        decoder.register_forward_pre_hook(_add_axes, with_kwargs=True)


def _add_axes(decoder: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a decoder the positions on all axes of an image, after those for its mask."""
    # Given [B, L], most decoders with such axes rotate by them, but build their mask without them.
    positions, separation = named.get("position_ids"), getattr(decoder, "separation", None)
    if positions is None or positions.ndim != 2 or (separation and separation.way != "attention"):
        return args, named
    return args, named | {"position_ids": positions.expand(1 + len(AXES), *positions.shape)}


def _add_masks(decoder: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions = named.get("position_ids")
    if positions is None or named.get("attention_mask") is not None or named.get("past_key_values") is not None:
        return args, named
    # Only the shape, the device, and the precision of the embeddings are used.
    like = torch.empty(
        (*positions.shape, 1), dtype=decoder.get_input_embeddings().weight.dtype, device=positions.device
    )
    given = {"config": decoder.config, "inputs_embeds": like, "attention_mask": None, "past_key_values": None}
    masks = {"full_attention": create_causal_mask(**given, position_ids=positions), "linear_attention": None}
    if getattr(decoder.config, "sliding_window", None):
        masks["sliding_attention"] = create_sliding_window_causal_mask(**given, position_ids=positions)
    return args, named | {"attention_mask": masks}
