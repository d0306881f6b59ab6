"""Looks for faults in every step, whose numbers stay the same without these listeners."""
