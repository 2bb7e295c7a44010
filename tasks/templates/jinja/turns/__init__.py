"""Find the turns of a conversation in its rendering, and check that it is whole.

`locate` makes samples of prompts and `answers`. `labels` and `context` check them.
"""
