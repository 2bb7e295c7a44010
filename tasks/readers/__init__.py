"""Readers: the bytes of one source file become records.

In:  a source file with its container ("jsonl") and compression ("gz"), and a range of bytes or row groups.
Out: numbers and records; a record is a dict, or a `Reject` if it cannot be parsed.
A new container is one file here and one line in `containers.py`.
"""
