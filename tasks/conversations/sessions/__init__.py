"""Read the sessions of coding agents, one file per agent.

In:  the records of a session, as an agent writes them, in their order.
Out: the messages of the conversation that the session ends with, and the number of records that are left out.
"""
