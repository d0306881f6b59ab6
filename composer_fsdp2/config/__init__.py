"""Settings of a run: each is declared once, and checked before anything starts."""
