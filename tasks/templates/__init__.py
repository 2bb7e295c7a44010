"""Templates: a `Conversation` becomes spans.

In:  a `Conversation`, and which of its turns are trained on.
Out: spans: control tokens by id, and text, each with its role and whether it is trained on.
"""
