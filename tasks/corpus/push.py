"""Push a corpus to a dataset on the Hugging Face Hub.

    manifest ─push_corpus─▶ commits of shards and other files ─▶ last commit: dataset card, manifest

The manifest is sent last, so a reader that sees it sees the whole corpus. A file that the dataset already has with the
same content is not sent again, so running an interrupted push again continues it. Two corpora are never mixed: with
`replace`, the first commit removes the manifest and the files of the former corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from packcorpus.tasks.core.errors import StorageError, UsageError
from packcorpus.tasks.corpus.publish import CARD
from packcorpus.tasks.storage.corpus_folder import changed_files, checked_folder, raise_all
from packcorpus.tasks.storage.facts import FileFacts, Shard
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.stores.hub import Branch, find_branch, has_content
from packcorpus.tasks.stores.store import Facts
from packcorpus.tasks.stores.urls import is_url, split_dataset

MANIFEST = "manifest.json"

COMMIT_FILES = 64  # per commit; committed files survive an interruption, and the Hub limits files and bytes
COMMIT_BYTES = 8 << 30

Report = Callable[[str], None]
"""Called with a line of text after each commit of data."""


@dataclass(frozen=True)
class Push:
    """Result of a push: a corpus on the Hub.

    `sent` is the number of files that this push sent; `found_done` is true if there was nothing to send.
    """

    url: str
    dataset: str
    revision: str
    folder: str
    commit: str
    files: int
    sent: int
    sent_bytes: int
    found_done: bool


def push_corpus(
    path: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str = "",
    message: str = "",
    replace: bool = False,
    report: Report = lambda line: None,
) -> Push:
    """Send the corpus of a manifest to a dataset.

    `repo` is OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/FOLDER. The dataset and the branch are created if they are
    new. Raises UsageError, DataError, InputMissing, StorageError, or Busy.
    """
    dataset = split_dataset(repo if is_url(repo) else f"hf://datasets/{repo}")
    if revision and dataset.revision and revision != dataset.revision:
        raise UsageError("bad_command_line", f"{repo} and --revision {revision}: name one revision")
    dataset = dataset._replace(revision=revision or dataset.revision)
    manifest = load_manifest(path)
    folder = checked_folder(manifest, path)
    listed = [*manifest.listed()]
    raise_all(changed_files(folder, listed), folder)
    branch = find_branch(dataset)
    if private and branch.commit and not branch.private:
        raise UsageError(
            "push_refused",
            f"{branch.url}: is public, and --private applies only to new datasets; make the dataset private on its "
            "page, or omit --private",
        )
    there, own = branch.files(dataset.key), (folder / MANIFEST).read_bytes()
    place = f"{dataset.key}/" if dataset.key else ""
    old = branch.get(f"{place}{MANIFEST}") if MANIFEST in there else b""
    missing = [file for file in listed if not has_content(there.get(file.path), folder / file.path, file.sha256)]
    stale = [] if old == own else _stale(branch, place, there, listed, missing, old, replace)
    files = len(listed) + 1
    if old == own and not missing and not branch.is_new:
        return Push(branch.url, dataset.name, branch.name, dataset.key, branch.commit, files, 0, 0, True)
    branch.create(private)
    message = message or f"Add {manifest.name} {manifest.key[:12]}"
    if stale:
        branch.add({}, stale, f"{message} (remove the former corpus)")
    groups: list[list[Shard | FileFacts]] = []
    for file in (file for file in missing if file.path != CARD):
        last = groups[-1] if groups else []
        if not last or len(last) == COMMIT_FILES or sum(one.bytes for one in last) + file.bytes > COMMIT_BYTES:
            groups.append(last := [])
        last.append(file)
    sent, all_sent = 0, len(missing) + (old != own)
    for number, group in enumerate(groups, 1):
        paths = {f"{place}{file.path}": folder / file.path for file in group}
        branch.add(paths, [], f"{message} (data {number} of {len(groups)})")
        sent += len(group)
        report(f"{branch.url}: sent {sent:,} of {all_sent:,} files")
    arrived = branch.files(dataset.key)  # a .gitignore of the dataset makes a commit leave out files silently
    for file in listed:
        if file.path != CARD and not has_content(arrived.get(file.path), folder / file.path, file.sha256):
            raise StorageError(
                "object_cut",
                f"{branch.url}: {file.path} is missing or differs on the Hub; check the .gitignore of the dataset and "
                "that no other process writes to the corpus, then run again",
            )
    names = [*[CARD] * any(file.path == CARD for file in missing), *[MANIFEST] * (old != own)]
    if names:
        branch.add({f"{place}{name}": folder / name for name in names}, [], message)
    size = sum(file.bytes for file in missing) + (old != own) * len(own)
    return Push(branch.url, dataset.name, branch.name, dataset.key, branch.commit, files, all_sent, size, False)


def _stale(
    branch: Branch,
    place: str,
    there: Mapping[str, Facts],
    listed: Sequence[Shard | FileFacts],
    missing: Sequence[Shard | FileFacts],
    old: bytes,
    replace: bool,
) -> list[str]:
    """Return the paths of another corpus, which must be removed first.

    Raises UsageError if there are any and `replace` is false.
    """
    foreign = [file.path for file in missing if file.path in there]
    if not (old or foreign):
        return []
    try:
        other: Manifest | None = Manifest.model_validate_json(old)
    except ValidationError:
        other = None
    if not replace:
        where = f"{branch.url}/{place}".rstrip("/")
        found = f"the corpus {other.name} {other.key[:12]}" if other else f"another {MANIFEST if old else foreign[0]}"
        raise UsageError(
            "push_refused",
            f"{where}: has {found}; push to another dataset or folder (OWNER/NAME/FOLDER), or add --replace, which "
            "removes it from the branch",
        )
    former = {MANIFEST, *foreign, *(file.path for file in (other.listed() if other else ()))}
    kept = {file.path for file in listed} - set(foreign)
    return [f"{place}{name}" for name in sorted(former & there.keys() - kept)]
