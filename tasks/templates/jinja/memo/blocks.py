"""Remember what loops of a template have written and set.

    {% for call in message.tool_calls %}  …  {% endfor %}      written once for each message
    {% for message in messages %}  …  {% endfor %}             continued where an earlier rendering had other messages

The first is remembered as a whole (`Block`). The second depends on more messages from rendering to rendering; if it
knows of a message only what came before it and which one is next, then what it has written up to there is the same in
all renderings that have this one (`Messages`). See `depends` for what can be remembered.
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

# The names of the filters of statements that are ours.
BLOCK, MESSAGES = "a block that is remembered", "messages that are remembered"

# Expressions that a loop must have so that looking it up takes less than executing it.
LEAST = 8

# What a loop may use of `loop` to be continued: nothing but these depends on what has not been seen.
_BEHIND = {"index", "index0", "first", "previtem"}
_AHEAD = {"last", "nextitem"}


def attributes_of(namespace: Namespace) -> dict[str, Any]:
    """Return the attributes of a namespace, which are private to it."""
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


class Remembered:
    """Statements that are remembered, and what they depend on.

    `names` are variables that they use; what they use of namespaces are `attributes`. `sets` has the attributes that
    they set: the index of the name, and the attribute. `loop` is what is executed.
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
        """Return what the statements depend on; None if something of it may change in a way that is not seen."""
        memo = self._memo
        for one, other in self._pairs:
            if values[one] is values[other]:
                return None  # setting an attribute of one name changes the other
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
        """Return the attributes that the statements set; None if one may change in a way that is not seen."""
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
        """Set what the statements have set."""
        for (place, attribute), value in zip(self.sets, state, strict=True):
            if value is not missing:
                values[place][attribute] = value


class Block(Remembered):
    """A loop that is remembered as a whole."""

    def known(self, key: Key | None, values: Sequence[Any]) -> str | None:
        """Return what the statements have written, and set what they have set; None if they must be executed."""
        found = self._memo.known.get(key) if key else None
        if found is None:
            return None
        text, state = found
        self.replay(values, state)
        return str(text)

    def keep(self, key: Key | None, values: Sequence[Any], text: str) -> str:
        """Remember what the statements have written and set, and return the text."""
        state = self.state(values) if key else None
        if key and state is not None:
            self._memo.keep(key, (text, state), len(text))
        return text


class Messages(Remembered):
    """A loop that is continued. `ahead`: it looks at whether there is a next item, and which."""

    def __init__(self, memo: Memo, number: int, names: dict[str, Any], needs: Needs, ahead: bool):
        super().__init__(memo, number, names, needs)
        self._ahead = ahead

    def run(self, items: Any, values: Sequence[Any]) -> Run:
        """Start to go through the items, after those that are known; set what was set of these."""
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
        """Remember that another item is done, and return what was written of it."""
        progress = run.progress
        if progress is not None and len(progress.texts) + self._ahead < len(progress.items):
            state = self.state(run.values)
            if state is None or not self._memo.has_room(str.__len__(text)):  # placeholders record `len`
                run.progress = None  # what follows is not known
            else:
                progress.texts.append(text)
                progress.states.append(state)
        return text


class _Progress:
    """What a loop has written of each item, and set until then."""

    def __init__(self, items: list[Any]):
        self.items = items
        self.texts: list[str] = []
        self.states: list[list[Any]] = []


class Run:
    """A loop on its way. `text` is what was written of the items that are `done` before."""

    def __init__(self, messages: Messages, values: Sequence[Any], items: Any):
        self.values, self.items = values, items
        self.progress: _Progress | None = None
        self.text, self.done = "", 0
        self.went = messages.went

    def left(self) -> Any:
        """Return the items that are left."""
        return self.items[self.done :] if self.done else self.items

    def context(self, undefined: Any) -> LoopContext:
        """Return what is left, with `loop`."""
        context = LoopContext(self.items, undefined)
        if self.done:
            context.index0 = self.done - 1
            context._current = self.items[self.done - 1]
            context._iterator = iter(self.items[self.done :])
        return context


def _common(one: list[Any], other: list[Any]) -> int:
    """Return how many items at the start of two lists are the same objects."""
    count = 0
    for count, (mine, theirs) in enumerate(zip(one, other, strict=False), 1):
        if mine is not theirs:
            return count - 1
    return count


def _size(loop: nodes.For) -> int:
    kinds = (nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Filter, nodes.Test, nodes.Compare, nodes.For, nodes.Assign)
    return sum(1 for _ in loop.find_all(kinds))


class Marker:
    """Mark the statements of a template that are remembered. `found` are these."""

    def __init__(self, environment: Environment, memo: Memo, tree: SyntaxTree):
        self._environment, self._memo, self._tree = environment, memo, tree
        self.found: list[Remembered] = []
        tree.root.body = list(self._marked(tree.root.body))

    def _marked(self, body: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
        """Yield statements with marks around those that are remembered."""
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
        """Return what the body of a loop depends on, if the loop can be continued."""
        if loop.test or loop.else_ or leaves(loop.body) or _size(loop) < LEAST:
            return None
        if stored_names(loop.target) & loaded_names([loop.iter]):
            return None  # in the iterator, a name of the target is another variable
        needs = self._tree.needs(loop.body)
        if needs and any(name in stored_names(loop.target) for name, _ in needs.sets):
            return None  # it sets attributes of its items
        used = needs.names.get("loop", ()) if needs else None  # None: something else than its attributes
        return needs if used is not None and set(used) <= _BEHIND | _AHEAD else None

    def _mark(self, body: Sequence[nodes.For], remembered: Remembered, kind: str) -> nodes.Node:
        self.found.append(remembered)
        [remembered.loop] = body
        names = nodes.ExprStmt(nodes.List([nodes.Name(name, "load") for name in remembered.names]))
        # What a statement reads before it is entered, Jinja looks up before it enters it.
        read = [nodes.Name(name, "load") for name in sorted(loaded_names([body[0].iter]))]
        number = nodes.Const(len(self.found) - 1)
        found = nodes.FilterBlock([names, *body], nodes.Filter(None, kind, [number, *read], [], None, None))
        found.set_environment(self._environment)
        return found.set_lineno(body[0].lineno)
