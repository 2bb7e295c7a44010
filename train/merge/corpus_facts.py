"""Collect facts about the merged model from the corpus of its run.

The corpus may be missing.

key of the corpus ─find_facts─▶ manifest, template, the tokens that end a turn, some of its rows
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.conversations.model import Conversation, Message
from tasks.core.errors import PackError, Reject
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import open_tokenizer
from tasks.inspection.manifests import find_manifest
from tasks.storage.manifest import Manifest, load_manifest
from tasks.storage.shards import open_shard
from tasks.templates.built_in import BUILT_IN
from tasks.templates.jinja.template import JinjaTemplate
from tasks.templates.spans import TEXT, Span, Template, trained_turns
from train.data.corpus import Corpus, open_corpus

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
    template: Template | None
    encoder: Encoder | None

    @property
    def is_built_in(self) -> bool:
        """Return whether the rows were written by a built-in template."""
        return self.manifest.template.name in BUILT_IN

    def stop_tokens(self) -> list[int]:
        """Return the IDs of the tokens that end a turn or a conversation in the corpus."""
        ends = [self.manifest.tokenizer.eos_token_id]
        if self.template:
            trained = trained_turns(EXAMPLE, self.manifest.train_on)
            try:
                samples = self.template.samples(EXAMPLE, trained)
            except (PackError, Reject):  # the template does not accept this conversation
                samples = []
            ends = [*dict.fromkeys(end for sample in samples for end in _ends(sample.spans)), *ends]
        return list(dict.fromkeys(ends))

    def chat_templates(self) -> list[str]:
        """Return the Jinja sources that wrote the rows.

        A second one is for conversations with tools. There are none for a built-in template, or if the files of the
        corpus are missing.
        """
        if self.is_built_in or self.corpus is None:
            return []
        return [(self.corpus.folder / file.path).read_text(encoding="utf-8") for file in self.manifest.template_files]

    def is_written_by(self, source: str) -> bool:
        """Return whether a Jinja template writes conversations like the corpus."""
        if self.template is None or self.encoder is None:
            return False
        other = JinjaTemplate("chat_template", source, self.encoder, self.manifest.train_on, "2024-07-26")
        trained = trained_turns(EXAMPLE, self.manifest.train_on)
        try:
            texts = [self._text(template, trained) for template in (self.template, other)]
        except (PackError, Reject):
            return False
        return texts[0] == texts[1]

    def _text(self, template: Template, trained: list[bool]) -> str:
        [sample] = template.samples(EXAMPLE, trained)
        text = "".join(span.text for span in sample.spans)
        bos = self.encoder and self.encoder.control_strings.get(self.encoder.bos_id or -1)
        return text.removeprefix(bos or "").rstrip()

    def rows(self, count: int, length: int) -> list[list[int]]:
        """Return the first tokens of some rows; [] for format 2.0, which has no tokens."""
        if self.corpus is None or not self.corpus.packed:
            return []
        shard = next(shard for split in self.manifest.splits.values() for shard in split.shards if shard.rows)
        with open_shard(self.manifest, self.corpus.folder, shard, verified=True) as batches:
            first = next(iter(batches))
        return [row.as_py()[:length] for row in first.column("input_ids").slice(0, count)]


def _ends(spans: list[Span]) -> Iterator[int]:
    """Yield the control token at the end of each run of trained spans.

    Only white space may follow it in the run.
    """
    for index, span in enumerate(spans):
        after = spans[index + 1 :]
        rest = "".join(s.text for s in after[: next((n for n, s in enumerate(after) if not s.trained), len(after))])
        if span.trained and span.token != TEXT and not rest.strip():
            yield span.token


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
        from train.data.conversations import open_template

        corpus = open_corpus(path, allow_unisolated=True)
        encoder = open_tokenizer(manifest, corpus.folder)
        return Facts(manifest, corpus, open_template(manifest, corpus.folder, encoder), encoder), ""
    except PackError as error:
        return Facts(manifest, None, None, None), f"the files of the corpus {name} cannot be used ({error})"
