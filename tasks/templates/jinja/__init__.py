"""A model's own chat template, which is a Jinja file: a `Conversation` becomes spans, in one sample or several.

In:  a `Conversation`, which of its turns are trained on, and the template's source.
Out: the samples that the model sees at inference, located in what the template writes.
"""
