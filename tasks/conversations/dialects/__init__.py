"""Read reasoning, calls, results, and lists as published data writes them.

Each file has one dialect or idea, and reads it from a value of a record. All formats with turns use them.
"""
