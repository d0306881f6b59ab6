"""Looks for faults in every step, whose numbers are the same without: order, watchdog, out of memory."""
