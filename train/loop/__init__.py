"""Loop: turn a model and rows into an adapter.

In:  a model, a dataset, and the training settings.
Out: checkpoints, the adapter, and a record of the run.
"""
