"""Progress: count and show the reports of a run's tasks.

In:  counts from the parent and from forked tasks.
Out: a display on the terminal, JSON lines, an estimate of the time left, and `run.json`.
"""
