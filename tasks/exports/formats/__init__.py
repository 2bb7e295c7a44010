"""One file for each export format.

In:  rows.
Out: the files of one trainer.
"""
