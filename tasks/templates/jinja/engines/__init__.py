"""Render Jinja templates, which are untrusted data.

In:  messages and tools.
Out: the text that the template writes, and the places of the turns in it.
"""
