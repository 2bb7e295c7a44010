"""Corpus: a plan becomes shards and a manifest. Publishing the manifest is the commit.

In:  the plan and the token files.
Out: a corpus folder: Arrow shards, index, rejects, tokenizer, dataset card, run record, and manifest.
"""
