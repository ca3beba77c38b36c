"""The pooled indexer: pool keys, scores, selection."""
