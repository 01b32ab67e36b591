"""Pure functions from recorded data to results. No torch, no files, no printing."""
