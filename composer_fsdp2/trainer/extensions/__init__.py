"""Algorithms, callbacks and models of others, and what each needs to work on shards."""
