"""Write the files next to merged weights: configs, tokenizer, template, card.

    base model ─┬─config.json────────────▶ in the new precision
                ├─tokenizer, processor───▶ copied; without one, the tokenizer of the run
                └─generation_config.json─▶ also stops at the tokens that end a turn in the corpus
    key of the corpus ─find_facts─▶ manifest, some of its rows, the tokens that end a turn
      template of the corpus ────▶ chat_template.jinja, if it is a Jinja template; if conversations with tools have a
                                   template of their own, additional_chat_templates/tool_use.jinja
    run, base, corpus, how it was merged ─model_card─▶ README.md: YAML header for the Hub, Markdown for people

The corpus may be missing. A chat template is never made up. The template of the base model is kept only if it writes
conversations in the form that the model was trained on. The card contains no time and no path, so equal merges have
equal bytes.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import Template

from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.core.printable import counted, printable
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import (
    MORE_TEMPLATES,
    TOKENIZER_FILES,
    TokenizerFiles,
    find_tokenizer,
    open_tokenizer,
)
from packcorpus.tasks.inspection.manifests import find_manifest
from packcorpus.tasks.storage.files import read_json, to_json, write_bytes
from packcorpus.tasks.storage.layout import kind_of
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.shards import open_shard
from packcorpus.tasks.templates.built_in import BUILT_IN
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import TEXT, trained_turns
from packcorpus.tasks.templates.spans import Template as ChatTemplate
from packcorpus.train.data.conversations import open_template
from packcorpus.train.data.corpus import Corpus, open_corpus
from packcorpus.train.merge.find_run import Base, Run
from packcorpus.train.merge.losses import Losses
from packcorpus.train.model.base_model import has_tokenizer

# Files of a tokenizer that are not in TOKENIZER_FILES.
MORE = ("merges.txt", "vocab.json", "added_tokens.json")
# Files of a base model other than its weights, configs, and tokenizer.
OTHERS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "LICENSE", "LICENSE.txt",
    "LICENSE.md", "NOTICE",
)  # fmt: skip
TEMPLATE = "chat_template.jinja"
CARD = "README.md"
TEMPLATE_OF_CARD = Path(__file__).with_name("card.md.jinja")

# Weights of the base model that an adapter is added to: its own, or their values in NF4.
Onto = Literal["original", "dequantized"]

SETTINGS = (
    "quantization", "lora_variant", "lora_r", "lora_alpha", "lora_dropout", "lora_targets", "optimizer",
    "learning_rate", "schedule", "warmup", "weight_decay", "max_grad_norm", "epochs", "max_steps", "tokens_per_step",
    "seed",
)  # fmt: skip
EXAMPLE = Conversation(
    (
        Message("user", "Hello"),
        Message("assistant", "Hello, how can I help?"),
        Message("user", "Thanks"),
        Message("assistant", "You are welcome."),
    )
)


@dataclass(frozen=True)
class Facts:
    """Corpus that still exists: at least its manifest, and usually its files."""

    manifest: Manifest
    corpus: Corpus | None
    template: ChatTemplate | None
    encoder: Encoder | None

    @property
    def is_built_in(self) -> bool:
        """Return whether the rows were written by a built-in template."""
        return self.manifest.template.name in BUILT_IN

    def stop_tokens(self) -> list[int]:
        """Return the IDs of the tokens that end a turn or a conversation in the corpus."""
        trained, ends = trained_turns(EXAMPLE, self.manifest.train_on), []
        try:
            samples = self.template.samples(EXAMPLE, trained) if self.template else []
        except (PackError, Reject):  # the template does not accept this conversation
            samples = []
        for spans in (sample.spans for sample in samples):
            for number, span in enumerate(spans, 1):
                # A control token ends a run of trained spans if only white space follows it in the run.
                rest = "".join(other.text for other in takewhile(lambda other: other.trained, spans[number:]))
                if span.trained and span.token != TEXT and not rest.strip():
                    ends.append(span.token)
        return list(dict.fromkeys([*ends, self.manifest.tokenizer.eos_token_id]))

    def chat_templates(self) -> list[str]:
        """Return the Jinja sources that wrote the rows; a second one is for tools."""
        if self.is_built_in or self.corpus is None:
            return []
        return [(self.corpus.folder / file.path).read_text(encoding="utf-8") for file in self.manifest.template_files]

    def is_written_by(self, source: str) -> bool:
        """Return whether a Jinja template writes conversations like the corpus."""
        if self.template is None or self.encoder is None:
            return False
        other = JinjaTemplate("chat_template", source, self.encoder, self.manifest.train_on, "2024-07-26")
        trained, texts = trained_turns(EXAMPLE, self.manifest.train_on), []
        bos = self.encoder.control_strings.get(self.encoder.bos_id or -1, "")
        try:
            for template in (self.template, other):
                [sample] = template.samples(EXAMPLE, trained)
                texts.append("".join(span.text for span in sample.spans).removeprefix(bos).rstrip())
        except (PackError, Reject):
            return False
        return texts[0] == texts[1]

    def rows(self, count: int, length: int) -> list[list[int]]:
        """Return the first tokens of some rows; [] for format 2.0, which has no tokens."""
        return [ids[:length] for ids, _ in self.labeled_rows(count)]

    def labeled_rows(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return ids and labels of some rows; [] for format 2.0, which has no tokens."""
        if self.corpus is None or not self.corpus.packed:
            return []
        shard = next(shard for split in self.manifest.splits.values() for shard in split.shards if shard.rows)
        with open_shard(self.manifest, self.corpus.folder, shard, verified=True) as batches:
            first = next(iter(batches)).slice(0, count)
        return list(zip(*(first.column(name).to_pylist() for name in ("input_ids", "labels")), strict=True))


def find_facts(record: dict[str, Any], root: Path) -> tuple[Facts | None, str]:
    """Return the facts about the corpus of a run, and a note if some are missing."""
    name, key = record["corpus"]["name"], record["corpus"]["key"]  # a manifest is named after 12 characters of its key
    try:
        with redirect_stderr(io.StringIO()):
            path = find_manifest(Path(key[:12]), root)
            manifest = load_manifest(path)
    except PackError:
        return None, f"the manifest of the corpus {name} ({key[:12]}) is not in {root / 'manifests'}"
    if manifest.key != key:
        return None, f"{path} is not the manifest of the corpus {key[:12]}"
    try:
        corpus = open_corpus(path, allow_unisolated=True)
        encoder = open_tokenizer(manifest, corpus.folder)
        return Facts(manifest, corpus, open_template(manifest, corpus.folder, encoder), encoder), ""
    except PackError as error:
        return Facts(manifest, None, None, None), f"the files of the corpus {name} cannot be used ({error})"


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass
class OtherFiles:
    """Summary of the written files, for the model card."""

    tokenizer: str = "none: neither the base model nor the run has one"
    template: str = "none"
    stops: list[int] = field(default_factory=list)


def write_other_files(
    folder: Path, base: Base, run: Run, facts: Facts | None, dtype: str, settings: dict[str, Any]
) -> OtherFiles:
    """Write all files except weights and card; `settings` replace config settings."""
    written = OtherFiles()
    # If the run names another tokenizer, the base model's own tokenizer may lack new tokens.
    source = base.folder if has_tokenizer(base.folder) else run.folder
    if run.record["config"].get("tokenizer"):
        source = run.folder if _tokenizer_in(run.folder) else base.folder
    for place, names in ((source, (*TOKENIZER_FILES, *MORE)), (base.folder, OTHERS)):
        for name in names:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    if files := _tokenizer_in(source):
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
            part.pop("quantization_config", None)  # of weights in MXFP4, which are written unpacked
    write_bytes(folder / "config.json", to_json(_in_precision(config, dtype)))
    return written


def _tokenizer_in(folder: Path) -> TokenizerFiles | None:
    try:
        return find_tokenizer(folder)
    except PackError:
        return None


def _write_template(folder: Path, files: TokenizerFiles, facts: Facts | None) -> str:
    """Write the chat template, and return a sentence that describes its source."""
    own = files.chat_template()
    if facts is None:
        unchecked = "the template of the tokenizer, unchecked because the corpus is missing"
        return unchecked if own else "none: the tokenizer has none"
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


def _write_generation_config(folder: Path, base: Base, facts: Facts | None) -> list[int]:
    """Write generation_config.json, and return the IDs that end a generation."""
    path = base.folder / "generation_config.json"
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    config = read_json(base.folder / "config.json")
    ends = facts.stop_tokens() if facts else []
    found = values.get("eos_token_id", config.get("eos_token_id"))
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
    inner = {name: _in_precision(value, dtype) for name, value in config.items() if isinstance(value, dict)}
    return config | inner | {name: dtype for name in ("dtype", "torch_dtype") if name in config}


def model_card(
    run: Run,
    base: Base,
    facts: Facts | None,
    others: OtherFiles,
    dtype: str,
    adapter: str,
    whole: bool,
    zero: bool,
    onto: Onto,
    losses: Losses | None,
) -> bytes:
    """Return the README.md of a merged model; names from files are escaped."""
    record = run.record
    corpus, config, result, choices = (record[name] for name in ("corpus", "config", "result", "choices"))
    rows = choices["micro_batch"] * choices["accumulation"] * choices["ranks"] * result["steps"]
    rows_of_corpus = f"of {corpus['sequence_length']:,} tokens; the corpus was not available when this was merged"
    if facts:
        manifest, tokens = facts.manifest, facts.manifest.ledger.tokens
        splits = [
            f"{split.rows:,} of {manifest.length_of_split(name):,}"
            for name, split in manifest.splits.items()
            if kind_of(name) == "train"
        ]
        rows_of_corpus = f"{' and '.join(splits)} tokens; the corpus has {tokens.packed:,} tokens, "
        rows_of_corpus += f"{tokens.trained:,} of them trained on"
    loss = f"{result['first_loss']:.4f} at the start, {result['last_loss']:.4f} at the end "
    loss += f"(means of {counted(result['loss_steps'], 'step')})"
    if result["validation_loss"] is not None:
        loss += f"; validation {result['validation_loss']:.4f}"
    licenses = facts.manifest.config.get("license") if facts else None
    lines = {
        "corpus": f"{_code(corpus['name'])}, key `{corpus['key']}`",
        "rows": rows_of_corpus,
        "trained on": f"{rows:,} rows in {counted(result['steps'], 'optimizer step')}, counted as often as they were "
        f"seen; run `{run.key}`",
        "loss": loss,
        **({"loss of this model": str(losses)} if losses else {}),
        "base model": _code(base.name) + (f" at commit `{base.commit}`" if base.commit else ""),
        "adapter": adapter + (" (all zero)" if zero else ""),
        "precision": f"{dtype}; base plus adapter computed in fp32, rounded once",
        "tokenizer": others.tokenizer,
        "chat template": others.template,
        "generation ends at": ", ".join(f"`{token}`" for token in others.stops) or "not known",
        "license of the corpus": ", ".join(map(_code, licenses or ())) or "not specified",
    }
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    beside = "the base model. Here, it is merged into the base model's own weights in full precision"
    if config.get("quantization") == "nf4":
        beside = "a copy of the base model in NF4 (4 bits). Here, it is merged into "
        beside += {
            "dequantized": "the values of these weights, so that this model is the one that was trained",
            "original": "the base model's own weights in full precision, which differ from it by the error of NF4",
        }[onto]
    license_ = license_of(base.folder)
    facts_of_hub = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base.name,
        "base_model_relation": "finetune",
        **({"license": license_} if license_ else {}),
        "tags": ["packcorpus", "merged", "lora", "sft", "conversational"],
    }
    template = Template(TEMPLATE_OF_CARD.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    return template.render(
        header=yaml.safe_dump(facts_of_hub, sort_keys=False, allow_unicode=True, width=1000),
        title=printable(corpus["name"]),
        base=_code(base.name),
        facts={name: printable(text).replace("|", "\\|") for name, text in lines.items()},
        beside=beside,
        written="loaded as a whole and saved by transformers" if whole else "written one layer at a time",
        settings={name: _code(str(config[name])) for name in SETTINGS if config.get(name) is not None},
        versions=versions,
    ).encode()


def license_of(folder: Path) -> Any:
    """Return the license that the card of the base model names, or None."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if not text.startswith("---\n") or (end := text.find("\n---", 4)) < 0:
        return None
    try:
        values = yaml.safe_load(text[4:end])
    except yaml.YAMLError:
        return None
    found = values.get("license") if isinstance(values, dict) else None
    return found if isinstance(found, str | list) else None


def _code(text: str) -> str:
    return f"`{printable(text).replace('`', chr(39))}`"
