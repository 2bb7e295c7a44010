"""Prepare recorded token ids, which are packed as they are.

RecordedTokens(ids, trained)  ─▶  Prepared: one segment for each id, no text, and EOS if the last id is not EOS
"""

from __future__ import annotations

import numpy as np

from tasks.conversations.keys.loss_weights import LOSS_WEIGHT
from tasks.conversations.model import Conversation, RecordedTokens, content_digest, whole_text
from tasks.conversations.traces.tokens import TOKENIZER
from tasks.core.errors import Reject, UsageError
from tasks.encoders.encoder import Encoder
from tasks.sources.model import SourceFile
from tasks.tokenization.frames import Prepared, Shape


def check_recorded(file: SourceFile, encoder: Encoder, packing: bool) -> None:
    """Raise PackError if the recorded ids of a file cannot be packed with this config."""
    if not packing:
        raise UsageError(
            "bad_setting",
            f"{file.name}: has recorded token ids, but with packing: false a row holds text; set packing: true, or "
            "leave the source out",
        )
    if file.tokenizer_sha256 and (problem := _other_tokenizer(file.tokenizer_sha256, encoder)):
        raise UsageError("bad_setting", f"{file.name}: {problem}")


def _other_tokenizer(digest: str, encoder: Encoder) -> str:
    """Return the problem if ids were recorded with another tokenizer, or ""."""
    known = encoder.digests()
    if digest in known:
        return ""
    ours = " or ".join(sorted(known))
    advice = "set tokenizer to the one that recorded the ids"
    return f"{TOKENIZER} is {digest}, but the tokenizer of the config has {ours}; {advice}"


def prepare_recorded(conversation: Conversation, recorded: RecordedTokens, encoder: Encoder) -> Prepared:
    """Return the sample of a record with ids. Raises Reject.

    EOS closes a sample in a row. If the last id is another one, EOS is added, and is not trained on: the model did not
    write it. A turn is a run of ids that are trained on, or are not.
    """
    if recorded.tokenizer and (problem := _other_tokenizer(recorded.tokenizer, encoder)):
        raise Reject("bad_ids", problem)
    highest = max(recorded.ids)
    if highest >= encoder.vocab_size:
        place = recorded.ids.index(highest)
        raise Reject(
            "bad_ids",
            f"id {highest:,} at place {place:,} is not in the vocabulary of {encoder.vocab_size:,} ids; was another "
            "tokenizer used?",
        )
    if not any(recorded.trained[1:]):
        raise Reject("no_trained_tokens", "its mask has no id to train on after the first one")
    separator = recorded.ids[-1] != encoder.eos_id
    tokens, trained = [*recorded.ids], [*recorded.trained]
    if separator:
        tokens.append(encoder.eos_id)
        trained.append(False)
    shape = Shape(
        tokens=np.array(tokens, np.int32),
        trained=np.array(trained, bool),
        separator=separator,
        usual=True,
        turns=1 + int(np.count_nonzero(np.diff(np.array(recorded.trained, np.int8)))),
    )
    weight = conversation.messages[0].loss_weight
    if weight == 0.0:
        raise Reject("no_trained_tokens", f"none of its ids is trained on: {LOSS_WEIGHT} is 0")
    weights = [(0, weight)] if isinstance(weight, float) else []
    return Prepared(shape, b"", (), content_digest(whole_text(conversation).encode()), weights=weights, separate=[])
