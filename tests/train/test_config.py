"""Training settings from the file and the command line, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from packcorpus.tasks.core.errors import InputMissing, UsageError
from packcorpus.train.__main__ import main, parser
from packcorpus.train.config import (
    BASIC,
    DEFAULT,
    EARLIER,
    LATER,
    WITHOUT_EFFECT,
    TrainingConfig,
    config_of,
    load_training_config,
    words_of,
)


def test_the_file_lists_every_setting_with_its_default() -> None:
    assert load_training_config(DEFAULT) == TrainingConfig()
    keys = [line.partition(":")[0] for line in DEFAULT.read_text().splitlines() if line[:1].islower()]
    assert sorted(keys) == sorted(TrainingConfig.model_fields)


def test_every_setting_is_a_command_line_option() -> None:
    options = {option for action in parser()._actions for option in action.option_strings}
    assert {f"--{name.replace('_', '-')}" for name in TrainingConfig.model_fields} <= options


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("learning_rate: 1e-3\nlora_r: 8\n")
    config = load_training_config(file, {"learning_rate": "5e-5", "compile": "true", "micro_batch": "4"})
    assert (config.learning_rate, config.lora_r, config.compile, config.micro_batch) == (5e-5, 8, True, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_rank: 8", "lora_rank: unknown key; packcorpus calls it lora_r"),
        ("lora_rr: 8", "lora_rr: unknown key; did you mean lora_r?"),
        ("weight_decay: much", "weight_decay: must be a number"),
        (
            "learning_rate: fast",
            "learning_rate: must be 'auto' or must be a number, found",
        ),
        ("micro_batch: 0", "micro_batch"),
        ("gpus: all", "gpus"),
        ("attention: flash", "attention: must be"),
        ("lora_dropout: 1.0", "lora_dropout: must be less than 1"),
        ("samples: 65", "samples: must be less than or equal to 64"),
        ("early_stopping: 0", "early_stopping: must be greater than or equal to 1"),
        ("keep: newest", "keep: must be 'last' or 'best'"),
        ("compile: 1", "compile: must be 'auto' or must be true or false"),
        ("activation_checkpointing: 0", "activation_checkpointing: "),
        ("activation_checkpointing: some", "activation_checkpointing: must be 'auto' or 'offload'"),
        ("base_model: ''", "base_model"),
        ("- 1", "expected `key: value` lines"),
        ("a: [", "line 1"),
    ],
)
def test_an_invalid_setting_names_its_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"mine\.yaml") as caught:
        load_training_config(file)
    assert message in str(caught.value)


def test_an_invalid_option_names_the_command_line() -> None:
    with pytest.raises(UsageError, match=r"command line") as caught:
        load_training_config(overrides={"lora_r": "many"})
    assert "lora_r: must be an integer" in str(caught.value)


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InputMissing, match="no such config"):
        load_training_config(Path("nowhere.yaml"))


def test_settings_without_effect_are_not_in_the_key() -> None:
    config = TrainingConfig()
    known = set(TrainingConfig.model_fields) - WITHOUT_EFFECT - set(LATER)
    assert set(config.settings()) == known | set(EARLIER)
    assert set(EARLIER) <= WITHOUT_EFFECT


def test_a_model_must_be_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_model:\n")
    for words in ([], ["--lora-r", "8"], ["--config", str(file)], ["--base-model", "null"]):
        with pytest.raises(UsageError, match=r"--base-model Qwen/Qwen3-8B, or .*--base-model toy$") as caught:
            config_of(parser().parse_args(words))
        assert caught.value.reason == "no_base_model"
    file.write_text("base_model: models/mine\n")
    assert config_of(parser().parse_args(["--config", str(file)])).base_model == "models/mine"


def test_the_toy_has_the_key_of_runs_that_named_no_model() -> None:
    found = config_of(parser().parse_args(["--base-model", "toy"]))
    assert found == TrainingConfig()
    assert found.settings()["base_model"] is None


def test_the_corpus_may_be_named_before_and_after_options() -> None:
    for words in ("mine --lora-r 8", "--lora-r 8 mine", "--lora-r 8 mine --base-model toy"):
        assert parser().parse_args(words.split()).corpus == Path("mine")


def test_a_misspelled_command_is_no_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, command in (("dcotor", "doctor"), ("Diagnos --budget 30", "diagnose"), ("mrege data/run", "merge")):
        assert main(words.split()) == UsageError.exit_code
        said = capsys.readouterr().err
        assert said == f"E101 error: {words.split()[0]}: no such command or corpus; did you mean {command}?\n"
    (tmp_path / "doctors").mkdir()
    (tmp_path / "doctors" / "manifest.json").touch()  # a corpus of such a name
    assert main(["doctors", "--budget", "30"]) == UsageError.exit_code
    assert "unrecognized arguments: --budget 30" in capsys.readouterr().err


def test_a_corpus_may_be_named_like_a_command_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A corpus of chat.jsonl is called chat."""
    monkeypatch.chdir(tmp_path)
    assert main(["chat", "--base-model", "toy"]) == UsageError.exit_code
    assert "packcorpus train chat" in capsys.readouterr().err, "there is no such corpus"
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "manifest.json").touch()
    assert main(["chat", "--base-model", "toy"]) != UsageError.exit_code
    assert "manifest.json" in capsys.readouterr().err
    assert main(["chat", "no-such-run"]) != 0
    assert "no-such-run" in capsys.readouterr().err


def test_another_process_gets_the_same_command_line(tmp_path: Path) -> None:
    file = tmp_path / "my settings.yaml"
    words = ["--manifest", "x.json", "--config", str(file), "--root", "r", "--debug"]
    words += ["--base-model", "a b", "--lora-targets", "[q_proj, v_proj]", "--max-steps", "-1", "--load", "stream"]
    given = parser().parse_args(words)
    again = parser().parse_args(words_of(given))
    assert again == given


def test_the_help_lists_few_settings_first() -> None:
    text = parser().format_help()
    assert text.startswith("usage: packcorpus train [CORPUS] --base-model MODEL [OPTION…]\n")
    basic = text[text.index("basic settings") : text.index("expert settings")]
    assert basic.count("\n  --") == len(BASIC) == 8
    assert "python -m" not in text
