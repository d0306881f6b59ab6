"""Brings all ranks out of a step that one of them cannot end."""
