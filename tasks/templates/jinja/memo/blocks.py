"""Remember the texts that loops of a template write and the values that they set.

    {% for call in message.tool_calls %}  …  {% endfor %}      written once for each message
    {% for message in messages %}  …  {% endfor %}             continued where an earlier rendering had other messages

The first loop is remembered as a whole (`Block`). The second loop depends on more messages from rendering to rendering.
If its text for a message depends only on the messages up to it and on the next message, the text up to a message is the
same in all renderings that share these messages (`Messages`). See `depends` for the loops that can be remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace, missing

from tasks.templates.jinja.memo.depends import Needs, SyntaxTree, leaves, loaded_names, stored_names
from tasks.templates.jinja.memo.memo import Changing, Key, Memo

# Names of the filters that mark our statements.
BLOCK, MESSAGES = "a block that is remembered", "messages that are remembered"

# Minimum number of expressions in a loop. Executing a smaller loop takes less time than looking it up.
LEAST = 8

# Attributes of `loop` that a continued loop may use. All others depend on items that have not been seen.
_BEHIND = {"index", "index0", "first", "previtem"}
_AHEAD = {"last", "nextitem"}


def attributes_of(namespace: Namespace) -> dict[str, Any]:
    """Return the attributes of a namespace, which Jinja keeps private."""
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


class Remembered:
    """Statements that are remembered, with their dependencies.

    `names` are the variables that they use. `attributes` has, for each variable, the attributes that they use, or None
    if they use the variable itself. `sets` lists the attributes that they set, by index of the name and name of the
    attribute. `loop` is the loop to execute.
    """

    loop: nodes.For

    def __init__(self, memo: Memo, number: int, names: dict[str, Any], needs: Needs):
        self.names = list(names)
        self._memo, self._number = memo, number
        self.attributes = list(names.values())
        self.sets = sorted((self.names.index(name), attribute) for name, attribute in needs.sets)
        namespaces = [place for place, attributes in enumerate(self.attributes) if attributes is not None]
        self._pairs = list(combinations(namespaces, 2))

    def key(self, values: Sequence[Any]) -> Key | None:
        """Return a key for the values that the statements depend on.

        Return None if one of them may change unnoticed.
        """
        memo = self._memo
        for one, other in self._pairs:
            if values[one] is values[other]:
                return None  # setting an attribute of one name would change the other
        key: list[Any] = [self._number]
        try:
            for value, attributes in zip(values, self.attributes, strict=True):
                if attributes is None or not isinstance(value, Namespace):
                    key.append(memo.same(value))
                else:
                    read, same = attributes_of(value), memo.same
                    found = [same(read[attribute]) if attribute in read else missing for attribute in attributes]
                    key.append(tuple(found))
        except Changing:
            return None
        for place, _ in self.sets:
            if not isinstance(values[place], Namespace):
                return None
        return tuple(key)

    def state(self, values: Sequence[Any]) -> list[Any] | None:
        """Return the attributes that the statements set.

        Return None if one of them may change unnoticed.
        """
        if not self.sets:
            return []
        found = [attributes_of(values[place]).get(attribute, missing) for place, attribute in self.sets]
        with suppress(Changing):
            for value in found:
                if value is not missing:
                    self._memo.same(value)
            return found
        return None

    def replay(self, values: Sequence[Any], state: Sequence[Any]) -> None:
        """Set the attributes to their remembered values."""
        for (place, attribute), value in zip(self.sets, state, strict=True):
            if value is not missing:
                values[place][attribute] = value


class Block(Remembered):
    """A loop that is remembered as a whole."""

    def known(self, key: Key | None, values: Sequence[Any]) -> str | None:
        """Return the remembered text, and set the remembered attributes.

        Return None if the statements must be executed.
        """
        found = self._memo.known.get(key) if key else None
        if found is None:
            return None
        text, state = found
        self.replay(values, state)
        return str(text)

    def keep(self, key: Key | None, values: Sequence[Any], text: str) -> str:
        """Remember the text and the attributes of the statements, and return the text."""
        state = self.state(values) if key else None
        if key and state is not None:
            self._memo.keep(key, (text, state), len(text))
        return text


class Messages(Remembered):
    """A loop that is continued from rendering to rendering.

    `ahead` is true if the loop uses the next item, or tests whether there is one.
    """

    def __init__(self, memo: Memo, number: int, names: dict[str, Any], needs: Needs, ahead: bool):
        super().__init__(memo, number, names, needs)
        self._ahead = ahead

    def run(self, items: Any, values: Sequence[Any]) -> Run:
        """Start the loop after the known items, and set the attributes that they set."""
        run = Run(self, values, items)
        memo = self._memo
        if type(items) is not list or not memo.parts or not memo.parts.issuperset(map(id, items)):
            return run
        key = self.key(values)
        if key is None:
            return run
        known: _Progress | None = memo.known.get(key)
        if known is None:
            run.progress = _Progress(items)
            memo.keep(key, run.progress, 0)
            return run
        same = _common(items, known.items)
        run.done = min(max(0, same - self._ahead), len(known.states))
        if run.done:
            run.text = "".join(known.texts[: run.done])
            self.replay(values, known.states[run.done - 1])
        return run

    def went(self, run: Run, text: str) -> str:
        """Remember the text and the attributes of the next item, and return the text."""
        progress = run.progress
        if progress is not None and len(progress.texts) + self._ahead < len(progress.items):
            state = self.state(run.values)
            if state is None or not self._memo.has_room(str.__len__(text)):  # placeholders record calls of `len`
                run.progress = None  # later items cannot be remembered
            else:
                progress.texts.append(text)
                progress.states.append(state)
        return text


class _Progress:
    """The text of each item of a loop, and the attributes that were set up to it."""

    def __init__(self, items: list[Any]):
        self.items = items
        self.texts: list[str] = []
        self.states: list[list[Any]] = []


class Run:
    """A loop that is being executed.

    `done` is the number of items that were known at the start, and `text` is their text.
    """

    def __init__(self, messages: Messages, values: Sequence[Any], items: Any):
        self.values, self.items = values, items
        self.progress: _Progress | None = None
        self.text, self.done = "", 0
        self.went = messages.went

    def left(self) -> Any:
        """Return the remaining items."""
        return self.items[self.done :] if self.done else self.items

    def context(self, undefined: Any) -> LoopContext:
        """Return the remaining items with the variable `loop`."""
        context = LoopContext(self.items, undefined)
        if self.done:
            context.index0 = self.done - 1
            context._current = self.items[self.done - 1]
            context._iterator = iter(self.items[self.done :])
        return context


def _common(one: list[Any], other: list[Any]) -> int:
    """Count the items at the start of two lists that are the same objects."""
    count = 0
    for count, (mine, theirs) in enumerate(zip(one, other, strict=False), 1):
        if mine is not theirs:
            return count - 1
    return count


def _size(loop: nodes.For) -> int:
    kinds = (nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter, nodes.Test, nodes.Compare, nodes.For, nodes.Assign)
    return sum(1 for _ in loop.find_all(kinds))


class Marker:
    """Mark the statements of a template that are remembered, and add them to `found`."""

    def __init__(self, environment: Environment, memo: Memo, tree: SyntaxTree):
        self._environment, self._memo, self._tree = environment, memo, tree
        self.found: list[Remembered] = []
        tree.root.body = list(self._marked(tree.root.body))

    def _marked(self, body: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
        """Yield statements, with marks around remembered statements."""
        for node in body:
            if isinstance(node, nodes.If):
                for branch in (node, *node.elif_):
                    branch.body = list(self._marked(branch.body))
                node.else_ = list(self._marked(node.else_))
            elif isinstance(node, nodes.For) and not node.recursive:
                yield self._marked_loop(node)
                continue
            yield node

    def _marked_loop(self, loop: nodes.For) -> nodes.Node:
        needs = self._tree.needs([loop])
        if needs and "loop" not in needs.names and _size(loop) >= LEAST:
            return self._mark([loop], Block(self._memo, len(self.found), needs.names, needs), BLOCK)
        needs = self._needs_of_messages(loop)
        loop.body = list(self._marked(loop.body))
        if not needs:
            return loop
        own = stored_names(loop.target) | {"loop"}
        names = {name: each for name, each in needs.names.items() if name not in own}
        ahead = not _AHEAD.isdisjoint(needs.names.get("loop") or ())
        return self._mark([loop], Messages(self._memo, len(self.found), names, needs, ahead), MESSAGES)

    def _needs_of_messages(self, loop: nodes.For) -> Needs | None:
        """Return the needs of a loop's body, or None if the loop cannot be continued."""
        if loop.test or loop.else_ or leaves(loop.body) or _size(loop) < LEAST:
            return None
        if stored_names(loop.target) & loaded_names([loop.iter]):
            return None  # in the iterable, a name of the target is another variable
        needs = self._tree.needs(loop.body)
        if needs and any(name in stored_names(loop.target) for name, _ in needs.sets):
            return None  # it sets attributes of its items
        used = needs.names.get("loop", ()) if needs else None  # None if it uses more than attributes of `loop`
        return needs if used is not None and set(used) <= _BEHIND | _AHEAD else None

    def _mark(self, body: Sequence[nodes.For], remembered: Remembered, kind: str) -> nodes.Node:
        self.found.append(remembered)
        [remembered.loop] = body
        names = nodes.ExprStmt(nodes.List([nodes.Name(name, "load") for name in remembered.names]))
        # Jinja looks up the names in the iterable before it enters the loop, so the mark has them as arguments.
        read = [nodes.Name(name, "load") for name in sorted(loaded_names([body[0].iter]))]
        number = nodes.Const(len(self.found) - 1)
        found = nodes.FilterBlock([names, *body], nodes.Filter(None, kind, [number, *read], [], None, None))
        found.set_environment(self._environment)
        return found.set_lineno(body[0].lineno)
