"""Causes: what is wrong with a step, what it costs, and what to change."""
