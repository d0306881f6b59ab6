"""Decides units, ties and the mesh, on names and numbers alone."""
