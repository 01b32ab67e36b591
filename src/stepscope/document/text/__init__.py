"""Terminal text, one file per topic."""
