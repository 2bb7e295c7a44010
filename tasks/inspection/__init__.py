"""Inspection: look up conversations, rows, manifests, and differences.

In:  a manifest, a shard, a source file, or a config.
Out: values that `cli` renders for a terminal and `--json` prints. Nothing here prints them.
"""
