"""Groups: plan a large corpus in separate groups of chunks, on any machine.

In:  token files with more conversations than `plan_group`.
Out: a plan and an index of each group, which are then joined to a plan and an index of the corpus.
"""
