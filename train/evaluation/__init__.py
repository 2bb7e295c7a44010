"""Evaluation: what a validation split decides, and what it shows.

In:  a model, validation rows, and the log of a run.
Out: loss and token accuracy, the evaluation whose adapter is kept, the end of a run, and samples of what it generates.
"""
