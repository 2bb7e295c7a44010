"""Loop: the model and the rows become an adapter.

In:  a model, a dataset, and the training settings.
Out: checkpoints, the adapter, and a record of the run.
"""
