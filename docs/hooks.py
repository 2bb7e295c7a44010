"""mkdocs hook: remove the backslash of `\\|` in code within tables.

GitHub requires the backslash before a pipe in code within a table. Python-Markdown would show it.
"""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    def unescape(row: re.Match[str]) -> str:
        return re.sub(r"`[^`]*`", lambda span: span[0].replace("\\|", "|"), row[0])

    return re.sub(r"^\|.*$", unescape, markdown, flags=re.MULTILINE)
