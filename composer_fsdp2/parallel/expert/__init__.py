"""Experts over ranks: each rank of a group holds some of them, and tokens travel to theirs."""
