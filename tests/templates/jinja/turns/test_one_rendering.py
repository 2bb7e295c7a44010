"""`turns: as_rendered` trains all turns of one rendering, with its tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reference.renderings import turns_in_chatml
from support.differential.agent_sessions import session
from support.packed_rows import folder_of
from support.profiles import examples
from support.small_corpus import make_recipe, pack_corpus
from support.templates.agent_templates import AGENTS
from support.templates.modern_templates import MODERN, STRIPPED, STRIPS
from support.tokenizer_kinds import kind_path, open_kind
from templates.jinja.turns.test_cover import CONSTANTS, SOURCES, TODAY, Counted, engines_of

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.corpus.summary import explain_as_rendered, explain_losses
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.templates.jinja.rendering import Job, Rendering
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Sample, trained_turns
from packcorpus.tasks.tokenization.samples import segments_of
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

transformers = pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")
KIND = "hf_byte_level"
# Templates that write every turn of an assistant between its header and its end token.
CHATML = {name: MODERN[name] for name in ("reasoning stripped from history", "empty block in the last turn")}
CHATML |= {name: AGENTS[name] for name in ("after the last user message", "until the final answer", "kept")}
CHATML |= {"reasoning of the last task": STRIPS, "history trimmed": MODERN["history trimmed"]}


@lru_cache
def library() -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(kind_path(KIND)))


def template_of(source: str) -> JinjaTemplate:
    return JinjaTemplate("t.jinja", source, open_kind(KIND), "assistant", "2026-01-01", "as_rendered")


def tokens_of(sample: Sample) -> tuple[list[int], list[bool]]:
    """Return the ids of a sample without an added EOS, and which are trained on."""
    encoder = open_kind(KIND)
    tokens, flags, texts, separator = segments_of(sample.spans, encoder)
    ids, trained, remaining = [], [], iter(texts)
    for token, flag in zip(tokens, flags, strict=True):
        part = [token] if token >= 0 else encoder.encode([next(remaining)]).ids.tolist()
        ids += part
        trained += [flag] * len(part)
    return (ids[:-1], trained[:-1]) if separator else (ids, trained)


def trained_texts(ids: Sequence[int], trained: Sequence[bool]) -> list[str]:
    """Return the text of each run of trained tokens."""
    edges = [0, *(n + 1 for n, (one, other) in enumerate(pairwise(trained)) if one != other), len(ids)]
    return [open_kind(KIND).decode(list(ids[one:other])) for one, other in pairwise(edges) if trained[one]]


@pytest.mark.parametrize("name", CHATML)
def test_tokens_are_those_of_transformers_and_labels_those_of_the_turns(name: str) -> None:
    template = template_of(CHATML[name])

    @settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.randoms(use_true_random=False))
    @example([2, 2], random.Random(1))
    @example([0, 0, 0], random.Random(2))
    def check(sizes: list[int], draw: random.Random) -> None:
        messages = session(sizes, draw)
        conversation = read_record({"messages": messages}, "messages")
        [found] = template.all_samples([(conversation, trained_turns(conversation, "assistant"))])
        if isinstance(found, Exception):  # calls or results that the template does not write
            assert "cannot be located" not in str(found)
            return
        [sample] = found
        assert sample.turn is None
        said = template.expected_messages(conversation)
        text = library().apply_chat_template(said, chat_template=CHATML[name], tokenize=False)
        ids, trained = tokens_of(sample)
        assert ids == library().encode(text, add_special_tokens=False)
        written = [turn for turn in turns_in_chatml(text) if turn != "<|im_end|>"]
        # A token may join the line break of a header with one of the content; it is not trained on.
        assert [found.strip() for found in trained_texts(ids, trained)] == [turn.strip() for turn in written]

    check()


@pytest.mark.parametrize("name", SOURCES)
def test_few_renderings_find_what_all_renderings_find(name: str) -> None:
    engines = engines_of(SOURCES[name])

    @settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.randoms(use_true_random=False))
    @example([6, 6], random.Random(1))
    def check(sizes: list[int], draw: random.Random) -> None:
        messages = session(sizes, draw)
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        job = Job(messages, None, False, turns, "as_rendered", "", "both")
        few, [every] = engines._fast_rendering(job), engines.renderer.render_all([job])
        if few and few.lost and isinstance(every, Rendering) and every.lost:
            return  # it is rejected; which of several turns is named depends on the order of renderings
        assert few is None or str(few._replace(marks=[])) == str(every)

    check()


def test_the_number_of_renderings_does_not_grow_with_the_turns() -> None:
    counts = []
    for size in (40, 160):
        source = SOURCES["after the last user message"]
        engines = engines_of(source)
        engines._fast = Counted(source, CONSTANTS, TODAY)
        messages = session([size, 1], random.Random(5))
        for message in messages:  # of one kind
            message.update({"content": "be"})
            if message["role"] == "assistant":
                message.update({"reasoning_content": "since"})
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        found = engines._fast_rendering(Job(messages, None, False, turns, "as_rendered", "", "minijinja"))
        assert found is not None
        assert found.lost is None
        counts.append(engines._fast.count)
    assert counts[1] <= counts[0] + 2 < 40, "only a binary search takes more renderings"


RECORD = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d", "reasoning_content": "e f g"},
        {"role": "user", "content": "h i"},
        {"role": "assistant", "content": "j k", "reasoning_content": "l m"},
    ]
}
REASONING_ONLY = {
    "messages": [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "", "reasoning_content": "e f g"},
        *RECORD["messages"][2:],
    ]
}


@pytest.mark.parametrize("overlong", ["truncate", "turns"])
@pytest.mark.parametrize("loss_weight", ["none", "data"])
def test_a_corpus_counts_what_differs_from_inference(tmp_path: Path, overlong: str, loss_weight: str) -> None:
    (tmp_path / "t.jinja").write_text(STRIPPED)
    settings = {"template": "t.jinja", "tokenizer": str(kind_path(KIND)), "turns": "as_rendered", "overlong": overlong}
    settings |= {"loss_weight": loss_weight, "default_system": "Be brief.", "sequence_length": 128}
    recipe = make_recipe(tmp_path, [RECORD, RECORD, REASONING_ONLY], **settings)
    path = pack_corpus(recipe)
    verify(path)
    assert rebuild(path).endswith(": identical")
    ledger = load_manifest(path).ledger
    assert ledger.samples is None
    assert ledger.as_rendered is not None
    reasoning = len(open_kind(KIND).encode(["e f g"]).ids)
    assert ledger.as_rendered.model_dump() == {
        "other_prompts": 0,
        "other_answers": 3,
        "without_reasoning": 3,
        "unwritten_tokens": 3 * reasoning,
    }
    lost = f"lost: the reasoning of 3 trained answers, {3 * reasoning} tokens (turns: as_rendered)"
    assert lost in explain_losses(ledger)
    [line] = explain_as_rendered(ledger)
    assert f"3 answers without their reasoning ({3 * reasoning} tokens not written)" in line
    assert predict(recipe.config, tmp_path, tmp_path).ledger == ledger
    assert (folder_of(path) / "index.arrow").exists()


def test_reasoning_that_no_turn_has_is_rejected_as_ever() -> None:
    conversation = read_record(RECORD, "messages")
    with pytest.raises(Reject) as caught:
        template_of(STRIPPED.replace("loop.last and m.reasoning_content", "false")).samples(
            conversation, trained_turns(conversation, "assistant")
        )
    assert caught.value.reason == "reasoning_not_written"


@pytest.mark.parametrize("train_on", ["assistant", "last", "rounds", "all"])
def test_one_sample_with_any_trained_turns(tmp_path: Path, train_on: str) -> None:
    (tmp_path / "t.jinja").write_text(STRIPPED)
    settings = {"template": "t.jinja", "tokenizer": str(kind_path(KIND)), "turns": "as_rendered", "train_on": train_on}
    path = pack_corpus(make_recipe(tmp_path, [RECORD], sequence_length=128, **settings))
    verify(path)
    ledger = load_manifest(path).ledger
    assert ledger.samples is None
    assert ledger.as_rendered is not None
    assert ledger.as_rendered.without_reasoning == (train_on in ("assistant", "all"))


def test_the_built_in_mistral_writes_one_sample(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"{role} text"} for role in ("system", "user", "assistant", "user", "assistant")]
    ledgers = {}
    for value in ("auto", "as_rendered"):
        recipe = make_recipe(
            tmp_path / value, [{"messages": turns}], template="mistral", turns=value, unknown_markers="text"
        )
        ledgers[value] = load_manifest(pack_corpus(recipe)).ledger
    assert ledgers["auto"].samples is not None
    assert ledgers["as_rendered"].samples is None
    assert ledgers["as_rendered"].as_rendered is not None
    assert ledgers["as_rendered"].as_rendered.other_prompts == 1, "the system message is in the last request"
    assert ledgers["as_rendered"].as_rendered.other_answers == 0
