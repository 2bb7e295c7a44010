"""Find the dependencies of a template's statements in its syntax tree.

    {% for call in message.tool_calls %}{{ call.name }}{% set ns.any = true %}{% endfor %}

This loop reads `message` and sets `ns.any`. Statements can be remembered if they write texts, set attributes of
namespaces, and have no other effect. Only the kinds of statements in `_STATEMENTS` meet this condition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jinja2 import Environment, nodes

# Variables that change between renderings. Other names that a template never sets are constants, functions, or
# undefined.
_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
_SPECIAL = {"self", "super", "caller", "varargs", "kwargs", "loop"}

_IMPURE = {nodes.ExtensionAttribute, nodes.ContextReference, nodes.DerivedContextReference}
_STATEMENTS = {nodes.Output, nodes.Assign, nodes.If, nodes.For, nodes.Break, nodes.Continue}

Attribute = tuple[str, str]  # names of a namespace and its attribute


class Effects(NamedTuple):
    """Attributes of namespaces that a macro uses, and attributes that it sets."""

    used: frozenset[Attribute] = frozenset()
    sets: frozenset[Attribute] = frozenset()


class Needs(NamedTuple):
    """The dependencies of statements.

    `names` maps each name to the attributes that the statements use, or to None if they use the name in another way.
    `sets` are the attributes of namespaces that they set.
    """

    names: dict[str, tuple[str, ...] | None]
    sets: frozenset[Attribute]


class SyntaxTree:
    """The statements of a template.

    `constants` are the names of variables that are the same in all renderings.
    """

    def __init__(self, environment: Environment, source: str, constants: Collection[str]):
        self.root = environment.parse(source)
        macros = [node.name for node in self.root.find_all(nodes.Macro)]
        names = list(_names(self.root))
        self._stored = Counter(name.name for name in names if name.ctx != "load")
        changing = {*self._stored, *macros, *_VARIABLES, *_SPECIAL}
        self._fixed = {*environment.globals, *constants, *(name.name for name in names)} - changing
        created = [node for node in self.root.find_all(nodes.Assign) if self._is_namespace(node)]
        self._namespaces = {node.target.name for node in created if isinstance(node.target, nodes.Name)}
        once = {name for name in self._namespaces if self._stored[name] == 1 and name not in macros}
        self._global = once & {node.target.name for node in created if node in self.root.body}  # type: ignore[attr-defined]
        self._lists = self._lists_of_messages()
        self._pure, self._effects = frozenset[str](), dict[str, Effects]()
        self._macros = set(macros)
        candidates = [
            macro
            for macro in self.root.body
            if isinstance(macro, nodes.Macro) and macros.count(macro.name) == 1 and not self._stored[macro.name]
        ]
        self._pure = self._pure_macros(candidates)
        self._effects = self._macro_effects([macro for macro in candidates if macro.name not in self._pure])

    @property
    def pure_macros(self) -> frozenset[str]:
        """Return the names of macros whose result depends only on their arguments."""
        return self._pure

    def needs(self, body: Sequence[nodes.Node]) -> Needs | None:
        """Return the dependencies of statements; None if they cannot be remembered."""
        if not _is_pure(body) or any(loop.recursive for node in body for loop in node.find_all(nodes.For)):
            return None
        free = outer_names(body, set()) - self._fixed - self._pure
        # A name that is also set may be another variable. Lists of messages and macros differ between renderings.
        if free & (set().union(*map(stored_names, body)) | self._lists | (self._macros - self._effects.keys())):
            return None
        whole, attributes, sets = _uses(body)
        used: dict[str, set[str] | None] = {}
        called = [self._effects[name] for name in free if name in self._effects]
        for name in free - self._effects.keys():
            is_path = name not in whole and (name == "loop" or name in self._namespaces)
            used[name] = {attribute for of, attribute in attributes if of == name} if is_path else None
        found = {(name, attribute) for name, attribute in sets if name in free}
        for effects in called:
            found |= effects.sets
            for name, attribute in effects.used:
                if used.setdefault(name, set()) is None:
                    return None
                used[name].add(attribute)  # type: ignore[union-attr]
        for name, attribute in found:
            if used.get(name) is None:
                return None
            used[name].add(attribute)  # type: ignore[union-attr]
        names = {name: None if each is None else tuple(sorted(each)) for name, each in sorted(used.items())}
        return Needs(names, frozenset(found))

    def _is_namespace(self, node: nodes.Assign) -> bool:
        made = node.node
        return (
            isinstance(node.target, nodes.Name)
            and isinstance(made, nodes.Call)
            and isinstance(made.node, nodes.Name)
            and made.node.name == "namespace"
            and "namespace" in self._fixed
        )

    def _lists_of_messages(self) -> set[str]:
        """Return the names of lists that differ between renderings.

        These are `messages` and parts of it.
        """
        found = {"messages"}
        for node in self.root.find_all(nodes.Assign):
            value = node.node
            if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
                value = value.node
            if isinstance(value, nodes.Name) and value.name in found:
                found |= stored_names(node.target)
        return found

    def _pure_macros(self, macros: Sequence[nodes.Macro]) -> frozenset[str]:
        found = {macro.name: self._free(macro) for macro in macros if _is_pure(macro.body)}
        while removed := [name for name, needs in found.items() if not needs <= found.keys()]:
            for name in removed:
                del found[name]
        return frozenset(found)

    def _macro_effects(self, macros: Sequence[nodes.Macro]) -> dict[str, Effects]:
        """Return the effects of macros that only use attributes of global namespaces."""
        found: dict[str, Effects] = {}
        calls: dict[str, set[str]] = {}
        names = {macro.name for macro in macros}
        for macro in macros:
            free = self._free(macro) - self._pure
            whole, attributes, sets = _uses([macro])
            own = free - names
            if _is_pure(macro.body) and own <= self._global and not own & whole:
                used = {each for each in attributes | sets if each[0] in own}
                found[macro.name] = Effects(frozenset(used), frozenset(each for each in sets if each[0] in own))
                calls[macro.name] = free & names
        while removed := [name for name in found if not calls[name] <= found.keys()]:
            for name in removed:
                del found[name]
        for _ in found:  # maximum depth of calls
            for name, effects in found.items():
                every = [effects, *(found[other] for other in calls[name])]
                found[name] = Effects(
                    frozenset().union(*(each.used for each in every)), frozenset().union(*(each.sets for each in every))
                )
        return found

    def _free(self, macro: nodes.Macro) -> set[str]:
        given = {argument.name for argument in macro.args}
        return (loaded_names(macro.defaults) - given | outer_names(macro.body, given)) - self._fixed


def _is_pure(body: Sequence[nodes.Node]) -> bool:
    """Return whether statements only write texts and set variables."""
    # Other statements may record their position, or get a text from outside.
    return not any(
        (isinstance(node, nodes.Stmt) and type(node) not in _STATEMENTS) or type(node) in _IMPURE
        for statement in body
        for node in (statement, *statement.find_all(nodes.Node))
    )


def outer_names(body: Sequence[nodes.Node], known: set[str]) -> set[str]:
    """Return the names that statements read before they set them.

    Names that the statements always set are added to `known`.
    """
    found: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Assign):
            found |= loaded_names([node.node]) - known
            found |= {each.name for each in node.target.find_all(nodes.NSRef)} - known
            found |= {node.target.name} - known if isinstance(node.target, nodes.NSRef) else set()
            known |= stored_names(node.target)
        elif isinstance(node, nodes.If):
            found |= loaded_names([node.test]) - known
            branches = [set(known) for _ in range(2 + len(node.elif_))]
            found |= outer_names(node.body, branches[0]) | outer_names(node.else_, branches[1])
            for other, names in zip(node.elif_, branches[2:], strict=True):
                found |= (loaded_names([other.test]) - known) | outer_names(other.body, names)
            known |= set.intersection(*branches)
        elif isinstance(node, nodes.For):
            found |= loaded_names([node.iter]) - known
            inner = known | stored_names(node.target) | {"loop"}
            found |= (loaded_names([node.test]) if node.test else set()) - inner
            found |= outer_names(node.body, inner) | outer_names(node.else_, set(known))
        else:
            found |= loaded_names([node]) - known
    return found


def _uses(body: Sequence[nodes.Node]) -> tuple[set[str], set[Attribute], set[Attribute]]:
    """Return names that are used whole, attributes that are read, and attributes set.

    A name is used whole if the statements use more than its attributes.
    """
    whole: set[str] = set()
    reads: set[Attribute] = set()
    sets: set[Attribute] = set()
    left: list[nodes.Node] = list(body)
    while left:
        node = left.pop()
        if isinstance(node, nodes.NSRef):
            sets.add((node.name, node.attr))
        elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            reads.add((node.node.name, node.attr))
        elif isinstance(node, nodes.Name):
            if node.ctx == "load":
                whole.add(node.name)
        else:
            left += node.iter_child_nodes()
    return whole, reads, sets


def loaded_names(found: Sequence[nodes.Node]) -> set[str]:
    return {name.name for node in found for name in _names(node) if name.ctx == "load"}


def stored_names(target: nodes.Node) -> set[str]:
    return {name.name for name in _names(target) if name.ctx == "store"}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)


def leaves(body: Sequence[nodes.Node]) -> bool:
    """Return whether statements leave the loop that contains them."""
    return any(
        isinstance(node, nodes.Break | nodes.Continue)
        or leaves(node.else_ if isinstance(node, nodes.For) else list(node.iter_child_nodes()))
        for node in body
    )
