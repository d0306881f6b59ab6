"""Sequence parallelism: each sequence is divided between ranks, which exchange in attention."""
