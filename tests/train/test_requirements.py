"""Evaluation settings without an effect are an error before torch is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, process
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import PackError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus, open_corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Corpus]:
    """Corpora with and without a validation split."""
    folder = tmp_path_factory.mktemp("corpora")
    return {
        has_split: open_corpus(
            pack_corpus(make_recipe(folder / str(has_split), conversations(20), validation=0.2 if has_split else 0))
        )
        for has_split in (True, False)
    }


def check(config: TrainingConfig, corpus: Corpus) -> None:
    config.check_evaluation(corpus.name, corpus.rows("validation"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eval_every": 5}, "eval_every: 5"),
        ({"samples": 2}, "samples: 2"),
        ({"keep": "best", "eval_every": 5}, "keep: best"),
        ({"early_stopping": 3, "eval_every": 5}, "early_stopping: 3"),
    ],
)
def test_a_validation_split_is_required(corpora: dict[bool, Corpus], settings: dict[str, Any], named: str) -> None:
    config = TrainingConfig(**settings)
    check(config, corpora[True])
    with pytest.raises(PackError, match=f"^{named} requires a validation split.*`validation: 0.05`") as caught:
        check(config, corpora[False])
    assert (caught.value.code, caught.value.exit_code) == ("E646", 65)


@pytest.mark.parametrize(("settings", "named"), [({"keep": "best"}, "keep: best"), ({"early_stopping": 3}, "early_")])
def test_what_compares_evaluations_requires_several(
    corpora: dict[bool, Corpus], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(PackError, match=f"^{named}.*such as eval_every: 50") as caught:
        check(TrainingConfig(**settings), corpora[True])
    assert (caught.value.code, caught.value.exit_code) == ("E647", 64)


def test_the_defaults_require_nothing(corpora: dict[bool, Corpus]) -> None:
    for corpus in corpora.values():
        check(TrainingConfig(), corpus)


def test_the_check_is_made_before_torch_is_loaded(corpora: dict[bool, Corpus], tmp_path: Path) -> None:
    program = (
        "import sys; from packcorpus.train.__main__ import main; "
        f"code = main(['--manifest', {str(corpora[False].folder)!r}, '--base-model', 'toy', '--eval-every', '5']); "
        "print(code, 'torch' in sys.modules)"
    )
    done = process(tmp_path, sys.executable, "-c", program, PYTHONPATH=str(ROOT))
    assert done.stdout.split() == ["65", "False"], done.stderr
    assert "E646 error: eval_every: 5 requires a validation split" in done.stderr
    assert "Traceback" not in done.stderr
