"""Holds the dialects, also those made of the tables of others."""
