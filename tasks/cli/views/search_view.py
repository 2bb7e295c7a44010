"""Render the results of a search, and the rejects of a corpus.

SearchResult ─▶ the place of each match, and the text around it     Rejects ─▶ counts by reason, and the first rejects
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tasks.cli.views.token_text import HEADING_STYLE, print_hanging, styled, text_of
from tasks.core.error_codes import CODES
from tasks.core.printable import counted, printable, printable_lines
from tasks.inspection.lookup import turn_of
from tasks.inspection.search import Excerpt, Rejects, SearchResult


def show_search(result: SearchResult, console: Console) -> None:
    """Render the matches of a search."""
    for piece in result.conversations:
        number = f"  #{piece['number']:,}" if piece["number"] is not None else ""
        where = f"  row {piece['row_of_split']:,} of {piece['split']}{number}"
        trained = "  trained on" if piece["trained_on"] else ""
        console.print(
            Text.assemble(
                ("━━ ", "cyan"), (piece["origin"] + turn_of(piece), HEADING_STYLE), (where, "dim"), (trained, "green")
            ),
            soft_wrap=True,
        )
        if piece["excerpt"]:
            print_hanging(console, _line_of(piece["excerpt"], result.search))
    if not result.conversations:
        console.print(f"no conversation contains {printable(result.search)!r}")
    elif result.more:
        console.print(Text(f"the first {result.limit:,}; use --limit for more", "dim"))
    else:
        console.print(Text(counted(len(result.conversations), "conversation"), "dim"))


def _line_of(excerpt: Excerpt, search: str) -> Text:
    """Return the tokens around a match on one line."""
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
        console.print(meaning, soft_wrap=True)
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
