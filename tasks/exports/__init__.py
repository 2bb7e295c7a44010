"""Exports: the rows of a corpus in the formats that trainers read.

In:  a manifest, and the name of a format.
Out: a folder that the trainer reads, and export.json: where it comes from, what it holds, and a checksum of each file.
"""
