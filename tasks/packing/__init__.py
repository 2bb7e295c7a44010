"""Packing: turn the lengths of all conversations into one plan.

In:  token files; only lengths, content hashes, and counts are read.
Out: a plan with the shard, row, and start of every conversation; the index; the ledger.
"""
