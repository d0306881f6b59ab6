"""Muon for sharded models: each matrix is whole on one rank while it is made orthogonal."""
