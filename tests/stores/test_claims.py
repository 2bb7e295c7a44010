"""One machine makes each output that several machines need, under a claim.

A machine that was lost delays the others only for a limited time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
from support.bucket_roots import own_scratch
from support.servers.remote import SECRET, faulty_s3, needs_remote, new_bucket, s3, use

from tasks.core import notes
from tasks.core.errors import DataError
from tasks.storage.files import locked
from tasks.stores import claims
from tasks.stores.claims import EXPIRY, make_once
from tasks.stores.mirror import LOCAL, Mirror, mirror_of
from tasks.stores.scratch import root_of
from tasks.stores.store import Store, open_store

needs_remote()

from tasks.stores.bucket import Bucket  # noqa: E402

CLAIM, MADE = "data/digests/x.claim", "data/digests/x.json"


class Machines:
    """This machine and a second one.

    A test sets the clock and the pauses of this machine. The second machine is visible only through the bucket.
    """

    def __init__(self, mirror: Mirror, bucket: Store, monkeypatch: pytest.MonkeyPatch):
        self.mirror, self.bucket, self.now, self.made = mirror, bucket, 0.0, 0
        self.pauses: list[float] = []
        self.in_pause: Callable[[], None] = lambda: None
        monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=self._pause, monotonic=lambda: self.now))

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        assert len(self.pauses) < 100, "waits forever"
        self.now += seconds
        self.in_pause()

    def find(self) -> bytes | None:
        return self.bucket.get(MADE) if self.bucket.head(MADE) else None

    def make(self) -> bytes:
        assert self.bucket.head(CLAIM), "claimed while it works"
        self.made += 1
        self.bucket.put(MADE, b"ours")
        return b"ours"

    def make_once(self, wait: bool = True) -> bytes | None:
        return make_once(self.mirror, root_of(self.bucket.url_of("")) / MADE, self.find, self.make, wait=wait)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machines:
    use(monkeypatch, s3())
    own_scratch(monkeypatch, tmp_path)
    return machines_at(f"s3://{new_bucket()}/root", monkeypatch)


def machines_at(url: str, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(mirror_of(root_of(url)), open_store(url), monkeypatch)


def test_the_first_machine_makes_it_and_leaves_no_claim(machines: Machines) -> None:
    assert machines.make_once() == machines.make_once() == b"ours"
    assert machines.made == 1
    assert [key for key, _ in machines.bucket.list()] == [MADE]


def test_the_others_wait_for_it(machines: Machines) -> None:
    machines.bucket.put(CLAIM, b"theirs")
    assert machines.make_once(wait=False) is None
    assert not machines.pauses

    def finish() -> None:
        if len(machines.pauses) == 3:
            machines.bucket.put(MADE, b"theirs")
            machines.bucket.delete(CLAIM)

    machines.in_pause = finish
    assert machines.make_once() == b"theirs"
    assert len(machines.pauses) == 3
    assert not machines.made


def test_a_machine_that_is_lost_is_replaced(machines: Machines) -> None:
    machines.bucket.put(CLAIM, b"theirs")
    assert machines.make_once() == b"ours"
    assert EXPIRY <= machines.now < EXPIRY + 2 * claims.LONGEST
    assert machines.bucket.head(CLAIM) is None


def test_a_machine_that_renews_its_claim_is_not_replaced(machines: Machines) -> None:
    """The work may take any time, as long as the claim is renewed."""
    machines.bucket.put(CLAIM, b"0")

    def renew() -> None:
        machines.bucket.put(CLAIM, str(len(machines.pauses)).encode())
        if machines.now > 3 * EXPIRY:
            machines.bucket.put(MADE, b"theirs")

    machines.in_pause = renew
    assert machines.make_once() == b"theirs"
    assert not machines.made


def test_one_of_several_that_wait_replaces_a_lost_machine(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines may notice the loss at the same moment."""
    both, is_made, now = Barrier(2, timeout=60), Event(), 0.0
    put = Bucket.put

    def put_together(store: Bucket, key: str, source: Any, absent: bool = False, expected: Any = None) -> bool:
        if expected:
            both.wait()
        return put(store, key, source, absent, expected)

    def pause(_: float) -> None:
        nonlocal now
        if not now:
            both.wait()
            now = EXPIRY + 1
        else:
            assert is_made.wait(60)

    def make() -> bytes:
        made = machines.make()
        is_made.set()
        return made

    monkeypatch.setattr(Bucket, "put", put_together)
    monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=pause, monotonic=lambda: now))
    machines.bucket.put(CLAIM, b"lost")
    file = root_of(machines.bucket.url_of("")) / MADE
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda _: make_once(machines.mirror, file, machines.find, make), range(2))]
    assert found == [b"ours"] * 2
    assert machines.made == 1
    assert machines.bucket.head(CLAIM) is None


def test_a_machine_that_was_replaced_leaves_the_claim_of_the_other_one(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was taken for lost, as a computer that slept would be.

    It neither renews nor deletes the claim of the other machine.
    """
    monkeypatch.setattr(claims, "RENEWAL", 0.001)

    def work() -> bytes:
        for _ in range(5):  # a renewal that has begun may be written after the other claim
            machines.bucket.put(CLAIM, b"theirs")
            if {machines.bucket.get(CLAIM) for _ in range(50)} == {b"theirs"}:
                return b"ours"
        raise AssertionError("renewed")

    file = root_of(machines.bucket.url_of("")) / MADE
    assert make_once(machines.mirror, file, machines.find, work) == b"ours"
    assert machines.bucket.get(CLAIM) == b"theirs"


def theirs(**who: Any) -> bytes:
    return json.dumps(
        {"id": "1", "host": "node-7", "process": 4242, "since": "2026-01-02 03:04:05 UTC", **who}
    ).encode()


@pytest.mark.parametrize(
    ("claim", "who"),
    [
        (theirs(), "which node-7, process 4242, has been making since 2026-01-02 03:04:05 UTC"),
        (theirs(host="\x1b[2Jnode"), r"which \x1b[2Jnode, process 4242, has been making"),
        (b"\xffof another version", "which another process is making"),
        (b"[1]", "which another process is making"),
    ],
)
def test_who_waits_sees_once_for_whom(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, claim: bytes, who: str
) -> None:
    shown, first = list[str](), list[float]()
    monkeypatch.setattr(notes, "_show", lambda note: (shown.append(note), first.append(machines.now)))
    machines.bucket.put(CLAIM, claim)

    def finish() -> None:
        if machines.now > 20:
            machines.bucket.put(MADE, b"theirs")

    machines.in_pause = finish
    assert machines.make_once() == b"theirs"
    [note], [when] = shown, first
    assert note.startswith(f"note: waiting for {machines.bucket.url_of(MADE)}, {who}")
    end = f"; its claim is replaced after 30 s without renewal, of which {when:.0f} have passed"
    assert note.endswith(end)
    assert claims.NOTED_AFTER <= when < claims.NOTED_AFTER + claims.LONGEST
    assert SECRET not in note


def test_who_waits_shortly_sees_nothing(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()
    monkeypatch.setattr(notes, "_show", shown.append)
    machines.bucket.put(CLAIM, theirs())

    def finish() -> None:
        if machines.now > 2:
            machines.bucket.put(MADE, b"theirs")

    machines.in_pause = finish
    assert machines.make_once() == b"theirs"
    assert not shown


def test_a_claim_says_who_holds_it(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> bytes:
        found = json.loads(machines.bucket.get(CLAIM))
        assert (found["host"], found["process"]) == (socket.gethostname(), os.getpid())
        return b"ours"

    file = root_of(machines.bucket.url_of("")) / MADE
    assert make_once(machines.mirror, file, machines.find, work) == b"ours"


def test_who_waits_for_a_lock_sees_once_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shown, works = tmp_path / "data" / "x.json", list[str](), Event()
    monkeypatch.setattr(claims, "NOTED_AFTER", 0.01)
    monkeypatch.setattr(notes, "_show", shown.append)

    def make() -> int:
        works.set()
        deadline = time.monotonic() + 20
        while not shown and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # so long that the waiting process looks again
        return 1

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(make_once, LOCAL, file, lambda: None, make)
        assert works.wait(20)
        assert make_once(LOCAL, file, lambda: 2 if first.done() else None, lambda: 3) in (2, 3)
    [note] = shown
    who = f"which {socket.gethostname()}, process {os.getpid()}, has been making since "
    assert note.startswith(f"note: waiting for {file}, {who}")
    assert note.endswith("; its lock ends with its process")


def test_what_another_machine_finishes_before_the_claim_is_not_made_again(machines: Machines) -> None:
    looks: list[bytes | None] = [None, b"theirs"]
    file = root_of(machines.bucket.url_of("")) / MADE
    assert make_once(machines.mirror, file, lambda: looks.pop(0), machines.make) == b"theirs"
    assert machines.bucket.head(CLAIM) is None


@pytest.mark.parametrize("fault", ["500", "503", "late"])
def test_a_claim_that_the_store_answers_with_an_error_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The machine recognizes its own claim if the error followed the write."""
    own_scratch(monkeypatch, tmp_path)
    with faulty_s3() as store:
        use(monkeypatch, store.address)
        machines = machines_at(f"s3://{new_bucket()}/root", monkeypatch)
        store.fails("PUT", CLAIM, fault, times=1)
        assert machines.make_once() == b"ours"
        assert store.met == 1
        assert machines.bucket.head(CLAIM) is None
    assert not machines.pauses


@pytest.mark.parametrize("end", [DataError("object_changed", "s3://x: changed"), KeyboardInterrupt(), SystemExit(143)])
def test_work_that_fails_leaves_no_claim(machines: Machines, end: BaseException) -> None:
    def fail() -> bytes:
        raise end

    with pytest.raises(type(end)):
        make_once(machines.mirror, root_of(machines.bucket.url_of("")) / MADE, machines.find, fail)
    assert machines.bucket.head(CLAIM) is None
    assert machines.make_once() == b"ours"


def test_a_claim_is_renewed_while_the_work_is_done(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each renewal changes the content, so that waiting machines see it."""
    monkeypatch.setattr(claims, "RENEWAL", 0.001)

    def work() -> bytes:
        first = machines.bucket.head(CLAIM)
        assert any(machines.bucket.head(CLAIM) != first for _ in range(2000))
        return machines.make()

    file = root_of(machines.bucket.url_of("")) / MADE
    assert make_once(machines.mirror, file, machines.find, work) == b"ours"
    assert machines.bucket.head(CLAIM) is None, "and is not renewed afterwards"


def test_a_local_root_has_a_lock_in_the_place_of_a_claim(tmp_path: Path) -> None:
    """The lock ends with its process; a caller that does not wait gets nothing."""
    file, made, asked = tmp_path / "data" / "x.json", list[int](), list[None]()
    lock = file.with_name(".x.json.lock")

    def make() -> int:
        assert lock.is_file()
        time.sleep(0.2)
        made.append(len(made))
        return made[0]

    def once(wait: bool = True) -> int | None:
        find = lambda: made[0] if made else None  # noqa: E731
        return make_once(LOCAL, file, find, make, wait=wait, check=lambda: asked.append(None))

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda _: once(), range(4))] == [0] * 4
    assert made == [0]
    assert asked, "those who wait may end that"
    made.clear()
    with locked(lock):
        assert once(wait=False) is None
    assert once(wait=False) == 0
    assert not [*file.parent.iterdir()], "the lock is gone"
