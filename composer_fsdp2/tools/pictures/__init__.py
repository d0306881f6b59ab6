"""Drawings of values: a plan, a mesh, a step, two runs. Only `sheet` knows matplotlib."""
