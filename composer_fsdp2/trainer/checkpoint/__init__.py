"""Saves and loads checkpoints of the Trainer, and finds the one to resume from."""
