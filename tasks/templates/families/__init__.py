"""Families: the built-in templates, one file each.

In:  a `Writer` and the turns of a conversation.
Out: spans. A new template is one file here and one line in `templates.built_in.FAMILIES`.
"""
