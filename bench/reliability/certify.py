"""Certify sound runs of many architectures, tokenizers, and templates.

    python bench/reliability/certify.py [ARCHITECTURE …]

Each run is merged by the real code. No finding may be a fault, and nothing but vLLM may be skipped. Prints a line for
each run: the architecture, the tokenizer, the number of prompts, the seconds, and every fault.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests/ has a folder `train`, too

import torch  # noqa: E402
from support.training.served_runs import CORPORA, SOUND, make_corpus, make_run  # noqa: E402

from packcorpus.train.certify.command import certify  # noqa: E402
from packcorpus.train.model.base_model import silence_libraries  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    silence_libraries()
    alarms = 0
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        homes = [Path(folder) / str(number) for number in range(len(CORPORA))]
        manifests = [make_corpus(home, *corpus) for home, corpus in zip(homes, CORPORA, strict=True)]
        for number, name in enumerate(names or SOUND):
            which, start = number % len(CORPORA), time.perf_counter()
            # The precision changes once per round, so that each corpus is used with both.
            dtype = DTYPES[number // len(CORPORA) % 2]
            with redirect_stderr(log):
                served = make_run(homes[which], homes[which] / name, manifests[which], name, dtype=dtype, scale=0.05)
                subject = served.subject()
                findings = certify(subject)
            wrong = [each for each in findings if each.result in ("FAULT", "skipped") and each.check != "vLLM"]
            alarms += bool(wrong)
            facts = f"{len(subject.prompts[0])} prompts, {str(dtype)[6:]}, {time.perf_counter() - start:.1f} s"
            print(f"{name:16} {CORPORA[which][0]:14} {facts}", flush=True)
            for each in wrong:
                print(f"    {each.check} of {each.of}: {each.result}: {each.text}")
    print(f"{len(names or SOUND)} sound runs, {alarms} with an alarm")
    return bool(alarms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
