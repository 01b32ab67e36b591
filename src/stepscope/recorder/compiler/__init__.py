"""Watches torch.compile while a script runs."""
