"""The one door: what a path is, opened once, with views computed on demand."""
