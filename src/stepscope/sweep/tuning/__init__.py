"""Searches the knobs of a workload."""
