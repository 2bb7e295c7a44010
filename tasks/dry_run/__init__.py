"""Dry run: what a run would produce, estimated from samples; and the config that `packcorpus init` writes.

In:  a config, or paths of source files.
Out: a `Prediction` (rows, efficiency, rejects, disk, memory, time, warnings), or a commented config.
"""
