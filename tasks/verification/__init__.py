"""Verification: check, rebuild, or repair a published corpus.

In:  a manifest and its corpus folder.
Out: every invariant recomputed, a byte-for-byte comparison with a rebuilt corpus, or restored files.
"""
