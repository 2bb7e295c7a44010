"""Sample the source files for the dry run and the check of the encoder.

In:  source files and a budget of bytes.
Out: records from all over the files, each with the number of records that it represents.
"""
