"""Divides each sequence between ranks, which exchange tensors in attention."""
