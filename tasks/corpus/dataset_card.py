"""The dataset card: README.md of a corpus folder, by which `datasets.load_dataset(folder)` finds the splits.

    manifest ─dataset_card─▶ YAML header: files of each split, size, language, licence, tags
                             then for a person: how to load it, what is in it, how to train on it without leaks

Its bytes follow from the manifest, and not from what that says of this very file.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from tasks.core.printable import counted, printable
from tasks.corpus.mixture_table import mixture_table
from tasks.storage.manifest import Manifest, SourceFacts
from tasks.storage.splits import ANEW

CARD = "README.md"

SHOWN_SOURCES = 50

TRAINED_ON = {
    "assistant": "every assistant turn, with the token that ends it",
    "last": "the last assistant turn, with the token that ends it",
    "all": "everything that is said",
}

COLUMNS = {
    "3.0": """\
| column | type | content |
|---|---|---|
| `input_ids` | int32[{length}] | conversations one after another, each closed by EOS ({eos}), then pads ({pad}) |
| `labels` | int32[{length}] | the token where it is trained on, else -100 |
| `position_ids` | int32[{length}] | begin at 0 again with every conversation, and with the pads |
| `attention_mask` | int8[{length}] | 1 on tokens, 0 on pads; **not for the model**: see below |
""",
    "2.0": """\
| column | content |
|---|---|
| `messages` | role, content, name, tool_calls and tool_call_id of every turn |
| `tools` | the tools of the conversation, as JSON; empty where it has none |
| `text` | the conversation as the template writes it |
""",
}

TRAINING = {
    "3.0": """\
Several conversations share a row, and must not see each other. Give the model `input_ids`, `labels` and `position_ids`,
turn its cache off, and give it **no** `attention_mask`: transformers then finds the conversations where the positions
begin at 0 again. With a mask, even one of ones alone, or without the positions, they see each other, and the loss looks
healthy all the same.

```python
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

rows = load_dataset("path/to/this/folder", split="{split}").remove_columns("attention_mask").with_format("torch")
model = AutoModelForCausalLM.from_pretrained("path/to/model", attn_implementation="sdpa", use_cache=False)
for batch in DataLoader(rows, batch_size=8, shuffle=True, collate_fn=default_data_collator):
    loss = model(**batch).loss
```

Flash attention does so with one row a batch alone; more rows need `cu_seq_lens_q` and the like, which
`train.model.attention.Collator` of packcorpus gives. To see that nothing leaks, replace the tokens of the first
conversation of a row: the logits of all later ones must stay exactly where they were.
""",
    "2.0": """\
A row is one conversation, so that none can see another. Train on `messages` (where it is null, on `text`) with a
trainer that knows the template, such as TRL's SFTTrainer, or with `python -m train --manifest` of packcorpus, which
cuts at {length} tokens and trains on {trained_on}.
""",
}

COPIED = "Tokens are counted once, those that are trained on in all rows, further copies included.\n\n"


def dataset_card(manifest: Manifest) -> bytes:
    """README.md of a corpus. Names that come from files are shown as text."""
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{header}---\n\n{_body(manifest)}".encode()


def _header(manifest: Manifest) -> dict[str, Any]:
    licences, languages = (manifest.config.get(name) or [] for name in ("license", "language"))
    configs = [
        {"split": split_name(split), "path": _pattern(facts.shards[0].path)}
        for split, facts in manifest.splits.items()
        if facts.rows
    ]
    return {
        "pretty_name": manifest.name,
        **({"license": licences[0] if len(licences) == 1 else licences} if licences else {}),
        **({"language": languages} if languages else {}),
        "task_categories": ["text-generation"],
        "size_categories": [size_category(sum(split.rows for split in manifest.splits.values()))],
        "tags": ["packcorpus", "conversational", "sft", *["packed"] * manifest.packing_metadata.enabled],
        "configs": [{"config_name": "default", "data_files": configs}],
    }


def split_name(split: str) -> str:
    """As `datasets` takes it: letters, digits and underscores."""
    return re.sub(r"\W", "_", split)


def _pattern(shard: str) -> str:
    """One for all shards of a split, and for no file of another whose name begins alike."""
    return re.sub(r"-\d{5}-of-", "-?????-of-", shard)


def size_category(rows: int) -> str:
    """As the Hub names it, such as 10K<n<100K."""
    edges = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for place, edge in enumerate(edges):
        if rows < 1000 * 10**place:
            return f"{edges[place - 1]}<n<{edge}" if place else "n<1K"
    return f"n>{edges[-1]}"


def _body(manifest: Manifest) -> str:
    length, packing, tokenizer = manifest.sequence_length, manifest.packing_metadata, manifest.tokenizer
    conversations, tokens = manifest.ledger.conversations, manifest.ledger.tokens
    rows = counted(packing.rows, "row")
    form = f"{rows} of {length:,} tokens, {packing.packing_efficiency:.2f} % full" if packing.enabled else f"{rows}"
    names = {"length": length, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    trained_on = TRAINED_ON[manifest.train_on]
    first = split_name(next((split for split, facts in manifest.splits.items() if facts.rows), "train"))
    share = 100 * tokens.trained / max(tokens.packed, 1)
    lost = sum(conversations.rejected.values()), sum(conversations.dropped.values())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in conversations.dropped.items() if count)
    dropped = f"{lost[1]:,} dropped" + (f" ({reasons})" if reasons else "")
    mixture = _mixture(manifest) + (COPIED if tokens.repeated else "")
    copies = f", {tokens.repeated:,} are further copies" if tokens.repeated else ""
    training = TRAINING[manifest.format_version].format(split=first, length=f"{length:,}", trained_on=trained_on)
    return f"""\
# {manifest.name}

{counted(conversations.packed, "conversation")} in {form}: a corpus for fine-tuning language models, made with
packcorpus (format {manifest.format_version}). `manifest.json` says what went in, what came out and with which settings;
`packcorpus verify path/to/this/folder` checks every byte and every row.

| | |
|---|---|
| tokens | {tokens.packed:,}, of which {tokens.trained:,} ({share:.1f} %) are trained on{copies} |
| trained on | {trained_on} |
| tokenizer | {_code(tokenizer.path)}, {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, SHA-256 `{tokenizer.sha256}` |
| template | {_code(manifest.template.name)}, SHA-256 `{manifest.template.sha256}` |
| conversations | {conversations.read:,} read, {lost[0]:,} rejected (`rejects.jsonl`), {dropped} |
| licence | {", ".join(map(_code, manifest.config.get("license") or [])) or "not stated; see the sources"} |
| key | `{manifest.key}` |

## Load it

```python
from datasets import load_dataset

rows = load_dataset("path/to/this/folder")
```

| split | rows | shards | bytes |
|---|---:|---:|---:|
{_splits(manifest)}
{COLUMNS[manifest.format_version].format(**names)}
`index.arrow` says for every conversation where it came from and where it stands.

## Train on it

{training}{_packings(manifest)}
## Sources

{mixture}| file | format | conversations | rejected | tokens | trained on |
|---|---|---:|---:|---:|---:|
{_sources(manifest.sources)}"""


def _packings(manifest: Manifest) -> str:
    """How to train on several packings of the training split; nothing where there is one."""
    anew = [name for name in manifest.splits if name.startswith(ANEW)]
    if not anew:
        return ""
    names = ", ".join(f"`{name}`" for name in anew)
    return f"""
{names}: the conversations of `train` once more, in other rows. Take one packing for each epoch, not all at once:

```python
packings = {["train", *anew]}
for epoch in range(3):
    rows = load_dataset("path/to/this/folder", split=packings[epoch % {len(anew) + 1}])
```
"""


def _mixture(manifest: Manifest) -> str:
    """What each entry of the config's sources gives; nothing where every conversation is packed once."""
    lines = mixture_table(manifest.mixture, manifest.config.get("weighting"))
    if not lines:
        return ""
    head, *rows = lines
    table = [head, ["---", *["---:"] * (len(head) - 1)], *([_code(row[0]), *row[1:]] for row in rows)]
    title = f"One pass over the training split (`weighting: {manifest.config.get('weighting')}`):"
    return "\n".join([title, "", *(f"| {' | '.join(cells)} |" for cells in table), "", "The files:", "", ""])


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
        lines.append(f"| and {len(rest):,} more, see `manifest.json` | | | | | |\n")
    return "".join(lines)


def _code(text: str) -> str:
    """Text as code within a table: no mark of Markdown or HTML in it is obeyed."""
    shown = printable(text).replace("\n", "\\n").replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{space}{shown}{space}{fence}"
