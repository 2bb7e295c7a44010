"""Data: a manifest or a folder of shards becomes a dataset.

In:  a manifest, or shards.
Out: verified rows in memory (format 3.0), or tokenized conversations (format 2.0).
"""
