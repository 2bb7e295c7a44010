"""Core: errors with their codes, the settings of YAML files, and text that is safe to print.

In:  nothing of packcorpus; every other folder imports this one.
Out: `PackError` and `Reject`, one message format for people and machines, validated settings.
"""
