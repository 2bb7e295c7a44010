"""Write pieces of a template separately, and leave gaps for them in renderings.

    {% for key, value in call.arguments | items %}…{% endfor %}    a loop that depends on `call` alone

    trace     call.arguments is a placeholder   ──▶  ␀p0␀, and the values of piece 0: {"call": {"arguments": ␀7␀}}
    write     {"call": {"arguments": {"a": 1}}}  ──▶  <parameter=a>1</parameter>

Only loops and macros that can be remembered (see `memo`) are pieces. Their results depend on nothing but their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import orjson
from jinja2 import Environment, nodes
from jinja2.runtime import Undefined
from jinja2.utils import Namespace, missing

from tasks.templates.jinja.memo.blocks import Block, Marker, Messages, Remembered, Run, attributes_of
from tasks.templates.jinja.memo.depends import SyntaxTree
from tasks.templates.jinja.memo.memo import Memo
from tasks.templates.jinja.traced import GAP_OF_PIECE, Trace, Traced, TracedObject
from tasks.templates.placeholders import GAP, with_values

# The number of a loop, values by name of the variable, and namespaces by name; or the name of a macro and its
# arguments.
Piece = list[Any]
State = list[Any]  # attributes that a loop has set, in the order of Block.sets
# A piece, whether it writes more than white space, and the values that it sets, with None for each text.
Expected = tuple[Piece, bool, State]


class LeftGap(NamedTuple):
    """A gap for a piece.

    `text` is "" if the piece only writes white space. `state` has the values that the piece sets if it is written with
    the values of `Gaps.watch`.
    """

    text: str
    number: int
    state: State
    expected: Expected


_PLAIN = frozenset([int, float, bool, type(None)])


class _NoPieceError(Exception):
    """A piece must not depend on a value."""


class Writer:
    """Write pieces of a template separately.

    Each loop becomes a macro whose arguments are the names that the loop depends on.
    """

    def __init__(self, environment: Environment, source: str, constants: Mapping[str, Any]):
        self._namespace: Any = environment.globals["namespace"]
        tree = SyntaxTree(environment, source, constants)
        found = enumerate(Marker(environment, Memo(), tree).found)
        blocks = {number: block for number, block in found if isinstance(block, Block)}
        # Jinja itself has an argument named `caller`.
        self._blocks = {number: block for number, block in blocks.items() if "caller" not in block.names}
        prefix = "loop_"
        while prefix in source:
            prefix += "_"
        macros: list[nodes.Node] = [node for node in tree.root.body if isinstance(node, nodes.Macro)]
        macros += [_macro(f"{prefix}{number}", block) for number, block in self._blocks.items()]
        program = nodes.Template(macros, lineno=1)
        program.set_environment(environment)
        template = environment.from_string(program)
        context = template.new_context(dict(constants))
        for _ in template.root_render_func(context):  # defines the macros and writes nothing
            pass
        self._macros: dict[Any, Any] = {number: context.vars[f"{prefix}{number}"] for number in self._blocks}
        self._macros |= context.vars

    def write(self, piece: Piece) -> tuple[str, State]:
        """Return the text that a piece writes, and the attributes that it sets."""
        name, values, namespaces = piece
        macro = self._macros[name]
        if not isinstance(name, int):
            args, named = values
            return macro(*args, **named), []
        block = self._blocks[name]
        made = {name: self._namespace(**attributes) for name, attributes in namespaces.items()}
        given = [made[each] if each in made else values.get(each, missing) for each in block.names]
        return macro(*given), [attributes_of(given[place])[attribute] for place, attribute in block.sets]


def _macro(name: str, block: Block) -> nodes.Macro:
    """Return a loop as a macro."""
    return nodes.Macro(name, [nodes.Name(each, "param") for each in block.names], [], [block.loop], lineno=1)


class Gaps(Memo):
    """Leave gaps for pieces that depend on objects, while a template is traced.

    When a gap is left, the piece is also written with the values of a conversation instead of placeholders, because the
    template may depend on the values that the piece sets.
    """

    def __init__(self, writer: Writer):
        super().__init__()
        self._writer = writer
        self._trace = Trace()
        self._values: Sequence[Any] = ()
        self.left: dict[bytes, LeftGap] = {}
        self.watched: Any = None  # the messages whose parts are remembered

    def left_for(self, remembered: Sequence[Remembered]) -> list[Remembered]:
        """Return the statements of a template with gaps instead of loops."""
        return [_with_gaps(number, each, self) for number, each in enumerate(remembered)]

    def same(self, value: Any) -> Any:
        """Return a key that is equal for equal values.

        Placeholders with the same number are equal.
        """
        if type(value) is Traced:
            return str.__str__(value)
        return (TracedObject, value.number) if type(value) is TracedObject else super().same(value)

    def traced(self, text: str) -> str:
        return Traced.of(text, self._trace) if "\0" in text else text

    def watch(self, trace: Trace, values: Sequence[Any], left: dict[bytes, LeftGap]) -> None:
        """Start a conversation with these values, and collect its gaps in `left`."""
        self._trace, self._values, self.left = trace, values, left

    def of(self, name: str, write: Callable[..., str], args: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Return the gap of a macro, or its text if it does not depend on an object."""
        seen = _Seen()
        try:
            piece = [name, [[seen.plain(each) for each in args], {key: seen.plain(named[key]) for key in named}], {}]
        except _NoPieceError:
            return write(*args, **named)
        return self._gap(piece)[0] if seen.object else write(*args, **named)

    def of_block(self, number: int, block: Block, values: Sequence[Any]) -> str | None:
        """Return the gap of a loop, and set the attributes that the loop sets.

        Return None if the loop must be executed.
        """
        seen = _Seen()
        plain: dict[str, Any] = {}
        namespaces: dict[str, Any] = {}
        try:
            for name, value, attributes in zip(block.names, values, block.attributes, strict=True):
                if attributes is not None and isinstance(value, Namespace):
                    read = attributes_of(value)
                    namespaces[name] = {each: seen.plain(read[each]) for each in attributes if each in read}
                elif not isinstance(value, Undefined):
                    plain[name] = seen.plain(value)
        except _NoPieceError:
            return None
        spaces = [value for value in values if isinstance(value, Namespace)]
        if not seen.object or any(one is other for one, other in combinations(spaces, 2)):
            return None
        if any(block.names[place] not in namespaces for place, _ in block.sets):
            return None
        text, number_of_piece, state = self._gap([number, plain, namespaces])
        block.replay(values, [self._of_state(number_of_piece, k, each) for k, each in enumerate(state)])
        return text

    def _gap(self, piece: Piece) -> tuple[str, int, State]:
        """Return the gap of a piece, its number, and the values that it sets."""
        key = orjson.dumps(piece)
        if key not in self.left:
            number = len(self.left)
            text, state = self._writer.write(with_values(piece, self._values))
            kinds = [None if isinstance(each, str) and each.strip() else each for each in state]
            gap = f"\0p{number}\0" if text.strip() else ""
            self.left[key] = LeftGap(gap, number, state, (piece, bool(gap), kinds))
        gap, number, state, _ = self.left[key]
        return Traced.of(gap, self._trace) if gap else "", number, state

    def _of_state(self, number: int, place: int, value: Any) -> Any:
        """Return the gap for a text that a piece sets, or any other value unchanged."""
        if isinstance(value, str) and value.strip():
            return Traced.of(f"\0p{number}.{place}\0", self._trace)
        if value is not missing and type(value) not in _PLAIN and value != "":
            self._trace.open = False
        return value


class GapBlock(Block):
    """A loop that is replaced with a gap."""

    def __init__(self, number: int, block: Block, gaps: Gaps):
        self.__dict__ |= block.__dict__
        self._place, self._gaps = number, gaps

    def key(self, values: Sequence[Any]) -> None:
        return None

    def known(self, key: Any, values: Sequence[Any]) -> str | None:
        return self._gaps.of_block(self._place, self, values)


class GapMessages(Messages):
    """A loop over messages with gaps, which is continued like any other loop."""

    def __init__(self, messages: Messages, gaps: Gaps):
        self.__dict__ |= messages.__dict__
        self._gaps = gaps

    def run(self, items: Any, values: Sequence[Any]) -> Run:
        run = super().run(items, values)
        run.text = self._gaps.traced(run.text)
        return run


def _with_gaps(number: int, remembered: Remembered, gaps: Gaps) -> Remembered:
    if isinstance(remembered, Block):
        return GapBlock(number, remembered, gaps)
    return GapMessages(remembered, gaps) if isinstance(remembered, Messages) else remembered


class _Seen:
    """Convert values of a template to JSON.

    `object` is true once a placeholder for an object was among them.
    """

    def __init__(self) -> None:
        self.object = False

    def plain(self, value: Any) -> Any:
        """Return a value with its placeholders as JSON.

        Raises _NoPieceError if the value has a part that is neither JSON nor a placeholder.
        """
        kind = type(value)
        if kind is str or kind in _PLAIN:
            return value
        if kind is dict:
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        if kind is list:
            return [self.plain(item) for item in value]
        if kind is TracedObject:
            self.object = True
            return {f"\0{value.number}\0": 0}
        if kind is Traced:
            text = str.__str__(value)
            if not GAP_OF_PIECE.search(text) and not any(gap[2] for gap in GAP.finditer(text)):
                return text
        raise _NoPieceError
