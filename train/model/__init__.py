"""Model: turn a base model into a quantized model with an adapter.

In:  the name or folder of a base model, and the training settings.
Out: the model, its attention backend, and the proof that packed conversations do not see each other.
"""
