"""Draws a plan, a mesh, a step and two runs. Only `sheet` knows matplotlib."""
