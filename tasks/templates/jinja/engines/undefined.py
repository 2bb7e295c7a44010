"""Find the names that a template reads and does not define."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jinja2 import Environment, nodes

# Names that Jinja itself defines in loops, blocks, and macros.
_OF_JINJA = ("loop", "self", "super", "caller", "varargs", "kwargs")

_DEFAULTS = ("default", "d")


def names_read(environment: Environment, tree: nodes.Template) -> dict[str, int]:
    """Return in how many places a template reads each name that it does not define.

    A name that the template tests somewhere, or gives a default, is an option of the template and left out. So is a
    name that any statement sets, whether or not it is set in every case.
    """
    every: Any = nodes.Node
    known, read, tested = {*environment.globals, *_OF_JINJA}, list[str](), list[nodes.Node | None]()
    for node in tree.find_all(every):
        if isinstance(node, nodes.Name):
            if node.ctx == "load":
                read.append(node.name)
            else:
                known.add(node.name)
        elif isinstance(node, nodes.Macro):
            known.add(node.name)
        elif isinstance(node, nodes.If | nodes.CondExpr | nodes.For):
            tested.append(node.test)
        elif isinstance(node, nodes.And | nodes.Or):
            tested.append(node.left)
        elif isinstance(node, nodes.Not | nodes.Test) or (isinstance(node, nodes.Filter) and node.name in _DEFAULTS):
            tested.append(node.node)
    for node in filter(None, tested):
        known |= {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}
    return dict(sorted(Counter(name for name in read if name not in known).items()))
