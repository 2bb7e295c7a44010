"""Packing: the lengths of all conversations become one plan.

In:  token files; only lengths, digests, and counts are read.
Out: the plan: which tokens of which conversation go to which shard, row, and position; the index; the ledger.
"""
