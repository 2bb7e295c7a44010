"""Data: turn a manifest or a folder of shards into a dataset.

In:  a manifest, or shards.
Out: verified rows (formats 3.0 and 3.1), or tokenized conversations (format 2.0).
"""
