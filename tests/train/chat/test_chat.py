"""`packcorpus train chat` renders prompts as training did, and prints answers."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training.served_runs import CHATML, Served, make_corpus, make_run

from packcorpus.tasks.conversations.model import Message
from packcorpus.tasks.core.errors import InputMissing, PackError, UsageError
from packcorpus.train.certify.prompts import conversations_of, prompts_of
from packcorpus.train.chat import command
from packcorpus.train.chat.dialog import OfCorpus, remembered
from packcorpus.train.chat.speaker import Printed, Speaker, Stopped, open_dialog
from packcorpus.train.chat.subject import find_subject
from packcorpus.train.loop.run_folder import model_digest
from packcorpus.train.merge.other_files import find_facts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a run, its corpus, and its merged model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("served")
    return make_run(folder, folder, make_corpus(folder), "llama")


@pytest.fixture
def chat(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command, and returns what it printed."""
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.signal, "set_wakeup_fd", lambda _: None)

    def chat(run: Path | str, *options: str, root: Path = served.root, piped: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert command.main([str(run), "--root", str(root), *options]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return chat


@pytest.mark.parametrize(
    ("kind", "template", "how"),
    [
        ("hf_byte_level", CHATML, {}),
        ("hf_byte_level", CHATML, {"train_on": "all"}),
        ("hf_byte_level", "chatml", {"train_on": "last"}),
        ("hf_unigram", CHATML, {}),
    ],
)
def test_a_prompt_has_the_tokens_of_training(kind: str, template: str, how: dict[str, Any], tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, kind, template, **how)
    facts, _ = find_facts({"corpus": {"name": corpus["name"], "key": corpus["key"]}}, tmp_path)
    assert facts
    assert facts.corpus
    assert facts.encoder
    dialog, manifest, folder = OfCorpus(facts), facts.manifest, facts.corpus.folder
    expected, _ = prompts_of(manifest, folder, facts.encoder, tmp_path)
    several = 0
    for conversation in conversations_of(manifest, folder, tmp_path)[:20]:
        answers = [k for k, message in enumerate(conversation.messages) if message.role == "assistant"]
        found = dialog.prompt(conversation.messages[: answers[-1]])
        starts = [one.id_starts or (len(found),) for one in expected if one.ids[: len(found)] == found]
        assert any(len(found) in each for each in starts), dialog.text(found)
        several += len(answers) > 1
    assert several


def test_a_run_and_its_merged_model_give_the_same_answer(served: Served, chat: Any) -> None:
    """Standard output has the answer and nothing else.

    The model is random, so only `--max-tokens` ends it.
    """
    few = ("--max-tokens", "8")
    answer, said = chat(served.run, "--prompt", "Which train?", *few)
    assert said.startswith(f"loading {served.run} on base\nCPU, ")
    assert "template mine.jinja of the corpus small" in said
    assert said.endswith("[ended after 8 tokens: --max-tokens]\n")
    assert chat(served.run, *few, piped="Which train?\n")[0] == answer
    merged, said = chat(served.merged, "--prompt", "Which train?", *few)
    assert merged == answer
    assert "chat template of" in said, "its run is not in data/adapters"
    assert chat(served.run, "--prompt", "Which train?", "--system", "Be brief.", *few)[0] != answer


def test_a_temperature_draws_tokens_by_the_seed(served: Served, chat: Any) -> None:
    def answer(*options: str) -> str:
        return str(chat(served.run, "--prompt", "When?", "--max-tokens", "12", *options)[0])

    assert answer("--temperature", "1") == answer("--temperature", "1", "--seed", "42")
    assert len({answer(), answer("--temperature", "1"), answer("--temperature", "1", "--seed", "1")}) == 3


def test_without_the_corpus_the_template_of_the_model_is_used(served: Served, chat: Any, tmp_path: Path) -> None:
    shutil.copytree(served.run, tmp_path / "run")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(served.merged / name, tmp_path / "run")
    given = ("--prompt", "Which train?", "--max-tokens", "8")
    answer, said = chat(tmp_path / "run", *given, root=tmp_path)
    assert f"chat template of {tmp_path / 'run'}, because its corpus is not here" in said
    assert answer == chat(served.run, *given)[0]
    (tmp_path / "run" / "chat_template.jinja").unlink()
    with pytest.raises(PackError, match="has no chat template, and its corpus is missing"):
        chat(tmp_path / "run", *given, root=tmp_path)


def test_a_checkpoint_of_an_unfinished_run_is_offered_and_answers(served: Served, chat: Any) -> None:
    record = json.loads((served.run / "training.json").read_bytes())
    run = served.root / "data" / "adapters" / "mine-0123456789ab"
    checkpoint = run / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    values = {"key": "e" * 64, "corpus": record["corpus"]["key"], "settings": record["config"]}
    (run / "run.json").write_text(json.dumps(values | {"base_model": model_digest(record["base_model"])}))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(served.run / name, checkpoint)
    with pytest.raises(InputMissing, match="no checkpoint yet"):
        chat("mine", "--prompt", "x")
    with pytest.raises(PackError, match=r"checkpoint-4: is not complete"):
        chat(checkpoint, "--prompt", "x")
    (checkpoint / "complete.json").write_text("{}")
    with pytest.raises(
        InputMissing, match=f"not finished .* talk to the checkpoint: packcorpus train chat {checkpoint}"
    ):
        chat("mine", "--prompt", "x")
    given = ("--prompt", "Which train?", "--max-tokens", "8")
    assert chat(checkpoint, *given)[0] == chat(served.run, *given)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the question is empty; pass it as --prompt TEXT or as standard input"),
        ([], "the question is empty"),
        (["--max-tokens", "0", "--prompt", "x"], "--max-tokens 0: must be at least 1"),
        (["--temperature", "-1", "--prompt", "x"], "--temperature -1: must be from 0 to 10"),
        (["--seed", "-1", "--prompt", "x"], "--seed -1: must be from 0"),
    ],
)
def test_wrong_options_are_reported(served: Served, chat: Any, options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chat(served.run, *options)


def test_a_run_that_does_not_exist_is_reported(served: Served, chat: Any) -> None:
    with pytest.raises(InputMissing, match="nothing: no such run"):
        chat("nothing", "--prompt", "x")


def test_a_dialog_that_is_too_long_is_an_error_before_it_is_generated(served: Served) -> None:
    dialog = open_dialog(find_subject(str(served.run), served.root), served.root)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=8)))
    speaker = Speaker(model, torch.float32, dialog, 4, 0.0, 42, "")
    with pytest.raises(UsageError, match=r"the dialog has 9 tokens, but the model has positions for 8"):
        speaker.answer([1] * 9)


# -- the dialog --------------------------------------------------------------------------------------------------------


class Letters:
    """Prompts and answers of letters; "." ends an answer."""

    stops, about = [ord(".")], ""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = "|".join(f"{message.role[0]}:{message.content}" for message in messages)
        if "!" in text:
            raise UsageError("bad_prompt", "no shouting")
        return [*text.encode()]

    def text(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Echo:
    """A model that answers with the number of its prompts.

    Ctrl-C arrives during the answer to "wait".
    """

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.is_stopped = False
        self.during: Any = None

    def stop(self) -> None:
        self.is_stopped = True

    def answer(self, prompt: Sequence[int]) -> list[int]:
        self.is_stopped = False
        self.prompts.append(bytes(prompt).decode())
        if self.prompts[-1].endswith("wait"):
            self.during(2, None)
            return [*b"so"]
        return [*f"{len(self.prompts)}.".encode()]


def test_each_prompt_has_the_answers_before_and_ctrl_c_ends_the_answer_then_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    echo = Echo()
    talk = command.Talk(Letters(), echo, "brief")  # type: ignore[arg-type]
    echo.during = talk.on_ctrl_c
    questions = iter(["a", "", "wait", "no!", "b"])

    def ask(_: str) -> str:
        if question := next(questions, None):
            return question
        if question is None:
            talk.on_ctrl_c(2, None)
        return ""

    talk.run(ask)
    assert echo.prompts == ["s:brief|u:a", "s:brief|u:a|a:1|u:wait", "s:brief|u:a|a:1|u:wait|a:so|u:b"]
    said = capsys.readouterr().err
    assert "[stopped]" in said
    assert "no shouting" in said


def test_text_is_printed_as_soon_as_its_characters_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(Letters())  # type: ignore[arg-type]
    printed.put(torch.tensor([[1, 2]]))  # the prompt
    shown = []
    for byte in "aé\x1b\nz.".encode():
        printed.put(torch.tensor([byte]))
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "é", "\\x1b", "\n", "z", ""]
    printed.put(torch.tensor([0xC3]))
    printed.end()
    assert capsys.readouterr().out == "\ufffd"
    assert len(printed.ids) == 8


@pytest.mark.parametrize(
    ("prompt", "answer", "content"),
    [
        ("a:", "x.", "x"),
        ("a:<think>\n", "x</think>y.", "<think>\nx</think>y"),
        ("a:<think>\n", "<think>x</think>y", "<think>x</think>y"),
        ("a:", "x</think>y.", "x</think>y"),
    ],
)
def test_reasoning_that_the_prompt_has_opened_is_remembered_as_a_whole(prompt: str, answer: str, content: str) -> None:
    dialog: Any = Letters()
    assert remembered(dialog, [*prompt.encode()], [*answer.encode()]) == Message("assistant", content)


def test_a_stopped_answer_ends_after_its_token() -> None:
    speaker: Any = SimpleNamespace(is_stopped=False)
    stopped, ids = Stopped(speaker), torch.ones(1, 3)
    assert not stopped(ids, None)
    speaker.is_stopped = True
    assert stopped(ids, None)
