"""Prepares a model: settles its plan, applies transformations, shards it, starts its run."""
