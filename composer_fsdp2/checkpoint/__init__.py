"""Reads, writes, verifies, compares and converts checkpoints; does not depend on Composer."""
