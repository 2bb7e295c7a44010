"""Dry run: predict what a run would produce from samples, and write the config of `packcorpus init`.

In:  a config, or paths of source files.
Out: a `Prediction` (rows, efficiency, rejects, disk, memory, time, warnings), or a commented config.
"""
