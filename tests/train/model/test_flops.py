"""The FLOP of a token equal torch's own count of the operations of a step."""

from __future__ import annotations

import pytest
import torch
from support.training.architectures import ARCHITECTURES, build
from support.training.tiny_training import LENGTH, VOCABULARY, packed_rows, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from packcorpus.train.measures import flops_per_token, parameters, peak_flops
from packcorpus.train.model.attention import Collator

ROWS = 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_flops_equal_the_count_of_torch(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied, attn_implementation="eager", vocab_size=VOCABULARY)
    # Otherwise the first layer computes no gradient of its input.
    model.enable_input_require_grads()
    batch = Collator("eager")(packed_rows()[:ROWS])
    with FlopCounterMode(display=False) as counter:
        model(**batch)["loss"].backward()
    counted = counter.get_total_flops() / (ROWS * LENGTH)
    # Eager attention computes all L scores per token, masked or not, as if each attended to L.
    everything = torch.full((1, 1), LENGTH - 1)
    assert flops_per_token(model, everything) == pytest.approx(counted, rel=0.005)


def test_attention_is_counted_within_conversations() -> None:
    model, rows = tiny_model(), packed_rows()[:4]
    places = torch.stack([row["position_ids"] for row in rows])
    # The number of tokens that each token attends to, from the conversations of the rows.
    number = (places == 0).cumsum(1)
    attends = (number[:, :, None] == number[:, None, :]).tril().sum(2).double().mean().item()
    assert 1 < attends < LENGTH / 2
    alone = flops_per_token(model, torch.zeros(1, 1, dtype=torch.int32))
    assert flops_per_token(model, places) - alone == pytest.approx(12 * 2 * 64 * (attends - 1))


def test_a_sliding_window_limits_attention() -> None:
    model, places = tiny_model("mistral"), torch.arange(LENGTH)[None]
    window = model.config.sliding_window
    assert flops_per_token(model, places) < flops_per_token(tiny_model("llama"), places)
    seen = (places + 1).clamp(max=window).double().mean().item()
    alone = flops_per_token(model, places[:, :1])
    assert flops_per_token(model, places) - alone == pytest.approx(12 * 2 * 64 * (seen - 1))


def test_experts_count_as_often_as_tokens_are_routed_to_them() -> None:
    place = torch.zeros(1, 1, dtype=torch.int32)
    some, all_of_them = (
        flops_per_token(tiny_model("qwen3_moe", adapter=False, num_experts_per_tok=count), place) for count in (4, 16)
    )
    model = tiny_model("qwen3_moe", adapter=False)
    experts = sum(weights.numel() for name, weights in model.named_parameters() if ".experts." in name)
    assert all_of_them - some == pytest.approx(6 * experts * 12 / 16)


def test_layers_with_a_state_count_by_their_weights() -> None:
    place, far = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), LENGTH - 1)
    model = build("mamba2", **ARCHITECTURES["mamba2"][0], tie_word_embeddings=True)
    assert flops_per_token(model, far) == 6 * sum(weights.numel() for weights in model.parameters())
    hybrid = build("lfm2", **ARCHITECTURES["lfm2"][0])
    assert flops_per_token(hybrid, far) - flops_per_token(hybrid, place) == 12 * 64 * (LENGTH - 1), "one of two layers"


def test_counted_parameters() -> None:
    bare, model = tiny_model(adapter=False), tiny_model()
    everything, trainable = parameters(model)
    # r = 4 on q, k, v, o, and the MLP's three; two layers of width 64, k and v half as wide, 128 in the MLP.
    assert trainable == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert everything - trainable == sum(weights.numel() for weights in bare.parameters())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12), ("NVIDIA A10", 125e12), ("NVIDIA GeForce RTX 4090", 165e12), ("Tesla T4", 65e12),
        ("NVIDIA H20", 148e12), ("NVIDIA H800", 989e12), ("NVIDIA H800 PCIe", 756e12), ("NVIDIA A800 80GB", 312e12),
        ("NVIDIA L20", 119.5e12), ("NVIDIA GeForce RTX 3080", 59.5e12), ("NVIDIA GeForce RTX 3080 Ti", 68e12),
        ("NVIDIA GeForce RTX 4080", 97e12), ("NVIDIA GeForce RTX 5080", 113e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", 125e12), ("Tesla V100S-PCIE-32GB", None), ("NVIDIA RTX A4000", None),
        ("CPU, 2 cores", None),
    ],
)  # fmt: skip
def test_peak_flops_of_a_gpu(name: str, peak: float | None) -> None:
    assert peak_flops(name, torch.float16) == peak_flops(name, torch.bfloat16) == peak
    assert peak_flops(name, torch.float32) is None
