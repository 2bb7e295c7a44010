"""CLI: the `packcorpus` command and its views.

In:  the command line.
Out: text on a terminal, or JSON.
"""
