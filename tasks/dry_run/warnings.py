"""Find the failures and warnings that a dry run shows."""

from __future__ import annotations

from tasks.corpus.mixture_table import explain_limits
from tasks.dry_run.model import Prediction, about
from tasks.packing.rejects import suggest_settings
from tasks.sources.model import found_layouts


def find_failures(found: Prediction) -> list[str]:
    """Return the reasons why the run will fail, as far as the sample shows."""
    config = found.recipe.config
    failures: list[str] = []
    read = sum(source.conversations for source in found.sources)
    rejected = sum(source.rejected for source in found.sources)
    cut_off = found.cut_off.expected
    if rejected and rejected / max(read, 1) > config.max_rejects:
        failures.append(
            f"The run will fail: {100 * rejected / read:.2f} % of the conversations are rejected, but max_rejects "
            f"allows {100 * config.max_rejects:.2f} %. Rejects shows the first of each reason; "
            f"{suggest_settings(rejected, cut_off, read)}"
        )
    if config.overlong == "error" and found.too_long:
        failures.append(
            f"The run will fail: {about(found.too_long, found)} conversations are longer than a row, and overlong is "
            "error; use truncate, drop, or split (figures below are for truncate)"
        )
    if not found.rows["train"]:
        failures.append("The run will fail: no conversation of the sample is left to train on")
    elif found.empty_shares:
        failures.append(
            f"The run will fail: {found.empty_shares} has no conversation in the training split of the sample, so it "
            "cannot have a share of the tokens (weighting: token_share); figures are for the other sources"
        )
    return failures


def find_warnings(found: Prediction) -> list[str]:
    """Return what a user may want to change or to know."""
    warnings: list[str] = []
    if limited := explain_limits(found.giving_all, found.dropped.get("weight", 0.0), found.packed):
        warnings.append(limited)
    if found.config.duplicates == "drop" and not found.whole:
        warnings.append("duplicates: drop: duplicates are only found within the sample; the run may drop more")
    files = [source.sample.file for source in found.sources]
    warnings += found_layouts(files, found.config.sources)
    short = [source.sample.file.name for source in found.sources if source.sample.reach < 1]
    if short:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        warnings.append(f"{names}: compressed and too large to read completely; only the beginning was sampled")
    return warnings
