"""Stores: where remote data lies, behind one interface; local files remain the only thing that a step reads.

In:  a URL (`s3://`, `gs://`, `az://`, `hf://`, `file://`), or a folder.
Out: whole objects as local files, verified by size and identity; objects written from finished local files only.
     A root in a bucket has a local folder (scratch.py), which mirror.py keeps like it.
"""
