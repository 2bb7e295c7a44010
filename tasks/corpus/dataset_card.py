"""Write the dataset card, the README.md of a corpus folder.

`datasets.load_dataset(folder)` finds the splits in its header.

    manifest ─dataset_card─▶ YAML header for tools: files of each split, size, language, license, tags
                             Markdown for people: contents, how to load it, how to train on it without leaks, sources

The card depends only on the manifest, without the manifest's entry for the card.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tasks.core.printable import counted, lengths_in_words, printable
from tasks.corpus.mixture_table import mixture_table
from tasks.storage.facts.inputs import SourceFacts
from tasks.storage.keys import PACKED, WHOLE
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import is_weighted
from tasks.storage.splits import TRAIN_EPOCH_PREFIX, kind_of

CARD = "README.md"

SHOWN_SOURCES = 50

TRAINED_ON = {
    "assistant": "every assistant turn, including its stop token",
    "last": "the last assistant turn, including its stop token",
    "all": "every turn",
}

COLUMNS = {
    "3.0": """\
| column | type | content |
|---|---|---|
| `input_ids` | int32[{length}] | token IDs: conversations, each ending with EOS ({eos}), then padding ({pad}) |
| `labels` | int32[{length}] | the token ID if the token is trained on, otherwise -100 |
| `position_ids` | int32[{length}] | positions; restart at 0 at every conversation and at the padding |
| `attention_mask` | int8[{length}] | 1 for tokens, 0 for padding; **do not pass it to the model** (see Training) |
""",
    "lists": """\
| column | type | content |
|---|---|---|
| `input_ids` | list of int32 | token IDs: conversations, each ending with EOS ({eos}); {length} at most |
| `labels` | list of int32 | the token ID if the token is trained on, otherwise -100 |
| `position_ids` | list of int32 | positions; restart at 0 at every conversation |
| `seq_lens` | list of int32 | the number of tokens of each conversation |
| `max_seqlen` | int32 | the number of tokens of the longest conversation |
""",
    "2.0": """\
| column | content |
|---|---|
| `messages` | role, content, name, tool_calls, tool_call_id, reasoning_content, and training flags of every message |
| `tools` | the tools of the conversation as JSON; empty if it has none |
| `text` | the conversation as rendered by the template |
""",
}

TRAINING = {
    "3.0": """\
Several conversations share a row and must not attend to each other. Pass `input_ids`, `labels`, and `position_ids` to
the model, disable its cache, and do **not** pass an `attention_mask`: transformers then separates the conversations
where the positions restart at 0. With any mask, even one of all ones, or without positions, conversations attend to
each other, and the loss still looks healthy.

```python
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

rows = load_dataset("path/to/this/folder", split="{split}").remove_columns("attention_mask").with_format("torch")
model = AutoModelForCausalLM.from_pretrained("path/to/model", attn_implementation="sdpa", use_cache=False)
for batch in DataLoader(rows, batch_size=8, shuffle=True, collate_fn=default_data_collator):
    loss = model(**batch).loss
```

With flash attention, this works only for batches of one row. Larger batches also need `cu_seq_lens_q` and related
arguments, which `train.model.attention.Collator` of packcorpus computes. To check for leaks, replace the tokens of the
first conversation in a row: the logits of all later conversations must not change.
""",
    "lists": """\
Several conversations share a row and must not attend to each other. Join the rows of a batch to one row, pass its
`input_ids`, `labels`, and `position_ids` to the model, disable its cache, and do **not** pass an `attention_mask`:
transformers then separates the conversations where the positions restart at 0, with flash attention, too.

```python
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

NAMES = ("input_ids", "labels", "position_ids")

def join(rows):
    return {{name: torch.cat([row[name] for row in rows])[None] for name in NAMES}}

rows = load_dataset("path/to/this/folder", split="{split}").with_format("torch")
model = AutoModelForCausalLM.from_pretrained("path/to/model", attn_implementation="sdpa", use_cache=False)
for batch in DataLoader(rows, batch_size=8, shuffle=True, collate_fn=join):
    loss = model(**batch).loss
```

To check for leaks, replace the tokens of the first conversation in a row: the logits of all later conversations must
not change.
""",
    "2.0": """\
Each row is one conversation. Train on `messages` (or on `text` if it is null) with a trainer that applies the chat
template, such as TRL's SFTTrainer, or with `python -m train --manifest` of packcorpus, which truncates at {length}
tokens and trains on {trained_on}.
""",
}

WEIGHT_COLUMN = """\
| `loss_weight` | float32[{length}] | weight of a trained token in the loss; 0 for all other tokens |
"""

WEIGHTED_TRAINING = """\

The models of transformers ignore `loss_weight`. Remove it from the batch, and compute the loss from the logits:

```python
import torch

weights, labels = batch.pop("loss_weight")[:, 1:], batch.pop("labels")[:, 1:]
logits = model(**batch).logits[:, :-1].transpose(1, 2)
losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
loss = (weights * losses).sum() / weights.sum()
```

`train.weigh_loss(model)` of packcorpus makes the model do this. With several micro-batches or ranks, divide by the sum
of the weights of the whole step.
"""

LENGTHS = """
Rows have {lengths} tokens. Rows of each length are a separate configuration, named after the length. A training step
has rows of one length. All steps have about the same number of tokens, so a step has more rows if they are shorter. In
`manifest.json`, `shape.mix: {mix}` is the order of the steps.
"""

BALANCED = """\

Rows are ordered so that {ranks:,} ranks, or a divisor of this number, have about the same work in each step. Shuffling
the rows destroys this order, so `shuffle` is false above. With several ranks, deal the rows to them in turn, as
`torch.utils.data.DistributedSampler(rows, shuffle=False)` does with batches of one row.
"""

COPIED = "`tokens` counts each conversation once; `trained on` counts all rows, including additional copies.\n\n"


def dataset_card(manifest: Manifest) -> bytes:
    """Return the README.md of a corpus.

    Names that come from files are escaped.
    """
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{header}---\n\n{_body(manifest)}".encode()


def _header(manifest: Manifest) -> dict[str, Any]:
    licenses, languages = (manifest.config.get(name) or [] for name in ("license", "language"))
    files: dict[str, list[dict[str, str]]] = {}  # by config: for `datasets`, each length of rows is a separate type
    for split, facts in manifest.splits.items():
        if facts.rows:
            length = facts.sequence_length
            name = "default" if length is None else str(length)
            listed = split_name(split if length is None else kind_of(split))
            files.setdefault(name, []).append({"split": listed, "path": _pattern(facts.shards[0].path)})
    files = files or {"default": []}
    return {
        "pretty_name": manifest.name,
        **({"license": licenses[0] if len(licenses) == 1 else licenses} if licenses else {}),
        **({"language": languages} if languages else {}),
        "task_categories": ["text-generation"],
        "size_categories": [size_category(sum(split.rows for split in manifest.splits.values()))],
        "tags": ["packcorpus", "conversational", "sft", *["packed"] * manifest.packing_metadata.enabled],
        "configs": [{"config_name": name, "data_files": files[name]} for name in sorted(files, key=_by_length)],
    }


def _by_length(name: str) -> int:
    return int(name) if name.isdecimal() else 0


def split_name(split: str) -> str:
    """Replace all characters but letters, digits, and underscores, for `datasets`."""
    return re.sub(r"\W", "_", split)


def _pattern(shard: str) -> str:
    """Return a pattern that matches the shards of one split.

    The pattern does not match other splits that begin with the name of this split.
    """
    return re.sub(r"-\d{5}-of-", "-?????-of-", shard)


def size_category(rows: int) -> str:
    """Return the Hub's name for a number of rows, such as 10K<n<100K."""
    edges = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for place, edge in enumerate(edges):
        if rows < 1000 * 10**place:
            return f"{edges[place - 1]}<n<{edge}" if place else "n<1K"
    return f"n>{edges[-1]}"


def _samples(manifest: Manifest) -> str:
    """Return the line about samples, or nothing if every conversation is one sample."""
    samples = manifest.ledger.samples
    if samples is None:
        return ""
    repeated = f"{samples.repeated_prompt_tokens:,} prompt tokens repeat an earlier sample"
    return f"| samples | {samples.packed:,}; some conversations have one sample for each trained turn; {repeated} |\n"


def _body(manifest: Manifest) -> str:
    length, packing, tokenizer = manifest.sequence_length, manifest.packing_metadata, manifest.tokenizer
    conversations, tokens = manifest.ledger.conversations, manifest.ledger.tokens
    rows = counted(packing.rows, "row")
    form = (
        f"{rows} of {lengths_in_words(manifest.row_lengths)} tokens ({packing.packing_efficiency:.2f} % full)"
        if packing.enabled
        else rows
    )
    names = {
        "length": " or ".join(map(str, manifest.row_lengths)),
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    trained_on = TRAINED_ON[manifest.train_on]
    several = len(manifest.row_lengths) > 1
    first = split_name(kind_of(next((split for split, facts in manifest.splits.items() if facts.rows), "train")))
    share = 100 * tokens.trained / max(tokens.packed, 1)
    rejected = sum(conversations.rejected.values())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in conversations.dropped.items() if count)
    dropped = f"{sum(conversations.dropped.values()):,} dropped" + (f" ({reasons})" if reasons else "")
    mixture = _mixture(manifest) + (COPIED if tokens.repeated else "")
    licenses = ", ".join(map(_code, manifest.config.get("license") or [])) or "not specified; see the sources"
    copies = f"; {tokens.repeated:,} are additional copies" if tokens.repeated else ""
    kind = PACKED if packing.enabled else WHOLE
    if manifest.row_shape.padding == "none":
        kind, form = "lists", f"{rows} of up to {length:,} tokens ({packing.packing_efficiency:.2f} % full)"
    training = TRAINING[kind].format(split=first, length=f"{length:,}", trained_on=trained_on)
    if balance := manifest.config.get("balance"):
        training = training.replace("shuffle=True", "shuffle=False") + BALANCED.format(ranks=balance["ranks"])
    config = f', "{manifest.row_lengths[-1]}"' if several else ""
    if several:
        training = training.replace('"path/to/this/folder", split', f'"path/to/this/folder"{config}, split')
    columns = COLUMNS[kind]
    if is_weighted(manifest.config):
        columns, training = columns + WEIGHT_COLUMN, training + WEIGHTED_TRAINING
    return f"""\
# {manifest.name}

A fine-tuning dataset of {counted(conversations.packed, "conversation")} in {form}, created with packcorpus (format
{manifest.format_version}). `manifest.json` records its sources, settings, and statistics. To check every byte and every
row, run `packcorpus verify path/to/this/folder`.

| | |
|---|---|
| tokens | {tokens.packed:,}; {tokens.trained:,} ({share:.1f} %) are trained on{copies} |
| trained on | {trained_on}; a flag in a message (`train`, or `weight: 0`) decides instead |
| tokenizer | {_code(tokenizer.path)}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, SHA-256 `{tokenizer.sha256}` |
| template | {_code(manifest.template.name)}, SHA-256 `{manifest.template.sha256}` |
| conversations | {conversations.read:,} read, {rejected:,} rejected (see `rejects.jsonl`), {dropped} |
{_samples(manifest)}| license | {licenses} |
| key | `{manifest.key}` |

## Usage

```python
from datasets import load_dataset

dataset = load_dataset("path/to/this/folder"{config})
```
{LENGTHS.format(lengths=lengths_in_words(manifest.row_lengths), mix=manifest.row_shape.mix) * several}
### Splits

| split | rows | shards | bytes |
|---|---:|---:|---:|
{_splits(manifest)}
### Columns

{columns.format(**names)}
{_alignment(manifest)}`index.arrow` records the source and the location of every conversation.

## Training

{training}{_packings(manifest, config)}
## Sources

{mixture}| file | format | conversations | rejected | tokens | trained on |
|---|---|---:|---:|---:|---:|
{_sources(manifest.sources)}"""


def _alignment(manifest: Manifest) -> str:
    """Explain the padding between conversations; empty if there is none."""
    align = manifest.row_shape.align
    if align == 1:
        return ""
    return (
        f"Conversations start at multiples of {align}. Padding fills the gap after each of them: the pad token, label "
        "-100, and positions from 0.\n\n"
    )


def _packings(manifest: Manifest, config: str) -> str:
    """Explain how to train on several packings; empty if there is only one."""
    kinds = dict.fromkeys(kind_of(name) for name in manifest.splits)
    repacked = [name for name in kinds if name.startswith(TRAIN_EPOCH_PREFIX)]
    if not repacked:
        return ""
    names = ", ".join(f"`{name}`" for name in repacked)
    return f"""
Also included: {names}. Each contains all conversations of `train`, packed into different rows. Use one packing per
epoch; do not concatenate them:

```python
packings = {["train", *repacked]}
for epoch in range(3):
    rows = load_dataset("path/to/this/folder"{config}, split=packings[epoch % {len(repacked) + 1}])
```
"""


def _mixture(manifest: Manifest) -> str:
    """Tabulate the contribution of each entry of `sources`.

    The table is empty if every conversation is packed exactly once.
    """
    lines = mixture_table(manifest.mixture, manifest.config.get("weighting"))
    if not lines:
        return ""
    titles, *rows = lines
    table = [titles, ["---", *["---:"] * (len(titles) - 1)], *([_code(row[0]), *row[1:]] for row in rows)]
    title = f"Mixture of one pass over the training split (`weighting: {manifest.config.get('weighting')}`):"
    return "\n".join([title, "", *(f"| {' | '.join(cells)} |" for cells in table), "", "Source files:", "", ""])


def _splits(manifest: Manifest) -> str:
    return "".join(
        f"| `{split_name(name)}` | {split.rows:,} | {len(split.shards):,} | {sum(s.bytes for s in split.shards):,} |\n"
        for name, split in manifest.splits.items()
        if split.rows
    )


def _sources(sources: list[SourceFacts]) -> str:
    lines = []
    for source in sources[:SHOWN_SOURCES]:
        counts = (source.conversations, source.rejected, source.tokens, source.trained_tokens)
        lines.append(f"| {_code(source.path)} | {source.format} | {' | '.join(f'{count:,}' for count in counts)} |\n")
    if rest := sources[SHOWN_SOURCES:]:
        lines.append(f"| {len(rest):,} more in `manifest.json` | | | | | |\n")
    return "".join(lines)


def _code(text: str) -> str:
    """Format text as code within a table, so that no markup in it is interpreted."""
    shown = printable(text).replace("\n", "\\n").replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"
