"""Commands: the functions of `packcorpus`, in groups.

In:  arguments and options, as typer has checked them.
Out: one call of a lower layer, and its result printed.
"""
