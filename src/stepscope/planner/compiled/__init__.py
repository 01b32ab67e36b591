"""Plans compiled programs through Inductor's own code."""
