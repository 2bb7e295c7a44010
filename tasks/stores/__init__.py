"""Stores: remote data behind one interface. Steps read local files only.

In:  a URL (`s3://`, `gs://`, `az://`, `hf://`, `file://`), or a folder.
Out: whole objects as local files, verified by size and identity; objects written from finished local files only.
     A root in a bucket has a local scratch folder (urls.py); mirror.py keeps both alike.
"""
