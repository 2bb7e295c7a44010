"""Export formats, one per file.

In:  rows.
Out: the files of one trainer.
"""
