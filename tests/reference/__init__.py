"""A second statement of what a corpus must hold, slow and plain, to compare the real one with.

    record ─records─▶ messages, tools ─families─▶ pieces of samples ─tokens─▶ [(token id, trained on), …]
        └─▶ None: it must be rejected

It follows the published rules of formats, model families, and tokenizers, and the documentation of this project where
those leave a choice. It imports nothing of the code that is tested; a test reads its imports.
"""
