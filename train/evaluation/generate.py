"""Continue a prompt greedily with a model in training, and restore the model.

    prompt ─decoder, with a cache─▶ last hidden state ─head─▶ most probable token ─▶ … until a stop token or the limit

`generate` of transformers is not used, because it follows the generation_config of a model: temperature, penalties,
minimum length. The decoder and the head are called directly, because the logits of a long prompt may not fit into
memory. A head that scales or caps its logits does not change which logit is the highest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from train.model.adapters.adapter import keep_random
from train.model.attention import BACKENDS, autocast, backend_to_load, use_attention

# Attention backends that continue a single sequence from a cache.
WITH_CACHE = ("sdpa", "eager")


@contextmanager
def generating(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Make a model in training ready for `greedy` in this context.

    Dropout and activation checkpointing are off, compiled layers run uncompiled, and a backend for packed rows is
    replaced. The mode, the backend, and the state of the random number generators are restored.
    """
    was_training, backend = model.training, model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(keep_random(model.device))
        stack.enter_context(autocast(model.device, dtype))
        if any(module._compiled_call_impl for module in model.modules()):
            # Otherwise, each length would be compiled separately.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.train, was_training)
        model.eval()
        if backend not in WITH_CACHE:
            name = next(name for name, theirs in BACKENDS.items() if theirs == backend)
            stack.callback(use_attention, model, name)
            use_attention(model, backend_to_load(model.config, "sdpa")[0])
        yield


def greedy(model: Any, prompt: Sequence[int], limit: int, stops: Collection[int]) -> list[int]:
    """Return at most `limit` tokens that follow a prompt.

    The last token is a stop token if one was reached. Call this within `generating`.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    ids, cache, found = torch.tensor([list(prompt)], device=model.device), None, list[int]()
    while len(found) < limit:
        outputs = decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        token = int(head(outputs[0][:, -1].to(head.weight.dtype)).argmax())
        found.append(token)
        if token in stops:
            break
        ids = torch.tensor([[token]], device=model.device)
    return found
