"""Install a wheel in a new environment, and pack three conversations with it.

    python tests/smoke.py dist/packcorpus-0.1.0-py3-none-any.whl            with any Python from 3.11 to 3.14
    python tests/smoke.py dist/packcorpus-0.1.0-py3-none-any.whl --here     with the libraries of this environment

The folder also has a train.py, a tasks.py, and a pipeline/, as many projects do: they must be ignored. Each command is
printed with its seconds. The exit code is 1 after the first command that does not do what it should.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONVERSATIONS = [
    [("user", "How long is the ride?"), ("assistant", "It takes 85 minutes.")],
    [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "4 + 4?"), ("assistant", "8")],
    [("user", "Say hello in German."), ("assistant", "Hallo!")],
]

FOREIGN = 'raise SystemExit("a module of the user was loaded")\n'

# A tokenizer with a token for each byte.
TOKENIZER = """
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
vocab = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
tokenizer.save("model/tokenizer.json")
"""

API = """
import packcorpus, sys
corpus = packcorpus.open(sys.argv[1])
assert len(list(corpus.rows("train"))) >= 1
"""


class Smoke:
    """The commands of one environment, run in one folder."""

    def __init__(self, folder: Path, bin: Path, environment: dict[str, str]):
        self.folder, self.bin, self.environment = folder, bin, environment

    def run(self, *words: str, code: int = 0, says: str = "", **environment: str) -> str:
        """Run a command, and return the last line that it prints."""
        start = time.perf_counter()
        given = self.environment | environment
        program = [str(self.bin / words[0]), *words[1:]]
        done = subprocess.run(program, cwd=self.folder, env=given, capture_output=True, text=True, check=False)
        shown = " ".join(word if len(word) < 80 else "…" for word in words)
        print(f"{time.perf_counter() - start:6.1f} s  {shown}", flush=True)
        output = done.stdout + done.stderr
        if done.returncode != code or "Traceback" in output or says not in output:
            print(output, file=sys.stderr)
            sys.exit(f"{shown}: exit code {done.returncode}, expected {code} and {says!r}")
        return done.stdout.strip().rpartition("\n")[2]


def install(wheel: Path, folder: Path, here: bool) -> Smoke:
    """Install the wheel: in a new environment or, if `here`, in front of this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACKCORPUS"))}
    work = folder / "project"
    work.mkdir()
    if here:
        place = folder / "wheel"
        given = environment | {"PYTHONPATH": str(place)}
        pip = Smoke(folder, Path(sys.executable).parent, environment)
        pip.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel))
        return Smoke(work, Path(sys.executable).parent, given)
    Smoke(folder, Path(sys.executable).parent, environment).run(Path(sys.executable).name, "-m", "venv", "venv")
    smoke = Smoke(work, folder / "venv" / "bin", environment)
    smoke.run("python", "-m", "pip", "install", "--quiet", str(wheel))
    return smoke


def main() -> None:
    wheel, here = Path(sys.argv[1]).resolve(), "--here" in sys.argv
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="packcorpus-smoke-") as name:
        smoke = install(wheel, Path(name), here)
        folder, path = smoke.folder, smoke.environment.get("PYTHONPATH", "")
        for module in ("train.py", "tasks.py", "pipeline/__init__.py"):
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / module).write_text(FOREIGN)
        (folder / "model").mkdir()
        turns = [[{"role": role, "content": content} for role, content in turns] for turns in CONVERSATIONS]
        (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
        smoke.run("python", "-P", "-c", TOKENIZER)
        settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
        smoke.run("packcorpus", "--version", says="packcorpus ")
        smoke.run("packcorpus", "pack", "chats.jsonl", "--tokenizer", "model", says="manifests/")
        print(f"{time.perf_counter() - start:6.1f} s  from nothing to the first rows", flush=True)
        smoke.run("packcorpus", "init", "chats.jsonl", "--tokenizer", "model", says="corpus.yaml")
        smoke.run("packcorpus", "check", says="3 of 3 conversations")
        manifest = smoke.run("packcorpus", "pack", says="manifests/")
        smoke.run("packcorpus", "verify", "--rebuild", says="identical")
        smoke.run("packcorpus", "inspect", says="3")
        smoke.run("packcorpus", "inspect", "--row", "0", says="85 minutes")
        smoke.run("packcorpus", "inspect", "--at", "chats.jsonl:3", says="Hallo!")
        smoke.run("packcorpus", "report", "--output", "report.html", says="report.html")
        smoke.run("packcorpus", "list", says="chats", PYTHONPATH=os.pathsep.join([*[path] * bool(path), "."]))
        smoke.run("python", "-P", "-m", "packcorpus", "list", says="chats")
        smoke.run("python", "-P", "-c", API, manifest)
        if not here:
            missing = "pip install 'packcorpus[train]'"
            smoke.run("packcorpus", "train", manifest, "--base-model", "toy", code=69, says=missing)
    print(f"{time.perf_counter() - start:6.1f} s  in all")


if __name__ == "__main__":
    main()
