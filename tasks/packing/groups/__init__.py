"""Groups: a large corpus is planned in groups of chunks, each by itself, on any machine.

In:  token files of more conversations than `plan_group`.
Out: a plan and an index of each group; joined, a plan and an index of the corpus.
"""
