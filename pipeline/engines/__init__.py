"""Engines: run steps in this process, in worker processes, or on a Ray cluster.

An engine receives steps (tasks/steps.py) and yields the outcome of each step, in any order. Luigi decides which steps
there are and whether they are done, in the same way for all engines.
"""
