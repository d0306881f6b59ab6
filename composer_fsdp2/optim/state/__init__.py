"""Keeps an optimizer's state in another form, or in another place, between two steps."""
