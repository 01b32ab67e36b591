"""Dtypes while a script runs: settings, casts and attention calls."""
