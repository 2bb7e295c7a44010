"""Storage: everything on disk, and the only place that writes it.

In:  values, and the root of a project.
Out: paths and content keys, Arrow schemas, token files, manifests, and files written atomically.
"""
