"""Read exports with the trainers' own code, and compare them with the corpus.

    python bench/exports/readers.py MANIFEST READERS [FORMAT]

READERS is a folder with the packages of the readers, each unpacked into a folder of its name (`pip download --no-deps`,
`pip install --no-deps --target`), and `deps` with their dependencies. Each format runs in a separate process. There,
packages whose __init__ only imports other modules are entered without it (`bare`), and modules that do not read are
stubs.

Prints one line of a table for each format: pieces compared, and how many differ. The comparison covers the token ids,
the bounds, and the token that the loss is computed on at every position, as returned by the trainer's collator.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
IGNORED = -100

Piece = tuple[list[int], list[int]]  # ids, and the label of the next token for each token but the last
Read = Iterator[Piece]


def piece(ids: Sequence[int], targets: Sequence[int]) -> Piece:
    return [int(token) for token in ids], [int(target) for target in targets]


# -- readers -----------------------------------------------------------------------------------------------------------


def trl(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    from datasets import load_from_disk
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = load_from_disk(str(folder))[split]
    collate = DataCollatorForLanguageModeling(pad_token_id=facts["pad"], padding_free=True)
    for top in range(0, len(rows), 3):
        batch = collate([rows[number] for number in range(top, min(top + 3, len(rows)))])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        for start, end in pairwise(batch["cu_seq_lens_q"].tolist()):
            assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
            yield piece(ids[start:end], labels[start + 1 : end])


def megatron(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    parents = ("bridge", "bridge.data", "bridge.data.datasets", "bridge.data.packing", "bridge.utils")
    for name in ("megatron", "megatron.core", *(f"megatron.{parent}" for parent in parents)):
        bare(name)
    for name in ("", ".tokenizers", ".tokenizers.tokenizer"):
        stub(f"megatron.bridge.training{name}")
    for name in ("core.tokenizers", "bridge.utils.common_utils"):
        stub(f"megatron.{name}")
    off = type("Off", (), {"is_enabled": staticmethod(lambda: False)})
    stub("megatron.core.msc_utils", MultiStorageClientFeature=off)
    stubs_for("megatron.bridge.data.datasets.gpt_sft")
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

    tokenizer = types.SimpleNamespace(eos_id=facts["eos"], bos_id=1, space_sensitive=False)
    rows = GPTSFTPackedParquetDataset(
        str(folder / split),
        tokenizer,
        max_seq_length=facts["length"],
        prompt_template="{text} {answer}",
        label_key="answer",
    )
    for number in range(len(rows)):
        item = rows[number]
        rows.validate_row(number, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1])
        batch = rows.collate_fn([item])
        tokens, labels, mask = (batch[name][0].tolist() for name in ("tokens", "labels", "loss_mask"))
        bounds = batch["cu_seqlens_q"][0].tolist()[: len(item["seq_boundaries"])]
        assert not any(mask[bounds[-1] :]), "padding is trained on"
        for start, end in pairwise(bounds):
            targets = [label if on else IGNORED for label, on in zip(labels[start:end], mask[start:end], strict=True)]
            yield piece([*tokens[start:end], labels[end - 1]], targets)


def axolotl(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    stubs_for("axolotl.utils.data.wrappers")
    from axolotl.utils.collators.batching import V2BatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.data.shared import load_dataset_with_config
    from axolotl.utils.data.wrappers import get_dataset_wrapper
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.trainer import process_datasets_for_packing

    entry = DictDefault({"path": str(folder / split), "type": ""})
    cfg = DictDefault({"sample_packing": True, "sequence_len": facts["length"], "datasets": [entry]})
    found = load_dataset_with_config(entry, False, streaming=False)
    found, _ = get_dataset_wrapper(entry, tokenizer_of(facts), cfg, "", found)
    rows, _ = process_datasets_for_packing(cfg, found, None)
    collate = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer_of(facts), padding=True)
    for top in range(0, len(rows), 5):
        batch = collate([[rows[number] for number in range(top, min(top + 5, len(rows)))]])
        yield from by_positions(batch["input_ids"][0], batch["labels"][0], batch["position_ids"][0])


def llama_factory(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    bare("llamafactory")
    bare("llamafactory.data")
    stubs_for("llamafactory.data.collator")
    import torch
    from datasets import load_from_disk
    from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.data_utils import get_dataset_module
    from llamafactory.extras.misc import has_tokenized_data

    assert has_tokenized_data(str(folder))
    module = get_dataset_module(load_from_disk(str(folder)))
    rows = {"train": module["train_dataset"], "validation": module.get("eval_dataset")}.get(split)
    rows = load_from_disk(str(folder / split)) if rows is None else rows
    plugin = types.SimpleNamespace(image_token=None, audio_token=None, get_mm_inputs=lambda *_: {})
    settings = {"template": types.SimpleNamespace(mm_plugin=plugin), "pad_to_multiple_of": 8, "neat_packing": True}
    masked, unpadded = (
        SFTDataCollatorWith4DAttentionMask(
            tokenizer_of(facts), block_diag_attn=True, attn_implementation=kind, **settings
        )
        for kind in ("sdpa", "flash_attention_2")
    )
    for number in range(len(rows)):
        bounds = rows[number]["packing_params"]["sequence_boundaries"]
        batch = masked([rows[number]])
        allowed = batch["attention_mask"][0, 0] == 0
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        begins = torch.cat([torch.tensor([True]), ~allowed.diagonal(-1)]) & allowed.diagonal()
        starts, filled = begins.nonzero().flatten().tolist(), int(allowed.diagonal().sum())
        assert [*starts, filled, len(ids)] == bounds, "the mask and packing_params differ"
        mask = torch.zeros_like(allowed)
        for start, end in pairwise([*starts, filled]):
            mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        assert torch.equal(allowed, mask), "a piece sees another one, or not all of itself"
        flat = unpadded([rows[number]])
        flash = list(by_positions(*(flat[name][0] for name in ("input_ids", "labels", "position_ids"))))
        whole = [piece(ids[s:e].tolist(), labels[s + 1 : e].tolist()) for s, e in pairwise([*starts, filled])]
        assert flash == whole, "without padding, the positions differ from the mask"
        yield from whole


def xtuner(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    for name in ("xtuner", "xtuner.v1", "xtuner.v1.datasets"):
        bare(name)
    stubs_for("xtuner.v1.datasets.collator")
    stubs_for("xtuner.v1.datasets.preset_sampler")
    from xtuner.v1.datasets.collator import build_text_ctx_labels
    from xtuner.v1.datasets.jsonl import JsonlDataset
    from xtuner.v1.datasets.preset_pack import PresetPackDataset
    from xtuner.v1.datasets.preset_sampler import PresetSampler

    os.environ["XTUNER_TOKENIZE_WORKERS"] = "1"
    values: dict[str, Any] = {}
    exec(recipe("XTuner"), values)  # noqa: S102 - our own documentation
    paths = sorted((folder / split / "samples").iterdir())
    files = [JsonlDataset(str(path), tokenize_fn=values["Tokens"](), disable_filter=True) for path in paths]
    rows = PresetPackDataset(files, str(folder / split / "pack"), facts["length"])
    for number in PresetSampler(rows, str(folder / split / "order.npy"), global_batch_size=1):
        items = rows[number]
        context, shifted, _ = build_text_ctx_labels(items, facts["length"], 0, False, 1024)
        ids = [*context.input_ids[0].tolist(), items[-1]["input_ids"][-1]]
        targets, at = shifted[0].tolist(), 0
        sizes = [item["num_tokens"] for item in items]
        bounds = context.cu_seq_lens_q.tolist()
        assert bounds[1 : len(sizes)] == [sum(sizes[:k]) for k in range(1, len(sizes))], "the bounds differ"
        sizes = sizes[: -1 if all(label == IGNORED for label in items[-1]["labels"]) else None]
        for size in sizes:
            yield piece(ids[at : at + size], targets[at : at + size - 1])
            at += size


def olmo_core(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    """Read with the fixed-length dataset if EOS marks the bounds.

    Otherwise, read with the dataset that packs again.
    """
    stubs_for("olmo_core.data.numpy_dataset")
    import numpy as np
    from olmo_core.data.numpy_dataset import NumpyFSLDataset, NumpyPackedFSLDataset
    from olmo_core.data.utils import get_labels

    settings = facts["settings"]["NumpyFSLDatasetConfig"]
    tokenizer = facts["settings"]["TokenizerConfig"]
    paths = sorted((folder / split).glob("token_ids_part_*.npy"))
    masks = sorted((folder / split).glob("labels_mask_part_*.npy"))
    exact = settings["generate_doc_lengths"]
    kind = NumpyFSLDataset if exact else NumpyPackedFSLDataset
    tokenizer = tokenizer if exact else {**tokenizer, "use_array_if_local": False}
    rows = kind(
        *paths, sequence_length=facts["length"], dtype=getattr(np, settings["dtype"]), label_mask_paths=masks,
        generate_doc_lengths=True, **tokenizer,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        rows.work_dir = Path(work)
        rows.prepare()
        for number in range(len(rows)):
            row = rows[number]
            labels = get_labels({name: row[name][None] for name in ("input_ids", "label_mask")})[0].tolist()
            ids, at = row["input_ids"].tolist(), 0
            for size in row["doc_lens"].tolist():
                end = at + size
                # If BOS marks the bounds, padding belongs to the last document of its row. EOS is before the padding.
                while end == len(ids) and size > 1 and ids[at + size - 1] == facts["pad"] == ids[at + size - 2]:
                    ids.pop()
                    size, end = size - 1, end - 1
                if any(target != IGNORED for target in labels[at : at + size - 1]):
                    yield piece(ids[at : at + size], labels[at : at + size - 1])
                at += size


def mds(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    bare("streaming")
    stubs_for("streaming.base")
    from streaming.base import StreamingDataset

    rows = StreamingDataset(local=str(folder), split=split, batch_size=1, shuffle=False, validate_hash="sha256")
    for number in range(len(rows)):
        row = rows[number]
        found = list(by_positions(row["input_ids"], row["labels"], row["position_ids"]))
        yield from found[: -1 if all(label == IGNORED for label in found[-1][1]) else None]


def automodel(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    from datasets import load_from_disk
    from nemo_automodel.components.datasets.utils import packed_sequence_thd_collater

    rows = load_from_disk(str(folder / split))
    for top in range(0, len(rows), 2):
        batch = packed_sequence_thd_collater([rows[number] for number in range(top, min(top + 2, len(rows)))])
        for row in range(len(batch["input_ids"])):
            ids, labels, positions = (batch[name][row].tolist() for name in ("input_ids", "labels", "position_ids"))
            sizes, padded = (
                [size for size in batch[name][row].tolist() if size >= 0] for name in ("seq_lens", "seq_lens_padded")
            )
            assert sum(padded) == len(ids)
            at = 0
            for size, whole in zip(sizes, padded, strict=True):
                assert positions[at : at + whole] == list(range(whole))
                assert set(labels[at + size - 1 : at + whole]) <= {IGNORED}
                yield piece(ids[at : at + size], labels[at : at + size - 1])
                at += whole


def torchtune(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    """Read the rows of the corpus with the recipe in the guide, without an export."""
    for name in ("torchtune", "torchtune.data", "torchtune.modules", "torchtune.utils"):
        bare(name)
    stubs_for("torchtune.data._collate")
    from torchtune.data._collate import padded_collate_packed

    values: dict[str, Any] = {}
    exec(recipe("torchtune"), values)  # noqa: S102 - our own documentation
    rows = values["TorchtuneRows"](folder, split)
    for number in range(len(rows)):
        batch = padded_collate_packed([rows[number]])
        joined = batch["mask"][0].diagonal(-1)  # whether a token sees the token before it
        assert (joined == (batch["input_pos"][0, 1:] != 0)).all(), "the mask and the positions differ"
        found = list(by_positions(batch["tokens"][0], batch["labels"][0], batch["input_pos"][0]))
        yield from found[: -1 if all(label == IGNORED for label in found[-1][1]) else None]


def torchtitan(folder: Path, split: str, facts: dict[str, Any]) -> Read:
    """Read the rows of the corpus with the recipe in the guide, without an export."""
    for name in ("", ".components", ".models", ".models.common"):
        bare(f"torchtitan{name}")
    stubs_for("torchtitan.components.dataloader")
    stubs_for("torchtitan.models.common.attention")
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    values: dict[str, Any] = {}
    exec(recipe("torchtitan"), values)  # noqa: S102 - our own documentation
    for inputs, labels in ParallelAwareDataloader(values["TorchtitanRows"](folder, split), 0, 1, batch_size=1):
        bounds = create_varlen_metadata_for_document(inputs["positions"]).cu_seq_q.tolist()
        found = [piece(inputs["input"][0, s:e], labels[0, s : e - 1]) for s, e in pairwise(bounds)]
        yield from found[: -1 if all(label == IGNORED for label in found[-1][1]) else None]


READERS: dict[str, Callable[[Path, str, dict[str, Any]], Read]] = {
    "trl": trl, "megatron": megatron, "axolotl": axolotl, "llama-factory": llama_factory, "xtuner": xtuner,
    "olmo-core": olmo_core, "mds": mds, "automodel": automodel, "torchtune": torchtune,
    "torchtitan": torchtitan,
}  # fmt: skip
RECIPES = {
    "torchtune": {"package": "torchtune", "version": "0.6.1", "code": "torchtune.data.padded_collate_packed"},
    "torchtitan": {
        "package": "torchtitan", "version": "0.3.0", "code": "torchtitan.components.dataloader.ParallelAwareDataloader",
    },
}  # fmt: skip


def by_positions(ids: Any, labels: Any, positions: Any) -> Read:
    ids, labels, positions = (list(map(int, values)) for values in (ids, labels, positions))
    starts = [at for at, position in enumerate(positions) if position == 0]
    for start, end in pairwise([*starts, len(ids)]):
        if positions[start:end] == list(range(end - start)):
            yield piece(ids[start:end], labels[start + 1 : end])


def tokenizer_of(facts: dict[str, Any]) -> Any:
    """Return a tokenizer that only pads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    names = {f"<{token}>": token for token in range(facts["vocab"])}
    found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(names, f"<{facts['pad']}>")))
    found.pad_token = f"<{facts['pad']}>"
    return found


def recipe(heading: str) -> str:
    text = (ROOT / "docs" / "guides" / "export.md").read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


# -- packages that are not installed -----------------------------------------------------------------------------------


def bare(name: str) -> None:
    """Enter a package without running its __init__."""
    parent, _, last = name.rpartition(".")
    places = sys.modules[parent].__path__ if parent else sys.path
    module = types.ModuleType(name)
    module.__path__ = [str(Path(place) / last) for place in places if (Path(place) / last).is_dir()]
    assert module.__path__, f"{name} is not installed"
    sys.modules[name] = module


class _Named(type):
    """Metaclass of classes that have every attribute, and calls that do nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": lambda *_: object})


class _Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return getattr(_Named("Stub", (), {}), name)


def stub(name: str, **values: Any) -> None:
    module = _Stub(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(values)
    sys.modules[name] = module


def stubs_for(name: str) -> None:
    """Import a module; report missing modules, and replace them with stubs."""
    while True:
        try:
            importlib.import_module(name)
            return
        except ModuleNotFoundError as error:
            missing = error.name or name
            if name.startswith(missing):
                raise
            print(f"stub: {missing}", file=sys.stderr)
            stub(missing)
            sys.modules.pop(name, None)


# -- comparison --------------------------------------------------------------------------------------------------------


def run(manifest: Path, format: str) -> dict[str, Any]:
    """Export in a format, read every split with its reader, and count differences."""
    from reference.exports import expected

    from packcorpus.tasks.exports.export import export_corpus
    from packcorpus.tasks.storage.corpus_folder import corpus_folder
    from packcorpus.tasks.storage.manifest import load_manifest

    found = load_manifest(manifest)
    facts: dict[str, Any] = {
        "length": found.sequence_length, "eos": found.tokenizer.eos_token_id, "pad": found.tokenizer.pad_token_id,
        "vocab": found.tokenizer.vocab_size,
    }  # fmt: skip
    corpus = corpus_folder(found, manifest)
    compared = differ = 0
    with tempfile.TemporaryDirectory() as name:
        if format in RECIPES:
            reader, folder, again = RECIPES[format], corpus, False
        else:
            export = export_corpus(manifest, format, Path(name) / "export", Path())
            reader, folder, facts["settings"] = export.record["reader"], export.folder, export.record["settings"]
            # If EOS does not mark the bounds, the dataset that packs again reads them.
            again = format == "olmo-core" and not facts["settings"]["NumpyFSLDatasetConfig"]["generate_doc_lengths"]
        for split in (name for name, facts_of in found.splits.items() if facts_of.rows):
            want = [piece for row in expected(corpus, split) for piece in row]
            got = list(READERS[format](folder, split, facts))
            if again:
                want, got = sorted(want), sorted(got)
            compared += len(want)
            differ += abs(len(want) - len(got)) + sum(a != b for a, b in zip(want, got, strict=False))
    return {**reader, "compared": compared, "differ": differ}


def main(manifest: str, readers: str, format: str = "") -> None:
    if format:
        print(json.dumps(run(Path(manifest), format)))
        return
    paths = [str(path) for path in sorted(Path(readers).resolve().iterdir()) if path.is_dir()]
    print("| format | reader | pieces compared | different |\n|---|---|---:|---:|")
    for name in READERS:
        offline = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        environment = os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(
            [sys.executable, __file__, manifest, readers, name],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"| `{name}` | {done.stderr.strip().splitlines()[-1]} | | |")
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        reader = f"`{row['code'].rpartition('.')[2]}` of {row['package']} {row['version']}"
        print(f"| `{name}` | {reader} | {row['compared']:,} | {row['differ']:,} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
