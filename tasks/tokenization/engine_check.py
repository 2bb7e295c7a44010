"""Check that the fast encoder equals the reference encoder before it is used.

    sources ─ random windows ─▶ records ─ template ─▶ texts ─┐
                                 a fixed list of hard texts ─┴▶ gigatoken ═ reference ?
                                                                           └▶ data/engines/KEY.json: the verdict

The encoders are compared on texts of the corpus. If one text differs, the reference encodes the whole corpus. The
tokens are the same in both cases, so the verdict is in run.json and not in the manifest. The choice of texts depends
only on the sources, and not on parts, workers, or time. The check takes 0.4 s for 25 MB and runs once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import numpy as np

from tasks.core.errors import PackError, UsageError
from tasks.core.printable import shown
from tasks.encoders.encoder import Encoded, Encoder, TooSlow, Unencodable
from tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from tasks.encoders.texts import UNDERLINE
from tasks.encoders.tokenizer_files import forget_loaded
from tasks.recipe import Recipe
from tasks.sources.sample_files import sample_files
from tasks.storage.files import read_receipt, write_receipt
from tasks.storage.keys import key_of
from tasks.stores.mirror import mirror_of
from tasks.tokenization.frames import forget_frames
from tasks.tokenization.prepare import texts_of

TEXTS = 1500  # minimum number of texts to compare, if the corpus has as many
BUDGET = 1 << 20  # bytes of sources to read; if the sources are smaller, all texts are compared
MOST_BYTES = 1 << 24  # the budget for sources with few, long texts
MOST_FILES = 16  # maximum number of files to read
MOST_TOKENS = 100  # maximum number of content tokens, and of control strings, to compare
LONGEST = 2048  # characters; a longer text is cut to as many characters from a random place
MINIJINJA = "minijinja"
FAST = {GigatokenEncoder.engine, MINIJINJA}
THREADS = 4  # threads that encode with the reference

# Texts on which encoders are known to differ, from each other or between releases.
HARD = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\n" * 500, " " * 3000, "a" * 3000, "x" + " " * 50 + "y",
    "▁", "▁▁ ", "a ▁b", " ▁", "\0", "a\0b", "\x1b[0m", "\x1c\x1d", "\x7f", "\x80", "\x85", "\u00a0", "\u2028", "\u3000",
    "a\u200bb", "\u200d", "\ufeff", "\ufffd", "\U0010ffff", "\ue000", "e\u0301\u0323", "\u0301e", "é", "ﬁ①", "＜/s＞",
    "\u1100\u1161\u11a8", "각", "ǅ", "İ", "ß", "ส\u0e33", "漢字かな", "Привет, мир", "مرحبا بالعالم", "नमस्ते", "שָׁלוֹם",
    "🙂", "👩‍👩‍👧", "🇩🇪🇫🇷", "👍🏽", "❤️", "1234567890" * 20, "3.14159", "1 000 000", "ⅷ²", "don't 'S I'LL we'Ve ''",
    "a  1", "<unk>", "<0x41>", "<0x0A>x", "<|im_start|", "[INS", "</", "<s", "< s >", "[/INST", "a</b></a>", "aBcDEFGh",
    "def f(x):\n    return x ** 2\n\n\tpass  # ok\n", '{"a": [1, -2.5e3, null], "b": "\\u00e9\\n"}', "https://a.b/c?d=e&f#g",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check.

    `engine` encodes the corpus. `texts` and `bytes` are the numbers of texts and bytes that were compared. `differs` is
    an excerpt of a text that differed. `reason` is the reason why gigatoken cannot read this tokenizer. Without
    `uses_minijinja`, Jinja2 renders all conversations; `rendering_differs` is where minijinja's rendering differed.
    """

    engine: str
    texts: int = 0
    bytes: int = 0
    differs: str | None = None
    reason: str | None = None
    uses_minijinja: bool = True
    rendering_differs: str | None = None

    @property
    def refused(self) -> set[str]:
        """Return the fast engines that were not chosen."""
        return FAST - {self.engine, MINIJINJA if self.uses_minijinja else ""}


def encoder_of(recipe: Recipe) -> Encoder:
    """Return gigatoken if the check passed, or else the reference encoder.

    Raises the errors of `verdict_of`.
    """
    return encoder_named(verdict_of(recipe).engine, recipe.encoder)


def encoder_named(engine: str, reference: Encoder) -> Encoder:
    """Return the encoder that a verdict chose."""
    return _gigatoken(reference) if engine == GigatokenEncoder.engine else reference


def verdict_of(recipe: Recipe) -> Verdict:
    """Return the recorded verdict, or run the check and record it.

    Raises UsageError if the config asks for gigatoken and it cannot read the tokenizer.
    """
    verdict = known_verdict(recipe)
    if verdict is None:
        mirror, file = mirror_of(recipe.layout.root), verdict_file(recipe)
        if mirror.adopt(file):
            verdict = known_verdict(recipe)
    if verdict is None:
        verdict = _prove(recipe)
        write_receipt(file, asdict(verdict))
        mirror.push([file])
    if recipe.config.engine == "gigatoken" and verdict.reason:
        raise UsageError(
            "engine_refused",
            f"engine: gigatoken cannot replace {recipe.tokenizer_files.main}: {verdict.reason}; remove `engine` from "
            "the config, or use another tokenizer",
        )
    return verdict


def known_verdict(recipe: Recipe) -> Verdict | None:
    """Return the verdict that the config sets, or the recorded verdict.

    Returns None if the check has not run yet.
    """
    if recipe.config.engine == "reference":
        return Verdict(recipe.encoder.engine, uses_minijinja=False)
    try:
        return Verdict(**read_receipt(verdict_file(recipe)))
    except (PackError, TypeError):
        return None


def refused(recipe: Recipe) -> set[str]:
    """Return the engines whose tokens must not be used for this corpus.

    Such tokens may exist because another corpus has used the engine. They are refused if the config requires the
    references, or if the recorded verdict does not choose the engine.
    """
    if recipe.config.engine == "reference":
        return FAST
    verdict = known_verdict(recipe) if recipe.has_tokenizer else None
    return verdict.refused if verdict else set()


def refuse_minijinja(recipe: Recipe, differs: str) -> None:
    """Record that Jinja2 must render all conversations.

    `differs` is where minijinja's rendering of one of them differs.
    """
    verdict = verdict_of(recipe)
    if verdict.uses_minijinja:
        file = verdict_file(recipe)
        write_receipt(file, asdict(replace(verdict, uses_minijinja=False, rendering_differs=differs)))
        mirror_of(recipe.layout.root).push([file])


def verdict_file(recipe: Recipe) -> Path:
    return recipe.layout.engine(key_of("engine", {"texts": recipe.texts_key, "versions": _versions()}))


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    return {
        name: metadata.version(name) for name in ("gigatoken", "jinja2", "minijinja", "sentencepiece", "tokenizers")
    }


@lru_cache(maxsize=2)
def _gigatoken(reference: Encoder) -> GigatokenEncoder:
    """Load gigatoken once per process.

    A forked child inherits the encoder and its cache of words.
    """
    return GigatokenEncoder(reference)


def release_encoders() -> None:
    """Free the memory of encoders and frames that are no longer needed.

    An encoder takes about 40 MB.
    """
    _gigatoken.cache_clear()
    forget_loaded()
    forget_frames()


def _prove(recipe: Recipe) -> Verdict:
    reference, engines = recipe.encoder, recipe.template.engines
    with engines.comparing() if engines else nullcontext():
        texts = [*HARD, *hard_tokens(reference), *sample(recipe)]
    uses_minijinja, rendering_differs = (engines.are_fast, engines.differs) if engines else (True, None)
    try:
        fast = _gigatoken(reference)
    except Unsupported as error:
        return Verdict(
            reference.engine,
            reason=str(error),
            uses_minijinja=uses_minijinja,
            rendering_differs=rendering_differs,
        )
    differs = difference(fast, reference, texts)
    engine = fast.engine if differs is None else reference.engine
    size = sum(len(text.encode()) for text in texts)
    return Verdict(engine, len(texts), size, differs, None, uses_minijinja, rendering_differs)


def hard_tokens(encoder: Encoder) -> list[str]:
    """Return texts with content tokens and control strings of the tokenizer.

    They are whole, cut, repeated, and next to other text.
    """
    tokens = sorted(encoder.content_tokens)[:MOST_TOKENS] + sorted(encoder.controls)[:MOST_TOKENS]
    found: list[str] = []
    for token in tokens:
        found += [token, f"a{token}b", f" {token} ", f"{token}{token}\n\n", token[:-1], f"{token[:-1]}{token}"]
        if UNDERLINE in token:
            found += [f"a{token.replace(UNDERLINE, ' ')}b"]
    return found


def difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> str | None:
    """Return an excerpt of the first text that the encoders encode differently.

    The excerpt starts shortly before the difference. Returns None if all texts are equal.
    """
    if not texts:
        return None
    # The reference takes most of the time of the check, and its library can encode in several threads at once.
    size = -(-len(texts) // min(THREADS, os.cpu_count() or 1))
    blocks = [texts[start : start + size] for start in range(0, len(texts), size)]
    try:
        with ThreadPoolExecutor(len(blocks)) as threads:
            expected = threads.map(reference.encode, blocks)
            different = (
                block
                for block, theirs in zip(blocks, expected, strict=True)
                if not _are_equal(fast.encode(block), theirs)
            )
            block = next(different, None)
    except Unencodable as error:  # conversations with these texts are rejected
        return difference(fast, reference, [text for text in texts if text not in error.problems])
    except TooSlow as error:  # the reference will name its place
        return shown(error.text)
    if block is None:
        return None
    for text in block:
        theirs, ours = fast.encode([text]).ids.tolist(), reference.encode([text]).ids.tolist()
        if theirs != ours:
            differing = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            same = next(differing, min(len(theirs), len(ours)))
            place = len(b"".join(map(reference.token_bytes, ours[:same])).decode("utf-8", "ignore"))
            return shown(text[max(0, place - 20) :])
    return "several texts in one call"


def _are_equal(one: Encoded, other: Encoded) -> bool:
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)


# -- the sample -------------------------------------------------------------------------------------------------------


def sample(recipe: Recipe, at_least: int = TEXTS, budget: int = BUDGET) -> list[str]:
    """Return distinct texts from all over the sources, as the template writes them.

    All texts are returned if the sources are within the budget. Files and records that cannot be read are left out; the
    step that reads the whole source reports them.
    """
    limit = recipe.config.max_record_bytes
    while True:
        samples = sample_files(
            recipe.files, budget, limit, most_files=MOST_FILES, stream=4 * BUDGET, skip_unreadable=True
        )
        draw = random.Random("".join(file.sha256 for file in recipe.files))  # only .random() is stable across releases
        texts: dict[str, None] = {}
        for drawn in samples:
            for text in texts_of((record.value for record in drawn.records), drawn.file, recipe):
                start = int(draw.random() * (len(text) - LONGEST)) if len(text) > LONGEST else 0
                texts[text[start : start + LONGEST]] = None
        if len(texts) >= at_least or budget >= MOST_BYTES or all(drawn.whole for drawn in samples):
            return list(texts)
        budget = min(MOST_BYTES, budget * max(2, 2 * at_least // max(len(texts), 1)))
