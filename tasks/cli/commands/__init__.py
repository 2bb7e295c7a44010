"""Commands: the functions behind the `packcorpus` commands, in groups.

In:  arguments and options, checked by typer.
Out: one call to a lower layer, whose result is printed.
"""
