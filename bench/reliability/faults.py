"""Check the files after runs are killed, refused by the disk, or run in parallel.

    make faults    (or: python bench/reliability/faults.py [--seed 0] [--jobs 2] [--only ROW] [--case N] [--most N])

    project before ─copy─▶ root ─the command, with one fault─▶ root ─the command again─▶ the files of an undisturbed run
                                            └─ nothing is published, or a corpus that `verify` accepts; earlier files
                                               are untouched; a process that was not killed printed one message

Prints a table. Every fault hits the real command. strace injects the faults in system calls: a first run lists the
calls of the main thread that touch the project's data, then a separate run is hit at each of these calls. These runs
have one worker, so that the work is in the main thread. The project has a few hundred conversations, a tokenizer to
train, and a second corpus that is finished. "commit" is the same project with all files except the files next to the
shards. The seed and the number of the case decide the moment of a fault, and a broken guarantee is reported with both.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.verification.verify import verify

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [str(Path(sys.executable).parent / "luigi"), "--module", "pipeline", "PackCorpus"]
CONFIG = "name: chats\nsources: chats.jsonl\nsequence_length: 128\nvocab_size: 400\nvalidation: 0.1\npart_size: 24000\n"
# The corpus, a corpus that differs only in its rows, one that differs only in its name, and one that shares nothing.
CONFIGS = {"corpus": "", "longer": "sequence_length: 200\n", "twin": "name: twin\n", "other": "vocab_size: 390\n"}
CALLS = ("openat", "write", "fsync", "rename", "mkdir", "flock")

Done = subprocess.CompletedProcess[str]
Strike = Callable[[Path], int]


class Lost(Exception):
    """A guarantee is broken; the message names the guarantee and the place."""


@dataclass(frozen=True)
class Project:
    """A folder before the run, and all files before and after an undisturbed run."""

    start: Path
    before: dict[str, bytes]
    after: dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """Faults in one copy of the project.

    `strike` causes the faults, checks the guarantees after each fault, and returns the number of faults that occurred.
    A fault does not occur if the run ends before it.
    """

    row: str
    what: str
    project: Project
    strike: Strike


def works(*command: str) -> bool:
    return bool(shutil.which(command[0])) and not subprocess.run(command, capture_output=True, check=False).returncode


def can_trace() -> bool:
    return works("strace", "-f", "--seccomp-bpf", "-y", "-o", os.devnull, "true")


def words(config: str = "corpus", workers: int = 1) -> list[str]:
    return [*COMMAND, "--config", f"{config}.yaml", "--workers", str(workers)]


def start(folder: Path, command: list[str], before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg"), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=before,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Done:
    out, said = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


def undisturbed_run(folder: Path, config: str) -> Done:
    """Run the command without a fault; the tests have a faster way to do that."""
    return finish(start(folder, words(config)))


def files_of(root: Path) -> dict[str, bytes]:
    """Return the contents of all files that a run wrote, by path.

    Leaves out files with times (run.json, data/digests) and the name of the latest run.
    """
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in ("data", "manifests")
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and path.name not in ("run.json", ".last") and path.parent.name != "digests"
    }


def require(held: bool, promise: str) -> None:
    if not held:
        raise Lost(promise)


def check_struck(project: Project, root: Path, done: Done, killed: bool = False) -> None:
    """Check the guarantees right after a fault, whichever process died.

    `killed` is true if one of the workers may have been killed.
    """
    if done.returncode > 0:
        errors = [line for line in done.stderr.splitlines() if " error: " in line]
        require(len(errors) == 1 and "Traceback" not in done.stderr, f"not one message:\n{done.stderr}")
    check_left(project, root, done, killed)


def check_left(project: Project, root: Path, done: Done, killed: bool = False) -> None:
    """Check the guarantees about files right after a fault."""
    found = files_of(root)
    harmed = sorted(name for name, content in project.before.items() if found.get(name) != content)
    require(not harmed, f"files from before the run have changed: {harmed[:3]}")
    for manifest in (root / "manifests").glob("*.json"):
        try:
            verify(manifest)
        except PackError as error:
            raise Lost(f"a damaged corpus was published: {error}") from None
    if done.returncode == 0:
        require(found.keys() >= project.after.keys(), "exit code 0, but no corpus")
    elif done.returncode > 0:
        temporary = [name for name in found if name.endswith(".tmp")]
        require(killed or not temporary, "a process that was not killed left a temporary file")


def check_rerun(project: Project, root: Path) -> None:
    """Run the same command again, and check that it repairs everything.

    The files must be the files of an undisturbed run, with the same bytes, and no others.
    """
    done = undisturbed_run(root, "corpus")
    require(done.returncode == 0, f"the rerun failed:\n{done.stderr}")
    found = files_of(root)
    differ = sorted(name for name in found.keys() | project.after.keys() if found.get(name) != project.after.get(name))
    require(not differ, f"other files than after an undisturbed run: {differ[:3]}")


def survive(case: Case) -> int:
    """Return the number of faults that occurred.

    Raises Lost if a guarantee is broken.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "project"
        shutil.copytree(case.project.start, root)
        came = case.strike(root)
        check_rerun(case.project, root)
        return came


# -- projects --------------------------------------------------------------------------------------------------------


def make_project(folder: Path, conversations: int) -> Project:
    """Make a project of short, distinct chats, and a second, finished corpus."""
    folder.mkdir()
    with (folder / "chats.jsonl").open("wb") as file:
        for number in range(conversations):
            turns = [
                {"role": "user", "content": f"What is {number} + {number % 7}?" + " Think first." * (number % 5)},
                {"role": "assistant", "content": f"{number + number % 7}, of course." * (1 + number % 3)},
            ]
            file.write(orjson.dumps({"messages": turns}) + b"\n")
    for name, setting in CONFIGS.items():
        changed = setting.partition(":")[0]
        kept = [line for line in CONFIG.splitlines(keepends=True) if not changed or not line.startswith(changed)]
        (folder / f"{name}.yaml").write_text("".join(kept) + setting)
    pack(folder, "other")
    return undisturbed(folder, "corpus")


def pack(folder: Path, config: str) -> None:
    done = undisturbed_run(folder, config)
    require(done.returncode == 0, f"an undisturbed run failed:\n{done.stderr}")


def undisturbed(folder: Path, *configs: str) -> Project:
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        shutil.copytree(folder, whole)
        for config in configs:
            pack(whole, config)
        return Project(folder, files_of(folder), files_of(whole))


def before_commit(project: Project, folder: Path) -> Project:
    """Return the project with only the files next to the shards missing."""
    shutil.copytree(project.start, folder)
    for name, content in project.after.items():
        if not name.startswith(("manifests/", "data/corpora/")) or re.search("/(train|validation)-", name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return Project(folder, files_of(folder), project.after)


def from_nothing(project: Project, folder: Path) -> Project:
    """Return the project before any run."""
    shutil.copytree(project.start, folder, ignore=shutil.ignore_patterns("data", "manifests"))
    return Project(folder, {}, {name: project.after[name] for name in project.after.keys() - project.before.keys()})


# -- faults in system calls ------------------------------------------------------------------------------------------


def traced(root: Path, *options: str) -> tuple[Done, list[str]]:
    """Run with one worker under strace; return the run and its main thread's calls.

    The calls are in order. Paths in them are relative to the root.
    """
    log = root.parent / "strace.log"
    done = finish(start(root, ["strace", "-f", "-y", "-o", str(log), *options, *words()]))
    text = log.read_text(errors="replace").replace(f"{root}/", "").replace(str(root), ".")
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    main = "\n".join(call for thread, call in lines if thread == lines[0][0])
    # A call that another thread interrupts is on two lines.
    return done, re.sub(r" <unfinished \.\.\.>\n<\.\.\. \w+ resumed>", "", main).splitlines()


def paths_of(call: str) -> list[str]:
    """Return the paths of the project that a call names, also by file descriptor."""
    by_number = re.match(r"\w+\(\d+<([^>]*)>", call)
    named = [by_number[1]] if by_number else re.findall('"([^"]*)"', call)
    return [path for path in named if re.match(r"(data|manifests)(/|$)|\.$", path)]


def calls_of(folder: Path) -> list[tuple[str, int, str]]:
    """Return all calls that touch the project's data.

    A call is (name, number among the calls of this name, line of strace).
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "project"
        shutil.copytree(folder, root)
        done, lines = traced(root, "--seccomp-bpf", "-e", f"trace={','.join(CALLS)}")
        require(done.returncode == 0, f"an undisturbed run failed under strace:\n{done.stderr}")
    counts = dict.fromkeys(CALLS, 0)
    found = []
    for line in lines:
        call = line.partition("(")[0]
        if call in counts:
            counts[call] += 1
            if paths_of(line):
                found.append((call, counts[call], line))
    return found


def unsynced(calls: list[tuple[str, int, str]]) -> list[str]:
    """Return the files and folders of a corpus that a power cut could destroy.

    These were written but not synced when the manifest was renamed to its place. For the manifest and its folder, the
    end of the run counts.
    """
    dirty: set[str] = set()
    lost: set[str] = set()
    for call, _, line in calls:
        *others, path = paths_of(line)
        folder = str(Path(path).parent)
        if call == "rename":
            dirty = {path if other in others else other for other in dirty} | {folder}
            if folder == "manifests":
                lost = {other for other in dirty if other in (".", "data") or other.startswith("data/corpora")}
        elif call == "fsync":
            dirty.discard(path)
        elif call == "mkdir" or "O_CREAT" in line:
            dirty.add(folder)
        if call == "write" or "O_CREAT" in line:
            dirty.add(path)
    return sorted(lost | {path for path in dirty if path.startswith("manifests") or path == "."})


def cut_power(root: Path) -> int:
    lost = unsynced(calls_of(root))
    require(not lost, f"written and not synced before the commit, or after: {lost}")
    return 1


def inject(project: Project, call: str, number: int, fault: str) -> Strike:
    """Return a strike that injects a fault at a system call.

    `fault` is in the syntax of strace: signal=KILL, error=EIO, retval=0, and so on.
    """

    def strike(root: Path) -> int:
        # A filter in the kernel makes strace fast, but then strace cannot inject signals.
        fast = [] if fault == "signal=KILL" else ["--seccomp-bpf"]
        done, lines = traced(root, *fast, "-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={number}")
        # Python may open a file more or less in each run. The call that was hit may then be a different one.
        refused = any("INJECTED" in line and paths_of(line) for line in lines)
        if not refused and done.returncode != -signal.SIGKILL:
            return 0
        check_struck(project, root, done)
        return 1

    return strike


def call_cases(name: str, project: Project) -> Iterator[Case]:
    """Yield cases that kill the run at each call, or refuse each call like a disk."""
    for call, number, line in calls_of(project.start):
        reads = call == "openat" and "O_CREAT" not in line
        faults = ["signal=KILL", "error=EIO"]
        if call in ("write", "mkdir", "fsync") or (call == "openat" and not reads):
            faults.append("error=ENOSPC")
        if call == "write":
            size = int(line.rpartition("=")[2])
            faults += ["retval=0", f"retval={size // 2}", f"retval={size}"] if size > 1 else []
        for fault in faults:
            kind = "lost write" if fault.startswith("retval") else fault.partition("=")[2].replace("KILL", "SIGKILL")
            row = f"{name}: {kind} at {'every call' if kind == 'SIGKILL' else 'a call'}"
            yield Case(row, f"{fault} at {call} {number}: {line}", project, inject(project, call, number, fault))


# -- kills at random moments -----------------------------------------------------------------------------------------


def interrupt_at_random(project: Project, moments: random.Random, took: float) -> Strike:
    """Return a strike that interrupts a run with two workers, and up to two more runs.

    The interrupt is Ctrl-C, once or several times, or SIGTERM to the parent alone.
    """

    def strike(root: Path) -> int:
        came = 0
        for _ in range(moments.randint(1, 3)):
            process = start(root, words(workers=2))
            time.sleep(moments.uniform(0.1, 1) * took)
            with suppress(ProcessLookupError):
                if moments.random() < 0.3:
                    process.terminate()
                else:
                    for _ in range(moments.choice((1, 1, 2, 4))):
                        os.killpg(process.pid, signal.SIGINT)
                        time.sleep(moments.uniform(0, 0.1))
            begin = time.perf_counter()
            done = finish(process)
            # Until the project's own modules are loaded, a signal ends Python in its usual way, so nothing is checked.
            if re.search(r"^chats: |^E\d{3} |/(pipeline|tasks)/(?!__init__|loading)", done.stderr, re.MULTILINE):
                require(time.perf_counter() - begin < 30, "an interrupted run did not end soon")
                require(done.returncode in (0, 75), f"exit code {done.returncode}:\n{done.stderr}")
                errors = [line for line in done.stderr.splitlines() if re.match(r"E\d{3} ", line)]
                require(len(errors) == (done.returncode != 0), f"exit code {done.returncode}, stderr:\n{done.stderr}")
                require("Traceback" not in done.stderr, done.stderr)
            check_left(project, root, done)
            require(not list(root.rglob("*.tmp")), "a temporary file is left")
            came += done.returncode != 0
        return came

    return strike


def kill_at_random(project: Project, moments: random.Random, took: float, whole: bool) -> Strike:
    """Return a strike that kills a run with two workers, and up to two more runs.

    It kills the whole run or one of its processes.
    """

    def strike(root: Path) -> int:
        came = 0
        for _ in range(moments.randint(1, 3)):
            process = start(root, words(workers=2))
            time.sleep(moments.uniform(0.3, 1) * took)
            with suppress(ProcessLookupError, FileNotFoundError):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                if whole:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    os.kill(moments.choice([process.pid, *map(int, children)]), signal.SIGKILL)
            done = finish(process)
            check_struck(project, root, done, killed=True)
            came += done.returncode != 0
        return came

    return strike


# -- disks that are too small ----------------------------------------------------------------------------------------


@contextmanager
def small_disk(root: Path, room: int) -> Iterator[None]:
    """Put `root` on a tmpfs with `room` free bytes while the block runs."""
    copy = root.with_name("copy")
    root.rename(copy)
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "faults", str(root)], check=True)
    try:
        shutil.copytree(copy, root, dirs_exist_ok=True)
        disk = os.statvfs(root)
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        subprocess.run(["mount", "-o", f"remount,size={used + room}", str(root)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,size=64m", str(root)], check=True)
        shutil.rmtree(copy)
        shutil.copytree(root, copy)
    finally:
        subprocess.run(["umount", str(root)], check=True)
    root.rmdir()
    copy.rename(root)


def on_small_disk(project: Project, room: int) -> Strike:
    def strike(root: Path) -> int:
        with small_disk(root, room):
            done = finish(start(root, words(workers=2)))
        check_struck(project, root, done)
        return int(done.returncode != 0)

    return strike


def with_small_files(project: Project, size: int) -> Strike:
    """Return a strike in which files are limited to `size` bytes.

    The kernel refuses the rest: a short write, then an error.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def strike(root: Path) -> int:
        done = finish(start(root, words(workers=2), before=limit))
        check_struck(project, root, done)
        return int(done.returncode != 0)

    return strike


# -- two at once -----------------------------------------------------------------------------------------------------


def two_at_once(project: Project, first: str, second: str) -> Strike:
    def strike(root: Path) -> int:
        both = [start(root, words(config, workers=2)) for config in (first, second)]
        struck = [finish(process) for process in both]
        for done in struck:
            check_struck(project, root, done)
        codes = sorted(done.returncode for done in struck)
        same = first == second
        said = struck[0].stderr + struck[1].stderr
        require(codes == [0, 0] or (same and codes == [0, 75]), f"exit codes {codes}:\n{said}")
        busy = "another run is packing this corpus" in said
        require(
            busy == (codes == [0, 75]), "exit code 75 and the message 'another run is packing this corpus' do not match"
        )
        return 1

    return strike


# -- all of it -------------------------------------------------------------------------------------------------------


def all_cases(folder: Path, seed: int) -> Iterator[Case]:
    project = make_project(folder / "whole", 300)
    if can_trace():
        commit = before_commit(project, folder / "commit")
        yield from call_cases("commit", commit)
        yield from call_cases("whole run", project)
        for some in (commit, project, from_nothing(project, folder / "nothing")):
            yield Case("power cut at the commit", some.start.name, some, cut_power)
    else:
        print("system calls: left out, strace is not here or may not trace", file=sys.stderr)
    begin = time.perf_counter()
    undisturbed(project.start, "corpus")
    took = time.perf_counter() - begin
    for whole, chains in ((True, 200), (False, 40)):
        for number in range(chains):
            moments = random.Random(f"{seed} {whole} {number}")
            row = f"two workers: {'all' if whole else 'one'} killed at random"
            yield Case(row, f"chain {number}", project, kill_at_random(project, moments, took, whole))
    for number in range(200):
        moments = random.Random(f"{seed} interrupt {number}")
        row = "two workers: interrupted at random"
        yield Case(row, f"chain {number}", project, interrupt_at_random(project, moments, took))
    sizes = [len(content) for name, content in project.after.items() if name not in project.before]
    # With less than a page, neither Luigi nor a worker can start.
    for size in range(1 << 12, max(sizes), max(sizes) // 100):
        yield Case("files of a limited size: short writes", f"{size} bytes", project, with_small_files(project, size))
    if works("unshare", "--mount", "mount", "-t", "tmpfs", "none", tempfile.gettempdir()):
        for room in range(0, sum(sizes) * 5 // 4, 1 << 12):
            yield Case("full disk (tmpfs)", f"{room} bytes of room", project, on_small_disk(project, room))
    else:
        print("full disk: left out, a tmpfs cannot be mounted (as root it can)", file=sys.stderr)
    for number in range(20):
        yield Case("two runs, one corpus", f"pair {number}", project, two_at_once(project, "corpus", "corpus"))
    for other in ("longer", "twin"):
        both = undisturbed(project.start, "corpus", other)
        for number in range(10):
            yield Case("two runs, shared sources", f"{other} {number}", both, two_at_once(both, "corpus", other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--only", default="", help="rows that contain this text")
    parser.add_argument("--case", default="", help="cases that contain this text")
    parser.add_argument("--most", type=int, default=1 << 30, help="faults of each row, drawn by the seed")
    options = parser.parse_args()
    rows: dict[str, list[Case]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        for case in all_cases(Path(name), options.seed):
            if options.only in case.row and options.case in case.what:
                rows.setdefault(case.row, []).append(case)
        print("| fault | injected | survived | seconds | seed |\n|---|---:|---:|---:|---:|", flush=True)
        broken = 0
        for row, cases in rows.items():
            begin = time.perf_counter()
            chosen = random.Random(options.seed).sample(cases, min(options.most, len(cases)))
            found = list(pool.map(count_faults, chosen))
            came, lost = sum(result or 0 for result in found), found.count(None)
            seconds = time.perf_counter() - begin
            print(f"| {row} | {came + lost} | {came} | {seconds:.0f} | {options.seed} |", flush=True)
            broken += lost
    return min(broken, 1)


def count_faults(case: Case) -> int | None:
    """Return the number of faults that occurred, or None if a guarantee was broken.

    Prints a message if a guarantee was broken.
    """
    try:
        return survive(case)
    except Lost as lost:
        print(f"lost: {case.row}: {case.what}: {lost}", file=sys.stderr, flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
