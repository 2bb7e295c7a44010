"""Remember what a template writes of a conversation, whose renderings have most of it in common.

In:  a template's syntax tree, and the conversation that is rendered next.
Out: macros, `tojson`, and loops that are not executed again if nothing that they depend on has changed.
"""
