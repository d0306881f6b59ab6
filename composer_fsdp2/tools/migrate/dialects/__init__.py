"""Dialects made of the tables of others: one trainer's settings in another's file."""
