"""The tsmoe study."""
