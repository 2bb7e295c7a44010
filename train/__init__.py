"""The consumer of corpora. It reads manifests and shards and imports nothing of `pipeline`."""
