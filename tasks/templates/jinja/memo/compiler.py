"""Compile templates so that the statements marked by `blocks` are remembered."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from tasks.templates.jinja.memo.blocks import BLOCK, MESSAGES


class RememberingGenerator(CodeGenerator):
    """Jinja's compiler with support for marked statements.

    A mark is a filter block with a name that no template can write.
    """

    def visit_FilterBlock(self, node: nodes.FilterBlock, frame: Frame) -> None:
        if node.filter.name not in (BLOCK, MESSAGES):
            super().visit_FilterBlock(node, frame)
            return
        inner = frame.inner()
        inner.symbols.analyze_node(node)
        self.enter_frame(inner)
        marked, loop = node.body
        found, values = self.temporary_identifier(), self.temporary_identifier()
        number: Any = node.filter.args[0]
        self.writeline(f"{found} = environment.remembered[{number.value}]")
        self.writeline(f"{values} = (")
        names: Any = marked
        for name in names.node.items:
            self.visit(name, inner)
            self.write(", ")
        self.write(")")
        if node.filter.name == BLOCK:
            self._block(loop, inner, found, values)
        else:
            self._messages(loop, inner, found, values)
        self.leave_frame(inner)

    def _block(self, loop: nodes.Node, frame: Frame, found: str, values: str) -> None:
        """Write the known text, or execute the loop.

        key = found.key(values)
        text = found.known(key, values)
        if text is None: … the loop, which writes to a buffer; text = found.keep(key, values, text)
        """
        key, text, outside = self.temporary_identifier(), self.temporary_identifier(), frame.buffer
        self.writeline(f"{key} = {found}.key({values})")
        self.writeline(f"{text} = {found}.known({key}, {values})")
        self.writeline(f"if {text} is None:")
        self.indent()
        self.buffer(frame)
        self.blockvisit([loop], frame)
        self.writeline(f"{text} = {found}.keep({key}, {values}, concat({frame.buffer}))")
        self.outdent()
        frame.buffer = outside
        self.simple_write(text, frame)

    def _messages(self, loop: Any, frame: Frame, found: str, values: str) -> None:
        """Write the text of known items, and execute the loop for the other items.

        run = found.run(items, values)
        for item, loop in run.context(undefined): … the body, which writes to a buffer; run.went(run, text)
        """
        run = self.temporary_identifier()
        self.writeline(f"{run} = {found}.run(")
        self.visit(loop.iter, frame)
        self.write(f", {values})")
        self.simple_write(f"{run}.text", frame)
        inner = frame.inner()
        inner.loop_frame = True
        extended = any(name.name == "loop" for name in loop.find_all(nodes.Name))
        reference = inner.symbols.declare_parameter("loop") if extended else None
        inner.symbols.analyze_node(loop, for_branch="body")
        if reference:
            self.writeline(f"{reference} = missing")
        self.writeline("for ", loop)
        self.visit(loop.target, inner)
        self.write(f", {reference} in {run}.context(undefined):" if reference else f" in {run}.left():")
        self.indent()
        self.enter_frame(inner)
        self.writeline("_loop_vars = {}")
        outside = inner.buffer
        self.buffer(inner)
        self.blockvisit(loop.body, inner)
        text = f"{run}.went({run}, concat({inner.buffer}))"
        inner.buffer = outside
        self.simple_write(text, inner)
        self.outdent()
        self.leave_frame(inner)
        if self._assign_stack:
            self._assign_stack[-1].difference_update(inner.symbols.stores)
