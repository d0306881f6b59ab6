"""Dialects of their own, and those made of the tables of others."""
