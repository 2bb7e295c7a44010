"""Adapters: a frozen model becomes one with trainable weights.

In:  a loaded base model, the training settings, and perhaps the folder of an existing adapter.
Out: the model with a LoRA adapter in fp32, and perhaps embeddings and head that are trained as a whole.
"""
