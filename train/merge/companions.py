"""Write the config, tokenizer, and chat template next to the merged weights.

    base model ─┬─config.json────────────▶ in the new precision
                ├─tokenizer, processor───▶ copied; without one, the tokenizer of the run
                └─generation_config.json─▶ also stops at the tokens that end a turn in the corpus
    template of the corpus ──────────────▶ chat_template.jinja, if it is a Jinja template; if conversations with tools
                                           have a template of their own, additional_chat_templates/tool_use.jinja

A chat template is never made up. The template of the base model is kept only if it writes conversations in the form
that the model was trained on.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import PackError
from tasks.encoders.tokenizer_files import MORE_TEMPLATES, TOKENIZER_FILES, TokenizerFiles, find_tokenizer
from tasks.storage.files import read_json, to_json, write_bytes
from train.merge.corpus_facts import Facts
from train.merge.find_run import Base, Run
from train.model.base_model import has_tokenizer

# Files of a tokenizer that are not in TOKENIZER_FILES.
MORE = ("merges.txt", "vocab.json", "added_tokens.json")
# Files of a base model other than its weights, configs, and tokenizer.
OTHERS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.txt",
    "LICENSE.md", "NOTICE",
)  # fmt: skip
TEMPLATE = "chat_template.jinja"


@dataclass
class Companions:
    """Summary of the written files, for the model card."""

    tokenizer: str = "none: neither the base model nor the run has one"
    template: str = "none"
    stops: list[int] = field(default_factory=list)


def write_companions(
    folder: Path, base: Base, run: Run, facts: Facts | None, dtype: str, settings: dict[str, Any]
) -> Companions:
    """Write all files except the weights and the model card.

    `settings` replace settings in the config of the base model. Raises PackError.
    """
    written = Companions()
    source = _tokenizer_folder(base, run)
    for place, names in ((source, (*TOKENIZER_FILES, *MORE)), (base.folder, OTHERS)):
        for name in names:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    try:
        files = find_tokenizer(source)
    except PackError:
        pass
    else:
        if files.main.suffix == ".model":  # transformers looks for this name
            shutil.copyfile(files.main, folder / "tokenizer.model")
        for file in files.templates:
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / MORE_TEMPLATES / file.name)
        written.tokenizer = "the tokenizer of the base model" if source == base.folder else "the copy in the corpus"
        written.template = _write_template(folder, files, facts)
    written.stops = _write_generation_config(folder, base, facts)
    config = read_json(base.folder / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.update(settings)
    write_bytes(folder / "config.json", to_json(_in_precision(config, dtype)))
    return written


def _tokenizer_folder(base: Base, run: Run) -> Path:
    """Return the folder with the tokenizer of the merged model.

    If the run names another tokenizer, the base model's own tokenizer may lack new tokens.
    """
    if run.record["config"].get("tokenizer"):
        try:
            find_tokenizer(run.folder)
        except PackError:
            return base.folder
        return run.folder
    return base.folder if has_tokenizer(base.folder) else run.folder


# -- chat template -----------------------------------------------------------------------------------------------------


def _write_template(folder: Path, files: TokenizerFiles, facts: Facts | None) -> str:
    """Write the chat template, and return a sentence that describes its source."""
    own = files.chat_template()
    if facts is None:
        return (
            "the template of the tokenizer, unchecked because the corpus is missing"
            if own
            else "none: the tokenizer has none"
        )
    name = facts.manifest.template.name
    if sources := facts.chat_templates():
        _replace_templates(folder, sources)
        options = facts.manifest.config.get("template_options")
        return f"the Jinja template of the corpus ({name}){f', rendered with {options}' if options else ''}"
    if not facts.is_built_in:
        _replace_templates(folder)
        return f"none: the corpus was written by a Jinja template ({name}), which is missing"
    written = f"the corpus was written by the built-in template {name}, which exists only as code"
    if own and facts.is_written_by(own):
        return f"the template of the tokenizer; {written}, and an example conversation renders identically"
    _replace_templates(folder)
    if own:
        return f"none: {written}; the template of the tokenizer renders differently and was left out"
    return f"none: {written}, and the tokenizer has none"


def _replace_templates(folder: Path, sources: Sequence[str] = ()) -> None:
    (folder / TEMPLATE).unlink(missing_ok=True)
    shutil.rmtree(folder / MORE_TEMPLATES, ignore_errors=True)
    config = folder / "tokenizer_config.json"
    if config.is_file():
        values = read_json(config)
        if isinstance(values, dict) and values.pop("chat_template", None) is not None:
            write_bytes(config, to_json(values))
    for name, source in zip((TEMPLATE, f"{MORE_TEMPLATES}/tool_use.jinja"), sources, strict=False):
        write_bytes(folder / name, source.encode())


# -- configs -----------------------------------------------------------------------------------------------------------


def _write_generation_config(folder: Path, base: Base, facts: Facts | None) -> list[int]:
    """Write generation_config.json, and return the IDs that end a generation."""
    path = base.folder / "generation_config.json"
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    config = read_json(base.folder / "config.json")
    ends = facts.stop_tokens() if facts else []
    for found in (values.get("eos_token_id", config.get("eos_token_id")),):
        ends += found if isinstance(found, list) else [found] if isinstance(found, int) else []
    ends = list(dict.fromkeys(ends))
    if ends:
        values["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if facts:
        tokenizer = facts.manifest.tokenizer
        for name, token in (("bos_token_id", tokenizer.bos_token_id), ("pad_token_id", tokenizer.pad_token_id)):
            if token is not None and values.get(name) is None:
                values[name] = token
    if values:
        write_bytes(folder / "generation_config.json", to_json(values))
    return ends


def _in_precision(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config with the precision replaced, also in its parts."""
    changed = {
        name: _in_precision(value, dtype) if isinstance(value, dict) else value for name, value in config.items()
    }
    for name in ("dtype", "torch_dtype"):
        if name in changed:
            changed[name] = dtype
    return changed
