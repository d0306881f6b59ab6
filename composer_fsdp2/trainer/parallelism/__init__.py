"""Tensor parallelism in Composer's Trainer."""
