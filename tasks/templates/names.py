"""Find the role developer and undefined variables in Jinja templates.

{% if messages[0].role in ['system', 'developer'] %}    knows the role: messages keep it
{{ persona }}                                           neither Transformers nor `template_options` defines it
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasks.conversations.model import DEVELOPER
from tasks.core.printable import printable
from tasks.storage.layout import TEMPLATE

_DEVELOPER = re.compile(rf"""(["']){DEVELOPER}\1""")

# The maximum number of names to list, and of characters of a name.
_MOST_NAMES, _LONGEST_NAME = 8, 60


def knows_developer(source: str) -> bool:
    """Return whether a template has the role developer as a string."""
    return _DEVELOPER.search(source) is not None


def explain_undefined(undefined: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each template that reads names that nothing defines.

    `undefined` maps the file of a template to these names.
    """
    lines = []
    for file, names in undefined.items():
        listed = [printable(name[:_LONGEST_NAME]) for name in [*names][:_MOST_NAMES]]
        listed += [f"{len(names) - _MOST_NAMES:,} more names"] * (len(names) > _MOST_NAMES)
        *first, last = listed
        joined, are, them = (f"{', '.join(first)} and {last}", "they are", "them") if first else (last, "it is", "it")
        which = "the template" if file == TEMPLATE else f"the template {file}"
        lines.append(
            f"{which} reads {joined}, which neither Transformers nor template_options defines: {are} empty unless a "
            f"record has {them} in chat_template_kwargs"
        )
    return lines
