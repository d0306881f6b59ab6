"""Acts in every step: listeners, their order, accumulation, prefetch, unused parameters."""
