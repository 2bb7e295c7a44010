"""Facts: the parts of a manifest.

In:  values of a run, or of the JSON of a manifest.
Out: models that serialize to the JSON that they were read from, without fields that do not apply to the corpus.
"""
