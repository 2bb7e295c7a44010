"""In: a conversation to render. Out: its rendering, composed of the rendering of placeholders and of pieces.

A piece is what a loop or a macro of the template writes of a few values, such as the arguments of a call.
"""
