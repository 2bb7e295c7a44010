"""The consumer of corpora: a manifest in, an adapter out. It imports nothing of `pipeline`.

python -m train --manifest manifests/sample-0123456789ab.json

manifest ─corpus─▶ what was given ─dataset─▶ rows in memory, each shard's digest checked
config + manifest ─models, qlora─▶ model with adapter ─isolation─▶ proven: conversations do not see each other
both ─batch─▶ micro-batch and accumulation, measured ─trainer─▶ adapter, tokenizer, record, picture
"""
