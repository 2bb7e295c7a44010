"""Keys of a record: used, unused, or a sign of other data.

A record is only changed if the config requests it. A key that no format uses is counted. A key that changes the meaning
of the data stops the run until the config decides.
"""
