"""`overlong: split` cuts between turns, and keeps every trained token that fits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import EOS, make_recipe, pack_corpus

from packcorpus.tasks.packing.pieces import Cut, cut_between_turns
from packcorpus.tasks.packing.turn_marks import TurnMarks, marks_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

BOS, START, USER, RESULT, SYSTEM, SPACE = 1, 3, 4, 5, 6, 7
ENCODER: Any = SimpleNamespace(bos_id=BOS, eos_id=EOS, token_bytes=lambda token: b" \n" if token == SPACE else b"x")
MARKS = TurnMarks(ENCODER, (START, USER), (START, USER, RESULT))


class Turn(NamedTuple):
    """The tokens of a message of the user, or of a result, and of its answer."""

    is_result: bool
    prompt: int
    answer: int
    is_trained: bool = True


class Said(NamedTuple):
    """A conversation as numbers, and where it may be cut."""

    values: list[int]
    opening: int  # tokens before the first message of the user
    rounds: list[int]  # offsets of messages of the user
    turns: list[int]  # ends of trained turns


def said(bos: bool, system: int, turns: list[Turn]) -> Said:
    values: list[int] = [~BOS] * bos
    if system:
        values += [~START, ~SYSTEM, *[~20] * system, ~EOS, ~SPACE]
    opening, rounds, ends = len(values), [], []
    for number, turn in enumerate(turns):
        if turn.is_result and number:
            values += [~START, ~USER, ~RESULT]
        else:
            rounds.append(len(values))
            values += [~START, ~USER]
        values += [*[~(30 + number)] * turn.prompt, ~EOS, ~SPACE, ~START, ~8]
        answer = [*[60 + number] * turn.answer, EOS]
        values += answer if turn.is_trained else [~value for value in answer]
        values.append(~SPACE)
        ends += [len(values)] * turn.is_trained
    return Said(values, opening, rounds, ends)


turns_of = st.lists(
    st.builds(Turn, st.booleans(), st.integers(1, 25), st.integers(1, 25), st.sampled_from([True, True, False])),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.booleans(), st.integers(0, 12), turns_of, st.integers(16, 60))
def test_nothing_that_fits_is_lost_and_pieces_begin_where_turns_do(
    bos: bool, system: int, turns: list[Turn], length: int
) -> None:
    conversation = said(bos, system, turns)
    values, opening, rounds, ends = conversation
    cuts = cut_between_turns(np.array(values, np.int32), length, MARKS)
    repeated = opening if opening <= length // 2 else int(bos)
    at = 0
    for cut in cuts:
        assert cut.first >= at, "pieces are in order and do not overlap"
        at = end = cut.first + cut.taken
        assert cut.repeated == (repeated if cut.first else 0)
        assert cut.repeated + cut.taken + cut.closed <= length
        assert cut.trained == sum(value >= 0 for value in values[cut.first + 1 : end]) > 0
        last = next(value for value in reversed(values[:end]) if value != ~SPACE)
        assert cut.closed == (end < len(values) and last not in (EOS, ~EOS)), "a row needs EOS after each piece"
    assert at <= len(values)

    # The same in plain Python: what cannot be kept, and where a piece may begin.
    room = length - repeated - 1
    starts = [start for start in rounds if start > repeated]
    stretches = [*zip([0, *starts], [*starts, len(values)], strict=True)]
    short = [(first, end) for first, end in stretches if end - first <= (room if first else length - 1)]
    lost = [
        n for n, value in enumerate(values) if value >= 0 and not any(c.first < n < c.first + c.taken for c in cuts)
    ]
    assert not [n for n in lost if any(first <= n < end for first, end in short)], "trained tokens that fit are kept"
    for cut in cuts:
        if cut.first in (0, *starts):
            assert not cut.inside
            continue
        [within] = [(first, end) for first, end in stretches if first < cut.first < end]
        assert within not in short, "what fits in a row is not cut"
        edges = [within[0], *(end for end in ends if within[0] < end < within[1]), within[1]]
        assert cut.inside == (cut.first not in edges)
        if cut.inside:
            [turn] = [pair for pair in pairwise(edges) if pair[0] < cut.first < pair[1]]
            assert turn[1] - turn[0] > (room if turn[0] else length - 1), "a turn that fits in a row is not cut"
    assert len(lost) <= sum(cut.inside for cut in cuts), "only the first token of a piece within a turn is lost"


def test_a_piece_without_a_trained_turn_gives_its_place_to_context() -> None:
    asked = [Turn(False, 5, 5, is_trained=False)] * 5 + [Turn(False, 5, 5)]
    values, _, rounds, _ = said(True, 2, asked)
    [cut] = cut_between_turns(np.array(values, np.int32), 60, MARKS)
    assert (cut.first, cut.repeated, cut.first + cut.taken) == (rounds[4], 7, len(values)), "two rounds fit"


def test_an_answer_that_fits_stays_whole_with_the_end_of_its_prompt() -> None:
    values, opening, rounds, _ = said(True, 2, [Turn(False, 4, 4), Turn(False, 80, 20)])
    first, second = cut_between_turns(np.array(values, np.int32), 40, MARKS)
    assert first == Cut(0, rounds[1], False, 5)
    assert second == Cut(len(values) - (40 - opening - 1), 32, False, 21, repeated=7, inside=True)


def test_everything_trained_is_cut_between_messages_of_the_user() -> None:
    values, opening, rounds, _ = said(True, 2, [Turn(False, 5, 5)] * 4)
    trained = np.array([value ^ (value >> 31) for value in values], np.int32)
    marks = TurnMarks(ENCODER, MARKS.user, MARKS.result, trains_all=True)
    cuts = cut_between_turns(trained, 48, marks)
    assert [(cut.first, cut.repeated) for cut in cuts] == [(0, 0), (rounds[2], opening)]
    assert sum(cut.trained for cut in cuts) == len(values) - 2


def test_without_marks_pieces_begin_after_trained_turns() -> None:
    values, _, _, ends = said(True, 2, [Turn(False, 5, 5)] * 4)
    cuts = cut_between_turns(np.array(values, np.int32), 48, TurnMarks(ENCODER))
    assert [(cut.first, cut.repeated, cut.inside) for cut in cuts] == [(0, 0, False), (ends[1], 1, False)]


SYSTEM_TEXT = "You answer with numbers."
RECORDS = [
    {
        "messages": [
            {"role": "system", "content": SYSTEM_TEXT},
            *(
                {"role": role, "content": f"{text} {n} and {n}?"}
                for n in range(30)
                for role, text in (("user", "What is"), ("assistant", "It is twice"))
            ),
        ]
    }
] * 3 + [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 200}]}]


@pytest.mark.parametrize(("template", "begin"), [("chatml", "<|im_start|>user"), ("llama2", "<s>"), ("alpaca", "")])
def test_marks_are_where_messages_of_the_user_begin(tmp_path: Path, template: str, begin: str) -> None:
    recipe = make_recipe(tmp_path, RECORDS, template=template)
    marks = marks_of(recipe.template, recipe.encoder, False)
    assert recipe.encoder.decode(marks.user).startswith(begin)
    assert bool(marks.user) == bool(begin)


def test_results_of_tools_do_not_begin_a_piece(tmp_path: Path) -> None:
    template = """{% for m in messages %}<|im_start|>{% if m.role == "tool" %}user
=result= {{ m.content }}{% else %}{{ m.role }}
{% for call in m.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{{ m.content }}
{%- endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    (tmp_path / "own.jinja").write_text(template)
    recipe = make_recipe(tmp_path, RECORDS, template="own.jinja")
    marks = marks_of(recipe.template, recipe.encoder, False)
    assert recipe.encoder.decode(marks.user) == "<|im_start|>user"
    assert "=result=" in recipe.encoder.decode(marks.result)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_corpus_of_split_conversations(tmp_path: Path, train_on: str) -> None:
    given_: dict[str, Any] = {"sequence_length": 128, "loss_weight": "both", "epochs": 2, "validation": 0.3}
    given_ |= {"train_on": train_on}
    path = pack_corpus(make_recipe(tmp_path, RECORDS, **given_))
    verify(path)
    manifest = load_manifest(path)
    pieces, tokens = manifest.ledger.pieces, manifest.ledger.tokens
    assert manifest.config["split_at"] == "turns"
    assert (tokens.truncated, tokens.dropped, manifest.ledger.conversations.split) == (0, 0, 4)
    with pa.memory_map(str(path.parents[1] / manifest.corpus / "index.arrow")) as file:
        index = pa.ipc.open_stream(file).read_all().to_pylist()
    first = [entry for entry in index if entry["split"] in ("train", "validation")]
    assert pieces.later == sum(entry["first"] > 0 for entry in first) > 0
    assert pieces.repeated_tokens == sum(entry["repeated"] for entry in first) > 0
    assert pieces.inside == sum(entry["first"] > 0 for entry in first if entry["record"] == 4) > 0
    rows = {}
    for split, facts in manifest.splits.items():
        for number, shard in enumerate(facts.shards):
            with pa.memory_map(str(path.parents[1] / manifest.corpus / shard.path)) as file:
                rows[split, number] = pa.ipc.open_stream(file).read_all().to_pylist()
    begins = {}
    for entry in index:
        row = rows[entry["split"], entry["shard"]][entry["row"]]
        ids, labels = (row[name][entry["start"] :][: entry["length"]] for name in ("input_ids", "labels"))
        opening, own = entry["repeated"], slice(entry["repeated"], entry["repeated"] + 3)
        assert labels[: opening + 1] == [-100] * (opening + 1), "what is repeated is not trained on again"
        if entry["record"] < 4:
            begins.setdefault(entry["first"] > 0, set()).add((*ids[:opening], *ids[own]))
    whole, later = begins[False], begins[True]
    assert len(later) == 1, "each later piece begins with the system message and a message of the user"
    assert {ids[: len(next(iter(whole)))] for ids in later} == whole, "as the whole conversation does"
    assert rebuild(path).endswith("identical")


def test_earlier_corpora_were_cut_at_any_token(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS, sequence_length=128, split_at="tokens"))
    manifest = load_manifest(path)
    assert "split_at" not in manifest.config, "their manifests do not have the setting"
    assert (manifest.ledger.pieces.later, manifest.ledger.tokens.repeated) == (None, 0)
    verify(path)
    assert rebuild(path).endswith("identical")
