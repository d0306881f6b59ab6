"""Acts in every step: accumulation, prefetch, order check, watchdog, out of memory."""
