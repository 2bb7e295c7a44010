"""Read what agents and models recorded, one file per agent or format.

In:  the records of a session, as an agent writes them, or the token ids of a trace.
Out: the conversation that the session ends with and the number of records that are left out, or the ids.
"""
