"""Observes every op of one step: its FLOPs, and the lifetime of every storage."""
