"""Find the config that a command names, or draft one for the data that it names.

    packcorpus pack chats.yaml                     ─▶ chats.yaml
    packcorpus pack chats.jsonl --tokenizer MODEL  ─▶ chats.yaml, drafted as by `init`; its first line is this command

A file is a draft of a command if its first line is that command. Then it is used as it is, so the same command gives
the same corpus and asks nothing, also after the user has edited the file. A file with another first line is never
changed: the draft is chats-2.yaml, and so on.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from glob import has_magic
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from packcorpus.tasks.cli.options import default_config, value_as_json
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.printable import from_here, one_line, printable
from packcorpus.tasks.dry_run.given import Choose, Given
from packcorpus.tasks.storage.files import write_bytes

if TYPE_CHECKING:
    from packcorpus.tasks.config import Config
    from packcorpus.tasks.dry_run.config_draft import Draft

YAML = (".yaml", ".yml")
SAMPLE = 1 << 16  # bytes of a JSON file that show whether it is a config


def find_config(words: Sequence[str], given: Given) -> Path | None:
    """Return the config that the words of a command name, or None if they name data.

    Raises UsageError if they name a config and something else, or a config with settings, and InputMissing if there is
    no config.
    """
    configs = [word for word in words if _is_config(word, alone=len(words) == 1 and not given.options)]
    if words and not configs:
        return None
    config = Path(configs[0]) if configs else default_config()
    if len(words) > 1:
        problem = "name one config, or only data"
        raise UsageError("bad_command_line", f"{config}: is a config, and other files are named, too; {problem}")
    if options := [option for option in given.options if option[0] != "--sequence-length"]:
        option = options[0][0]
        problem = f"set `{option[2:]}` there, or name the data instead of the config"
        raise UsageError("bad_command_line", f"{option}: {config} is a config; {problem}")
    return config


def _is_config(word: str, alone: bool) -> bool:
    """Return whether a word names a config; `alone` if nothing else is given."""
    path = Path(word)
    if path.suffix.lower() in YAML:
        return True
    if path.suffix.lower() == ".json" and path.is_file():
        with path.open("rb") as file:
            return file.read(1) == b"{" and b'"sources"' in file.read(SAMPLE)
    from packcorpus.tasks.dry_run.config_draft import is_remote
    from packcorpus.tasks.readers.containers import container_by_extension

    if path.is_file():
        return container_by_extension(word) is None and path.suffix != ".model"
    return alone and not (path.exists() or is_remote(word) or container_by_extension(word) or has_magic(word))


def write_config(
    words: Sequence[str], given: Given, root: Path, json_output: bool, quiet: bool, choose: Choose | None
) -> Path:
    """Return the config of a command that names data, and write it unless it exists.

    Prints where it is, and what was decided, to standard error. Raises the errors of `make_draft`.
    """
    from packcorpus.tasks.dry_run.config_draft import make_draft

    path, is_there = _place(words, given)
    draft = None
    if not is_there:
        draft = make_draft(words, Path(), given, root, choose, trains=False)
        write_bytes(path, draft.text(title=_command(words, given)).encode())
    if json_output:
        found = {"settings": draft.values, "found": draft.summary(), "will_fail": draft.will_fail} if draft else {}
        print(value_as_json({"config": path, "written": not is_there} | found), file=sys.stderr, flush=True)
    elif not quiet:
        how = "as an earlier run of this command wrote it, or you edited it; delete it to draft it again"
        if draft:
            how = f"written; to change settings, edit it, then run: packcorpus pack {shlex.quote(str(path))}"
        for line in (*(draft.summary() if draft else ()), f"config: {path}: {how}"):
            print(printable(line), file=sys.stderr, flush=True)
    return path


def config_for(words: Sequence[str], given: Given, root: Path, choose: Choose | None) -> tuple[Config, Draft | None]:
    """Return the config that `write_config` would write or use, and write nothing."""
    from packcorpus.tasks.config import config_from, load_config
    from packcorpus.tasks.core.yaml_settings import parse_settings
    from packcorpus.tasks.dry_run.config_draft import make_draft

    path, is_there = _place(words, given)
    if is_there:
        return load_config(path), None
    draft = make_draft(words, Path(), given, root, choose, trains=False)
    return config_from(parse_settings(draft.text(), str(path), {}), str(path)), draft


def _place(words: Sequence[str], given: Given) -> tuple[Path, bool]:
    """Return the path of the draft of a command, and whether it is there."""
    from packcorpus.tasks.dry_run.config_draft import name_of

    name, title = name_of(words, given), f"# {_command(words, given)}".encode()
    for number in count(1):
        path = Path(f"{name}{f'-{number}' if number > 1 else ''}.yaml")
        try:
            with path.open("rb") as file:
                if file.readline().rstrip(b"\n") == title:
                    return path, True
        except FileNotFoundError:
            return path, False
        except OSError:  # such as a folder of this name
            continue
    raise AssertionError


def _command(words: Sequence[str], given: Given) -> str:
    """Return the command that names data, as the first line of its draft."""
    options = [text for option in given.options for text in option]
    return one_line(shlex.join(["packcorpus", "pack", *words, *options]))


def chooser(json_output: bool) -> Choose | None:
    """Return what asks which tokenizer to use, or None without a terminal."""
    return None if json_output or not (sys.stdin.isatty() and sys.stderr.isatty()) else _ask


def _ask(found: Sequence[str]) -> str:
    lines = [f"  {number}  {printable(from_here(path))}" for number, path in enumerate(found, 1)]
    print("several tokenizers are nearby; which one is that of your model?", *lines, sep="\n", file=sys.stderr)
    while True:
        print(f"1 to {len(found)}: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:
            raise UsageError("tokenizer_unnamed", "several tokenizers are nearby, and none was chosen")
        if answer.strip().isdecimal() and 1 <= int(answer) <= len(found):
            return found[int(answer) - 1]
