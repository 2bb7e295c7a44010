"""Dry run: predict the result of a run from samples, and draft a config.

In:  a config, or paths of source files.
Out: a `Prediction` (rows, efficiency, rejects, disk, memory, time, warnings), or a commented config.
"""
