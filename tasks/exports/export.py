"""Export a corpus: write all of its shards in a format, then export.json.

    manifest ─export_corpus─▶ .NAME.partial/ ─files of every shard, in threads─▶ export.json ─rename─▶ NAME/

Shards are written in parallel. The folder appears only when it is complete. The next export removes the remains of an
interrupted export.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.core.errors import Busy, DataError, UsageError
from packcorpus.tasks.core.printable import aligned, counted, in_bytes, suggest
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.exports.automodel import Automodel
from packcorpus.tasks.exports.axolotl import Axolotl
from packcorpus.tasks.exports.llama_factory import LlamaFactory
from packcorpus.tasks.exports.mds import Mds
from packcorpus.tasks.exports.megatron import Megatron
from packcorpus.tasks.exports.model import FOLDER, ExportFormat, Note, OutputFolder, Part, ShardJob, common_notes
from packcorpus.tasks.exports.olmo_core import OlmoCore
from packcorpus.tasks.exports.trl import Trl
from packcorpus.tasks.exports.xtuner import Xtuner
from packcorpus.tasks.storage.corpus_folder import check_listed, checked_folder
from packcorpus.tasks.storage.facts import FileFacts
from packcorpus.tasks.storage.files import locked, make_folder, read_json, sync_folder, to_json, write_bytes
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import RowBatch, open_shard, rows_of
from packcorpus.tasks.stores.urls import refuse_url, url_of

# All formats. Import and add new ones here.
EXPORTS: list[ExportFormat] = [
    Trl(),
    Megatron(),
    Axolotl(),
    LlamaFactory(),
    Xtuner(),
    OlmoCore(),
    Mds(),
    Automodel(),
]
RECORD = "export.json"
FIGURES = ("rows", "pieces", "tokens", "trained")  # counts of each split in the record
THREADS = 8  # shards written at a time; each has one record batch in memory


@dataclass(frozen=True)
class Export:
    """A complete export."""

    folder: Path
    record: dict[str, Any]
    found_done: bool  # nothing had to be written

    def lines(self) -> list[str]:
        """Return the contents, the settings of the trainer, and notes as lines of text."""
        record, files = self.record, self.record["files"]
        state = "already complete, nothing to do" if self.found_done else "written"
        size = in_bytes(sum(file["bytes"] for file in files))
        table = [["split", "rows", "pieces", "tokens", "trained"]]
        table += [[split, *(f"{count:,}" for count in figures.values())] for split, figures in record["splits"].items()]
        return [
            f"{self.folder}: {state}: {counted(len(files), 'file')}, {size}",
            *(f"  {line}" for line in aligned(table)),
            "set:",
            *(f"  {line}" for line in _settings_as_lines(record["settings"], str(self.folder))),
            *(f"note: {note['name']}: {note['text']}" for note in record["notes"]),
        ]


def export_corpus(path: Path, to: str, output: Path | None, root: Path) -> Export:
    """Write the corpus of a manifest in the format `to`.

    Raises UsageError, DataError, InputMissing, StorageError, or Busy.
    """
    if output:
        refuse_url(output, "name a folder, then copy it", "writes")
    format = next((format for format in EXPORTS if format.name == to), None)
    if format is None:
        names = [format.name for format in EXPORTS]
        given = f"--to {to}" if to else "--to is missing"
        raise UsageError("bad_command_line", f"{given}: expected {', '.join(names)}{suggest(to, names)}")
    manifest = load_manifest(path)
    if not manifest.packing_metadata.enabled:
        raise DataError(
            "cannot_export",
            f"{path}: holds conversations as text (format 2.0), not rows of tokens; pack it with packing: true, or "
            "give its messages to a trainer that tokenizes",
        )
    if manifest.row_layout.is_shared:
        raise DataError(
            "cannot_export",
            f"{path}: has trees of samples (share: {manifest.row_layout.share}), with which {format.name} would let "
            "samples see each other; pack it with share: none",
        )
    if manifest.loss_weight is not None and not format.weighted:
        holding = ", ".join(each.name for each in EXPORTS if each.weighted)
        raise DataError(
            "cannot_export",
            f"{path}: has a loss_weight for each token, which {format.name} cannot hold; pack it with "
            f"loss_weight: none, or export it to {holding}",
        )
    folder = checked_folder(manifest, path)
    project = Path() if url_of(root) else root  # trainers read local files, and a scratch folder may be deleted
    final = output or project / "data" / "exports" / f"{folder.resolve().name}-{format.name}"
    if final.name in ("", ".."):
        raise UsageError("bad_command_line", f"--output {final}: expected the name of a new folder")
    # The facts that decide the bytes of an export, apart from its location.
    provenance = {
        "format": format.name,
        "format_version": format.version,
        "reader": asdict(format.reader),
        "corpus": {
            "name": manifest.name,
            "key": manifest.key,
            "manifest_digest": manifest.digest,
            "sequence_length": manifest.sequence_length,
            **({"lengths": list(manifest.row_lengths)} if len(manifest.row_lengths) > 1 else {}),
            "tokenizer_sha256": manifest.tokenizer.sha256,
        },
    }

    def refuse() -> None:
        raise Busy("busy", f"{final}: another export is writing it; wait for it, then run again")

    with locked(final.with_name(f".{final.name}.lock"), refuse):
        if done := _find_done(final, provenance):
            return Export(final, done, True)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            make_folder(partial)
            record = provenance | _write_files(manifest, folder, format, OutputFolder(partial, final))
            write_bytes(partial / RECORD, to_json(record))
            os.rename(partial, final)
            sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return Export(final, record, False)


def _settings_as_lines(settings: dict[str, Any], folder: str, prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _settings_as_lines(value, folder, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            yield f"{prefix}{name} = {text.replace(FOLDER, folder)}"


def _find_done(final: Path, provenance: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record of this export, or None if its folder is missing or empty.

    Raises UsageError if the folder has any other content.
    """
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return None
    fix = "delete it, or choose another folder with --output"
    record = read_json(final / RECORD) if (final / RECORD).is_file() else None
    if not isinstance(record, dict) or not {"format", "corpus", "files"} <= record.keys():
        raise UsageError("export_exists", f"{final}: exists and is not an export; {fix}")
    if any(record.get(name) != value for name, value in provenance.items()):
        corpus = record["corpus"] if isinstance(record["corpus"], dict) else {}
        made = f"{record['format']} of {corpus.get('name')} {str(corpus.get('key'))[:12]}"
        raise UsageError("export_exists", f"{final}: has another export ({made}); {fix}")
    for file in (FileFacts.model_validate(entry) for entry in record["files"]):
        where = final / file.path
        if not where.is_file() or where.stat().st_size != file.bytes:
            raise UsageError("export_exists", f"{where}: is missing, or changed after the export; {fix}")
    return record


def _write_files(manifest: Manifest, folder: Path, format: ExportFormat, out: OutputFolder) -> dict[str, Any]:
    """Write every file of an export except its record, and return the facts to record.

    If rows have several lengths, the rows of each length are a separate export, in a folder named after the length.
    """
    if len(manifest.row_lengths) == 1:
        values, parts = _write_rows(manifest, folder, format, out)
    else:
        found, parts = dict[str, dict[str, Any]](), list[Part]()
        for length in map(str, manifest.row_lengths):
            part = manifest.of_length(int(length))
            if any(split.rows for split in part.splits.values()):
                inside = OutputFolder(out.folder / length, out.final / length)
                found[length], own = _write_rows(part, folder, format, inside)
                settings = orjson.dumps(found[length]["settings"])
                found[length]["settings"] = orjson.loads(
                    settings.replace(FOLDER.encode(), f"{FOLDER}/{length}".encode())
                )
                parts += own
                out.files += [file.model_copy(update={"path": f"{length}/{file.path}"}) for file in inside.files]
        text = (
            f"the order of the steps (mix: {manifest.row_layout.mix}) is lost: rows of each length are in a separate "
            "folder, and a trainer reads one folder; each step must have rows of one length"
        )
        values = {
            "settings": {length: own["settings"] for length, own in found.items()},
            "notes": [*notes_of({length: own["notes"] for length, own in found.items()}), asdict(Note("mix", text))],
            "splits": {f"{kind}-{n}": figures for n, own in found.items() for kind, figures in own["splits"].items()},
        }
    for name, planned in (("tokens", manifest.ledger.tokens.packed), ("trained", manifest.ledger.tokens.trained)):
        written = sum(getattr(part, name) for part in parts)
        if written != planned:
            raise DataError(
                "wrong_figure",
                f"the manifest records {planned:,} {name}, but the rows have {written:,}; run packcorpus verify",
            )
    return values | {"files": [file.model_dump() for file in sorted(out.files, key=lambda file: file.path)]}


def notes_of(notes: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    """Return the notes of all lengths; those of one length name it."""
    found = {}
    for length, own in notes.items():
        for note in own:
            is_common = all(note in others for others in notes.values())
            found[note["name"], note["text"]] = note if is_common else note | {"text": f"{length}: {note['text']}"}
    return list(found.values())


def _write_rows(
    manifest: Manifest, folder: Path, format: ExportFormat, out: OutputFolder
) -> tuple[dict[str, Any], list[Part]]:
    """Write rows of one length; return settings, notes, and figures, and the parts."""
    splits = {name: split.shards for name, split in manifest.splits.items() if split.rows}
    jobs = [ShardJob(manifest, name, number, len(own)) for name, own in splits.items() for number in range(len(own))]

    def batches_of(job: ShardJob, part: Part) -> Iterator[RowBatch]:
        shard = splits[job.split][job.number]
        check_listed(folder, shard)
        with open_shard(manifest, folder, shard, streamed=True) as batches:
            for batch in (batch for batch in batches if batch.num_rows):
                rows = rows_of(batch, manifest.sequence_length, manifest.row_layout, manifest.tokenizer.pad_token_id)
                if not ((rows.positions == 0) & rows.filled)[:, 0].all():
                    where = folder / shard.path
                    raise DataError("bad_row", f"{where}: a row does not start at position 0; run packcorpus verify")
                part.count(rows)
                yield rows

    def write(job: ShardJob) -> Part:
        part = Part()
        format.write_shard(job, batches_of(job, part), part, out)
        return part

    with ThreadPoolExecutor(min(THREADS, cores())) as threads:
        try:
            parts = list(threads.map(write, jobs))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    of_split = {name: [part for part, job in zip(parts, jobs, strict=True) if job.split == name] for name in splits}
    for name, own in of_split.items():
        format.close_split(manifest, name, own, out)
    format.close(manifest, list(splits), out)
    notes = [*format.notes(manifest, parts), *common_notes(manifest, format, list(splits))]
    return {
        "settings": format.settings(manifest, parts),
        "notes": [asdict(note) for note in notes],
        "splits": {
            name: {count: sum(getattr(part, count) for part in own) for count in FIGURES}
            for name, own in of_split.items()
        },
    }, parts
