"""Dtypes while a script runs: settings, casts, attention calls."""
