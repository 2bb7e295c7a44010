"""Say before a run what weights and limits leave out or repeat.

a small sample of every source ─▶ conversations of each entry of `sources` ─▶ left out, or packed several times
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.core.printable import counted, printable
from packcorpus.tasks.corpus.summary import percent
from packcorpus.tasks.packing.mixture import is_mixed
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.sample_files import Sample, sample_files

BUDGET = 1 << 20  # bytes of the sources to read, which takes 0.1 s
REPEATED = 1.05  # sources that are packed more often are named


def expected_mixture(recipe: Recipe) -> list[str]:
    """Return what weights and limits do, from a small sample of the sources.

    Nothing is read if there are none, and sources that cannot be read are left to the run.
    """
    config = recipe.config
    if not is_mixed(config):
        return []
    try:
        samples = sample_files(recipe.files, BUDGET, config.max_record_bytes, skip_unreadable=True)
    except (PackError, OSError):
        return []
    return [*explain_mixture(config, sizes_of(samples), "" if all(sample.counted for sample in samples) else "about ")]


def sizes_of(samples: list[Sample]) -> dict[int, float]:
    """Return the conversations of each entry of `sources` that samples represent."""
    sizes: dict[int, float] = {}
    for sample in samples:
        sizes[sample.file.entry] = sizes.get(sample.file.entry, 0.0) + sample.expected
    return sizes


def explain_mixture(
    config: Config, sizes: Mapping[int, float], about: str, copies: Mapping[int, float] | None = None
) -> Iterator[str]:
    """Yield what weights and limits leave out and repeat.

    `sizes` has the conversations of each entry of `sources`, and `about` is before counts that are estimates. `copies`
    is how often each entry is packed; without it, that is estimated, as if none is rejected or filtered out.
    """
    if config.weighting == "token_share":
        yield (
            "weighting: token_share leaves out conversations of every source but the scarcest; to leave out none, set "
            "weighting: proportions, where weights are shares of the conversations"
        )
        return
    sources, total = config.sources, sum(sizes.values())
    within = {entry: min(size, sources[entry].limit or size) for entry, size in sizes.items()}
    if config.weighting == "proportions":
        shared = {entry: size for entry, size in within.items() if sources[entry].split != "validation"}
        scale = max((size / sources[entry].weight for entry, size in shared.items()), default=0.0)
        times = copies or {entry: sources[entry].weight * scale / max(size, 1.0) for entry, size in shared.items()}
        known = about if copies else "about "
        said = [
            f"{printable(sources[n].path)} {known}{often:.1f} times" for n, often in times.items() if often > REPEATED
        ]
        if said:
            yield f"weighting: proportions leaves out no conversation, and packs those of {', '.join(said)}"
        within_weights = within
    else:
        within_weights = {entry: size * min(1.0, sources[entry].weight) for entry, size in within.items()}
    lost = {entry: sizes[entry] - within_weights[entry] for entry in sizes if sizes[entry] - within_weights[entry] >= 1}
    if lost:
        gone = round(sum(lost.values()))
        said = [
            f"{printable(sources[entry].path)} {count:,.0f}"
            + f" (weight {sources[entry].weight:g})" * (within_weights[entry] < within[entry])
            + f" (limit {sources[entry].limit or 0:,})" * (within[entry] < sizes[entry])
            for entry, count in lost.items()
        ]
        instead = "; for shares of the result that leave out none, set weighting: proportions"
        by_weight = any(within_weights[entry] < within[entry] for entry in lost)
        yield (
            f"weights and limits leave out {about}{gone:,} of {counted(round(total), 'conversation')} "
            f"({percent(gone, total)}): {', '.join(said)}{instead * by_weight}"
        )
