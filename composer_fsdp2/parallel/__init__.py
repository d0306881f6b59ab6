"""Divides layers, sequences and experts between ranks: tensor, sequence, expert parallelism."""
