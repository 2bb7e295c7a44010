"""Packing: the lengths of all conversations become one plan.

In:  token files; only lengths, content hashes, and counts are read.
Out: a plan that assigns the tokens of every conversation a shard, a row, and a start; the index; the ledger.
"""
