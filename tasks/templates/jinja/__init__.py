"""Jinja chat templates, such as the template that a model is published with.

In:  a `Conversation`, which of its turns are trained on, and the source of the template.
Out: one or several samples of spans, as the model sees them at inference, located in the rendered text.
"""
