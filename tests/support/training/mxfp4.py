"""A tiny gpt-oss as it is published: experts in MXFP4, everything else in bf16.

    save_mxfp4(folder) ─▶ the values of its experts by the names of their weights, decoded here

32 values of a row have one scale, a power of two, and 4 bits each: a sign, and one of eight sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.training.architectures import ARCHITECTURES, build

SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def save_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    build("gpt_oss", **ARCHITECTURES["gpt_oss"][0]).to(torch.bfloat16).save_pretrained(folder)
    tensors, decoded = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32))
        values = SIZES[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (scales[..., None] - 127)
        decoded[name] = values.flatten(2).transpose(1, 2)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }  # as published
    (folder / "config.json").write_text(json.dumps(config))
    return decoded
