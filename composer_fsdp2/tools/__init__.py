"""Holds the programs around the product: migrate, parity, doctor, pictures."""
