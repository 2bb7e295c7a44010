"""Describe the figures of a manifest in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.conversations.keys.unused import OTHERS
from tasks.core.printable import common_folder, counted, printable
from tasks.storage.manifest import Manifest

WEIGHTED = {
    "data": "as in the data, by conversation or turn",
    "conversation": "the same total for every conversation",
    "both": "the same total for every conversation, times the weight in the data",
}

# Numbers of rows per optimizer step to show steps for.
BATCH_ROWS = (8, 32, 64)

# A shorter run is over before the learning rate has warmed up and decayed.
FEW_STEPS = 100


def steps_of(manifest: Manifest, split: str, batch: int) -> int:
    """Return the optimizer steps of an epoch at `batch` rows of the longest length.

    All steps have equally many tokens, so a step has more of the shorter rows.
    """
    places = manifest.splits[split].rows * manifest.length_of_split(split)
    return -(-places // (batch * manifest.sequence_length))


# For each count in the manifest's `noticed`: the noun that is counted, and its meaning.
NOTICED = {
    "control_text_seen": ("conversation", "with the name of a control token in its text: encoded as plain text"),
    "not_round_trip": ("conversation", "with ▁ (U+2581), which this tokenizer decodes to a space"),
    "unknown_tokens": ("token", "that is the unknown token: this tokenizer cannot encode these characters"),
    "unusual_order": (
        "conversation",
        "with an unusual order of roles (not system, user, assistant, user, …), which is kept",
    ),
    "empty_prompts": ("conversation", "with an answer to an empty prompt: the user message before it is blank"),
    "null_fields": (
        "field",
        "that is null in a struct of a table: left out, because a table gives every struct the keys of all rows",
    ),
    "calls_without_result": ("call", "of a tool without a result, although the conversation continues"),
    "results_without_call": ("result", "of a tool without a call before it"),
    "undefined_tools": ("conversation", "that calls a tool without a definition in its `tools`"),
    "reasoned_answers": ("trained answer", "with reasoning"),
    "empty_reasoning": (
        "trained answer",
        "without reasoning, for which the template writes an empty block of reasoning",
    ),
    "without_embedding": ("conversation", "without an embedding, which `company` cannot compare"),
}

# Maximum number of content tokens to list.
MOST_TOKENS = 12


def weighting(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the weighting of trained tokens as a list with a name and a value.

    The list is empty if all tokens weigh the same.
    """
    found = WEIGHTED.get(settings.get("loss_weight", ""))
    return [("loss weight", found)] if found else []


def content_tokens(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a printable phrase for each content token.

    For example: "<think> 12 (assistant 11, user 1)".
    """
    often = sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    lines = [
        f"{printable(token)} {sum(roles.values()):,} ({', '.join(f'{role} {n:,}' for role, n in roles.items())})"
        for token, roles in often[:MOST_TOKENS]
    ]
    return lines + [f"{len(often) - MOST_TOKENS:,} more tokens"] * (len(often) > MOST_TOKENS)


# Maximum number of unused keys to list for a source, and of sources to list.
MOST_KEYS, MOST_SOURCES = 8, 5


def unused_keys(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a printable line for each source with unused keys.

    For example: "chats.jsonl: id 998, messages[].id 4".
    """
    folder = common_folder(list(found))
    lines = []
    for source, counts in list(found.items())[:MOST_SOURCES]:
        often = sorted(counts.items(), key=lambda item: (item[0] == OTHERS, -item[1], item[0]))
        keys = [f"{key} {count:,}" for key, count in often[:MOST_KEYS]]
        rest = len(counts) - MOST_KEYS
        line = f"{source.removeprefix(folder)}: {', '.join(keys)}{f', and {rest:,} more' if rest > 0 else ''}"
        lines.append(printable(line))
    rest = len(found) - MOST_SOURCES
    return lines + [f"and in {counted(rest, 'more source')}"] * (rest > 0)


# Why a conversation is in no row, by the reason in the ledger.
DROPPED = {
    "too_long": "longer than a row",
    "min_tokens": "fewer tokens than min_tokens",
    "max_tokens": "more tokens than max_tokens",
    "min_turns": "fewer turns than min_turns",
    "max_turns": "more turns than max_turns",
    "duplicate": "duplicate of another conversation",
    "limit": "over the limit of its source",
    "weight": "left out by the weight of its source",
    "no_trained_tokens": "no token to train on",
}


def explain_samples(ledger: Mapping[str, Any]) -> str:
    """Describe the samples of a corpus whose conversations have several samples.

    `ledger` is that of a manifest, or a predicted one.
    """
    found, packed, conversations = ledger["samples"], ledger["tokens"]["packed"], ledger["conversations"]["packed"]
    repeated = found["repeated_prompt_tokens"]
    each = f"{found['packed'] / max(1, conversations):.1f} per conversation"
    share = f"{100 * repeated / max(1, packed):.1f} %"
    if apart := found.get("apart"):
        each += f" ({apart['samples'] / found['read'] * found['packed'] / max(1, conversations):.1f} with turns: apart)"
        share += f"; {100 * apart['repeated_prompt_tokens'] / max(1, apart['tokens']):.1f} % with turns: apart"
    gone = [f"{count:,} {DROPPED.get(reason, reason)}" for reason, count in found.get("dropped", {}).items()]
    return (
        f"{found['packed']:,} of {counted(found['read'], 'sample')} packed{' (' * bool(gone)}{', '.join(gone)}"
        f"{')' * bool(gone)}, {each}; {repeated:,} prompt tokens ({share}) repeat an earlier sample of the same "
        "conversation"
    )


# What settings leave out, by its name in the ledger.
LEFT_OUT = {
    "system": ("system message", "drop_roles"),
    "tool": ("result", "drop_roles"),
    "tools": ("conversation", "ignore: [tools]"),
}


def explain_left_out(left_out: Mapping[str, int]) -> str:
    """Describe what settings leave out of the context, or return nothing."""
    phrases = []
    for name, count in left_out.items():
        noun, setting = LEFT_OUT[name]
        phrases.append(f"{'the tools of ' * (name == 'tools')}{counted(count, noun)} ({setting})")
    return f"left out of the context: {', '.join(phrases)}" if phrases else ""


SHARE_NOTE = "share: of all tokens read, before the mixture"

TRAINED_TURNS = {
    "assistant": "assistant turns",
    "last": "the last assistant turn",
    "rounds": "assistant turns of the last round",
    "all": "all turns",
}


def balance_of_step(balance: Mapping[str, Any]) -> str:
    """Describe the rows of one step that `balance` is set for."""
    return f"{balance['ranks']:,} ranks with {counted(balance['rows_per_rank'], 'row')} each"
