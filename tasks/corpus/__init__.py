"""Corpus: turn a plan into shards and a manifest; publishing it is the commit.

In:  the plan and the token files.
Out: a corpus folder: Arrow shards, index, rejects, tokenizer, dataset card, run record, and manifest.
"""
