"""The keys of a record: which of them are used, which are not, and which mean that it is other data.

A record is never changed by what nobody asked for: a key that no format uses is counted, and a key that changes what
the data means stops the run until the config decides.
"""
