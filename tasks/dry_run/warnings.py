"""Find the failures and warnings that a dry run shows."""

from __future__ import annotations

from tasks.conversations.keys.loss_weights import loss_weight_hints
from tasks.conversations.keys.training_flags import flag_hints
from tasks.corpus.mixture_table import explain_limits
from tasks.dry_run.model import Prediction, about, train_rows
from tasks.encoders.encoder import is_blank
from tasks.packing.pieces import MOST_CONVERSATIONS
from tasks.packing.rejects import suggest_settings
from tasks.templates.sections import explain_empty_blocks

# If a larger share of the tokens repeats a prompt, a warning explains the reason.
NOTEWORTHY = 0.2

# If a larger share of the conversations has an answer to an empty prompt, a warning says so.
MOST_EMPTY_PROMPTS = 0.01


def find_failures(found: Prediction) -> list[str]:
    """Return the reasons why the run will fail, as far as the sample shows."""
    config = found.recipe.config
    failures: list[str] = []
    read = sum(source.conversations for source in found.sources)
    rejected = sum(source.rejected for source in found.sources)
    cut_off = found.cut_off.expected
    counts = {reason: reject.expected for reason, reject in found.rejects.items()}
    if rejected and rejected / max(read, 1) > config.max_rejects:
        failures.append(
            f"The run will fail: {100 * rejected / read:.2f} % of the conversations are rejected, but max_rejects "
            f"allows {100 * config.max_rejects:.2f} %. Rejects shows the first of each reason; "
            + "; ".join(suggest_settings(counts, cut_off, read))
        )
    if read - rejected > MOST_CONVERSATIONS:
        failures.append(
            f"The run will fail: {about(read - rejected, found)} conversations are more than a corpus can have "
            f"({MOST_CONVERSATIONS:,}); divide the sources into several corpora, each with its own config"
        )
    if config.overlong == "error" and found.too_long:
        failures.append(
            f"The run will fail: {about(found.too_long, found)} conversations are longer than a row, and overlong is "
            "error; use truncate, turns, drop, or split (figures below are for truncate)"
        )
    if not train_rows(found):
        failures.append("The run will fail: no conversation of the sample is left to train on")
    elif found.empty_shares:
        failures.append(
            f"The run will fail: {found.empty_shares} has no conversation in the training split of the sample, so it "
            "cannot have a share of the tokens (weighting: token_share); figures are for the other sources"
        )
    return failures


def find_warnings(found: Prediction) -> list[str]:
    """Return the warnings: facts that a user may want to change or know."""
    warnings: list[str] = []
    if limited := explain_limits(found.giving_all, found.dropped.get("weight", 0.0), found.packed):
        warnings.append(limited)
    if found.config.duplicates == "drop" and not found.whole:
        warnings.append("duplicates: drop: duplicates are only found within the sample; the run may drop more")
    warnings += found.recipe.notes
    warnings += [*flag_hints(found.unused_keys), *loss_weight_hints(found.unused_keys)]
    if found.unlike_transformers:
        warnings.append(
            f"tokenizer: {found.unlike_transformers}; inference may read other tokens than the model learned"
        )
    warnings += _weighs_alike(found)
    warnings += _overlong(found)
    warnings += _unbalanced(found)
    warnings += _repeated(found)
    warnings += _empty_prompts(found)
    warnings += explain_empty_blocks(found.noticed, found.config.sections, " of the sample")
    warnings += _markers_in_content(found)
    short = [source.sample.file.name for source in found.sources if source.sample.reach < 1]
    if short:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        warnings.append(f"{names}: compressed and too large to read completely; only the beginning was sampled")
    return warnings


def _overlong(found: Prediction) -> list[str]:
    """Warn about conversations that are longer than a row."""
    config, dropped = found.config, found.dropped.get("too_long", 0.0)
    length = f"longer than {config.sequence_length:,} tokens"
    keep = "to keep them whole, raise sequence_length; to keep all their tokens, set overlong: split"
    lines = []
    if found.cut and config.overlong in ("truncate", "turns"):
        after = " after the last trained turn that fits" * (config.overlong == "turns")
        lines.append(f"overlong: {_conversations(found.cut, found)} {length} will be cut{after}; {keep}")
    if dropped:
        without = ", without a trained turn that fits," * (config.overlong == "turns")
        lines.append(f"overlong: {_conversations(dropped, found)} {length}{without} will be dropped; {keep}")
    return lines


def _weighs_alike(found: Prediction) -> list[str]:
    """Warn if `loss_weight` reads weights, but all of them are 1."""
    if not found.weighs_alike:
        return []
    instead = "none" if found.config.loss_weight == "data" else "conversation"
    return [
        f"loss_weight: {found.config.loss_weight}: no record of the sample has a weight other than 1, so the "
        f"setting has the same effect as loss_weight: {instead}; if the key has another name, map it "
        "with columns: {loss_weight: KEY}"
    ]


def _unbalanced(found: Prediction) -> list[str]:
    """Warn if there are too few rows for `balance`."""
    balance, rows = found.config.balance, train_rows(found)
    if balance is None or rows >= balance.ranks * balance.rows_per_rank:
        return []
    return [
        f"balance: {about(rows, found)} rows are too few for one step of {balance.ranks:,} ranks × "
        f"{balance.rows_per_rank:,} rows, so it has no effect; lower ranks or rows_per_rank"
    ]


def _conversations(count: float, found: Prediction) -> str:
    return f"{about(count, found)} conversation{'' if round(count) == 1 else 's'}"


def _repeated(found: Prediction) -> list[str]:
    """Explain why conversations have several samples, if `turns: auto` chose so."""
    if not found.samples or found.config.turns != "auto":
        return []
    share = found.samples["repeated_prompt_tokens"] / max(1.0, found.tokens["packed"])
    if share < NOTEWORTHY:
        return []
    return [
        "turns: auto: the template writes earlier turns differently once another turn follows, so conversations have "
        f"several samples; {100 * share:.0f} % of all tokens are repeated. With train_on: last, none are repeated"
    ]


def _empty_prompts(found: Prediction) -> list[str]:
    """Warn if more than a few conversations have an answer to an empty prompt."""
    count, looked_at = found.noticed["empty_prompts"], sum(len(source.sample.records) for source in found.sources)
    if count <= MOST_EMPTY_PROMPTS * looked_at:
        return []
    return [
        f"{100 * count / looked_at:.1f} % of the conversations have an answer to an empty prompt: the user message "
        "before it is blank, so the model learns to answer without a request; check `columns`, or remove these records"
    ]


def _markers_in_content(found: Prediction) -> list[str]:
    """Warn about tokens that begin or end turns and that messages can write.

    If a tokenizer does not mark such tokens as special, they are matched in messages, as at inference.
    """
    encoder = found.encoder
    names = {token: name for name, token in encoder.content_tokens.items() if not is_blank(name)}
    markers: dict[int, None] = {}
    for one in [example for source in found.sources for example in source.shown]:
        ids = one.ids.tolist()
        first = 1 if ids[0] == encoder.bos_id and len(ids) > 1 else 0
        if ids[first] in names:
            markers[ids[first]] = None
            for place in range(first + 1, len(ids)):
                if ids[place] == ids[first]:
                    before = [token for token in ids[max(0, place - 3) : place] if encoder.token_bytes(token).strip()]
                    markers |= dict.fromkeys(token for token in before[-1:] if token in names)
    if not markers:
        return []
    setting = ", ".join(f"'-{names[token]}'" for token in markers)
    return [
        f"{' and '.join(names[token] for token in markers)} frame turns, but the tokenizer does not mark them as "
        f"special, so a message can write them, as at inference; to prevent this, set  content_tokens: [{setting}]"
    ]
