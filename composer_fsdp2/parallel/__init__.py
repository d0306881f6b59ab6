"""Divides layers and sequences between ranks: tensor and sequence parallelism."""
