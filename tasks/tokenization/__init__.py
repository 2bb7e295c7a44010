"""Tokenization: a part of a source file becomes a token file.

In:  a part, an encoder, and a template.
Out: an Arrow file with the tokens and labels of every conversation, and a receipt that counts them.
"""
