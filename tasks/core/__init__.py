"""Core: errors with codes, settings in YAML files, seeded orders, and safe text.

In:  nothing from packcorpus; every other folder imports this one.
Out: `PackError` and `Reject`, one message format for people and machines, validated settings, seeded orders.
"""
