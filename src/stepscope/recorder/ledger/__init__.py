"""One step with every op seen: FLOPs, and the lifetime of every storage."""
