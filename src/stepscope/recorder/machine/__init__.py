"""The machine that a script runs on: its names, its counters, and the rates it reaches."""
