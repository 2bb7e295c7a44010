"""Sources: the paths of a config become files, parts, and samples.

In:  the `sources` of a config and the folder its paths are relative to.
Out: source files with container, format, and SHA-256; parts, each of which one step reads; samples for a dry run.
"""
