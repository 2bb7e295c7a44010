"""Conversations: a record of any format becomes a `Conversation`.

In:  a record (a dict) and its format (`messages`, `alpaca`, ...).
Out: a `Conversation`, or a `Reject` that names the place in the record, the value, and the fix.
"""
