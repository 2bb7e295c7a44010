"""The work of each step, as plain functions and values.

    sources ─▶ readers ─▶ conversations ─▶ templates ─▶ encoders ─▶ tokenization ─▶ packing ─▶ corpus
    files      records    Conversation     spans        ids         token files     plan       shards, manifest

This is the path of a conversation. `recipe` derives the parts, keys, and paths of a run from a `config`. `verification`
checks a corpus, `dry_run` estimates a run, `inspection` looks up rows and conversations, `report` writes an HTML page,
and `cli` is the `packcorpus` command. All of them use `storage` and `core`. A package only imports packages below it in
the list of layers in `pyproject.toml`. Importing a module never imports luigi, torch, or transformers.
"""
