"""Tokens as text that a person can read and trust: what is trained on, what is a control token, where tokens end.

    ids, labels ─runs_of─▶ runs ─text_of─▶ ⟦trained⟧, not trained, ▐control token▌, tok▏ens ─print_hanging─▶ lines

What the data says is shown as text and never obeyed. Every mark is a symbol as well as a colour, so that it is seen
without colours and by those who do not tell them apart; in the data these symbols are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tasks.core.printable import BOUNDARY, CONTROL, MARKS, TRAINED, escaped, is_plain, printable
from tasks.encoders.encoder import Encoder
from tasks.inspection.token_runs import Run

TRAINED_STYLE, UNTRAINED_STYLE, ESCAPED_STYLE, HEADING_STYLE = "bold green", "dim", "magenta", "bold cyan"


BOUNDARY_STYLE = "blue"


def text_of(encoder: Encoder, runs: Sequence[Run], as_ids: bool = False, boundaries: bool = False) -> Text:
    """Runs as one text: ⟦ ⟧ around what is trained on, ▐ ▌ around control tokens, ▏ between tokens if asked for."""
    text = Text()
    trained = False
    for run in runs:
        style = TRAINED_STYLE if run.trained else UNTRAINED_STYLE
        gap = " " if as_ids and text.plain else ""
        if run.trained != trained:
            mark = TRAINED[0] if run.trained else TRAINED[1]
            text.append(gap + mark if run.trained else mark + gap, TRAINED_STYLE)
            trained, gap = run.trained, ""
        if as_ids:
            text.append(gap + " ".join(map(str, run.ids)), style)
        elif run.control:
            colour = "green" if run.trained else "default"
            text.append(CONTROL[0], colour)
            text.append(printable(encoder.decode(run.ids)), f"bold reverse {colour}")
            text.append(CONTROL[1], colour)
        elif boundaries:
            pieces = [styled(piece, style) for piece in _pieces(encoder, run.ids)]
            text.append_text(Text(BOUNDARY, BOUNDARY_STYLE).join(pieces))
        else:
            text.append_text(styled(encoder.decode(run.ids), style))
    if trained:
        text.append(TRAINED[1], TRAINED_STYLE)
    return text


def _pieces(encoder: Encoder, ids: Sequence[int]) -> Iterator[str]:
    """The text of each token. Tokens that make a character together are one piece: half of one cannot be shown."""
    held = b""
    for token in ids:
        held += encoder.token_bytes(token)
        try:
            text = held.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                continue
            text = held.decode("utf-8", "replace")
        yield text
        held = b""
    if held:
        yield held.decode("utf-8", "replace")


def print_hanging(console: Console, text: Text, indent: int = 2) -> None:
    """Print with every line moved in. Only a terminal gets lines that are wrapped; a pipe gets the data's own."""
    if console.is_terminal:
        lines = text.wrap(console, max(console.width - indent, 20))
    else:
        lines = text.split("\n", allow_blank=True)
    for line in lines:
        console.print(Text.assemble(" " * indent, line), soft_wrap=True)


def print_legend(console: Console, boundaries: bool = False) -> None:
    legend = Text.assemble(
        (f"{TRAINED[0]}trained on{TRAINED[1]}", TRAINED_STYLE), "  ", ("not trained on", UNTRAINED_STYLE), "  ",
        CONTROL[0], ("control token", "bold reverse"), CONTROL[1], "  ", ("\\x1b", ESCAPED_STYLE), " escaped character",
    )  # fmt: skip
    if boundaries:
        legend.append_text(Text.assemble("  tok", (BOUNDARY, BOUNDARY_STYLE), "ens"))
    console.print(legend, soft_wrap=True)


def print_conversation_head(console: Console, number: str, origin: str, facts: Sequence[str]) -> None:
    head = Text.assemble(("━━ ", "cyan"), (f"{number}  " if number else "", "dim"), (origin, HEADING_STYLE))
    facts_text = Text(" · ".join(facts), "dim")
    if console.is_terminal and head.cell_len + facts_text.cell_len + 2 > console.width:
        console.print(head, soft_wrap=True)
        console.print(Text.assemble("   ", facts_text), soft_wrap=True)
    else:
        console.print(Text.assemble(head, "  ", facts_text), soft_wrap=True)


def styled(text: str, style: str) -> Text:
    """`text` as `printable` has it, what was escaped in a colour of its own."""
    if text.isprintable() and MARKS.isdisjoint(text):
        return Text(text, style)
    found = Text()
    plain: list[str] = []
    for char in text:
        if is_plain(char):
            plain.append(char)
            continue
        found.append("".join(plain), style)
        found.append(escaped(char), ESCAPED_STYLE)
        plain = []
    return found.append("".join(plain), style)
