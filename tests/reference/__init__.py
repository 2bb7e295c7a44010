"""A slow, plain, independent specification of the contents of a corpus.

    record ─records─▶ messages, tools ─families─▶ pieces of samples ─tokens─▶ [(token id, trained on), …]
        │                      └─render─▶ renderings of a chat template ─┘
        └─▶ None: the record must be rejected

Tests compare real corpora with it. It follows the published rules of formats, model families, and tokenizers. Where
those leave a choice, it follows the documentation of this project. It imports none of the code under test, and a test
checks its imports.
"""
