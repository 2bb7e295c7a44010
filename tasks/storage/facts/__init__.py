"""Facts: the parts of a manifest.

In:  values of a run, or of the JSON of a manifest.
Out: models that are written as they are read; what other corpora do not have is left out.
"""
