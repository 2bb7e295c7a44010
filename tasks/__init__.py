"""The work of each step, as plain functions and values. Imports no luigi, torch, or transformers.

    sources ─▶ readers ─▶ conversations ─▶ templates ─▶ encoders ─▶ tokenization ─▶ packing ─▶ corpus
    files      records    Conversation     spans        ids         token files     plan       shards, manifest

This is the path of a conversation. `recipe` derives the parts, keys, and paths of a run from a `config`. `verification`
checks a corpus, `dry_run` estimates a run, `inspection` looks up rows and conversations, `report` writes an HTML page,
and `cli` is the `packcorpus` command. `storage` and `core` lie underneath. Imports run down the list of layers in
`pyproject.toml`.
"""
