"""Check that the fast encoder equals the reference encoder on texts of the corpus, before it is used.

    sources ─ random windows ─▶ records ─ template ─▶ texts ─┐
                                 a fixed list of hard texts ─┴▶ gigatoken ═ reference ?
                                                                           └▶ data/engines/KEY.json: the verdict

If one text differs, the reference encodes the whole corpus. The choice of texts depends on the sources alone, not on
parts, workers, or time, so the verdict can be part of the manifest. The check takes 0.4 s for 25 MB and runs once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from itertools import islice

import numpy as np

from tasks.core.errors import PackError, Reject, UsageError
from tasks.core.printable import shown
from tasks.encoders.encoder import Encoder
from tasks.encoders.gigatoken_encoder import GigatokenEncoder
from tasks.encoders.gigatoken_model import Unsupported
from tasks.readers.containers import container_named
from tasks.recipe import Recipe
from tasks.sources.model import Part, SourceFile
from tasks.sources.parts import read_part
from tasks.storage.files import read_json, to_json, write_bytes
from tasks.storage.keys import key_of
from tasks.tokenization.prepare import texts_of

TEXTS = 2000  # compared at least, if the corpus has as many
WHOLE = 1 << 20  # bytes of sources up to which every text is compared
LONGEST = 2048  # characters; of a longer text, as many from a random place

WINDOW = 1 << 15  # bytes of a file that are read at once
MOST_FILES = 16  # that are read
MOST_BYTES = 1 << 24  # read from a file; a window is as long as its lines, which may be megabytes
RECORDS = 100  # read at once if a container has no windows

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
    """`engine` encodes the corpus. `texts` and `bytes` count what was compared; `differs` is an excerpt that differed.

    `reason` is why gigatoken cannot read this tokenizer.
    """

    engine: str
    texts: int = 0
    bytes: int = 0
    differs: str | None = None
    reason: str | None = None


def encoder_of(recipe: Recipe) -> Encoder:
    """Return gigatoken if the check passed, else the reference. Raises what `verdict_of` raises."""
    return _gigatoken(recipe.encoder) if verdict_of(recipe).engine == GigatokenEncoder.engine else recipe.encoder


def verdict_of(recipe: Recipe) -> Verdict:
    """Return the recorded verdict, or run the check and record it.

    Raises UsageError if the config asks for gigatoken and it cannot read the tokenizer.
    """
    verdict = known_verdict(recipe)
    if verdict is None:
        verdict = _prove(recipe)
        write_bytes(recipe.layout.engine(_key(recipe)), to_json(asdict(verdict)))
    if recipe.config.engine == "gigatoken" and verdict.reason:
        raise UsageError(
            "engine_refused",
            f"engine: gigatoken: it cannot replace {recipe.tokenizer_files.main}: {verdict.reason}; "
            "remove `engine` from the config, or name another tokenizer",
        )
    return verdict


def known_verdict(recipe: Recipe) -> Verdict | None:
    """Return the recorded verdict, or that of the config; None if the check has not run yet."""
    if recipe.config.engine == "reference":
        return Verdict(recipe.encoder.engine)
    try:
        return Verdict(**read_json(recipe.layout.engine(_key(recipe))))
    except (PackError, TypeError):
        return None


def refused(recipe: Recipe) -> bool:
    """Check whether tokens from gigatoken, perhaps made for another corpus, are known to be wrong for this one."""
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
    """Load once per process. A forked child inherits the encoder and its cache of words."""
    return GigatokenEncoder(reference)


def forget() -> None:
    """Free the memory of encoders that are no longer needed, about 40 MB."""
    _gigatoken.cache_clear()


def _prove(recipe: Recipe) -> Verdict:
    reference = recipe.encoder
    try:
        fast = _gigatoken(reference)
    except Unsupported as error:
        return Verdict(reference.engine, reason=str(error))
    texts = [*HARD, *sample(recipe)]
    differs = difference(fast, reference, texts)
    engine = fast.engine if differs is None else reference.engine
    return Verdict(engine, len(texts), sum(len(text.encode()) for text in texts), differs)


def difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> str | None:
    """Return an excerpt of the first text that the two encode differently, from shortly before the difference."""
    found, expected = fast.encode(texts), reference.encode(texts)
    if np.array_equal(found.ids, expected.ids) and np.array_equal(found.offsets, expected.offsets):
        return None
    for text in texts:
        theirs, ours = fast.encode([text]).ids.tolist(), reference.encode([text]).ids.tolist()
        if theirs != ours:
            differing = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            same = next(differing, min(len(theirs), len(ours)))
            place = len(b"".join(map(reference.token_bytes, ours[:same])).decode("utf-8", "ignore"))
            return shown(text[max(0, place - 20) :])
    return "only texts that are encoded together"


# -- the sample -------------------------------------------------------------------------------------------------------


def sample(recipe: Recipe) -> list[str]:
    """Return texts of the corpus as the template writes them, each once.

    They come from the first, the last, and random files: from the start, the end, and random places of a file that can
    be read from anywhere, else from its start. If the sources have up to WHOLE bytes, these are all texts. Errors are
    ignored here; the task that reads the whole file reports them.
    """
    draw = random.Random("".join(file.sha256 for file in recipe.files))  # only .random() is the same in every release
    whole = sum(file.bytes for file in recipe.files) <= WHOLE
    count = len(recipe.files)
    files = list(range(count))
    if not whole and count > MOST_FILES:
        files = sorted({0, count - 1, *(int(draw.random() * count) for _ in range(MOST_FILES - 2))})
    streams = [(recipe.files[number], _chunks(recipe, recipe.files[number], whole, draw)) for number in files]
    texts: dict[str, None] = {}
    characters = 0
    # Compressed sources contain more text than their bytes; four times as much is enough.
    while streams and (len(texts) < TEXTS or (whole and characters < 4 * WHOLE)):
        for stream in list(streams):
            file, chunks = stream
            chunk = next(chunks, None)
            if chunk is None:
                streams.remove(stream)
                continue
            for text in _texts(recipe, file, chunk):
                start = int(draw.random() * (len(text) - LONGEST)) if len(text) > LONGEST else 0
                texts[text[start : start + LONGEST]] = None
                characters += len(text)
    return list(texts)


def _chunks(recipe: Recipe, file: SourceFile, whole: bool, draw: random.Random) -> Iterator[list[object]]:
    """Yield lists of records of a file: all records in order if `whole`."""
    limit = recipe.config.max_record_bytes
    stop = max(part.stop for part in recipe.parts if part.file == file)  # bytes, or row groups
    lines = file.container == "jsonl" and not file.compression
    try:
        if whole or not (lines or file.container == "parquet"):
            records = (
                (record for _, record in read_part(Part(file, 0, stop, ""), limit))
                if whole
                else container_named(file.container).first_records(file)
            )
            while chunk := list(islice(records, RECORDS)):
                yield chunk
            return
        last = max(0, stop - (WINDOW if lines else 1))
        passed = 0
        for number in range(stop // WINDOW + 1 if lines else stop):
            place = (0, last)[number] if number < 2 else int(draw.random() * stop)
            window = Part(file, *(_lines(file, place, stop, limit) if lines else (place, place + 1)), "")
            passed += window.stop - place
            if lines and passed > MOST_BYTES:
                return
            yield [record for _, record in islice(read_part(window, limit), None if lines else RECORDS)]
    except (PackError, OSError):
        return


def _lines(file: SourceFile, place: int, stop: int, limit: int) -> tuple[int, int]:
    """Return [start, stop) of the lines that begin within WINDOW bytes after `place`."""
    with file.path.open("rb") as lines:
        if place:
            lines.seek(place - 1)
            lines.readline(limit)
        start = lines.tell()
        lines.seek(min(start + WINDOW, stop) - 1)
        lines.readline(limit)
        return start, max(start, min(lines.tell(), stop))


def _texts(recipe: Recipe, file: SourceFile, records: list[object]) -> list[str]:
    """Return the texts that are encoded of records; none for those that cannot be used."""
    texts = []
    for record in records:
        with suppress(Reject, PackError):
            texts += texts_of(record, file, recipe.template, recipe.encoder, recipe.config.train_on)
    return texts
