"""Applies a plan: `fully_shard` in a loop, initial weights, optimizer, precision, averaging."""
