"""Report: one corpus as a single HTML page.

In:  a manifest, its index, and a sample of rows.
Out: a self-contained page without scripts.
"""
