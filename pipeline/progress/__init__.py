"""Progress: what the tasks of a run report, counted and shown.

In:  counts from the parent and from forked tasks.
Out: a display on the terminal, JSON lines, an estimate of the time left, and `run.json`.
"""
