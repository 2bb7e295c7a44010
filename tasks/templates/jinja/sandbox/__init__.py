"""Render templates in a child process with limited time and memory.

In:  conversations, and pieces of a template to write.
Out: texts and located turns.
"""
