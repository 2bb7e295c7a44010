"""Certify raises no alarm on sound runs of several tokenizers and templates.

bench/reliability/certify.py has the same for 32 architectures.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.training.served_runs import CORPORA, SOUND, make_corpus, make_run

from packcorpus.train.certify.command import certify, main


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


CHOSEN = dict(zip(("gpt2", "qwen3_moe", "gemma2", "mixtral", "phi3", "deepseek_v3"), CORPORA, strict=True))


@pytest.mark.parametrize("architecture", CHOSEN)
def test_a_sound_run_has_no_fault(architecture: str, tmp_path: Path) -> None:
    assert architecture in SOUND
    manifest = make_corpus(tmp_path, *CHOSEN[architecture])
    served = make_run(tmp_path, tmp_path, manifest, architecture)
    findings = certify(served.subject())
    assert [each for each in findings if each.result == "FAULT"] == []
    assert {each.check for each in findings if each.result == "skipped"} <= {"vLLM"}
    assert {each.check for each in findings if each.result == "avoid"} <= {"names"}, "of stacked experts"


def test_the_command_prints_a_table_of_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = make_run(tmp_path, tmp_path, make_corpus(tmp_path), "llama")
    served.merged.rename(tmp_path / "moved")
    words = [str(served.run), "--root", str(tmp_path)]
    assert main([*words, "--merged", str(tmp_path / "moved")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert printed[0].split() == ["check", "of", "result"]
    assert printed[printed.index("") + 1].startswith("SOUND:")
    (tmp_path / "moved" / "chat_template.jinja").unlink()
    assert main([*words, "--merged", str(tmp_path / "moved")]) == 65
    assert "NOT SOUND: 1 fault" in capsys.readouterr().out


def test_the_newest_merge_of_the_run_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = make_run(tmp_path, tmp_path, make_corpus(tmp_path), "llama")
    (tmp_path / "data" / "merged").mkdir(parents=True)
    served.merged.rename(tmp_path / "data" / "merged" / "run-fp32")
    assert main([str(served.run), "--root", str(tmp_path)]) == 0
    assert "data/merged/run-fp32isserved" in "".join(capsys.readouterr().out.split())


def test_without_the_corpus_the_rest_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = make_run(tmp_path, tmp_path, make_corpus(tmp_path), "llama")
    code = main([str(served.run), "--root", str(tmp_path / "elsewhere"), "--merged", str(served.merged)])
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "Not checked: ids of base, ids of merged" in printed
    assert "logits merged ok to base plus adapter" in printed


def test_without_the_sources_the_prompts_are_examples(tmp_path: Path) -> None:
    served = make_run(tmp_path, tmp_path, make_corpus(tmp_path), "llama")
    (tmp_path / "chat.jsonl").unlink()
    prompts, what = served.subject().prompts
    assert what == "2 prompts made here, because the sources are gone"
    assert prompts[1].messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nope"], 66, "nope: no such run"),
        ([], 64, "required: RUN"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    from packcorpus.train.__main__ import main as of_train

    assert of_train(["certify", *words, "--root", str(tmp_path)]) == code
    assert message in capsys.readouterr().err
