"""Where the steps of a run are taken: in this process, in worker processes, or on a Ray cluster.

An engine receives steps (tasks/steps.py) and yields what became of each, in any order. It decides neither what there is
to do nor what is done: that is Luigi's part, and the same for all engines.
"""
