"""Run code in several ranks of one process group, without a launcher.

gloo_ranks(2, code) ─▶ forks of the process with torch, each with `rank` and `given` ─▶ the `result` of each
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from support.commands import ROOT, in_fork_with_torch


def gloo_ranks(count: int, code: str, given: Any = None, **environment: list[str]) -> list[Any]:
    """Run `code` in `count` ranks, and return their results.

    Each environment variable has one value per rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = {"count": count, "code": code, "given": given, "folder": folder, "environment": environment}
        start = "import json, sys; from support.training.gloo_ranks import main; main(json.loads(sys.argv[1]))"
        done = in_fork_with_torch(ROOT, "-c", start, json.dumps(plan))
        assert done.returncode == 0, done.stderr
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def train_on_two_ranks(file: str, manifest: Path, run: Path, **options: Any) -> list[Any]:
    """Call `train(manifest, run, 2, **options)` of a test file in two ranks.

    Returns their results.
    """
    code = """
import importlib.util, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, given["tests"])
spec = importlib.util.spec_from_file_location("training_of_test", given["file"])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
result = module.train(Path(given["manifest"]), Path(given["run"]), 2, **given["options"])
"""
    given = {"file": file, "tests": str(ROOT / "tests"), "manifest": str(manifest), "run": str(run), "options": options}
    return gloo_ranks(2, code, given, MASTER_ADDR=["localhost"] * 2, LOCAL_WORLD_SIZE=["2"] * 2)


def main(plan: dict[str, Any]) -> None:
    pids = []
    for rank in range(plan["count"]):
        pid = os.fork()
        if not pid:
            _be(rank, plan)
            os._exit(0)
        pids.append(pid)
    raise SystemExit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


def _be(rank: int, plan: dict[str, Any]) -> None:
    import traceback

    import torch

    folder = Path(plan["folder"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(plan["count"]), "LOCAL_RANK": str(rank)}
    os.environ |= {name: values[rank] for name, values in plan["environment"].items()}
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=plan["count"]
        )
        names = {"rank": rank, "given": plan["given"], "result": None}
        exec(compile(plan["code"], "ranks", "exec"), names)  # noqa: S102 - the code of a test
        (folder / f"{rank}.json").write_text(json.dumps(names["result"]))
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
