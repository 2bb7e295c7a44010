"""Weights: merge an adapter into the tensors of a base model.

In:  the safetensors files of a base model, and an adapter.
Out: safetensors files with the same names, of at most 5 GB each.
"""
