"""Diagnose: find out by trials which settings make a training run faster.

In:  a corpus, and the settings of a run.
Out: one row for each trial, a sentence with the options to copy, diagnosis.json, and a picture.
"""
