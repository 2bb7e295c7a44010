"""Load weights in 4 bits, and refuse checkpoints that cannot be trained.

    config.json ─check_stored─▶ trains, trains with a warning, or an error that says what to download instead
    checkpoint ─Nf4Quantizer─▶ linear layers and stacked experts in NF4, one tensor at a time; MXFP4 is unpacked first
    loaded model ─watch─▶ layers whose weights are read directly: such a weight stays in 16 bits
    experts in 4 bits ─QuantizedExperts─▶ the adapter of PEFT on them ─unpack_on_use─▶ bitsandbytes unpacks a layer

A stack of experts, [experts, out, in], is quantized like the weight of one linear layer. bitsandbytes unpacks the
stacks of a layer when the layer runs, so that the experts of one layer are in 16 bits at a time. Without activation
checkpointing, autograd keeps the unpacked weights of all layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper, _LoraFactorsProxy
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize
from transformers import AutoConfig, BitsAndBytesConfig, Mxfp4Config
from transformers.core_model_loading import WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from packcorpus.tasks.core.errors import DataError, PartMissing
from packcorpus.tasks.core.printable import counted
from packcorpus.train.config import TrainingConfig
from packcorpus.train.measures import ROUTING

# -- the weights of a checkpoint ---------------------------------------------------------------------------------------

# Names of `quant_method` in messages.
METHODS = {
    "fp8": "FP8", "fbgemm_fp8": "FP8", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "gptq": "GPTQ", "awq": "AWQ",
    "bitsandbytes_8bit": "int8 (bitsandbytes)", "modelopt": "the format of NVIDIA ModelOpt", "mlx": "the format of MLX",
}  # fmt: skip
# Files that name the method if config.json does not.
SIDECARS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Endings of tensors that only quantized checkpoints have.
PACKED = re.compile(r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv)?|SCB|absmax|quant_state\..*)$")
# Ends of the names of quantized copies of a model.
SUFFIX = re.compile(
    r"[-_.](bnb|unsloth|quantized|dynamic|block|torchao|ao|hqq|eetq|quanto|gguf|mlx|aqlm|autoround|auto-round|"
    r"((nv|mx)?fp|nf|int)[-_]?[48](bit)?|w\d+a\d+(fp8|kv\d+)?|[2348][-_]?bits?|gptq|awq|fp8|g\d+|\d+g|marlin)$",
    re.IGNORECASE,
)


def stored_as(config: Any) -> str:
    """Return the method in which a checkpoint is quantized; "" if it is not.

    It is `nf4`, `mxfp4`, or a method that cannot be trained.
    """
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        found = found if found is None or isinstance(found, dict) else found.to_dict()
        if found:
            break
    else:
        return "mlx" if isinstance(getattr(config, "quantization", None), dict) else ""
    method = found.get("quant_method") or ("mlx" if "group_size" in found and "bits" in found else "an unknown format")
    method = str(getattr(method, "value", method))
    if found.get("load_in_8bit"):
        return "bitsandbytes_8bit"
    if found.get("load_in_4bit") or method == "bitsandbytes":
        return str(found.get("bnb_4bit_quant_type", "fp4"))
    return method


def check_stored(base: Path | str, config: Any) -> None:
    """Raise DataError if a checkpoint is quantized in a way that cannot be trained."""
    method = stored_as(config)
    if not method and isinstance(base, Path):
        method = next((kind for name, kind in SIDECARS.items() if (base / name).is_file()), "")
    if method not in ("", "nf4", "mxfp4"):
        raise refused(base, METHODS.get(method, method.upper() if method.islower() and len(method) < 6 else method))


def refused(base: Path | str, method: str) -> DataError:
    """Return the error for weights that are quantized and cannot be trained."""
    name, former = Path(base).name, ""
    while name != former:
        name, former = SUFFIX.sub("", name), name
    # Most quantized copies are by others than the author of the model, who would not have the original.
    owner = "" if isinstance(base, Path) else base.rpartition("/")[0]
    is_author = len(owner) > 3 and owner.lower()[:4] in name.lower()
    instead = f", such as {f'{owner}/' * is_author}{name}" if name != Path(base).name else ""
    return DataError(
        "quantized_model",
        f"base_model: {base}: is stored in {method}, which cannot be trained; use the original checkpoint in 16 bits"
        f"{instead}, which is quantized when it is loaded",
    )


# -- loading -----------------------------------------------------------------------------------------------------------


def stack_of(model: Any, name: str) -> torch.Tensor | None:
    """Return a parameter if it holds a matrix for each expert of a layer."""
    module, attribute = get_module_from_name(model, name)
    weights = module._parameters.get(attribute)
    if weights is None or len(shape_of(weights)) != 3 or isinstance(module, _ConvNd):
        return None
    config = model.config.get_text_config()
    experts = {getattr(config, name, None) for name in ROUTING[1]}
    is_stack = shape_of(weights)[0] in experts or ".experts." in f".{name}"
    return weights if is_stack else None


def shape_of(weights: torch.Tensor) -> torch.Size:
    """Return the shape of weights before they were packed."""
    state = getattr(weights, "quant_state", None)
    return weights.shape if state is None else state.shape


class _Quantize(Bnb4bitQuantize):
    """Quantize the weights of linear layers and stacks of experts."""

    def convert(self, input_dict: dict[str, Any], model: Any = None, **others: Any) -> dict[str, torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        done: dict[str, torch.Tensor] = {}
        for name, values in input_dict.items():
            value = values[0] if isinstance(values, list) else values
            if stack_of(model, name) is not None:
                packed, state = quantize_4bit(
                    value.contiguous(), blocksize=64, compress_statistics=True, quant_type="nf4"
                )
                done[name] = torch.nn.Parameter(packed, requires_grad=False)
                done[name].quant_state = state
            elif Bnb4BitHfQuantizer.param_needs_quantization(self.hf_quantizer, model, name):
                done |= super().convert({name: value}, model=model, **others)
            else:
                done[name] = value
        return done


class Nf4Quantizer(Bnb4BitHfQuantizer):
    """Quantizer of transformers that also quantizes experts, and reads MXFP4."""

    def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
        if super().param_needs_quantization(model, param_name, **others):
            return True
        stack = None if self.pre_quantized else stack_of(model, param_name)
        return stack is not None and should_convert_module(param_name, self.modules_to_not_convert)

    @staticmethod
    def get_modules_to_not_convert(model: Any, skip: Any = None, fp32: Any = None, _add: bool = False) -> list[str]:
        return Bnb4BitHfQuantizer.get_modules_to_not_convert(model, skip, fp32, add_default_skips=True)

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[Any]:
        if self.pre_quantized:
            return list(super().get_weight_conversions())
        stored = Mxfp4HfQuantizer.serialized_names.items()
        return [WeightConverter(names, weight, [Mxfp4Dequantize(self)]) for weight, names in stored]


# transformers chooses the quantizer by the config, also when a merge repeats the quantization of a run.
AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = Nf4Quantizer


def nf4_of(dtype: torch.dtype, skipped: Sequence[str] = ()) -> BitsAndBytesConfig:
    """Return how the frozen weights are quantized, except `skipped`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(skipped),
    )


def how_to_load(base: Path | str, nf4: BitsAndBytesConfig | None) -> dict[str, Any]:
    """Return the arguments of from_pretrained that concern quantization."""
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    method = stored_as(config)
    if method == "nf4" and nf4 is None:
        text = f"quantization: none: {base} is stored in NF4, and its weights stay in 4 bits; set quantization: nf4"
        raise DataError("quantized_model", text)
    if method == "mxfp4" and nf4 is None:
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if method == "mxfp4":  # our quantizer reads it, one tensor at a time
        del config.quantization_config
    return {"config": config, "quantization_config": nf4}


def check_loaded(base: Path | str, loaded: dict[str, Any]) -> None:
    """Raise DataError if a checkpoint is quantized, but its config does not say so."""
    if any(PACKED.search(name) for name in loaded["unexpected_keys"]):
        raise refused(base, "a quantized format")


def require_repackable(base: Path | str, model: Any, names: Sequence[str]) -> None:
    """Raise PartMissing if a checkpoint has directly read weights in 4 bits."""
    if stored_as(AutoConfig.from_pretrained(base, trust_remote_code=False)) == "nf4":
        raise PartMissing(
            "no_nf4",
            f"base_model: {base}: is stored in NF4, but the code of a {model.config.model_type} model reads "
            f"{counted(len(names), 'weight')} directly, such as that of {names[0]}; use the original model in 16 bits",
        )


# -- experts -----------------------------------------------------------------------------------------------------------


def packed_stacks(model: Any) -> list[tuple[Any, str, torch.nn.Parameter]]:
    """Return (module, name of the parameter, packed weights) of all quantized experts."""
    from bitsandbytes.nn import Params4bit

    return [
        (module, name, weights)
        for module in model.modules()
        for name, weights in module._parameters.items()
        if hasattr(weights, "quant_state") and not isinstance(weights, Params4bit)
        if not isinstance(module, parametrize.ParametrizationList)  # it unpacks itself already
    ]


def unpack_on_use(model: Any) -> None:
    """Make quantized experts unpack themselves when they are read.

    PEFT recognizes parameters by name, so the adapter must be there before.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized

    for module, name, weights in packed_stacks(model):
        state = weights.quant_state
        replace_parameter_4bit_prequantized(module, name, state.as_dict(packed=True), weights.device)
        weights.quant_state = module.parametrizations[name][0].quant_state


def unpacked_on_use(model: Any) -> list[Any]:
    """Return the parametrizations of experts; the first step of each has the state."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    lists = [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]
    return [steps for steps in lists if isinstance(steps[0], Bnb4bitParametrization)]


class QuantizedExperts(ParamWrapper):
    """Adapter of PEFT on the experts of a layer, whose weights are in 4 bits.

    With a parameter that is parametrized already, PEFT's own class caches the weights without the adapter of the inner
    of two parameters, whose adapter then has no effect and no gradient, and it never removes its parametrization.
    """

    def get_param(self) -> torch.Tensor:
        """Return a tensor with the shape, precision, and device of the unpacked weights."""
        module, name = self.get_base_layer(), self.parameter_name
        if parametrize.is_parametrized(module, name):
            steps = module.parametrizations[name]
            packed, state = steps.original, steps[0].quant_state
        else:
            packed = module._parameters[name]
            state = packed.quant_state
        return torch.empty((), dtype=state.dtype, device=packed.device).expand(state.shape)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        steps = self.get_base_layer().parametrizations[self.parameter_name]
        names = [name for name in active_adapters if name in self.lora_A]
        for name in names:
            steps.append(_LoraFactorsProxy(*self.get_delta_factors(name)))
        try:
            with parametrize.cached():
                yield
        finally:
            del steps[len(steps) - len(names) :]


# PEFT recognizes the class by its name.
QuantizedExperts.__name__ = "ParamWrapper"


def use_quantized_experts(model: Any, lora: Any) -> None:
    """Make PEFT adapt experts that are in 4 bits with QuantizedExperts."""
    if kinds := {type(module) for module, _, _ in packed_stacks(model)}:
        lora._register_custom_module(dict.fromkeys(kinds, QuantizedExperts))


def check_experts(model: Any) -> None:
    """Raise DataError if experts in 4 bits have an adapter that would be ignored."""
    for name, module in model.named_modules():
        is_naive = isinstance(module, ParamWrapper) and not isinstance(module, QuantizedExperts)
        if is_naive and parametrize.is_parametrized(module.get_base_layer(), module.parameter_name):
            raise DataError("wrong_weights", f"{name}: an adapter on experts in NF4 would be ignored")


def unpack_in_passes(module: Any, name: str) -> list[Any]:
    """Make one stack of experts unpack itself once per pass; return its hooks."""
    from bitsandbytes.nn import parametrize as bnb

    state = module._parameters[name].quant_state
    parametrize.register_parametrization(module, name, bnb.Bnb4bitParametrization(state), unsafe=True)
    return [
        module.register_forward_pre_hook(bnb._enable_parametrization_cache),
        module.register_forward_hook(bnb._disable_parametrization_cache, always_call=True),
    ]


@contextmanager
def _unpacked(model: Any) -> Iterator[None]:
    """Make quantized experts unpack themselves in this context."""
    stacks = packed_stacks(model)
    handles = [handle for module, name, _ in stacks for handle in unpack_in_passes(module, name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, name, _ in stacks:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def described(base: Path | str, model: Any, config: TrainingConfig) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the weights of a loaded model."""
    method, notes, warnings = stored_as(AutoConfig.from_pretrained(base, trust_remote_code=False)), [], []
    if method == "mxfp4":
        now = "quantized to NF4" if config.quantization == "nf4" else "in 16 bits"
        notes.append(f"quantization: {base} is stored in MXFP4; its experts were unpacked, and are {now}")
    if method == "nf4":
        warnings.append(
            f"{base} is stored in NF4: the adapter can be used with it, but not merged into it; to merge, train on the "
            "original checkpoint in 16 bits"
        )
    if unused := model.get_base_model().unused_weights:
        kind = type(model.get_base_model()).__name__
        warnings.append(
            f"{base}: {kind} does not use {counted(len(unused), 'weight')} of the checkpoint, such as {unused[0]}; if "
            "its config.json was edited, copy the original"
        )
    if names := model.get_base_model().in_16_bits:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        notes.append(
            f"quantization: {counted(len(names), 'layer')} ({kinds}) {'is' if len(names) == 1 else 'are'} not "
            f"quantized, because the code of {model.config.model_type} models reads their weights directly"
        )
    return notes, warnings


# -- weights that are read directly ------------------------------------------------------------------------------------

TOKENS = 8


def watch(model: Any, run: Callable[[torch.Tensor], Any]) -> list[str]:
    """Run a pass, and return the names of layers whose packed weight is read directly.

    Such a weight must stay in 16 bits. An adapter would be ignored if the layer itself never runs, or would be wrong if
    it is not a linear function of its input; `no_adapter` is set on such layers, which `adaptable` reads. The pass may
    fail after it has read packed weights.
    """
    head = model.get_output_embeddings()
    layers = {module: name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    layers.pop(head, None)
    kinds = {layer: type(layer) for layer in layers}
    read, ran, inside, unlike = set[Any](), set[Any](), set[Any](), set[Any]()

    def watched(kind: Any) -> type:
        class Watched(kind):
            def __getattr__(self, name: str) -> Any:
                if name == "weight" and self not in inside:
                    read.add(self)
                return super().__getattr__(name)

            def __call__(self, *inputs: Any, **named: Any) -> Any:
                inside.add(self)
                ran.add(self)
                try:
                    out = super().__call__(*inputs, **named)
                    if kind.forward is not torch.nn.Linear.forward and not _is_linear(self, inputs, out):
                        unlike.add(self)
                    return out
                finally:
                    inside.discard(self)

        return Watched

    classes = {kind: watched(kind) for kind in set(kinds.values())}
    ids = torch.arange(TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    try:
        for layer, kind in kinds.items():
            layer.__class__ = classes[kind]
        with torch.no_grad(), _unpacked(model):
            run(ids)
    except Exception:  # noqa: S110 - each model fails in its own way; a pass of training reports it
        pass
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind

    def alike(chosen: set[Any]) -> set[Any]:
        """Add the same layers of other parts, which the pass may not have reached."""
        places = {_place(model, layers[layer]) for layer in chosen}
        return {layer for layer, name in layers.items() if _place(model, name) in places}

    for layer in alike((read - ran) | unlike):
        layer.no_adapter = True
    return sorted(layers[layer] for layer in alike(read) if hasattr(layer.weight, "quant_state"))


@contextmanager
def unpacked_layers(model: Any) -> Iterator[None]:
    """Make linear layers in 4 bits plain ones of the same values in this context."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    def weight(layer: Any) -> torch.Tensor:
        packed = layer._parameters["weight"]
        state = getattr(packed, "quant_state", None)
        return packed if state is None else dequantize_4bit(packed.data, state)

    plain = type("Unpacked", (torch.nn.Linear,), {"weight": property(weight)})
    kinds = {layer: type(layer) for layer in model.modules() if isinstance(layer, Linear4bit)}
    try:
        for layer in kinds:
            layer.__class__ = plain
        yield
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind


def _place(model: Any, name: str) -> tuple[type, str]:
    parent, _, attribute = name.rpartition(".")
    return type(model.get_submodule(parent)), attribute


def _is_linear(layer: Any, inputs: tuple[Any, ...], out: Any) -> bool:
    """Return whether the output is the product of the input with the weight."""
    if not inputs or hasattr(layer.weight, "quant_state") or isinstance(layer, Conv1D):
        return True
    [x, *_] = inputs
    expected = torch.nn.functional.linear(x.to(layer.weight.dtype), layer.weight, layer.bias)
    is_alike = isinstance(out, torch.Tensor) and out.shape == expected.shape
    return is_alike and torch.allclose(out.to(expected), expected, rtol=0.1, atol=0.01)
