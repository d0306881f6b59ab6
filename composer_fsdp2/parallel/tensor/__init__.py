"""Divides layers between ranks that compute one batch together: tensor parallelism."""
