"""What a run may be told: every setting is declared once, and checked before anything starts."""
