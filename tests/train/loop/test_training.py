"""`packcorpus train` on a small corpus: results, rejections, signals.

Signals are sent at a random moment after the first step (SIGKILL to the last rank); the logs of all steps are compared.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.commands import NO_PICTURE, ROOT, Done, command, started
from support.damage.kinds import flip
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.architectures import ARCHITECTURES, build
from support.training.validation import evaluated, with_adapter
from transformers import LlamaConfig, LlamaForCausalLM

from packcorpus.train.__main__ import main
from packcorpus.train.data.conversations import sft_dataset
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop.checkpoints import newest_complete

LENGTH, VOCABULARY = 128, 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora `packed` and `whole` (format 2.0), and the model `tiny`."""
    folder = tmp_path_factory.mktemp("training")
    records = conversations(180, seed=3)  # 11 rows of validation, an odd number
    for name, settings in {"packed": {"validation": 0.1}, "whole": {"packing": False, "validation": 0.1}}.items():
        pack_corpus(make_recipe(folder / name, records, name=name, sequence_length=LENGTH, **settings))
    save_model(folder / "tiny")
    return folder


def save_model(path: Path, vocab_size: int = VOCABULARY, positions: int = LENGTH) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def manifest_of(folder: Path, name: str = "packed") -> Path:
    (found,) = (folder / name / "manifests").glob("*.json")
    return found


def words(folder: Path, output: Path, *options: str, manifest: Path | None = None) -> list[str]:
    common = ["--device", "cpu", "--micro-batch", "1", "--tokens-per-step", str(2 * LENGTH), "--learning-rate", "5e-3"]
    where = ["--manifest", str(manifest or manifest_of(folder)), "--output", str(output)]
    return [sys.executable, "-m", "packcorpus.train", *where, "--base-model", str(folder / "tiny"), *common, *options]


def run(given: list[str], *, has_picture: bool = False) -> Done:
    return command(ROOT, *given, **({} if has_picture else NO_PICTURE))


def stop(given: list[str], number: int) -> tuple[int, str]:
    """Send a signal after the first step; return the exit code and stderr."""
    with started(ROOT, *given[1:], **NO_PICTURE) as process:
        output = ""
        for line in process.stderr:
            output += line
            if re.match(r"step \d+/", line):
                time.sleep(random.uniform(0, 0.1))
                ranks = psutil.Process(process.pid).children()
                os.kill(ranks[-1].pid if ranks and number == signal.SIGKILL else process.pid, number)
                break
        rest = process.stderr.read()
        return process.wait(), output + rest


def losses_of(output: Path) -> list[tuple[int, float]]:
    log = json.loads((output / "training.json").read_text())["log"]
    return [(entry["step"], round(entry["loss"], 5)) for entry in log if "step_seconds" in entry]


def test_a_run_writes_adapter_tokenizer_picture_and_record(folder: Path, tmp_path: Path) -> None:
    given = words(folder, tmp_path / "run", "--max-steps", "20", "--eval-every", "10", "--micro-batch", "2")
    done = run(given, has_picture=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    manifest = json.loads(manifest_of(folder).read_text())
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run" / "training.json")
    assert record["corpus"]["key"] == manifest["key"]
    assert record["isolation"]["moved"] == 0 < record["isolation"]["own_moved"]
    result = record["result"]
    assert (result["steps"], result["loss_steps"]) == (20, 2)
    losses = [entry["loss"] for entry in record["log"] if "step_seconds" in entry]
    assert result["first_loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert result["last_loss"] == pytest.approx(sum(losses[-2:]) / 2)
    assert [entry["step"] for entry in record["log"] if "eval_loss" in entry] == [10, 20], "each step once"
    assert record["log"][0]["learning_rate"] == 5e-3, "the first step learns"
    assert "(means of 2 steps)" in done.stderr
    assert result["last_loss"] < 0.9 * result["first_loss"]
    assert result["validation_loss"] < result["first_loss"]
    assert 0 <= result["data_wait"] < 0.2
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tiny.model", "training.svg"} <= files
    assert "<svg" in (tmp_path / "run" / "training.svg").read_text()
    assert not [*(tmp_path / "run").rglob("README.md")], "PEFT writes no model card of placeholders"
    assert "optimizer steps: 20, should be 100 or more" in done.stderr
    again = run(given)
    assert (again.returncode, "nothing to do" in again.stderr) == (0, True)
    assert again.stdout == done.stdout
    # A run killed between the last step and the record is completed without another step.
    weights = (tmp_path / "run" / "adapter_model.safetensors").read_bytes()
    for name in ("training.json", "adapter_model.safetensors"):
        (tmp_path / "run" / name).unlink()
    ended = run(given)
    assert ended.returncode == 0, ended.stderr
    finished = json.loads((tmp_path / "run" / "training.json").read_text())["result"]
    assert [finished[name] for name in ("steps", "last_loss")] == [result[name] for name in ("steps", "last_loss")]
    assert finished["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    assert (tmp_path / "run" / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_has_the_same_losses(folder: Path, tmp_path: Path, ranks: int) -> None:
    options = ("--max-steps", "20", "--gpus", str(ranks), "--save-every", "4")
    options += ("--eval-every", "10", "--keep", "best")
    options += ("--quantization", "none", "--samples", "1") if ranks == 2 else ()
    whole = run(words(folder, tmp_path / "whole", *options))
    assert whole.returncode == 0, whole.stderr
    assert len(losses_of(tmp_path / "whole")) == 20

    given, key = words(folder, tmp_path / "stopped", *options), json.loads(manifest_of(folder).read_text())["key"]
    code, output = stop(given, signal.SIGTERM)
    assert code == 75, output
    assert "Traceback" not in output
    checkpoints = list((tmp_path / "stopped").glob("checkpoint-*"))
    newest = max(checkpoints, key=lambda path: int(path.name.split("-")[1]))
    assert all((path / "complete.json").exists() for path in checkpoints)
    assert newest_complete(tmp_path / "stopped", key) == newest
    assert not (tmp_path / "stopped" / "training.json").exists()

    code, output = stop(given, signal.SIGKILL)
    assert code == (-signal.SIGKILL if ranks == 1 else 1), output
    assert ("rank 1 was killed by SIGKILL" in output) == (ranks == 2)
    assert f"from {newest.name}" in output

    resumed = run(given)
    assert resumed.returncode == 0, resumed.stderr
    assert "from checkpoint-" in resumed.stderr
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")
    for name in ("adapter_model.safetensors", *["samples.jsonl"] * (ranks == 2)):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    if ranks == 2:
        rows = PackedDataset(open_corpus(manifest_of(folder)), "validation")
        assert len(rows) % 2, "one rank has a row more"
        check_losses(folder, tmp_path / "whole", rows)


@pytest.mark.parametrize("name", ["packed", "whole"])
def test_a_run_resumes_on_another_number_of_ranks(folder: Path, tmp_path: Path, name: str) -> None:
    """Two ranks cannot share the rows of a step equally, and the last step has fewer."""
    tokens = {"packed": 7 * LENGTH, "whole": 480}[name]  # seven rows
    options = ("--tokens-per-step", str(tokens), "--lora-dropout", "0", "--quantization", "none", "--gpus")
    manifest = manifest_of(folder, name)
    whole = run(words(folder, tmp_path / "whole", *options, "1", manifest=manifest))
    assert whole.returncode == 0, whole.stderr
    record = json.loads((tmp_path / "whole" / "training.json").read_text())
    step = record["choices"]["step"]
    assert step % 2
    assert record["corpus"]["rows"] % step

    code, output = stop(words(folder, tmp_path / "run", *options, "1", manifest=manifest), signal.SIGTERM)
    assert code == 75, output
    code, output = stop(words(folder, tmp_path / "run", *options, "2", manifest=manifest), signal.SIGTERM)
    assert code == 75, output
    assert "when this run started" not in output, "nothing differs but the order of sums"
    assert f"the {step} rows of a step are not a multiple of 2 ranks" in output
    last = words(folder, tmp_path / "run", *options, "1", "--micro-batch", str(step), manifest=manifest)
    assert run(last).returncode == 0
    resumed = json.loads((tmp_path / "run" / "training.json").read_text())
    assert resumed["choices"]["step"] == step
    found, expected = ([entry for entry in one["log"] if "step_seconds" in entry] for one in (resumed, record))
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
    losses = [[entry["loss"] for entry in log] for log in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert resumed["result"]["validation_loss"] == pytest.approx(record["result"]["validation_loss"], rel=1e-5)


def check_losses(folder: Path, output: Path, rows: Any) -> None:
    """Compare the record of a run with a plain computation."""
    # The run has no quantization. The computation counts each row once.
    result = json.loads((output / "training.json").read_text())["result"]
    loss, accuracy = evaluated(with_adapter(folder / "tiny", output), rows)
    assert result["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert result["token_accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_training_on_format_2(folder: Path, tmp_path: Path) -> None:
    options = ("--max-steps", "6", "--eval-every", "3", "--samples", "1", "--quantization", "none")
    manifest = manifest_of(folder, "whole")
    done = run(words(folder, tmp_path / "run", *options, manifest=manifest))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    check_losses(folder, tmp_path / "run", sft_dataset(open_corpus(manifest), "validation")[0])
    assert record["samples"][0]["prompt"].endswith("<|im_start|>assistant\n")
    assert record["format_version"] == "2.0"
    assert record["result"]["last_loss"] < record["result"]["first_loss"]


# -- rejections: one fault at a time -----------------------------------------------------------------------------------


def rejected(capsys: pytest.CaptureFixture[str], given: list[str], code: int, message: str) -> None:
    """Run in this process: loading torch again takes five seconds."""
    assert main(given[given.index("packcorpus.train") + 1 :]) == code
    output = capsys.readouterr().err
    assert message in output
    assert sum(" error: " in line for line in output.splitlines()) == 1
    assert "step 1/" not in output


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("manifest", "was edited or damaged"),
        ("train-00000-of-00001.arrow", "train-00000-of-00001.arrow"),
        ("tokenizer/tiny.model", "tokenizer/tiny.model"),
    ],
)
def test_a_damaged_corpus_is_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, message: str
) -> None:
    shutil.copytree(folder / "packed", tmp_path / "packed")
    manifest = manifest_of(tmp_path)
    if file == "manifest":
        manifest.write_text(manifest.read_text().replace('"seed": 42', '"seed": 43'))
    else:
        [path] = (tmp_path / "packed").rglob(file)
        flip(path)
    rejected(capsys, words(folder, tmp_path / "run", manifest=manifest), 65, message)


@pytest.mark.parametrize(
    ("model", "message"),
    [({"vocab_size": 100}, "embeddings only for ids up to 99"), ({"positions": 64}, "positions for 64")],
)
def test_a_model_that_does_not_fit_the_rows_is_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict[str, int], message: str
) -> None:
    save_model(tmp_path / "other", **model)
    rejected(capsys, words(folder, tmp_path / "run", "--base-model", str(tmp_path / "other")), 65, message)


def test_a_different_tokenizer_is_rejected(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.model"
    data = bytearray((folder / "packed" / "tiny.model").read_bytes())
    other.write_bytes(data + b"\x0a\x00")
    given = words(folder, tmp_path / "run", "--tokenizer", str(other))
    rejected(capsys, given, 65, "the corpus was made with the tokenizer")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--lora-rr", "8"], 64, "unrecognized arguments: --lora-rr"),
        (["--load", "stream"], 64, "load: stream was removed; use load: mmap, which reads more rows than memory holds"),
        (["--cache", "folder"], 64, "cache was removed; leave it out"),
        (["--lora-r", "many"], 64, "lora_r: must be an integer"),
        (["--precision", "bf16"], 69, "bf16"),
        (["--attention", "varlen"], 69, "varlen needs a GPU"),
        (["--base-model", "./nowhere"], 66, "no such folder"),
    ],
)
def test_impossible_settings_are_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    rejected(capsys, words(folder, tmp_path / "run", *options), code, message)


@pytest.mark.slow
def test_a_hybrid_with_whole_modules_is_trained_and_then_continued(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    build("lfm2", **ARCHITECTURES["lfm2"][0] | {"initializer_range": 0.1}).save_pretrained(folder / "lfm2")
    options = ["--base-model", str(folder / "lfm2"), "--max-steps", "6", "--micro-batch", "2"]
    first = run(words(folder, tmp_path / "first", *options, "--modules-to-save", "[embed_tokens]"))
    assert first.returncode == 0, first.stderr
    record = json.loads((tmp_path / "first" / "training.json").read_text())
    assert record["in_effect"]["conversations"] == "layers with a state run on each conversation alone"
    assert "as a whole, embed_tokens" in record["in_effect"]["adapter"]
    assert record["isolation"]["moved"] == 0 < record["isolation"]["own_moved"]

    second = run(words(folder, tmp_path / "second", *options, "--adapter", str(tmp_path / "first")))
    assert second.returncode == 0, second.stderr
    again = json.loads((tmp_path / "second" / "training.json").read_text())
    assert again["key"] != record["key"]
    assert again["in_effect"]["starts"] == f"from {tmp_path / 'first'}"
    assert losses_of(tmp_path / "second")[0][1] < losses_of(tmp_path / "first")[0][1]

    (tmp_path / "first" / "adapter_model.safetensors").unlink()
    third = run(words(folder, tmp_path / "third", *options, "--adapter", str(tmp_path / "first")))
    assert third.returncode == 65, third.stderr
    assert "contains no adapter_model.safetensors" in third.stderr
