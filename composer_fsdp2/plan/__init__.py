"""Deciding what is done to a model. Pure: names and numbers only."""
