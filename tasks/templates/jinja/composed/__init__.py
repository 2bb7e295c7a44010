"""In: a conversation to render. Out: its samples, composed of those of placeholders and of pieces.

A piece is what a loop or a macro of the template writes of a few values, such as the arguments of a call.
"""
