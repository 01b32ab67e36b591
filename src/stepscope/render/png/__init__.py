"""Charts as PNG, by matplotlib."""
