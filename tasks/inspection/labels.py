"""Name the figures of a manifest for people."""

from __future__ import annotations

BATCH_ROWS = (8, 32, 64)


# Below this a run is over before the learning rate has warmed up and come down again.
FEW_STEPS = 100


# Counts of the manifest's `noticed`: what is counted, and what it means.
NOTICED = {
    "control_text_seen": ("conversation", "with the name of a control token in what is said: encoded as plain text"),
    "not_round_trip": ("conversation", "with ▁ (U+2581), which this tokenizer takes for a space: decodes to a space"),
    "unknown_tokens": ("token", "that only stands for the unknown: this tokenizer cannot write these characters"),
    "unusual_order": ("conversation", "not in the order system, user, assistant, user, …: taken as it is"),
}


LOST = {
    "too_long": "longer than a row",
    "min_tokens": "fewer tokens than min_tokens",
    "max_tokens": "more tokens than max_tokens",
    "min_turns": "fewer turns than min_turns",
    "max_turns": "more turns than max_turns",
    "duplicate": "says what another says",
    "limit": "over the limit of its source",
    "weight": "by the weight of its source",
    "no_trained_tokens": "no token to train on",
}


BEFORE_MIXTURE = "share: of the tokens that were read, before the mixture"


TRAINED_TURNS = {"assistant": "assistant turns", "last": "the last assistant turn", "all": "all turns"}
