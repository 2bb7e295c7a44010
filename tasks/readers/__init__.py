"""Readers: the bytes of one source file become records.

In:  a path, its container (`jsonl`), its compression (`gz`), and a range of bytes or row groups.
Out: numbers and records; a record is a dict, or a `Reject` if it cannot be parsed.
"""
