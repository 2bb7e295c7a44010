"""Sample the source files for the dry run and the check of the encoder.

In:  source files and a budget of bytes.
Out: records from everywhere in them, and the share of the file that each stands for.
"""
