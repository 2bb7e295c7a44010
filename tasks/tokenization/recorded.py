"""Prepare recorded token ids, which are packed as they are.

RecordedTokens(ids, trained)  ─▶  Prepared: one segment for each id, no text, and EOS if the last id is not EOS
"""

from __future__ import annotations

import numpy as np

from tasks.conversations.model import Conversation, RecordedTokens, content_digest, whole_text
from tasks.conversations.tokens import other_tokenizer
from tasks.conversations.turn_weights import LOSS_WEIGHT
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.tokenization.frames import Prepared, Shape


def prepare_recorded(conversation: Conversation, recorded: RecordedTokens, encoder: Encoder) -> Prepared:
    """Return the sample of a record with ids.

    EOS closes a sample in a row. If the last id is another one, EOS is added, and is not trained on, because the model
    did not write it. A turn is a run of ids that are trained on, or of ids that are not. Raises Reject if the ids are
    of another tokenizer, or if none of them is trained on.
    """
    if recorded.tokenizer and (problem := other_tokenizer(recorded.tokenizer, encoder.digests())):
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
