"""Fuzz tests that take longer than the test suite may: make fuzz.

content   10,000 conversations for each tokenizer and each template: none forges a control token
hostile   each hostile input through the real command: CPU seconds and memory beyond a usual run
reader, config, manifest   atheris over the functions of tests/properties/test_fuzz.py, guided by coverage
duplicates          records with equal keys, however the keys are written: only these records are rejected
random-tokenizers   files of tokenizers with any fields: an accepted tokenizer encodes the same each time
joined              fields side by side, made of private characters and their escapes: nothing lost, nothing forged
filters             Jinja filters and methods on control strings in contents: no control tokens
folders             folders of tokenizers: as AutoTokenizer loads them, or refused
files               files that are cut, joined, or followed by other bytes: read as a whole, or refused
configs             settings and mixtures: every conversation where, how often, and as the reference says

The last seven draw cases with hypothesis until the time is over. For a failure, the smallest failing case is shown.

python bench/reliability/fuzz.py [content] [hostile] [reader config manifest]
    [duplicates random-tokenizers joined filters folders files configs] [--seconds 60] [--seed 1]
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Tests are imported by name, from their folders.
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    *(
        str(ROOT / "tests" / name)
        for name in (
            "conversations",
            "encoders",
            "properties",
            "readers",
            "templates/jinja",
        )
    ),
]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Modules of tests with cases(), a strategy, and check(case), which returns the outcome of a case.
DRAWN = {
    "duplicates": "test_duplicate_keys",
    "random-tokenizers": "test_random_tokenizers",
    "folders": "test_random_folders",
    "files": "test_random_files",
    "joined": "test_joined_fields",
    "filters": "test_harmless",
    "configs": "test_together",
}
PARTS = ("content", "hostile", "reader", "config", "manifest", *DRAWN)
CONVERSATIONS = 10_000
ROUND = 250  # cases drawn before hypothesis restarts with a new seed


def content(seed: int, count: int) -> None:
    from support.tokenizer_kinds import KINDS
    from test_content import TEMPLATES

    start = time.perf_counter()
    todo = [(kind, name, seed, count) for kind in KINDS for name in TEMPLATES]
    packed = cpu = 0.0
    with ProcessPoolExecutor() as pool:
        for (kind, name, *_), (number, seconds) in zip(todo, pool.map(_content, todo), strict=True):
            print(f"content  {kind:20} {name:20} {number:7,} of {count:,} packed, {seconds:6.1f} s of CPU", flush=True)
            packed, cpu = packed + number, cpu + seconds
    print(
        f"content: {len(todo)} tokenizers and templates, {len(todo) * count:,} conversations, {packed:,.0f} packed, "
        f"none forged; {cpu:,.0f} s of CPU, {time.perf_counter() - start:,.0f} s; seed {seed}"
    )


def _content(todo: tuple[str, str, int, int]) -> tuple[int, float]:
    from test_content import BATCH, check_batch

    kind, name, seed, count = todo
    start = os.times()
    packed = 0
    for number in range(count // BATCH):
        try:
            packed += check_batch(kind, name, seed * 1_000_000 + number)
        except Exception as error:
            raise AssertionError(f"check_batch({kind!r}, {name!r}, {seed * 1_000_000 + number})") from error
    return packed, sum(os.times()[:2]) - sum(start[:2])


def hostile() -> None:
    from test_bounded import GOOD, PACKED, REJECTED, check, pack, rejects, usual

    every = {name: ("sp_bpe_chatml", {code: 1}, make) for name, (code, make) in REJECTED.items()}
    every |= {name: (kind, {}, make) for name, (kind, make) in PACKED.items()}
    for name, (kind, expected, make) in every.items():
        with tempfile.TemporaryDirectory() as folder:
            found = pack(Path(folder), make() + GOOD, kind=kind)
            check(found, kind)
            assert rejects(found) == expected, (name, found)
        more = (found.memory - usual(kind).memory) / (1 << 20)
        seconds = found.cpu - usual(kind).cpu
        print(f"hostile  {name:36} {kind:20} +{seconds:5.1f} s  +{more:5.0f} MiB  {expected or 'packed'}", flush=True)


def draw_cases(part: str, seed: int, seconds: float) -> None:
    """Check cases until the time is over.

    After a failure, reports the smallest failing case that hypothesis finds.
    """
    import hypothesis

    module = importlib.import_module(DRAWN[part])
    start = time.perf_counter()
    found = Counter[str]()
    failed = False

    def check(case: object) -> None:
        nonlocal failed
        if failed or time.perf_counter() - start < seconds:
            try:
                found[module.check(case)] += 1
            except BaseException:
                if not failed:
                    print(
                        f"{part}: failed after {found.total():,} cases, {time.perf_counter() - start:.1f} s", flush=True
                    )
                failed = True
                raise

    limits = hypothesis.settings(
        max_examples=ROUND,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    number = 0
    while time.perf_counter() - start < seconds:
        try:
            hypothesis.seed(seed * 1_000_000 + number)(limits(hypothesis.given(module.cases())(check)))()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{part}: found something; {module.__name__}.check(case) with the case above fails; seed {seed}")
        number += 1
    each = ", ".join(f"{count:,} {outcome}" for outcome, count in found.most_common())
    print(f"{part}: {found.total():,} cases in {time.perf_counter() - start:,.0f} s: {each}; none failed; seed {seed}")


def atheris_run(part: str, seed: int, seconds: int) -> None:
    """Run atheris in a separate process, because atheris ends its process."""
    words = [sys.executable, __file__, "--inside", part, "--seed", str(seed), "--seconds", str(seconds)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("Done")), "")
    if done.returncode:
        sys.exit(f"{part}: found something\n{done.stderr[-6000:]}")
    print(f"{part}: {last}; nothing found; seed {seed}", flush=True)


def inside(part: str, seed: int, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["packcorpus.tasks", "yaml"], enable_loader_override=False):
        import test_fuzz

    names, formats = test_fuzz.NAMES, ("auto", *test_fuzz.FORMAT_NAMES)

    def reader(data: bytes) -> None:
        if len(data) > 1:
            name, format = names[data[0] % len(names)], formats[data[1] % len(formats)]
            body = data[2:]
            if name.endswith(".gz") and data[1] & 64:
                body = test_fuzz.gzip.compress(body, 1)
            test_fuzz.read_source(body, name, format, 1 + (data[1] >> 7) * 40)

    def config(data: bytes) -> None:
        test_fuzz.read_config(data.decode("utf-8", "replace"))

    def manifest(data: bytes) -> None:
        test_fuzz.read_manifest(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, whole in enumerate(_examples(part)):
            (Path(corpus) / str(number)).write_bytes(whole)
        limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=1500"]
        atheris.Setup([sys.argv[0], *limits, corpus], {"reader": reader, "config": config, "manifest": manifest}[part])
        atheris.Fuzz()


def _examples(part: str) -> list[bytes]:
    import orjson
    import yaml
    from test_conversations import GOLDEN
    from test_fuzz import CONFIG, NAMES, a_manifest

    if part == "config":
        return [yaml.safe_dump(CONFIG).encode(), *(path.read_bytes() for path in ROOT.glob("data/sample/*.yaml"))]
    if part == "manifest":
        return [orjson.dumps(a_manifest())]
    records = [orjson.dumps(record, default=str) for _, record, _ in GOLDEN]
    lines = b"\n".join(records)
    return [bytes([i, 64]) + whole for i in range(len(NAMES)) for whole in (lines, b"[" + b",".join(records) + b"]")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; absent: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each part but content and hostile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=CONVERSATIONS, help="conversations, for each of content")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.seed, given.seconds)
    for part in given.parts or () if given.inside else given.parts or PARTS:
        if part == "content":
            content(given.seed, given.count)
        elif part == "hostile":
            hostile()
        elif part in DRAWN:
            draw_cases(part, given.seed, given.seconds)
        else:
            atheris_run(part, given.seed, given.seconds)


if __name__ == "__main__":
    main()
