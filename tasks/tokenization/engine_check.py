"""The proof that the fast encoder may be used for a corpus: both encoders, text by text, on texts of this very corpus.

    sources ─ a window here and there ─▶ records ─ template ─▶ texts ─┐
                                            a fixed list of hard ones ┴▶ gigatoken ═ reference ?
                                                                           └▶ data/engines/KEY.json: the verdict

One text that differs, and the reference encodes the whole corpus. What is drawn follows from the sources alone, not
from parts, workers or time, so the verdict can stand in the manifest. The proof of 25 MB takes 0.4 s and is made once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata

import numpy as np

from tasks.core.errors import PackError, Reject, UsageError
from tasks.core.printable import shown
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder
from tasks.encoders.gigatoken_model import Unsupported
from tasks.recipe import Recipe
from tasks.sources.model import SourceFile
from tasks.sources.sample_files import sample_files
from tasks.storage.files import read_json, to_json, write_bytes
from tasks.storage.keys import key_of
from tasks.tokenization.prepare import texts_of

TEXTS = 2000  # compared at least, if the corpus has as many
BUDGET = 1 << 20  # bytes of sources that are read for them; of smaller sources every text is compared
MOST_BYTES = 1 << 24  # the budget for sources with few, long texts
MOST_FILES = 16  # files that are read
LONGEST = 2048  # characters: of a longer text, as many from a random place

# Where encoders are known to differ, from each other or from one release to the next.
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
    """`engine` is what encodes the corpus; `texts` and `bytes` were compared before; `differs` shows the text that did.

    `reason` says why gigatoken cannot read this tokenizer.
    """

    engine: str
    texts: int = 0
    bytes: int = 0
    differs: str | None = None
    reason: str | None = None


def encoder_of(recipe: Recipe) -> Encoder:
    """What encodes the corpus: gigatoken, proven, or the reference. Raises what `verdict_of` raises."""
    return _gigatoken(recipe.encoder) if verdict_of(recipe).engine == GigatokenEncoder.engine else recipe.encoder


def verdict_of(recipe: Recipe) -> Verdict:
    """The verdict on record; where there is none, the proof is made and written.

    Raises UsageError where the config asks for gigatoken and the tokenizer is none that it can read.
    """
    verdict = known_verdict(recipe)
    if verdict is None:
        verdict = _prove(recipe)
        write_bytes(recipe.layout.engine(_key(recipe)), to_json(asdict(verdict)))
    if recipe.config.engine == "gigatoken" and verdict.reason:
        raise UsageError(
            "engine_refused",
            f"engine: gigatoken: it cannot stand in for {recipe.tokenizer_files.main}: {verdict.reason}; "
            "leave `engine` out of the config, or name another tokenizer",
        )
    return verdict


def known_verdict(recipe: Recipe) -> Verdict | None:
    """The verdict on record, or that of the config; None where the proof is still to be made."""
    if recipe.config.engine == "reference":
        return Verdict(recipe.encoder.engine)
    try:
        return Verdict(**read_json(recipe.layout.engine(_key(recipe))))
    except (PackError, TypeError):
        return None


def refused(recipe: Recipe) -> bool:
    """Whether tokens that gigatoken made, perhaps for another corpus, are known not to be good enough for this one."""
    if recipe.config.engine == "reference" or not recipe.has_tokenizer:
        return recipe.config.engine == "reference"
    verdict = known_verdict(recipe)
    return verdict is not None and verdict.engine != GigatokenEncoder.engine


def _key(recipe: Recipe) -> str:
    return key_of("engine", {"texts": recipe.texts_key, "versions": _versions()})


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("gigatoken", "sentencepiece", "tokenizers")}


@lru_cache(maxsize=2)
def _gigatoken(reference: Encoder) -> GigatokenEncoder:
    """Loaded once per process, and not again in a child that is forked from it: the words that it knows go along."""
    return GigatokenEncoder(reference)


def release_encoders() -> None:
    """Give back the memory of encoders that are needed no more, some 40 MB."""
    _gigatoken.cache_clear()


def _prove(recipe: Recipe) -> Verdict:
    reference = recipe.encoder
    try:
        fast = _gigatoken(reference)
    except Unsupported as why:
        return Verdict(reference.engine, reason=str(why))
    texts = [*HARD, *sample(recipe)]
    differs = difference(fast, reference, texts)
    engine = fast.engine if differs is None else reference.engine
    return Verdict(engine, len(texts), sum(len(text.encode()) for text in texts), differs)


def difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> str | None:
    """The first text that the two encode differently: printable, and of a long one what stands where they part."""
    found, expected = fast.encode(texts), reference.encode(texts)
    if np.array_equal(found.ids, expected.ids) and np.array_equal(found.offsets, expected.offsets):
        return None
    for text in texts:
        theirs, ours = fast.encode([text]).ids.tolist(), reference.encode([text]).ids.tolist()
        if theirs != ours:
            parted = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            same = next(parted, min(len(theirs), len(ours)))
            place = len(b"".join(map(reference.token_bytes, ours[:same])).decode("utf-8", "ignore"))
            return shown(text[max(0, place - 20) :])
    return "texts that are encoded together"


# -- the sample -------------------------------------------------------------------------------------------------------


def sample(recipe: Recipe, at_least: int = TEXTS, budget: int = BUDGET) -> list[str]:
    """Return texts of the corpus as the template writes them, each once, from everywhere in the sources.

    Every text if the sources are within the budget. Files and records that cannot be read are left out: the task that
    reads the whole source reports them.
    """
    limit = recipe.config.max_record_bytes
    while True:
        samples = sample_files(recipe.files, budget, limit, most_files=MOST_FILES, skip_unreadable=True)
        draw = random.Random("".join(file.sha256 for file in recipe.files))  # only .random() never changes
        texts: dict[str, None] = {}
        for drawn in samples:
            for text in _texts(recipe, drawn.file, [record.value for record in drawn.records]):
                start = int(draw.random() * (len(text) - LONGEST)) if len(text) > LONGEST else 0
                texts[text[start : start + LONGEST]] = None
        if len(texts) >= at_least or budget >= MOST_BYTES or all(drawn.whole for drawn in samples):
            return list(texts)
        budget *= 4


def _texts(recipe: Recipe, file: SourceFile, records: list[object]) -> list[str]:
    """What records give to the encoder; nothing of those that cannot be used."""
    texts = []
    for record in records:
        with suppress(Reject, PackError):
            texts += texts_of(record, file, recipe.template, recipe.encoder, recipe.config.train_on)
    return texts
