"""A run is found by folder, record, name, or key.

A run that cannot be merged is refused with its place and the fix.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.damage.kinds import flip
from support.training.finished_runs import finished_run, merged
from transformers import AutoModelForCausalLM

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.merge.command import main
from packcorpus.train.merge.find_run import find_base, find_run
from packcorpus.train.model.base_model import build_small_llama, commit_of

NAMES = ("mine-0123456789ab", "mine-2-abcdef012345", "other-abcdff012345")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with runs that have only a record."""
    values = {"key": "k", "corpus": {}, "base_model": "/x", "config": {}, "result": {}}
    for name in NAMES:
        folder = tmp_path / "data" / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mine", NAMES[0]),
        ("mine-2", NAMES[1]),
        (NAMES[1], NAMES[1]),
        ("0123", NAMES[0]),
        ("0123456789ab" + "0" * 52, NAMES[0]),
        ("abcde", NAMES[1]),
        (f"{{root}}/data/adapters/{NAMES[2]}", NAMES[2]),
        (f"{{root}}/data/adapters/{NAMES[2]}/training.json", NAMES[2]),
    ],
)
def test_a_run_is_found_as_it_is_named(project: Path, text: str, name: str) -> None:
    assert find_run(text.format(root=project), project).folder == project / "data" / "adapters" / name


def test_of_two_runs_of_a_name_the_newest_finished_one_is_meant(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = project / "data" / "adapters" / "mine-ffffffffffff"
    other.mkdir()
    (other / "run.json").write_text("{}")
    assert find_run("mine", project).folder.name == NAMES[0]
    assert capsys.readouterr().err == ""
    shutil.copy(project / "data" / "adapters" / NAMES[0] / "training.json", other)
    os.utime(other, (1 << 40, 1 << 40))
    assert find_run("mine", project).folder == other
    assert capsys.readouterr().err == f"{other}: the newest of 2 runs named mine\n"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("mime", InputMissing, "mime: no such run, .*did you mean mine"),
        ("012", InputMissing, "no such run"),
        ("abcd", UsageError, "is the prefix of several keys"),
        ("zzzzzzzz", InputMissing, "no such run, and no such name or key in .*adapters/, which has "),
        ("{root}/data", InputMissing, "data: is not a training run"),
        ("{root}/nothing/here", InputMissing, "no such run"),
        ("{root}/note.txt", UsageError, "note.txt: is not a training run; name its folder"),
        ("x" * 300, InputMissing, "no such run"),
    ],
)
def test_a_name_of_no_run_is_refused(project: Path, text: str, error: type[PackError], message: str) -> None:
    (project / "note.txt").write_text("")
    with pytest.raises(error, match=message):
        find_run(text.format(root=project), project)


def test_an_empty_project_has_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="which has no runs"):
        find_run("mine", tmp_path)


def test_a_run_in_progress_is_not_merged(project: Path) -> None:
    folder = project / "data" / "adapters" / NAMES[0]
    (folder / "training.json").unlink()
    (folder / "run.json").write_text("{}")
    for step in (40, 200):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "complete.json").write_text("{}")
    with pytest.raises(
        InputMissing,
        match=r"the run is not finished .*checkpoint is of step 200.*rerun the training command to resume it",
    ):
        find_run("mine", project)


@pytest.mark.parametrize("text", ["{", "[]", '{"key": "k"}'])
def test_a_record_of_something_else_is_refused(project: Path, text: str) -> None:
    (project / "data" / "adapters" / NAMES[0] / "training.json").write_text(text)
    with pytest.raises(PackError, match=r"training.json"):
        find_run("mine", project)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["mine", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["mine", "--shard-size", "1"], "unrecognized arguments"),
    ],
)
def test_a_mistyped_command_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        main(words)


# -- damaged -----------------------------------------------------------------------------------------------------------


def edited(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    values = orjson.loads(path.read_bytes())
    change(values)
    path.write_bytes(orjson.dumps(values))


def without_digests(run: Path) -> None:
    """Remove the digests of the adapter and base, as in runs of earlier versions."""
    edited(run / "training.json", lambda values: [values.pop(name) for name in ("adapter_sha256", "base_digest")])


def change_adapter(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = run / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    without_digests(run)


def first(weights: dict[str, torch.Tensor]) -> str:
    return min(name for name in weights if "lora_B" in name)


EMBEDDINGS = "base_model.model.model.embed_tokens"

DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "adapter of single tokens": (
        lambda run: change_adapter(run, lambda w: w.update({f"{EMBEDDINGS}.token_adapter.x": torch.zeros(2)})),
        "cannot_merge", "token_adapter.x belongs to a kind of adapter that cannot be merged; load it with AutoPeft",
    ),
    "adapter missing": (
        lambda run: (run / "adapter_model.safetensors").unlink(), "damaged_adapter", "_model.safetensors: is missing",
    ),
    "adapter flipped": (
        lambda run: flip(run / "adapter_model.safetensors"), "damaged_adapter", "differs from the file that the run "
        "wrote",
    ),
    "adapter truncated": (
        lambda run: (
            without_digests(run),
            (run / "adapter_model.safetensors").write_bytes((run / "adapter_model.safetensors").read_bytes()[:-9]),
        ),
        "damaged_adapter", "adapter_model.safetensors: cannot be read",
    ),
    "adapter without a weight": (
        lambda run: change_adapter(run, lambda w: w.pop(first(w))), "damaged_adapter", r"lora_B.weight is missing",
    ),
    "adapter with another weight": (
        lambda run: change_adapter(run, lambda w: w.update(more=torch.zeros(2))), "damaged_adapter",
        r"more has \[2\]; the base model has no such weight",
    ),
    "adapter of another shape": (
        lambda run: change_adapter(run, lambda w: w.update({first(w): torch.zeros(3, 4)})), "damaged_adapter",
        r"has \[3, 4\]; the base model expects \[\d+, 4\]",
    ),
    "adapter that is not finite": (
        lambda run: change_adapter(run, lambda w: w[first(w)].fill_(float("nan"))), "damaged_adapter",
        "is not finite with the adapter",
    ),
    "adapter_config.json missing": (
        lambda run: (run / "adapter_config.json").unlink(), "damaged_adapter", "adapter_config.json: is missing",
    ),
    "adapter_config.json not JSON": (
        lambda run: (run / "adapter_config.json").write_text("{"),
        "damaged_adapter",
        "adapter_config.json: cannot be read",
    ),
    "adapter without its whole module": (
        lambda run: edited(run / "adapter_config.json", lambda v: v.update(modules_to_save=["lm_head"])),
        "damaged_adapter",
        r"lm_head.weight is missing",
    ),
    "adapter of other layers": (
        lambda run: edited(run / "adapter_config.json", lambda v: v.update(target_modules=["nope"])), "damaged_adapter",
        "does not fit the base model",
    ),
    "base missing": (
        lambda run: shutil.rmtree(run.parent / "base"), "model_missing", "base: is missing; restore it",
    ),
    "base flipped": (
        lambda run: flip(run.parent / "base" / "model.safetensors"), "base_changed", "has changed since",
    ),
    "base with another file": (
        lambda run: (run.parent / "base" / "more.safetensors").write_text(""), "base_changed", "has changed since",
    ),
    "base quantized": (
        lambda run: edited(
            run.parent / "base" / "config.json", lambda v: v.update(quantization_config={"quant_method": "fp8"})
        )
        or without_digests(run),
        "cannot_merge", "is stored in fp8, .*; load base and adapter with AutoPeftModelForCausalLM",
    ),
    "text of the base quantized": (
        lambda run: edited(
            run.parent / "base" / "config.json",
            lambda v: v.update(text_config={"quantization_config": {"quant_method": "compressed-tensors"}}),
        )
        or without_digests(run),
        "cannot_merge", "is stored in compressed-tensors, .*; load base and adapter",
    ),
    "base truncated": (
        lambda run: (
            without_digests(run),
            (run.parent / "base" / "model.safetensors").write_bytes(b"\x10" * 99),
        ),
        "bad_model", "model.safetensors: cannot be read",
    ),
    "base without weights": (
        lambda run: (without_digests(run), (run.parent / "base" / "model.safetensors").unlink()),
        "bad_model", "contains neither model.safetensors nor",
    ),
    "base of an unknown kind": (
        lambda run: edited(run.parent / "base" / "config.json", lambda v: v.update(model_type="nope"))
        or without_digests(run),
        "bad_model", "is a nope model, which transformers .* does not know",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_or_base_is_refused_and_nothing_is_left(damage: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    change, reason, message = DAMAGES[damage]
    run = finished_run(tmp_path / "in")
    change(run)
    with pytest.raises(PackError, match=message) as raised:
        merged(run, tmp_path / "out")
    assert raised.value.reason == reason
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_run_without_digests_is_merged(tmp_path: Path) -> None:
    """Runs of earlier versions have digests in run.json at most."""
    torch.set_num_threads(1)
    run = finished_run(tmp_path / "in")
    digest = orjson.loads((run / "training.json").read_bytes())["base_digest"]
    without_digests(run)
    assert merged(run, tmp_path / "out").is_dir()
    (run / "run.json").write_bytes(orjson.dumps({"base_model": "0" * 64}))
    with pytest.raises(DataError, match="has changed since"):
        find_base(find_run(str(run), tmp_path))
    (run / "run.json").write_bytes(orjson.dumps({"base_model": digest}))
    assert find_base(find_run(str(run), tmp_path)).digest == digest


def test_a_small_llama_with_another_config_is_refused(tmp_path: Path) -> None:
    base = build_small_llama(500, 64, 42, tmp_path)
    values = {"key": "k", "corpus": {}, "base_model": str(base), "config": TrainingConfig().model_dump(), "result": {}}
    (tmp_path / "training.json").write_bytes(orjson.dumps(values))
    run = find_run(str(tmp_path), tmp_path)
    assert find_base(run).name == base.name
    edited(base / "config.json", lambda values: values.update(rms_norm_eps=0.1))
    with pytest.raises(DataError, match="has changed since"):
        find_base(run)


# -- the Hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with the model some/model, at two commits.

    The commit of the run is not the newest.
    """
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run = finished_run(tmp_path)
    home = tmp_path / "cache" / "models--some--model"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tmp_path / "base", home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("b" * 40)
    flip(home / "snapshots" / ("b" * 40) / "model.safetensors")
    edited(
        run / "training.json",
        lambda values: values.update(base_model="some/model", base_commit="a" * 40, base_digest=None),
    )
    return run


def test_a_base_of_the_hub_is_that_commit_of_the_cache(cache: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    base = find_base(find_run(str(cache), tmp_path))
    assert (base.name, base.commit, base.folder.name) == ("some/model", "a" * 40, "a" * 40)
    card = (merged(cache, tmp_path / "out") / "README.md").read_text()
    assert "base_model: some/model\n" in card
    assert f"at commit `{'a' * 40}`" in card
    edited(cache / "training.json", lambda values: values.update(base_commit="c" * 40))
    with pytest.raises(InputMissing, match="'some/model' at cccccccccccc: is neither in the cache nor could be"):
        find_base(find_run(str(cache), tmp_path))


def test_the_commit_that_a_run_records_is_the_one_that_transformers_loads(cache: Path, tmp_path: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained("some/model").state_dict()
    newest = load_file(tmp_path / "cache" / "models--some--model" / "snapshots" / ("b" * 40) / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in newest.items())
    assert commit_of("some/model") == "b" * 40
    assert commit_of("some/other") is None
    assert commit_of(tmp_path / "base") is None


def test_a_path_into_the_cache_has_the_name_of_the_model(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models--some--model" / "snapshots" / ("a" * 40)
    edited(cache / "training.json", lambda values: values.update(base_model=str(folder)))
    base = find_base(find_run(str(cache), tmp_path))
    assert (base.name, base.commit) == ("some/model", "a" * 40)
