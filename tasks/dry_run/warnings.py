"""Find the warnings of a dry run."""

from __future__ import annotations

from tasks.corpus.mixture_table import limited_by
from tasks.dry_run.model import Prediction, about
from tasks.packing.rejects import advice


def add_warnings(found: Prediction) -> None:
    config = found.recipe.config
    read = sum(source.conversations for source in found.sources)
    rejected = sum(source.rejected for source in found.sources)
    cut_off = found.cut_off.expected
    if rejected and rejected / max(read, 1) > config.max_rejects:
        found.failures.append(
            f"{100 * rejected / read:.2f} % of the conversations are rejected, max_rejects allows "
            f"{100 * config.max_rejects:.2f} %: the run will fail; the first of each reason is named under Rejects; "
            f"{advice(rejected, cut_off, read)}"
        )
    if config.overlong == "error" and found.too_long:
        found.failures.append(
            f"{about(found.too_long, found)} conversations are longer than a row: with overlong: error the run stops; "
            "truncate, drop or split goes on (figures are those of truncate)"
        )
    if not found.rows["train"]:
        found.failures.append("no conversation of the sample is left to train on: the run will fail")
    elif found.empty_shares:
        found.failures.append(
            f"{found.empty_shares}: no conversation of it in the sample is left in the training split, so that it can "
            "have no share of the tokens (weighting: token_share): the run will fail; figures are those of the others"
        )
    if limited := limited_by(found.giving_all, found.dropped.get("weight", 0.0), found.packed):
        found.warnings.append(limited)
    if config.duplicates == "drop" and not found.whole:
        found.warnings.append(
            "duplicates: drop: conversations that say the same are told within the sample alone; of all, the run may "
            "drop more"
        )
    short = [source.sample.file.name for source in found.sources if source.sample.reach < 1]
    if short:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        found.warnings.append(
            f"{names}: compressed and too long to be read to the end here: only the begin was looked at"
        )
