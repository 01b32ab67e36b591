"""The nano study."""
