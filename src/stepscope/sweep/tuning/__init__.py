"""Searches the knobs of a workload: the fastest configuration, the largest batch."""
