"""Dependencies are bounded, pinned, and locked.

pyproject.toml has the bounds, constraints.txt the pins, and requirements.lock the digests for CI.
"""

from __future__ import annotations

import re
import tomllib
from itertools import chain

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
}


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], *chain(*extras)]
    return [Requirement(line) for line in lines if not line.startswith("packcorpus[")]


def test_every_requirement_is_bounded_and_includes_its_pin() -> None:
    for requirement in requirements():
        assert {bound.operator for bound in requirement.specifier} == {">=", "<"}, requirement
        assert PINNED[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_lock_has_a_digest_for_every_pin() -> None:
    """`make lock` writes it."""
    lock = (ROOT / "requirements.lock").read_text()
    locked = {}
    for entry in re.split(r"\n(?=\S)", lock.strip()):
        found = re.match(r"([\w.-]+)==(\S+)", entry)
        assert found, entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), found[0]
        locked[canonicalize_name(found[1])] = found[2]
    assert locked == PINNED
