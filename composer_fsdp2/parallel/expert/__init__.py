"""Divides the experts of a layer between ranks, to which their tokens travel."""
