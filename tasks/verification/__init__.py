"""Verification: a published corpus is checked, rebuilt, or repaired.

In:  a manifest and its corpus folder.
Out: a second count of every invariant, a byte-for-byte comparison with a new run, or restored files.
"""
