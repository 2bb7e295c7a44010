"""Merge: turn a base model and the adapter of a run into one model.

In:  the folder of a finished run, and its base model.
Out: a folder that transformers loads without PEFT, checked against base and adapter.
"""
