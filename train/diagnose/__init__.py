"""Diagnose: find out by trials what makes a training run slow, and what would make it faster.

In:  a corpus, and the settings of a run.
Out: one row for each trial, a sentence with the options to copy, diagnosis.json, and a picture.
"""
