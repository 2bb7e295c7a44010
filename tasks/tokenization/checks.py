"""Check the engines and the template before the first part is tokenized.

    sources ─ random windows ─▶ records ─ template ─▶ texts ─┐
                                 a fixed list of hard texts ─┴▶ gigatoken ═ reference ?
                                                                           └▶ data/engines/KEY.json: the choice

    first 100 conversations ─┬─ all fail in the same way ─▶ DataError: it is the template
                             └─ otherwise ────────────────▶ each failure is a reject, under `max_rejects`

The encoders are compared on texts of the corpus. If one text differs, the reference encodes the whole corpus. The
tokens are the same in both cases, so the choice is in run.json and not in the manifest. The check takes 0.4 s for
25 MB and runs once. The check of the template stops at the first conversation that does not fail like the others.
Nearly always, that is the first one, so it takes a millisecond. A plan repeats it on the receipts of the parts, because
earlier runs may have tokenized them. Neither check depends on parts, workers, or time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.tasks.core.errors import DataError, PackError, Reject, UsageError
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.core.process import cores, versions_of
from packcorpus.tasks.encoders.encoder import Encoder, TooSlow, Unencodable
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from packcorpus.tasks.encoders.texts import UNDERLINE
from packcorpus.tasks.encoders.tokenizer_files import forget_loaded
from packcorpus.tasks.readers.container import RecordReader
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.sample_files import sample_files
from packcorpus.tasks.storage.files import read_receipt, write_receipt
from packcorpus.tasks.storage.keys import key_of
from packcorpus.tasks.stores.mirror import mirror_of
from packcorpus.tasks.templates.markers import explain_unknown
from packcorpus.tasks.tokenization.prepare import Preparer, texts_of
from packcorpus.tasks.tokenization.skeletons import forget_skeletons
from packcorpus.tasks.tokenization.tokenize_part import unknown_markers_of

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
class EngineChoice:
    """The engines that a comparison has chosen.

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

    def encoder(self, reference: Encoder) -> Encoder:
        """Return the encoder that was chosen: gigatoken, or else the reference."""
        return _gigatoken(reference) if self.engine == GigatokenEncoder.engine else reference


def choose_engines(recipe: Recipe) -> EngineChoice:
    """Return the recorded choice, or compare the engines and record the choice.

    Raises UsageError if the config asks for gigatoken and it cannot read the tokenizer.
    """
    choice = chosen_engines(recipe)
    if choice is None:
        mirror, file = mirror_of(recipe.layout.root), choice_file(recipe)
        choice = chosen_engines(recipe) if mirror.adopt(file) else None
    if choice is None:
        choice = _compare_engines(recipe)
        write_receipt(file, asdict(choice))
        mirror.push([file])
    if recipe.config.engine == "gigatoken" and choice.reason:
        raise UsageError(
            "engine_refused",
            f"engine: gigatoken cannot replace {recipe.tokenizer_files.main}: {choice.reason}; remove `engine` from "
            "the config, or use another tokenizer",
        )
    return choice


def chosen_engines(recipe: Recipe) -> EngineChoice | None:
    """Return the choice of the config, or the recorded choice, or None."""
    if recipe.config.engine == "reference":
        return EngineChoice(recipe.encoder.engine, uses_minijinja=False)
    try:
        return EngineChoice(**read_receipt(choice_file(recipe)))
    except (PackError, TypeError):
        return None


def refused_engines(recipe: Recipe) -> set[str]:
    """Return the engines whose tokens must not be used for this corpus.

    Such tokens may exist because another corpus has used the engine. They are refused if the config requires the
    references, or if the recorded choice is another engine.
    """
    if recipe.config.engine == "reference":
        return FAST
    choice = chosen_engines(recipe) if recipe.has_tokenizer else None
    return choice.refused if choice else set()


def refuse_minijinja(recipe: Recipe, differs: str) -> None:
    """Record that Jinja2 must render all; `differs` is where minijinja differs."""
    choice = choose_engines(recipe)
    if choice.uses_minijinja:
        file = choice_file(recipe)
        write_receipt(file, asdict(replace(choice, uses_minijinja=False, rendering_differs=differs)))
        mirror_of(recipe.layout.root).push([file])


def choice_file(recipe: Recipe) -> Path:
    return recipe.layout.engine(key_of("engine", {"texts": recipe.texts_key, "versions": _versions()}))


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    return versions_of("gigatoken", "jinja2", "minijinja", "sentencepiece", "tokenizers")


@lru_cache(maxsize=2)
def _gigatoken(reference: Encoder) -> GigatokenEncoder:
    """Load gigatoken once per process; forks inherit the encoder and its words."""
    return GigatokenEncoder(reference)


def release_encoders() -> None:
    """Free the memory of encoders, 40 MB each, and of skeletons."""
    _gigatoken.cache_clear()
    forget_loaded()
    forget_skeletons()


def _compare_engines(recipe: Recipe) -> EngineChoice:
    reference, engines = recipe.encoder, recipe.template.engines
    with engines.comparing() if engines else nullcontext():
        texts = [*HARD, *hard_tokens(reference), *sample(recipe)]
    choice = EngineChoice(reference.engine)
    if engines:
        choice = replace(choice, uses_minijinja=engines.are_fast, rendering_differs=engines.differs)
    try:
        fast = _gigatoken(reference)
    except Unsupported as error:
        return replace(choice, reason=str(error))
    differs = difference(fast, reference, texts)
    size = sum(len(text.encode()) for text in texts)
    engine = fast.engine if differs is None else reference.engine
    return replace(choice, engine=engine, texts=len(texts), bytes=size, differs=differs)


def hard_tokens(encoder: Encoder) -> list[str]:
    """Return content tokens and control strings: whole, cut, repeated, and in text."""
    texts: list[str] = []
    for token in sorted(encoder.content_tokens)[:MOST_TOKENS] + sorted(encoder.controls)[:MOST_TOKENS]:
        texts += [token, f"a{token}b", f" {token} ", f"{token}{token}\n\n", token[:-1], f"{token[:-1]}{token}"]
        if UNDERLINE in token:
            texts += [f"a{token.replace(UNDERLINE, ' ')}b"]
    return texts


def difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> str | None:
    """Return an excerpt of the first text that the encoders encode differently.

    The excerpt starts shortly before the difference. Returns None if all texts are equal.
    """
    if not texts:
        return None
    # The reference takes most of the time of the check, and its library can encode in several threads at once.
    size = -(-len(texts) // min(THREADS, cores()))
    blocks = [texts[start : start + size] for start in range(0, len(texts), size)]
    try:
        with ThreadPoolExecutor(len(blocks)) as threads:
            for block, theirs in zip(blocks, threads.map(reference.encode, blocks), strict=True):
                ours = fast.encode(block)
                if not (np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.offsets, theirs.offsets)):
                    return _first_difference(fast, reference, block)
    except Unencodable as error:  # conversations with these texts are rejected
        return difference(fast, reference, [text for text in texts if text not in error.problems])
    except TooSlow as error:  # the reference will name its place
        return shown(error.text)
    return None


def _first_difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> str:
    for text in texts:
        ours, theirs = fast.encode([text]).ids.tolist(), reference.encode([text]).ids.tolist()
        if ours != theirs:
            differing = (n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
            same = next(differing, min(len(ours), len(theirs)))
            place = len(b"".join(map(reference.token_bytes, theirs[:same])).decode("utf-8", "ignore"))
            return shown(text[max(0, place - 20) :])
    return "several texts in one call"


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


# -- the first conversations --------------------------------------------------------------------------------------

FIRST = 100

# Reasons to reject a conversation that are the fault of the template if all conversations have them.
OF_TEMPLATE = ("turn_not_located", "reasoning_not_written", "calls_not_written", "reasoning_left_out")


def check_first_conversations(recipe: Recipe) -> None:
    """Raise DataError if the first conversations all fail in the same way.

    An error of reading is left to the step that reads the whole source.
    """
    if recipe.config.max_rejects < 1 and (failure := first_failure(recipe)):
        raise failure


def first_failure(recipe: Recipe) -> DataError | None:
    """Return the error if the first conversations all fail in the same way."""
    rejects: list[tuple[str, Reject]] = []
    with suppress(PackError):
        for place, reject in islice(_rejects(recipe), FIRST):
            if reject is None:
                return None
            rejects.append((place, reject))
            if not are_alike([reject.reason for _, reject in rejects]):
                return None
        for place, first in rejects[:1]:
            return failure_of(len(rejects), place, first.reason, first.message)
    return None


def are_alike(reasons: Sequence[str]) -> bool:
    """Return whether conversations fail alike, perhaps due to the template."""
    return len(set(reasons)) == 1 and reasons[0] in OF_TEMPLATE


def failure_of(count: int, place: str, reason: str, message: str) -> DataError:
    """Return the error for `count` conversations that fail like the first one."""
    alike = f"; the first {count:,} conversations all fail like this" if count > 1 else ""
    return DataError(reason, f"{place}: {message}{alike}")


def check_markers(recipe: Recipe, receipts: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError if templates have written markers that the tokenizer lacks.

    A part stops at the first of them. But earlier runs may have tokenized it, with another setting or version.
    """
    tokenizer = recipe.config.checked_tokenizer
    if not tokenizer or not recipe.template.unknown.alone:
        return
    if markers := unknown_markers_of(receipts):
        raise UsageError("unknown_marker", explain_unknown(recipe.template.name, [*markers], tokenizer))
    for _, reject in islice(_rejects(recipe), FIRST):
        if reject is None:
            return


def _rejects(recipe: Recipe) -> Iterator[tuple[str, Reject | None]]:
    """Yield the place of each conversation, with its reject if it cannot be prepared."""
    config = recipe.config
    for file in recipe.files:
        weighted = config.reads_loss_weights
        preparer = Preparer(
            file,
            recipe.template,
            recipe.encoder,
            config.train_on,
            config.packing,
            weighted,
            config.checked_tokenizer,
        )
        reader = RecordReader(
            container_named(file.container), file, max_record_bytes=config.max_record_bytes, decode=preparer.decode
        )
        for number, record in reader:
            [result] = preparer.prepare_all([record])
            if isinstance(result, PackError):
                raise type(result)(result.reason, f"{file.name}:{number + 1}: {result}")
            yield f"{file.name}:{number + 1}", result if isinstance(result, Reject) else None
