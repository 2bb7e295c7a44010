"""Render rows, conversations, the results of a search, and rejects.

Row, Conversation ─▶ a title per conversation with its source line and number ─▶ ⟦trained⟧, not trained, ▐control▌
SearchResult      ─▶ the place of each match, and the text around it
Rejects           ─▶ counts by reason, and the first rejects
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from packcorpus.tasks.cli.console import HEADING_STYLE, print_hanging, print_legend, print_title, say, styled, text_of
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.printable import CONTROL, counted, printable, printable_lines
from packcorpus.tasks.inspection.lookup import turn_of
from packcorpus.tasks.inspection.rows import Conversation, Piece, Row
from packcorpus.tasks.inspection.search import Excerpt, Rejects, SearchResult

# Maximum number of rows with further copies of a piece to list.
SHOWN_COPIES = 10
# Columns by which a piece is indented for each level of its tree, and the deepest level that is indented.
INDENT, DEEPEST = 2, 10


def show_row(row: Row, console: Console) -> None:
    """Render a row, conversation by conversation."""
    say(
        console,
        (f"row {row.row:,}", "bold"),
        f" of {row.rows_of_split:,} in {row.split}",
        (f"  {row.shard}, row {row.row_of_shard:,}", "dim"),
    )
    if "input_ids" not in row.columns:
        console.print()
        _print_messages("1/1", row.conversations[0] | row.columns, console)
        return
    length = row.tokens + row.padding
    noun = "sample" if any(piece.get("turn", -1) >= 0 for piece in row.conversations) else "conversation"
    trees = sum(piece["under"] is None for piece in row.conversations if "under" in piece)
    in_trees = f" in {counted(trees, 'tree')}" * (0 < trees < len(row.conversations))
    say(
        console,
        f"{counted(len(row.conversations), noun)}{in_trees}, {counted(row.tokens, 'token')} of {length:,}, "
        f"{row.trained:,} trained ({100 * row.trained / max(row.tokens, 1):.0f} %), "
        f"{counted(row.padding, 'padding token')}",
    )
    say(console, (f"longest {noun} {row.longest:,} tokens; Σn² {row.squares:,}", "dim"))
    print_legend(console, any(_has_tokens(piece) for piece in row.conversations))
    for number, piece in enumerate(row.conversations, 1):
        console.print()
        facts = [counted(piece["length"], "token")]
        if piece.get("path"):
            first = sum(last - first for first, last in piece["path"])
            facts.append(f"positions {first:,} to {first + piece['length'] - 1:,}")
            facts.append(f"after the first {first:,} of {piece['under'] + 1}")
        indent = INDENT * min(piece.get("level", 0), DEEPEST)
        _print_piece(f"{number}/{len(row.conversations)}", piece, facts, console, indent)
    if row.padding:
        console.print()
        share = f"{100 * row.padding / length:.1f} % of the row"
        last = row.conversations[-1] if row.conversations else {"start": 0, "length": 0}
        if between := row.padding - (length - last["start"] - last["length"]):
            share += f"; {between:,} between conversations"
        console.print(Text.assemble(("━━ ", "dim"), counted(row.padding, "padding token"), (f"  {share}", "dim")))


def show_conversation(conversation: Conversation, console: Console) -> None:
    """Render each piece of a conversation with its rows, or why it was dropped."""
    first = conversation.pieces[0]
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for piece in conversation.pieces:
        pieces.setdefault((piece.get("turn", -1), piece["first"] or 0), []).append(piece)
    samples = {turn for turn, _ in pieces}
    title = Text.assemble((f"conversation {first['number']:,}", "bold"), f"  {first['origin']}")
    if len(samples) > 1:
        title.append(f"  {len(samples)} samples", "dim")
    if len(pieces) > len(samples):
        title.append(f"  {len(pieces)} pieces", "dim")
    if (times := max(map(len, pieces.values()))) > 1:
        title.append(f"  packed {times:,} times", "dim")
    say(console, title)
    if any("spans" in piece for piece in conversation.pieces):
        print_legend(console, any(_has_tokens(piece) for piece in conversation.pieces))
    for piece, *copies in pieces.values():
        console.print()
        if piece["row"] is None:
            say(console, (f"{turn_of(piece).lstrip()} dropped: {piece['why']}".lstrip(), "yellow"))
            file, _, record = piece["origin"].rpartition(":")
            command = f"packcorpus inspect {shlex.quote(file)} --line {record}"
            say(console, (f"its text: {command}", "dim"))
            continue
        label = f"row {piece['row_of_split']:,} of {piece['split']}"
        if "spans" in piece:
            own = [piece["start"], piece["start"] + piece["length"]]
            shared = sum(last - first for first, last in piece.get("path", ()))
            runs = ", ".join(f"{first:,} to {last - 1:,}" for first, last in [*piece.get("path", ()), own])
            facts = [counted(shared + piece["length"], "token"), *[f"{shared:,} shared"] * bool(shared)]
            _print_piece(f"{label}, tokens {runs}", piece, facts, console)
        else:
            _print_messages(label, piece, console)
        if copies:
            print_hanging(console, Text(_also_in(copies), "dim"))


def _also_in(copies: Sequence[Piece]) -> str:
    rows = [
        f"row {piece['row_of_split']:,} of {piece['split']}"
        + (f" from token {piece['start']:,}" if "spans" in piece else "")
        for piece in copies[:SHOWN_COPIES]
    ]
    more = f" and {len(copies) - SHOWN_COPIES:,} more" if len(copies) > SHOWN_COPIES else ""
    return f"also in {', '.join(rows)}{more}"


def _has_tokens(piece: Piece) -> bool:
    return any(span.tokens is not None for span in piece.get("spans", ()))


def _print_piece(label: str, piece: Piece, facts: list[str], console: Console, indent: int = 0) -> None:
    """Print a conversation of a packed row, or a piece of one.

    `facts` begin the line above it, with its tokens. It is indented by `indent` columns.
    """
    facts = [*facts, f"{piece['trained']:,} trained"]
    if weights := piece.get("loss_weight"):
        facts.append(f"weight {' to '.join(f'{weight:.4g}' for weight in dict.fromkeys(weights))}")
    if piece["number"] is not None:
        facts.append(f"#{piece['number']:,}")
        if piece["truncated"]:
            facts.append("truncated")
        if piece["first"] != piece.get("shared", 0) or piece.get("pieces", 1) > 1:
            facts.append(f"piece {piece['piece']} of {piece['pieces']}, from its token {piece['first']:,}")
            facts += [f"after its first {piece['repeated']:,}"] * bool(piece.get("repeated"))
    print_title(console, label, piece["origin"] + turn_of(piece), facts, indent)
    print_hanging(console, text_of(piece["spans"]), indent + 2)
    if _has_tokens(piece):
        print_hanging(console, Text.assemble(("ids ", "dim"), text_of(piece["spans"], as_ids=True)), indent + 2)


def _print_messages(label: str, piece: Piece, console: Console) -> None:
    facts = []
    if piece["number"] is not None:
        facts = [counted(piece["length"], "token"), f"{piece['trained']:,} trained", f"#{piece['number']:,}"]
    print_title(console, label, piece["origin"] + turn_of(piece), facts)
    if piece["messages"] is None:
        _print_titled(console, "text", piece["text"])
    else:
        print_messages(piece["messages"], piece["tools"], console)


def print_messages(messages: Sequence[dict[str, Any]], tools: str | None, console: Console) -> None:
    """Print messages of format 2.0, each under its role."""
    if tools:
        _print_titled(console, "tools", _pretty(tools))
    for message in messages:
        title = message["role"] + "".join(
            f" {name} {message[name]}" for name in ("name", "tool_call_id") if message[name] is not None
        )
        title += {0: " not trained on"}.get(message["weight"], " trained on" if message.get("train") else "")
        reasoning = message.get("reasoning_content")
        _print_titled(console, title, "" if reasoning else message["content"] or "")
        if reasoning:
            _print_titled(console, "reasoning", reasoning, 4)
            _print_titled(console, "content", message["content"] or "", 4)
        for call in message["tool_calls"] or []:
            function = call["function"]
            _print_titled(console, f"calls {function['name']}", _pretty(function["arguments"] or ""), 4)


def _print_titled(console: Console, title: str, content: str, indent: int = 2) -> None:
    say(console, CONTROL[0], (printable(title), "bold reverse"), CONTROL[1])
    if content:
        print_hanging(console, styled(content, ""), indent)


def _pretty(text: str) -> str:
    try:
        return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return text


# -- search and rejects ------------------------------------------------------------------------------------------------


def show_search(result: SearchResult, console: Console) -> None:
    """Render the matches of a search."""
    for piece in result.conversations:
        number = f"  #{piece['number']:,}" if piece["number"] is not None else ""
        where = f"  row {piece['row_of_split']:,} of {piece['split']}{number}"
        trained = "  trained on" if piece["trained_on"] else ""
        say(
            console,
            ("━━ ", "cyan"),
            (piece["origin"] + turn_of(piece), HEADING_STYLE),
            (where, "dim"),
            (trained, "green"),
        )
        if piece["excerpt"]:
            print_hanging(console, _line_of(piece["excerpt"], result.search))
    if not result.conversations:
        console.print(f"no conversation contains {printable(result.search)!r}")
    elif result.more:
        console.print(Text(f"the first {result.limit:,}; use --limit for more", "dim"))
    else:
        samples = f", {len(result.conversations):,} samples" * (len(result.conversations) > result.count)
        console.print(Text(f"{counted(result.count, 'conversation')}{samples}", "dim"))


def _line_of(excerpt: Excerpt, search: str) -> Text:
    text = text_of(excerpt.spans)
    text.highlight_words([printable_lines(search)], "reverse")
    line = Text(" ⏎ ", "dim").join(text.split("\n"))
    return Text.assemble("… " if excerpt.before else "", line, " …" if excerpt.after else "")


def show_rejects(rejects: Rejects, console: Console) -> None:
    """Render the number of rejects by reason, and the first rejects."""
    if not rejects.counts:
        console.print("no conversation was rejected")
        return
    for reason, count in sorted(rejects.counts.items(), key=lambda item: -item[1]):
        code = CODES.get(reason)
        meaning = Text.assemble(
            (f"{count:>8,}  ", "bold"), (f"{code.code if code else ''} {printable(reason)}  ", HEADING_STYLE),
            (code.meaning if code else "", "dim"),
        )  # fmt: skip
        say(console, meaning)
    console.print()
    for reject in rejects.rejects:
        place = f"{reject.get('source')}:{reject.get('line', reject.get('record'))}"
        line = Text.assemble(
            (printable(place), HEADING_STYLE),
            f"  {printable(str(reject.get('code')))} ",
            styled(str(reject.get("message")), ""),
        )
        print_hanging(console, line, 0)
    if (rest := sum(rejects.counts.values()) - len(rejects.rejects)) > 0:
        console.print(Text(f"… {rest:,} more; use --limit, or read rejects.jsonl", "dim"))
