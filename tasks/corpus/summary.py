"""Put the figures of a corpus in words, once for all that show them.

    ledger, packing figures, noticed ─▶ Facts: name, value, unit, note ─┐
    what a user may want to know ─▶ sentences ─────────────────────────┴─▶ terminal, report, summary of a run

`packcorpus check` shows the facts of a ledger that it predicts. Names that come from data are printable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from packcorpus.tasks.conversations.turn_weights import flag_hints, loss_weight_hints
from packcorpus.tasks.conversations.unused_keys import OTHERS
from packcorpus.tasks.core.messages import Note
from packcorpus.tasks.core.printable import common_folder, counted, lengths_in_words, printable
from packcorpus.tasks.storage.facts import HeldOutFacts, Ledger, MixtureFacts
from packcorpus.tasks.storage.keys import RELATIVE
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.templates.adjust import explain_undefined
from packcorpus.tasks.templates.sections import explain_empty_blocks, explain_sections, sections_of_config

if TYPE_CHECKING:
    from packcorpus.tasks.packing.balance import Waiting

BATCH_ROWS = (8, 32, 64)  # numbers of rows per optimizer step to show steps for
FEW_STEPS = 100  # a shorter run is over before the learning rate has warmed up and decayed
MOST_TOKENS = 12  # content tokens to list
MOST_KEYS, MOST_SOURCES = 8, 5  # unused keys to list for a source, and sources to list
SHORTEST_NAME = 20  # characters of a source's name to show in a table

SHARE_NOTE = "share: of all tokens read, before the mixture"

TRAINED_TURNS = {
    "assistant": "every assistant turn",
    "last": "the last assistant turn",
    "rounds": "every assistant turn after the last user message",
    "all": "every turn",
}
WEIGHTED = {
    "data": "as in the data, by conversation or turn",
    "conversation": "the same total for every conversation",
    "both": "the same total for every conversation, times the weight in the data",
}
SHARED = "what samples begin with is stored once"
# Why a conversation is in no row, by the reason in the ledger.
DROPPED = {
    "too_long": "longer than a row",
    "min_tokens": "fewer tokens than min_tokens",
    "max_tokens": "more tokens than max_tokens",
    "min_turns": "fewer turns than min_turns",
    "max_turns": "more turns than max_turns",
    "duplicate": "duplicate of another conversation",
    "near_duplicate": "near-duplicate of another conversation",
    "contaminated": "overlap with an evaluation set",
    "limit": "over the limit of its source",
    "weight": "left out by the weight of its source",
    "no_trained_tokens": "no token to train on",
}
# What settings leave out, by its name in the ledger.
LEFT_OUT = {
    "system": ("system message", "drop_roles"),
    "tool": ("result", "drop_roles"),
    "tools": ("conversation", "ignore: [tools]"),
    "answers": ("answer", "its flag, or a weight of 0"),
}
# For each count in the manifest's `noticed`: the noun that is counted, and its meaning.
NOTICED = {
    "control_text_seen": (
        "conversation",
        "with the name of a control token in its text, which only the template writes as a token",
    ),
    "not_round_trip": ("conversation", "with ▁ (U+2581), which this tokenizer decodes to a space"),
    "unknown_tokens": ("token", "that is the unknown token: this tokenizer cannot encode these characters"),
    "unusual_order": (
        "conversation",
        "with an unusual order of roles (not system, user, assistant, user, …), which is kept",
    ),
    "empty_prompts": ("conversation", "with an answer to an empty prompt: the user message before it is blank"),
    "null_fields": (
        "field",
        "that is null in a struct of a table: left out, because a table gives every struct the keys of all rows",
    ),
    "calls_without_result": ("call", "of a tool without a result, although the conversation continues"),
    "results_without_call": ("result", "of a tool without a call before it"),
    "without_key": ("conversation", "without the key that `validation_by` names: held out by its content"),
    "undefined_tools": ("conversation", "that calls a tool without a definition in its `tools`"),
    "reasoned_answers": ("trained answer", "with reasoning"),
    "empty_reasoning": (
        "trained answer",
        "without reasoning, for which the template writes an empty block of reasoning",
    ),
    "without_embedding": ("conversation", "without an embedding, which `neighbors` cannot compare"),
}


class Fact(NamedTuple):
    """One figure in words.

    In a sum, `sign` is that of the term: "", "−", "+", or "=". A part belongs to the last fact that is not a part.
    """

    name: str
    value: float | str
    unit: str = ""  # a noun in the singular, or "%"
    note: str = ""
    sign: str = ""
    is_part: bool = False

    @property
    def text(self) -> str:
        """Return the value with its unit if that is %."""
        if isinstance(self.value, float):
            return f"{self.value:.2f}{' %' * (self.unit == '%')}"
        return f"{self.value:,}" if isinstance(self.value, int) else self.value


def setting_facts(settings: Mapping[str, Any]) -> list[Fact]:
    """Return what is trained on, and what happens to conversations longer than a row."""
    trained = TRAINED_TURNS[settings["train_on"]] + explain_sections(sections_of_config(settings))
    weights = WEIGHTED.get(settings.get("loss_weight", ""))
    return [
        Fact("trained on", trained + ", without reasoning" * (settings.get("reasoning") == "drop")),
        Fact("overlong", str(settings.get("overlong", "?"))),
        *([Fact("loss weight", weights)] if weights else []),
        *([Fact("share", SHARED)] if settings.get("share", "none") != "none" else []),
    ]


def conversation_facts(ledger: Ledger, settings: Mapping[str, Any]) -> list[Fact]:
    """Return the sum of conversations from read to packed."""
    counts, unit = ledger.conversations, "conversation"
    facts = [Fact("read", counts.read, unit)]
    for name, lost in (("rejected", counts.rejected), ("dropped", counts.dropped)):
        facts.append(Fact(name, sum(lost.values()), unit, sign="−"))
        for reason, count in lost.items():
            limit = settings.get(reason)
            words = DROPPED.get(reason, printable(reason)) + (f": {limit:,}" if isinstance(limit, int) else "")
            facts += [Fact(words, count, unit, is_part=True)] * (count > 0)
    parts = (
        ("truncated", counts.truncated),
        ("split", counts.split),
        ("duplicates", counts.duplicates),
        ("pieces", ledger.pieces.packed * (ledger.pieces.packed != counts.packed)),
        ("pieces dropped", ledger.pieces.dropped),
    )
    packed = Fact("packed", counts.packed, unit, sign="=")
    return [*facts, packed, *(Fact(name, count, unit, is_part=True) for name, count in parts if count)]


def token_facts(ledger: Ledger, settings: Mapping[str, Any], rows: int) -> list[Fact]:
    """Return the sum of tokens from encoded to packed, then the places of `rows` rows."""
    tokens, unit = ledger.tokens, "token"
    share = f"{100 * tokens.trained / max(tokens.packed, 1):.1f} %"
    terms = [
        ("", "encoded", tokens.encoded),
        *[("part", "not included: rejected", tokens.rejected)] * (tokens.rejected > 0),
        ("+", "separators", tokens.separators),
        *[("+", "repeated", tokens.repeated)] * (tokens.repeated > 0),
        *[("part", "before later pieces", ledger.pieces.repeated_tokens or 0)] * bool(ledger.pieces.repeated_tokens),
        ("−", "truncated", tokens.truncated),
        *[("part", "of them trained", tokens.trained_truncated or 0)] * bool(tokens.trained_truncated),
        ("−", "dropped", tokens.dropped),
        *[("−", "shared", tokens.shared or 0)] * (tokens.shared is not None),
        ("=", "packed", tokens.packed),
        ("part", f"trained, {share}", tokens.trained),
        ("part", "context", tokens.packed - tokens.trained),
    ]
    if settings.get("packing"):
        terms.append(("+", "padding", tokens.padding))
        if tokens.alignment is not None:
            terms.append(("part", f"of align: {settings.get('align')}", tokens.alignment))
        lengths, in_rows = settings["sequence_length"], counted(rows, "row")
        if settings.get("padding") == "none":
            in_rows = f"in {in_rows}"
        elif not isinstance(lengths, list):
            in_rows += f" × {lengths:,}"
        terms.append(("=", in_rows, tokens.packed + tokens.padding))
    return [Fact(name, count, unit, "", sign.replace("part", ""), sign == "part") for sign, name, count in terms]


def packing_facts(manifest: Manifest) -> list[Fact]:
    """Return how full the rows are; the list is empty without packing."""
    packing, length = manifest.packing_metadata, f"{manifest.sequence_length:,}"
    if not packing.enabled:
        return []
    several, bound = [], packing.lower_bound_rows
    if packing.places is not None and packing.lower_bound_places is not None:
        several, bound = [Fact("places", packing.places, "token", "rows of all lengths")], packing.lower_bound_places
    positions = "all positions" if manifest.row_layout.padding != "none" else f"rows × {length} positions"
    noun = "samples" if manifest.ledger.samples else "conversations"
    return [
        Fact("rows", packing.rows, "row", f"of {lengths_in_words(manifest.row_lengths)} tokens"),
        *several,
        Fact("lower bound", bound, "" if several else "row", printable(packing.lower_bound)),
        Fact("above the bound", packing.above_lower_bound_percent, "%"),
        Fact("efficiency", packing.packing_efficiency or 0.0, "%", f"of {positions} hold a token"),
        Fact(f"{noun} per row", packing.avg_conversations_per_sequence),
    ]


# What a manifest noticed by name, besides the counts of `noticed_facts`.
NOTICED_NAMES = frozenset(("content_tokens", "undefined_names", "unknown_markers", "unused_keys"))


def noticed_facts(noticed: Mapping[str, Any]) -> list[Fact]:
    """Return the unusual things that were handled, with their counts."""
    return [
        Fact(name, count, *NOTICED.get(name, ("", printable(name))))
        for name, count in noticed.items()
        if isinstance(count, int) and count
    ]


def sentence(fact: Fact) -> str:
    """Return a noticed fact as a phrase: 2 conversations with …."""
    count = counted(int(fact.value), fact.unit) if fact.unit else f"{fact.value:,}"
    return f"{count} {fact.note}"


def notes(manifest: Manifest) -> Iterator[Note]:
    """Yield what a user may want to know about a corpus, besides its sums.

    The figures of each note are those that the manifest has of its kind.
    """
    ledger, unused, noticed = manifest.ledger, manifest.unused_keys, manifest.noticed
    if ledger.samples:
        yield from (Note(line, "samples", **ledger.samples.model_dump()) for line in explain_samples(ledger))
    figures = {"packed": ledger.tokens.packed, "shared": ledger.tokens.shared}
    yield from (Note(line, "share", **figures) for line in explain_shared(ledger))
    if ledger.as_rendered:
        yield from (
            Note(line, "as_rendered", **ledger.as_rendered.model_dump()) for line in explain_as_rendered(ledger)
        )
    duplicates = ledger.conversations.duplicates
    yield from (Note(line, "duplicates", conversations=duplicates) for line in content_notes(ledger, manifest.config))
    of_split = manifest.held_out.model_dump() if manifest.held_out else {}
    yield from (
        Note(line, "held_out", **of_split) for line in held_out_notes(manifest.held_out, ledger, manifest.config)
    )
    files = [file.model_dump() for file in manifest.evaluation]
    yield from (Note(line, "evaluation", files=files) for line in explain_evaluation(manifest))
    said = (fact for fact in noticed_facts(noticed) if fact.name in ("empty_prompts", "without_key"))
    yield from (Note(sentence(fact), fact.name, count=noticed[fact.name]) for fact in said)
    for line in explain_undefined(manifest.undefined_names):
        yield Note(f"note: {line}", "undefined_names", names=manifest.undefined_names)
    for line in unknown_markers(noticed):
        yield Note(f"note: {line}", "unknown_markers")
    for line in explain_empty_blocks(noticed, sections_of_config(manifest.config)):
        yield Note(f"note: {line}", "empty_blocks", noticed=noticed)
    if lines := unused_keys(unused):
        hints = (*flag_hints(unused), *loss_weight_hints(unused))
        yield Note("unused keys, with their counts:", "unused_keys", sources=unused)
        yield from (Note(line, "unused_keys_line") for line in (*lines, *hints))
    lost: dict[str, Any] = {"truncated": ledger.conversations.truncated, "split": ledger.conversations.split}
    lost |= {"dropped": ledger.conversations.dropped, "tokens_truncated": ledger.tokens.truncated}
    lost |= {"tokens_dropped": ledger.tokens.dropped}
    yield from (Note(line, "overlong", **lost) for line in explain_overlong(ledger, manifest.config))


def explain_evaluation(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each file of an evaluation set."""
    for file in manifest.evaluation:
        missed = f"; {counted(file.unmatched, 'item')} cannot be found: too few words of their own"
        unmatched = missed * bool(file.unmatched)
        yield (
            f"decontaminate: {counted(file.conversations, 'conversation')} left out for an overlap with "
            f"{printable(file.path)} ({counted(file.items, 'item')}{unmatched})"
        )


def percent(part: float, whole: float) -> str:
    """Return a share in percent with two digits; only all of it is 100 %."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.001:
        return "less than 0.001 %"
    text = f"{share:.0f}" if share >= 10 else f"{share:.2g}"
    return f"{text if text != '100' or part >= whole else '99.9'} %"


def lost_of(ledger: Ledger) -> list[tuple[str, int, int]]:
    """Return how many conversations and tokens of the data are in no row, of how many."""
    of, tokens = ledger.conversations, ledger.tokens
    lost = tokens.truncated + tokens.dropped + tokens.rejected
    gone = sum(of.rejected.values()) + sum(of.dropped.values())
    return [("conversations", gone, of.read), ("tokens", lost, tokens.encoded + tokens.rejected)]


def explain_losses(ledger: Ledger, about: str | None = None) -> list[str]:
    """Say what of the data is in no row: a line for each kind, or one line.

    `about` is for a ledger that is predicted: it is before each count, and "" if all data was read.
    """
    of, tokens, mark = ledger.conversations, ledger.tokens, about or ""
    verb, lines = "lost" if about is None else "will be lost", []
    reasons = {"rejected": sum(of.rejected.values())}
    reasons |= {DROPPED.get(reason, printable(reason)): count for reason, count in of.dropped.items()}
    of_tokens = {"truncated": tokens.truncated, "dropped": tokens.dropped, "in rejected conversations": tokens.rejected}
    every = tokens.encoded + tokens.rejected
    for noun, total, counts in (("conversation", of.read, reasons), ("token", every, of_tokens)):
        if count := sum(counts.values()):
            said = "; ".join(f"{mark}{number:,} {words}" for words, number in counts.items() if number)
            lines.append(f"{verb}: {mark}{count:,} of {counted(total, noun)} ({percent(count, total)}): {said}")
    phrases = []
    for name, count in (ledger.context.left_out if ledger.context else {}).items():
        noun, setting = LEFT_OUT[name]
        phrases.append(f"{'the tools of ' * (name == 'tools')}{mark}{counted(count, noun)} ({setting})")
    if phrases:
        lines.append(f"{verb.replace('lost', 'left out')} of the context: {', '.join(phrases)}")
    if (found := ledger.as_rendered) and found.without_reasoning:
        answers = f"{mark}{counted(found.without_reasoning, 'trained answer')}"
        lines.append(
            f"{verb}: the reasoning of {answers}, {mark}{counted(found.unwritten_tokens, 'token')} (turns: as_rendered)"
        )
    nothing = "nothing was lost" if about is None else "nothing will be lost"
    return lines or [f"{nothing}: {mark}{counted(of.read, 'conversation')}, {mark}{counted(every, 'token')}"]


def ledger_notes(ledger: Ledger) -> list[str]:
    """Describe the samples of conversations: several of each, or the one rendering."""
    return [*explain_samples(ledger), *explain_shared(ledger), *explain_as_rendered(ledger)]


def content_notes(ledger: Ledger, settings: Mapping[str, Any], is_sample: bool = False) -> Iterator[str]:
    """Yield lines about content that is left out, or packed again.

    With `is_sample`, the ledger is predicted from a part of the data.
    """
    duplicates, reasoning = ledger.conversations.duplicates, ledger.reasoning
    about = "about " * is_sample
    if reasoning and (dropped := reasoning.dropped):
        count = counted(dropped.answers, "answer")
        line = f"reasoning: drop leaves out the reasoning of {about}{count} ({about}{counted(dropped.tokens, 'token')})"
        could = ", although the template can write it; to train on it, set  reasoning: keep" * reasoning.template_writes
        yield f"{line}{could}"
    if reasoning and (unwritten := reasoning.unwritten):
        count, tokens = counted(unwritten.answers, "earlier answer"), counted(unwritten.tokens, "token")
        them = "it is" if unwritten.answers == 1 else "they are"
        yield (
            f"the template leaves out the reasoning of {about}{count} ({about}{tokens}), as at inference; {them} not "
            "trained on"
        )
    if duplicates:
        count = counted(duplicates, "conversation")
        has, is_packed, them = ("has", "is", "it") if duplicates == 1 else ("have", "are", "them")
        yield (
            f"duplicates: {'at least about ' * is_sample}{count} {has} the same content as another one and "
            f"{is_packed} packed again; to leave {them} out, set  duplicates: exact"
        )
    if is_sample and (duplicates or settings.get("duplicates") in ("exact", "near")):
        yield "duplicates are only found within the sample, so there may be more; the run counts them exactly"


def held_out_notes(
    held_out: HeldOutFacts | None, ledger: Ledger, settings: Mapping[str, Any], is_sample: bool = False
) -> Iterator[str]:
    """Yield a line about the validation split and prompts that training has, too.

    With `is_sample`, the figures are predicted from a part of the data.
    """
    if held_out is None:
        return
    about = "about " * is_sample
    count = counted(ledger.conversations.packed, "conversation")
    line = f"validation: {about}{held_out.conversations:,} of {count} ({percent(held_out.percent, 100)})"
    if held_out.prompts:
        line += f", with {about}{counted(held_out.prompts, 'prompt')}, "
        line += f"{about}{held_out.shared:,} of which are also in train" if held_out.shared else "none of them in train"
        line += f"{' and' if held_out.shared else ', but'} {held_out.near:,} nearly" if held_out.near else ""
    if held_out.shared:
        line += "; to keep all conversations with the same prompt on one side, set  validation_by: prompt"
    yield line + " (prompts are only compared within the sample)" * (is_sample and held_out.prompts > 0)


# What the ways out of several samples train on.
WAYS_OUT = {
    "turns: auto": "in as few samples as each answer needs to follow its prompt",
    "share: conversation": "stores what the samples of a conversation begin with once, in rows of format 3.2",
    "train_on: rounds": "trains only on the answers after the last user message",
    "train_on: last": "trains only on the last answer",
    "turns: as_rendered": "trains on all answers of one rendering, which differs from inference",
}


def explain_samples(ledger: Ledger) -> Iterator[str]:
    """Describe several samples of conversations, their price, and ways out."""
    found, packed, conversations = ledger.samples, ledger.tokens.packed, max(1, ledger.conversations.packed)
    if found is None:
        return
    repeated = found.repeated_prompt_tokens
    each = f"{found.packed / conversations:.1f} per conversation"
    share = f"{100 * repeated / max(1, packed):.1f} % of the compute"
    if found.repeated_rows:
        share += f", about {counted(found.repeated_rows, 'row')}"
    if apart := found.apart:
        each += f" ({apart.samples / found.read * found.packed / conversations:.1f} with turns: apart)"
        if ledger.tokens.shared is None:  # what trees of these samples would repeat is unknown
            share += f"; {100 * apart.repeated_prompt_tokens / max(1, apart.tokens):.1f} % with turns: apart"
    gone = [f"{count:,} {DROPPED.get(reason, reason)}" for reason, count in found.dropped.items()]
    yield (
        f"{found.packed:,} of {counted(found.read, 'sample')} packed{' (' * bool(gone)}{', '.join(gone)}"
        f"{')' * bool(gone)}, {each}; {repeated:,} prompt tokens ({share}) repeat an earlier sample of the same "
        "conversation"
    )
    ways, stored = [], ledger.tokens.encoded - (ledger.tokens.shared or 0)
    for setting, way in found.ways_out.items():
        price = ""
        if way.tokens is not None and way.rows is not None:
            if way.tokens >= stored:
                continue
            less = 100 * (1 - way.tokens / stored)
            price = f" (about {way.tokens:,} tokens in {counted(way.rows, 'row')}, {less:.0f} % less)"
        ways.append(f"{setting}{price} {WAYS_OUT.get(setting, '')}")
    if ways:
        yield f"to pay less: {'; '.join(ways)}"


def explain_shared(ledger: Ledger) -> Iterator[str]:
    """Describe what trees of samples save."""
    shared, stored = ledger.tokens.shared, ledger.tokens.packed - ledger.tokens.repeated
    if shared:
        yield f"{shared + stored:,} tokens of samples in {stored:,} ({percent(shared, shared + stored)} less): {SHARED}"
    elif shared is not None:
        yield "share saves nothing here: no samples that may be in one tree begin alike"


def explain_as_rendered(ledger: Ledger) -> Iterator[str]:
    """Describe how the one rendering of each conversation differs from inference."""
    found = ledger.as_rendered
    if found is None:
        return
    phrases = [
        f"{counted(found.other_prompts, 'trained answer')} after another prompt than the model sees",
        f"{counted(found.other_answers, 'trained answer')} written differently than the model writes them",
        f"{counted(found.without_reasoning, 'answer')} without their reasoning "
        f"({counted(found.unwritten_tokens, 'token')} not written)",
    ]
    counts = (found.other_prompts, found.other_answers, found.without_reasoning)
    differs = ", ".join(phrase for phrase, count in zip(phrases, counts, strict=True) if count)
    yield (
        "the one rendering of a conversation (turns: as_rendered) differs from inference: "
        f"{differs or 'in no answer of this corpus'}"
    )


def explain_overlong(ledger: Ledger, settings: Mapping[str, Any], will: str = "") -> Iterator[str]:
    """Describe what becomes of conversations and samples that are longer than a row.

    `will` stands before each verb, such as "will be ".
    """
    policy, lengths = settings.get("overlong"), settings["sequence_length"]
    longest = f"{lengths[-1] if isinstance(lengths, list) else lengths:,} tokens"
    conversations, tokens, samples = ledger.conversations, ledger.tokens, ledger.samples
    dropped, noun = (samples.dropped, "sample") if samples else (conversations.dropped, "conversation")
    keep = f"to keep them, raise sequence_length{' or set overlong: split' * (policy != 'split')}"

    def lost(count: int, trained: int | None = None) -> str:
        of_all = percent(count, tokens.encoded + tokens.rejected)
        of_them = f", {trained:,} of them trained" if trained is not None else ""
        return f", which drops {count:,} tokens ({of_all} of all{of_them}); {keep}"

    if conversations.truncated:
        cut = counted(conversations.truncated, "conversation")
        how = f"truncated to {longest}"
        if policy == "turns":
            how = f"cut after the last trained turn that fits in {longest}"
        yield f"overlong: {cut} {will}{how}{lost(tokens.truncated, tokens.trained_truncated)}"
    if conversations.split:
        later, repeated = ledger.pieces.later, ledger.pieces.repeated_tokens or 0
        once = not samples and tokens.repeated == repeated  # only then is each piece counted once
        pieces = f" into {ledger.pieces.packed - conversations.packed + conversations.split:,} pieces" * once
        gone = ledger.pieces.dropped
        without = f"; {counted(gone, 'more piece')} dropped, without a token to train on" * bool(gone)
        cut = f"{counted(conversations.split, 'conversation')} longer than {longest} {will}split"
        if later is not None:
            lack = f"{counted(later, 'piece')} without the beginning of the conversation"
            begin = f", of which {ledger.pieces.inside:,} within a turn that is longer than a row"
            again = f"; {repeated:,} tokens before the first user message are repeated for them"
            without = f": {lack}{begin * bool(ledger.pieces.inside)}{again * bool(repeated)}" * bool(later) + without
        yield f"overlong: {cut}{pieces}{without}; to keep them whole, raise sequence_length"
    if too_long := dropped.get("too_long"):
        without = ", without a trained turn that fits" * (policy == "turns")
        yield f"overlong: {counted(too_long, noun)} longer than {longest} {will}dropped{without}; {keep}"
    if policy in ("truncate", "split") and (untrained := dropped.get("no_trained_tokens")):
        alone = policy == "truncate" and sum(dropped.values()) == untrained  # only then are all dropped tokens theirs
        yield (
            f"overlong: {counted(untrained, noun)} {will}dropped, without a token to train on within {longest}"
            f"{lost(tokens.dropped) if alone else f'; {keep}'}"
        )


def content_tokens(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a printable phrase for each content token.

    For example: "<think> 12 (assistant 11, user 1)".
    """
    often = sorted(found.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    lines = [
        f"{printable(token)} {sum(roles.values()):,} ({', '.join(f'{role} {n:,}' for role, n in roles.items())})"
        for token, roles in often[:MOST_TOKENS]
    ]
    return lines + [f"{len(often) - MOST_TOKENS:,} more tokens"] * (len(often) > MOST_TOKENS)


def unknown_markers(noticed: Mapping[str, Any]) -> list[str]:
    """Return a printable line about markers that the tokenizer lacks, if any."""
    counts = {marker: of["conversations"] for marker, of in noticed.get("unknown_markers", {}).items()}
    often = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"{printable(marker)} in {counted(count, 'conversation')}" for marker, count in often[:MOST_TOKENS]]
    listed += [f"{len(often) - MOST_TOKENS:,} more markers"] * (len(often) > MOST_TOKENS)
    line = "the template writes markers that the tokenizer lacks, so they are encoded as text"
    return [f"{line}: {', '.join(listed)} (unknown_markers: text)"] * bool(often)


def unused_keys(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a printable line for each source with unused keys.

    For example: "chats.jsonl: id 998, messages[].id 4".
    """
    folder, lines = common_folder(list(found)), []
    for source, counts in list(found.items())[:MOST_SOURCES]:
        often = sorted(counts.items(), key=lambda item: (item[0] == OTHERS, -item[1], item[0]))
        keys = [f"{key} {count:,}" for key, count in often[:MOST_KEYS]]
        rest = len(counts) - MOST_KEYS
        line = f"{source.removeprefix(folder)}: {', '.join(keys)}{f', and {rest:,} more' if rest > 0 else ''}"
        lines.append(printable(line))
    rest = len(found) - MOST_SOURCES
    return lines + [f"and in {counted(rest, 'more source')}"] * (rest > 0)


def steps_of(rows: int, length: int, batch: int, longest: int) -> int:
    """Return the optimizer steps of an epoch over rows of one length.

    A step has `batch` rows of the longest length, or more of the shorter rows, so that all have equally many places.
    """
    return -(-rows * length // (batch * longest))


def steps_of_split(manifest: Manifest, split: str, batch: int) -> int:
    """Return the optimizer steps of an epoch over one split."""
    return steps_of(manifest.splits[split].rows, manifest.length_of_split(split), batch, manifest.sequence_length)


def waiting_line(waiting: list[Waiting], balance: Mapping[str, Any] | None) -> str:
    """Return the estimates of waiting as a sentence, or "" if there are none.

    `balance` is the setting of the corpus.
    """
    if not waiting:
        return ""
    first, *others = waiting
    shares = [f"{first.ranks:,} ranks {first.random:.2f} % of the time (with balance {first.balanced:.2f} %)"]
    shares += [f"{one.ranks:,} ranks {one.random:.2f} % ({one.balanced:.2f} %)" for one in others]
    ordered = f"; the rows are ordered for {balance['ranks']:,} ranks, or any divisor of it" if balance else ""
    return f"On several GPUs, ranks wait for the slowest rank of each step: {', '.join(shares)}{ordered}."


# -- the mixture -------------------------------------------------------------------------------------------------------


def mixture_table(mixture: Sequence[MixtureFacts], weighting: object) -> list[list[str]]:
    """Tabulate the contribution of each entry of `sources` to a pass over `train`.

    Returns column titles and one line per entry, as text; an entry for validation has none. The table is empty if every
    conversation is packed exactly once.
    """
    mixture = [m for m in mixture if m.split != "validation"]
    if weighting not in RELATIVE and all(m.weight == 1 and not m.limit for m in mixture):
        return []
    titles = ["source", "weight", "limit", "conversations", "copies", "tokens", "%", "trained", "%"]
    folder, lines = common_folder([m.path for m in mixture]), []
    for m in mixture:
        given = [printable(m.path.removeprefix(folder)), f"{m.weight:g}", f"{m.limit:,}" if m.limit else ""]
        counts = [f"{m.conversations:,}", f"{m.copies:,}", f"{m.tokens:,}", f"{m.tokens_percent:.1f}"]
        lines.append([*given, *counts, f"{m.trained_tokens:,}", f"{m.trained_tokens_percent:.1f}"])
    return [titles, *lines]


def fit_to_width(table: list[list[str]], width: int) -> list[list[str]]:
    """Fit the table to `width` characters, with two spaces between columns.

    Columns without information are removed. If the table is still too wide, the share of all tokens is removed (the
    share of trained tokens stays), and names are shortened in the middle.
    """
    if not table:
        return []
    columns = [list(column) for column in zip(*table, strict=True)]
    names, weight, limit, packed, copies = columns[:5]
    packed[0] = "packed"
    hidden = [1] * all(cell == "1" for cell in weight[1:]) + [2] * (not any(limit[1:]))
    hidden += [4] * (copies[1:] == packed[1:])
    kept = [n for n in range(len(columns)) if n not in hidden]
    surplus = max(0, max(map(len, names)) - SHORTEST_NAME)  # by which names can be shortened
    if _width([columns[n] for n in kept]) - surplus > width:
        kept.remove(6)
    room = max(SHORTEST_NAME, width - _width([[], *(columns[n] for n in kept[1:])]))
    half = (room - 1) // 2
    columns[0] = [name if len(name) <= room else f"{name[: room - 1 - half]}…{name[-half:]}" for name in names]
    return [list(line) for line in zip(*(columns[n] for n in kept), strict=True)]


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column), default=0) for column in columns) + 2 * (len(columns) - 1)


def explain_limits(giving_all: Sequence[str], left_out: float, packed: float) -> str:
    """Explain which sources limit a mixture by `token_share`.

    Sources that are used in full limit it. Returns "" if no conversation is left out.
    """
    if not giving_all or not left_out:
        return ""
    names, many = " and ".join(map(printable, giving_all)), len(giving_all) > 1
    verb = "are used in full and limit" if many else "is used in full and limits"
    return (
        f"{names} {verb} the others (token_share): {100 * left_out / (left_out + packed):.0f} % of the conversations "
        f"are left out; lower {'their weights' if many else 'its weight'} to include more"
    )
