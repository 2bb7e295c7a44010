"""Adapters: give a frozen model trainable weights.

In:  a loaded base model, the training settings, and optionally the folder of an existing adapter.
Out: the model with a LoRA adapter in fp32, and optionally embeddings and head that are trained as a whole.
"""
