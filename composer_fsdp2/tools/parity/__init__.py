"""Compares two runs of one job step by step. Pure: starts nothing and trains nothing."""
