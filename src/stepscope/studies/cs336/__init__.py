"""The cs336 study."""
