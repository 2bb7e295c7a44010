"""Training never imports the train.py, tasks.py, or pipeline/ of a user."""

from __future__ import annotations

from pathlib import Path

from support.commands import BIN
from support.own_modules import CLONE, CONFIG, RAISING, ok, write_data, write_modules
from support.training.tiny_training import tiny_model


def test_under_torchrun_merged_and_certified(tmp_path: Path) -> None:
    folder = write_data(tmp_path)
    tiny_model(adapter=False).save_pretrained(folder / "model")
    (folder / "my.yaml").write_text(CONFIG.replace("}", ', "sequence_length": 256}'))
    write_modules(folder, RAISING)
    ok(CLONE.run(folder, "packcorpus", "pack", "my.yaml"))
    torchrun = (str(BIN / "torchrun"), "--nproc-per-node", "2", "-m", "packcorpus", "train", "mine")
    settings = ("--base-model", "model", "--max-steps", "2", "--tokens-per-step", "512", "--quantization", "none")
    ok(CLONE.run(folder, *torchrun, *settings, "--device", "cpu", "--output", "run"))
    ok(CLONE.run(folder, "packcorpus", "train", "merge", "run", "--output", "merged"))
    done = CLONE.run(folder, "packcorpus", "certify", "run")
    assert done.returncode in (0, 65), done.stdout + done.stderr  # it depends on the model
    assert "MINE" not in done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 5
