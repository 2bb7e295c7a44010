"""Remember texts that a template writes, because renderings share most of them.

In:  a template's syntax tree, and the conversation that is rendered next.
Out: macros, `tojson`, and loops that are executed again only if a value that they depend on has changed.
"""
