"""Remember what a template writes of a part of a conversation, which is rendered many times.

    {% macro declare(tool) %}…{% endmacro %}     written once for each tool, instead of once for each rendering
    {{ tool | tojson }}                          likewise

Locating turns takes two renderings per turn, and most of what they write is the same. A macro is remembered if it reads
nothing but its arguments, constants, and other such macros. Its arguments must be parts of the conversation, which no
template can change, or strings, numbers, and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes

# The maximum number of characters that are remembered.
MOST_CHARACTERS = 4 << 20

_PLAIN = (str, int, float, bool, type(None))


class Memo:
    """What macros and `tojson` have written of the parts of one conversation.

    `macros` are the names of those that are remembered. Before `start`, there is no conversation.
    """

    def __init__(self, macros: frozenset[str] = frozenset()):
        self.macros = macros
        self._parts: set[int] = set()
        self._known: dict[Any, str] = {}
        self._room = MOST_CHARACTERS

    def start(self, *conversation: Any) -> None:
        """Forget everything, and remember what is written of parts of this conversation, while it exists."""
        self._known = {}
        self._parts = set()
        self._room = MOST_CHARACTERS
        _add_parts(conversation, self._parts)

    def of(self, name: str, write: Callable[..., str], args: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Return what `write` returns for these arguments; `name` identifies it."""
        key = self._key(name, args, named)
        if key is None:
            return write(*args, **named)
        known = self._known.get(key)
        if known is None:
            known = write(*args, **named)
            self._room -= len(known)
            if self._room > 0:
                self._known[key] = known
        return known

    def _key(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what the result depends on, or None if an argument is not known to stay the same."""
        parts, has_part = self._parts, False
        key: list[Any] = [name]
        for value in (*args, *named, *named.values()) if named else args:
            kind: Any = type(value)
            if kind is dict or kind is list:
                if id(value) not in parts:
                    return None
                has_part = True
                key += kind, id(value)
            elif kind in _PLAIN:
                key += kind, value
            else:
                return None
        return (len(args), *key) if has_part else None


def _add_parts(value: Any, found: set[int]) -> None:
    if isinstance(value, dict):
        found.add(id(value))
        for item in value.values():
            _add_parts(item, found)
    elif isinstance(value, list | tuple):
        found.add(id(value))
        for item in value:
            _add_parts(item, found)


def macros_of_arguments(environment: Environment, source: str, constants: Collection[str]) -> frozenset[str]:
    """Return the names of macros whose result depends on nothing but their arguments."""
    tree = environment.parse(source)
    macros = [node.name for node in tree.find_all(nodes.Macro)]
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    fixed = {*environment.globals, *constants} - assigned - set(macros)
    found: dict[str, set[str]] = {}
    for macro in tree.body:
        # Other statements may record where they are, or get a text from outside.
        if (
            isinstance(macro, nodes.Macro)
            and macros.count(macro.name) == 1
            and macro.name not in assigned
            and all(type(node) in _STATEMENTS for node in macro.find_all(nodes.Stmt))
            and not any(type(node) in _IMPURE for node in macro.find_all(nodes.Node))
        ):
            given = {argument.name for argument in macro.args}
            found[macro.name] = (_loaded(macro.defaults) - given | _outer(macro.body, given)) - fixed
    while removed := [name for name, needs in found.items() if not needs <= found.keys()]:
        for name in removed:
            del found[name]
    return frozenset(found)


_IMPURE = {nodes.ExtensionAttribute, nodes.ContextReference, nodes.DerivedContextReference}
_STATEMENTS = {nodes.Output, nodes.Assign, nodes.If, nodes.For, nodes.Break, nodes.Continue}


def _outer(body: Sequence[nodes.Node], known: set[str]) -> set[str]:
    """Return the names that statements read before they have set them; add those that they always set to `known`."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Assign):
            found |= _loaded([node.node]) - known
            found |= {each.name for each in node.target.find_all(nodes.NSRef)} - known
            found |= {node.target.name} - known if isinstance(node.target, nodes.NSRef) else set()
            known |= _stored(node.target)
        elif isinstance(node, nodes.If):
            found |= _loaded([node.test]) - known
            branches = [set(known) for _ in range(2 + len(node.elif_))]
            found |= _outer(node.body, branches[0]) | _outer(node.else_, branches[1])
            for other, names in zip(node.elif_, branches[2:], strict=True):
                found |= (_loaded([other.test]) - known) | _outer(other.body, names)
            known |= set.intersection(*branches)
        elif isinstance(node, nodes.For):
            found |= _loaded([node.iter]) - known
            inner = known | _stored(node.target) | {"loop"}
            found |= (_loaded([node.test]) if node.test else set()) - inner
            found |= _outer(node.body, inner) | _outer(node.else_, set(known))
        else:
            found |= _loaded([node]) - known
    return found


def _loaded(found: Sequence[nodes.Node]) -> set[str]:
    return {name.name for node in found for name in _names(node) if name.ctx == "load"}


def _stored(target: nodes.Node) -> set[str]:
    return {name.name for name in _names(target) if name.ctx == "store"}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)
