"""Core: errors with their codes, settings of YAML files, seeded orders, and safe text.

In:  nothing of packcorpus; every other folder imports this one.
Out: `PackError` and `Reject`, one message format for people and machines, validated settings, seeded orders.
"""
