"""Digests: hash source files and their parts, once for all runs and processes.

In:  source files, identified but not yet hashed.
Out: the digests of each file, of its parts, and of its blocks; an entry in data/digests for each file.
"""
