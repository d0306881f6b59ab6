"""Builds a run up to its first batch, with the model on meta."""
