"""Exports: write the rows of a corpus in the formats that trainers read.

In:  a manifest, and the name of a format.
Out: a folder that the trainer reads, with export.json: origin, settings, counts, and a checksum of each file.
"""
