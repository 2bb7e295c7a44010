"""Weights: the tensors of a base model become those of the merged one.

In:  the safetensors files of a base model, and an adapter.
Out: safetensors files with the same names, of at most 5 GB each.
"""
