"""All containers have the same properties."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest
from support.containers import WRITERS

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.inspection.sources import record_of
from packcorpus.tasks.readers.container import BLOCK, Container, RecordReader
from packcorpus.tasks.readers.containers import CONTAINERS, container_by_extension, container_named
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.sources.parts import PartReader, find_parts, place_of
from packcorpus.tasks.sources.sample_files import sample_files

RECORDS = [{"prompt": f'{number}: "a",\t[b]', "completion": "x, y\n" * (number % 40)} for number in range(900)]

each_container = pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: container.name)


def written(container: Container, folder: Path, ending: str = "") -> list[tuple[SourceFile, list[Part]]]:
    data = WRITERS[container.name](RECORDS)
    (folder / f"a{container.extensions[0]}{ending}").write_bytes(gzip.compress(data) if ending else data)
    return find_parts([Source(path=f"a{container.extensions[0]}{ending}")], folder, 4096)


def test_names_and_extensions_are_unique() -> None:
    assert {container.name for container in CONTAINERS} == set(WRITERS)
    extensions = [extension for container in CONTAINERS for extension in container.extensions]
    assert len(set(extensions)) == len(extensions)
    for container in CONTAINERS:
        assert container_named(container.name) is container
        for extension in container.extensions:
            assert container_by_extension(f"a.b{extension.upper()}") == (container, "")


@each_container
def test_records_are_read_in_order_and_numbered(container: Container, tmp_path: Path) -> None:
    [(file, _)] = written(container, tmp_path)
    assert (file.container, file.format, file.bytes) == (container.name, "prompt_completion", file.path.stat().st_size)
    reader = RecordReader(container, file)
    assert list(reader) == list(enumerate(RECORDS))
    assert reader.records == 900
    assert all(0 < len(records) <= BLOCK for _, records in reader.blocks())


@each_container
def test_parts_hold_each_record_once_and_name_its_place(container: Container, tmp_path: Path) -> None:
    [(file, parts)] = written(container, tmp_path)
    assert parts[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(parts))
    found = [(place_of(part, number), record) for part in parts for number, record in PartReader(part)]
    assert found == [(f"{file.name}:{number}", record) for number, record in enumerate(RECORDS, 1)]
    assert len({part.sha256 for part in parts}) == len(parts)


@each_container
def test_a_text_container_may_be_compressed_and_no_other(container: Container, tmp_path: Path) -> None:
    if not container.is_text:
        with pytest.raises(DataError, match="already compressed internally"):
            written(container, tmp_path, ".gz")
        return
    [(_, [part])] = written(container, tmp_path, ".gz")
    assert list(PartReader(part)) == list(enumerate(RECORDS))


@each_container
@pytest.mark.parametrize("budget", [8_000, 1 << 24])
def test_a_sample_has_records_of_the_file_and_counts_them(container: Container, budget: int, tmp_path: Path) -> None:
    [(file, _)] = written(container, tmp_path)
    [sample] = sample_files([file], budget, 1 << 20)
    known = {str(record) for record in RECORDS}
    assert all(str(record.value) in known for record in sample.records)
    assert sample.total == pytest.approx(900, rel=0.3)
    assert sample.whole == (budget > file.bytes * 4)
    if sample.whole:
        assert [record.place for record in sample.records] == [f"{file.name}:{number}" for number in range(1, 901)]


@each_container
def test_a_record_is_found_by_its_number(container: Container, tmp_path: Path) -> None:
    [(file, _)] = written(container, tmp_path)
    for number in (1, 2, 450, 900):
        assert record_of(file, number) == file.conversation(RECORDS[number - 1])
