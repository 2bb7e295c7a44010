"""Templates that turn conversations into spans.

In:  a `Conversation`, and which of its turns are trained on.
Out: spans: control tokens by ID, and text, each with its role and whether it is trained on.
"""
