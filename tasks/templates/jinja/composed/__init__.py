"""Compose the samples of a conversation from samples of placeholders and pieces.

In:  a conversation to render.
Out: its samples.

A piece is the text that a loop or a macro of the template writes for a few values, such as the arguments of a call.
"""
