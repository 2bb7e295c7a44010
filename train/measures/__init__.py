"""Measures: what a run measures of itself, and what follows from it.

In:  marks between the phases of a step, and the figures of a run.
Out: seconds per phase, a trace for torch's viewers, and advice.
"""
