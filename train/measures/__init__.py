"""Measures: the measurements of a run, and the advice that follows from them.

In:  marks between the phases of a step, and the figures of a run.
Out: seconds per phase, a trace for torch's viewers, and advice.
"""
