"""Token files: read the tokens, labels, and facts of conversations.

In:  the paths of token files, which tokenization has written.
Out: their columns, the tokens of a conversation, and where pieces are in the files.
"""
