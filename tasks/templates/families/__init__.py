"""Built-in templates, one file each.

In:  a `Writer` and the turns of a conversation.
Out: spans. A new template needs a file in this folder and a line in `templates.built_in.FAMILIES`.
"""
