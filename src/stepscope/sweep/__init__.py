"""Grids of points, each run in a process of its own: whatever happens to one is a row of the table."""
