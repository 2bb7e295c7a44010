"""Any folder of a tokenizer gives the ids of AutoTokenizer, or is refused.

model × class × files next to it × chat template ─┬─ refused with a code
                                                  └─ samples ─▶ ids of apply_chat_template, turn by turn
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.differential.auto_tokenizers import CHANGES, CLASSES, added, write_folder, write_json
from support.differential.composed_tokenizers import COMPOSED, NAMED
from support.differential.like_inference import TEMPLATES, Pair, compare, conversations, opened
from support.profiles import examples

STRINGS = (
    "<a>",
    "<ab>",
    "<|im_start|>",
    "<|im_end|>",
    "The",
    " the",
    "</s>",
    "<think>",
    "</think>",
    "[INST]",
    "é",
    "\n",
)
MODELS = (
    "llama",
    "qwen2",
    "qwen3_5",
    "mistral",
    "gpt2",
    "gemma3_text",
    "phi3",
    "cohere",
    "olmo",
    "granite",
    "new_type",
)
CONVERSATIONS = 12

FLAGS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), st.booleans())
)
TOKENS = st.sampled_from(STRINGS)


class Case(NamedTuple):
    """A case has the parts of a folder, and the seed of the conversations.

    `by_id` is the value of added_tokens_decoder, or None. `config` has other settings of tokenizer_config.json, and
    `files` the values of further files.
    """

    kind: str
    class_name: str
    change: str
    template: str
    by_id: dict[int, tuple[str, dict[str, bool]]] | None
    config: dict[str, Any]
    files: dict[str, dict[str, Any]]
    seed: int


def cases() -> st.SearchStrategy[Case]:
    config = st.fixed_dictionaries(
        {},
        optional={
            "extra_special_tokens": st.lists(TOKENS, max_size=3, unique=True),
            "add_prefix_space": st.booleans(),
            "legacy": st.booleans(),
            "add_bos_token": st.booleans(),
            "pad_token": TOKENS,
            "image_token": TOKENS,
        },
    )
    files = st.fixed_dictionaries(
        {},
        optional={
            "config.json": st.fixed_dictionaries({"model_type": st.sampled_from(MODELS)}),
            "added_tokens.json": st.dictionaries(TOKENS, st.integers(0, 600), max_size=2),
            "special_tokens_map.json": st.fixed_dictionaries({}, optional={"eos_token": TOKENS, "sep_token": TOKENS}),
        },
    )
    some = st.dictionaries(st.integers(0, 600), st.tuples(TOKENS, FLAGS), max_size=3)
    usual = st.just("nothing")
    return st.builds(
        Case, st.sampled_from(list(COMPOSED)), st.sampled_from(list(CLASSES)), usual | st.sampled_from(list(CHANGES)),
        st.sampled_from(list(TEMPLATES)), st.none() | some, st.just({}) | config, st.just({}) | files,
        st.integers(0, 999),
    )  # fmt: skip


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_random_folders_"))
    return Path(_KEPT[-1].name) / "tokenizer"


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def folder_of(case: Case) -> Path:
    """Write the folder of a case."""
    class_name, options = CLASSES[case.class_name]
    more = NAMED | options | case.config | {"chat_template": TEMPLATES[case.template]}
    if case.by_id is not None:
        more["added_tokens_decoder"] = {str(n): added(content, **flags) for n, (content, flags) in case.by_id.items()}
    place = write_folder(_place(), case.kind, case.change, class_name, settings=more)
    for name, values in case.files.items():
        write_json(place, name, values)
    return place


def check(case: Case) -> str:
    """Check that a folder is refused or loaded like by AutoTokenizer.

    Returns the outcome.
    """
    pair = opened(folder_of(case))
    if not isinstance(pair, Pair):
        return f"refused: {pair.reason}"
    words = [*pair.encoder.content_tokens] or [""]
    some = [
        messages
        for messages in conversations(random.Random(case.seed), CONVERSATIONS, words)
        if not pair.encoder.holding([message["content"] for message in messages])
    ]
    # A control token of white space looks like the white space after an answer.
    if not some or any(token.isspace() for token in pair.auto.all_special_tokens):
        return "nothing to compare"
    tally = compare(pair, some)
    assert not tally.wrong, tally.wrong[0]
    return "equal" if tally.outcomes["equal"] else "nothing to compare"


# An added token that absorbs the white space before an answer changes the prompt of the next answer.
ABSORBING = {600: ("</think>", {"lstrip": True})}
# A control token of letters, which are also in the keys of messages.
WORD = {"special_tokens_map.json": {"eos_token": "The"}}


# An added token that the library matches only between words.
SINGLE = {0: ("</s>", {"lstrip": False, "special": False, "single_word": True})}


@settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
@example(Case("byte-level", "as it is", "nothing", "chatml", ABSORBING, {}, {}, 0))
@example(Case("byte-level", "as it is", "nothing", "chatml", None, {}, WORD, 0))
@example(Case("byte-level", "as it is", "nothing", "joined", SINGLE, {}, {}, 0))
@given(cases())
def test_samples_of_any_folder_have_the_ids_of_auto_tokenizer(case: Case) -> None:
    check(case)


def test_a_refusal_names_the_way_out() -> None:
    place = folder_of(Case("Unigram", "T5", "nothing", "chatml", None, {}, {}, 0))
    refused = opened(place)
    assert not isinstance(refused, Pair)
    assert f"`tokenizer: {{path: {place}, as: files}}`" in str(refused)
    assert json.loads((place / "tokenizer_config.json").read_bytes())["tokenizer_class"] == "T5Tokenizer"
