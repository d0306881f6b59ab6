"""Declares every setting once, and checks all of them before anything starts."""
