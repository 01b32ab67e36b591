"""Comparisons of runs, sweeps, tunings and verifications, with their statistics."""
