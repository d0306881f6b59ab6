"""Reads, writes, verifies, compares and converts checkpoints; knows nothing of Composer."""
