"""Connects tensor and sequence parallelism with Composer's Trainer."""
