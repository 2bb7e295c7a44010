"""Evaluation: measure a model on the validation split, and act on the results.

In:  a model, validation rows, and the log of a run.
Out: loss and token accuracy, the evaluation whose adapter is kept, the decision to stop, and generated samples.
"""
