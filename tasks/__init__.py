"""The work of each step, as plain functions and values: from record to row.

A conversation's way, ground floor first::

    sources → conversations → templates → encoders → tokenization   a part becomes a token file
    tokenization → packing → plan                                   lengths become a plan
    plan → shards → manifest                                        the plan becomes rows and a ledger
    manifest → verify, show                                         what a person checks and looks at

Nothing here imports luigi, torch or transformers when it is imported.
"""
